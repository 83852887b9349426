"""The transformer measured on this machine: ``nox -s "bench(models)"``.

=============  ===================================================================================================
beyond         the loss of each position at twice the trained length, by kind of positions
generation     tokens a second of ``generate``, with a cache and without
plain_loop     time of a training step on one rank, over that of a plain PyTorch GPT in a plain loop
recomputation  time of a step and bytes that are alive, by what is computed again
=============  ===================================================================================================
"""
