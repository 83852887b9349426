"""The runner measured on this machine: ``nox -s "bench(pipeline)"``.

========  =======================================================================================================
overhead  processor time of the runner for one action, above the bare module and the bare message
========  =======================================================================================================

Nothing here is a test: a slow machine fails nobody. What is asked of a figure stands in its row.
"""
