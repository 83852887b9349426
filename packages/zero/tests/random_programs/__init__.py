"""Training loops drawn at random, run on a ZeroOptimizer and on plain torch beside it, and compared as they go.

A seed is a program: a stage with its options, then some twenty operations such as a forward pass, the backward pass of
one that was left pending, an evaluation, an edit, a step. Every rank draws the same ones. ::

    net.py          the module: ties, parameters of its own, unused and empty ones, attention
    losses.py       what a forward pass does, with order, recompute and parameters read outside of their modules
    settings.py     stage, bound and the other options
    pair.py         the two sides: this rank's part of the sharded training, and all of the plain one
    checks.py       what has to be equal, and how much may be gathered
    operations.py   what a program is made of: one function each, in one table
    programs.py     draws and runs one
    __main__.py     python -m packages.zero.tests.random_programs FIRST LAST --ranks 2 [--stage 3]
"""
