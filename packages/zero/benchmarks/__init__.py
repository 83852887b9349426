"""zero beside its peers, measured on this machine and printed as ratios: ``nox -s "bench(zero)"``.

======  =========================================================================================================
steps   time, processor time and bytes of a training step, with and without accumulation
memory  peak resident memory with 109 million parameters
small   two thousand parameters of 1 KiB
alone   own overhead on one rank, over plain AdamW
======  =========================================================================================================

The peers are torch's (DDP, ZeroRedundancyOptimizer, FSDP2) and, where it is installed, DeepSpeed. Nothing here is a
test: a slow machine fails nobody. What is asked of a figure stands in its row.
"""
