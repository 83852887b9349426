"""What communication costs, measured on this machine and printed as ratios: ``nox -s "bench(comm)"``.

=============  ==================================================================================================
two_level      collectives in two levels against torch's own, over a shaped link between two hosts
wire_bytes     bytes that compressed reductions put on the link, by the kernel's counters
overlap        how much of the gradients' reduction is hidden behind the backward pass
codec_cost     what compressing takes, and below which rate of the link it pays
training       steps per second and validation loss of compressed data-parallel training on a slow link
memory         collectives through memory that ranks of one host share, against the same by messages
ledger_cost    what counting every byte takes
=============  ==================================================================================================

Nothing here is a test: a slow machine fails nobody. What is asked of a figure stands in its row.
"""
