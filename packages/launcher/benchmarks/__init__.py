"""The launcher measured on this machine: ``nox -s "bench(launcher)"``.

=============  ===================================================================================================
building       `data build` beside the tokenizer alone, and the memory that it takes for a file of a gigabyte
indexed        files of tokens written, opened and read beside megatron-core's, where that is installed
=============  ===================================================================================================
"""
