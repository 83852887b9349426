"""Several documents packed into one row: what each token's number says about masks, positions and labels.

``documents`` ``[b, s]`` holds an integer for every token; tokens of a row with equal numbers are one document and lie
together::

    tokens       the cat sat .   | a dog ran
    documents     0   0   0  0   | 1  1   1
    positions     0   1   2  3   | 0  1   2
    targets      cat sat  .  -   |dog ran -      no label leads from one document into the next

Attention gets ``documents`` and does not look across the border. Relative positions (rotary, ALiBi) then need nothing
more; learned ones start again with each document.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_documents", "document_positions", "document_targets"]


def document_positions(documents: Tensor) -> Tensor:
    """Each token's position in its document, int64 ``[b, s]``, from the documents' numbers ``[b, s]``."""
    check_documents(documents)
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def document_targets(targets: Tensor, documents: Tensor, ignore_index: int = -100) -> Tensor:
    """``targets`` ``[b, s]`` without those that are the first token of another document; a new tensor.

    ``documents``: ``[b, s]``, of the input tokens; or ``[b, s + 1]`` with the number of the token behind the last, too.
    Of ``s`` numbers the last target's own is not known, and it is kept.
    """
    check_documents(documents)
    rows, length = targets.shape
    if documents.shape not in ((rows, length), (rows, length + 1)):
        raise ValueError(
            f"documents of shape {tuple(documents.shape)} for targets of shape {tuple(targets.shape)}; give a number "
            "for each input token, or for one more in each row"
        )
    crosses = documents[:, 1:] != documents[:, :-1]
    kept = targets.clone()
    kept[:, : crosses.shape[1]].masked_fill_(crosses, ignore_index)
    return kept


def check_documents(documents: Tensor, shape: tuple[int, int] | None = None) -> None:
    """Refuses numbers of documents that are no integers ``[b, s]``, or not of ``shape``, with a ValueError."""
    if documents.dim() != 2 or documents.is_floating_point() or documents.dtype == torch.bool:
        raise ValueError(
            f"documents are integers [b, s], one for each token, not {tuple(documents.shape)} of {documents.dtype}"
        )
    if shape is not None and tuple(documents.shape) != shape:
        raise ValueError(
            f"documents of shape {tuple(documents.shape)} for rows of shape {shape}; give the number of every token of "
            "the whole sequence, whatever part of it this rank holds"
        )
