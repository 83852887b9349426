"""The transformer measured on this machine: ``nox -s "bench(models)"``.

==========  ======================================================================================================
generation  tokens a second of ``generate``, with a cache and without
plain_loop  time of a training step on one rank, over that of a plain PyTorch GPT in a plain loop
==========  ======================================================================================================
"""
