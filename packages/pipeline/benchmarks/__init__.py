"""The runner measured on this machine and beside its peer: ``nox -s "bench(pipeline)"``.

========  =======================================================================================================
overhead  processor time of the runner for one action, above the bare module and the bare message
measured  the bubble of every schedule beside the simulated one, on ranks that sleep where they would compute
peers     time above what is simulated, time of real stages and memory beside torch.distributed.pipelining
========  =======================================================================================================

What is asked of a figure stands in its row. A slow machine fails nobody, but ``measured`` ends with status 1 where a
bubble is not the simulated one, and ``peers`` where gradients differ.
"""
