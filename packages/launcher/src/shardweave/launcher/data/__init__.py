"""Data: from files of text to the micro-batches of a rank, the same in every layout.

A room of its own inside the launcher: it imports nothing of the rest of it (a contract in ``pyproject.toml``), so a
loop of one's own can use it by itself.

    files of text --- texts, tokenizer ---> tokens (in memory, or Megatron's .bin/.idx)
        --- split by document, cut into samples ---> dataset
        --- order: a pure function of (seed, epoch, index) ---> this data rank's micro-batches
"""
