"""tensor_parallel beside its peers, in one run on this machine: ``nox -s "bench(tensor_parallel)"``.

======  =========================================================================================================
layers  time, processor time, bytes and calls of an MLP and of a GPT, forward and backward
pieces  an MLP under sequence parallelism, its products in pieces against at once, over links of several rates
======  =========================================================================================================

The peers of ``layers`` are DTensor's ``parallelize_module`` and, where it is installed, megatron-core with its CUDA
calls patched out. Nothing here is a test: a slow machine fails nobody. What is asked of a figure stands in its row.
"""
