"""Weights from Hugging Face files straight into the parameters of any layout.

A parameter's sharding record says which rectangle of it this rank holds, :mod:`.mapping` which blocks of their tensors
these are, and only these are read. Nothing is sent: every rank reads for itself. Everything that can be known from the
headers is checked before the first element is read, and told in one error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.comm import Rectangle, full_index, sharding_of

from ..config import TransformerConfig
from ..initialize import fill
from ..transformer import Transformer
from .configs import config_from_json
from .directory import CONFIG, DTYPES, Weights, read_json
from .errors import HuggingFaceError
from .families import Family
from .mapping import Piece, matches, pieces_by_parameter

__all__ = ["FromHuggingFace", "from_huggingface", "huggingface_config", "load_huggingface"]

_COMPARED = 1 << 22  # elements that are compared at a time


def huggingface_config(directory: str | Path) -> TransformerConfig:
    """The shape of the model in a directory of Hugging Face files; only ``config.json`` is read.

    Raises:
        HuggingFaceError: for a file that is missing, of no family that is known, or of a model that cannot be built.
    """
    return _described(Path(directory))[0]


def from_huggingface(
    directory: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Transformer:
    """A model with the weights of a directory of Hugging Face files (GPT-2, BLOOM, GPT-NeoX, Llama, Mixtral).

    ``dtype``: of the parameters; ``None``: the files'. ``options``: those of :class:`.Transformer` (``tensor=``,
    ``part=``, ``expert=``, ...): this rank then reads only its own slices, and no rank ever holds the whole model. No
    message is sent. The model is in training mode, with the dropout that ``config.json`` asks for.

    Raises:
        HuggingFaceError: for files that are not of such a model, are damaged, or do not fit ``config.json``; the text
            names all tensors that are wrong.
    """
    source = FromHuggingFace(directory)
    model = Transformer(
        source.config, device="meta", dtype=source.dtype if dtype is None else dtype, **options
    ).to_empty(device=torch.get_default_device() if device is None else device)
    return _filled(model, source)


def load_huggingface(module: Transformer, directory: str | Path) -> None:
    """Gives an existing model, or one part of it, the weights of a directory; each rank reads its own slices.

    The dtype is the model's: values are rounded as they are copied. Its dropout and other settings of training may
    differ from the directory's; what decides the function may not.

    Raises:
        HuggingFaceError: as :func:`from_huggingface`, and for files of another shape; nothing has changed then.
    """
    _filled(module, FromHuggingFace(directory, module.config))


class FromHuggingFace:
    """The values of parameters, from a directory: called with a parameter, it fills this rank's slice of it.

    ``config``: of the model that is filled; ``None``: the directory's. As ``initialize`` of a sharded optimizer that
    builds its modules on the meta device, or in :func:`.fill`.
    """

    def __init__(self, directory: str | Path, config: TransformerConfig | None = None) -> None:
        found, family = _described(Path(directory))
        self.config = found if config is None else config
        """Of the model that is filled."""
        _check_same(Path(directory), found, self.config)
        self._weights = Weights(Path(directory))
        self._names = _Names(self._weights, family)
        self._pieces = pieces_by_parameter(self.config, family)
        _check(self._weights, self._names, self._pieces)
        if self.config.tie_embeddings:
            _check_head(self._weights, self._names, self._pieces["embedding.weight"][0])

    @property
    def dtype(self) -> torch.dtype:
        """That of the token embedding in the files."""
        name = self._names.of(self._pieces["embedding.weight"][0].theirs)
        return DTYPES[self._weights.tensors[name].dtype]

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        """Reads what this rank holds of it, and nothing else."""
        index = full_index(parameter)
        here = Rectangle(tuple(i.start for i in index), tuple(parameter.shape))
        for piece in self._pieces[sharding_of(parameter).name]:
            for match in matches(piece, here):
                block = self._weights.read(self._names.of(piece.theirs), match.theirs.index)
                values = block.t() if piece.transposed else block
                inside = match.ours.moved([-start for start in here.offsets])
                parameter[inside.index].copy_(values.reshape(inside.sizes))


def _filled(model: Transformer, source: FromHuggingFace) -> Transformer:
    for module in model.modules():
        fill(module, source)
    return model


def _described(directory: Path) -> tuple[TransformerConfig, Family]:
    path = directory / CONFIG
    return config_from_json(read_json(path), str(path))


@dataclass(frozen=True)
class _Names:
    """Which of the names in the files is meant: older files leave out what all names begin with."""

    weights: Weights
    family: Family

    def of(self, name: str) -> str:
        for candidate in self.all_of(name):
            if candidate in self.weights.tensors:
                return candidate
        return name

    def all_of(self, name: str) -> tuple[str, ...]:
        return self.family.head if name in self.family.head else (name, name.removeprefix(self.family.base))


def _check_same(directory: Path, found: TransformerConfig, wanted: TransformerConfig) -> None:
    """That the model to be filled computes what the files' does."""
    wrong = [
        f"{_KEYS.get(field, field)}: {ours}, but {theirs} in the directory"
        for field in _FUNCTION
        if (ours := getattr(wanted, field)) != (theirs := getattr(found, field))
    ]
    if wanted.position == "learned" and wanted.sequence != found.sequence:
        wrong.append(f"sequence: {wanted.sequence}, but {found.sequence} learned positions in the directory")
    if wrong:
        raise HuggingFaceError(
            f"{directory} holds another model: {'; '.join(wrong)}; change these, or build the model from the directory"
        )


_FUNCTION = (
    "layers", "hidden", "heads", "num_kv_heads", "head_size", "ffn_size", "vocab", "position", "norm", "activation",
    "embedding_norm", "qk_norm", "parallel_residual", "tie_embeddings", "use_attention_bias", "use_mlp_bias",
    "norm_eps", "rotary_base", "rotary_fraction", "rotary_scaling", "experts", "experts_per_token",
)  # fmt: skip
"""What of a configuration decides the function that trained weights are of."""

_KEYS = {
    "num_kv_heads": "kv_heads",
    "head_size": "head_dim",
    "ffn_size": "ffn",
    "use_attention_bias": "attention_bias",
    "use_mlp_bias": "mlp_bias",
}
"""What a person writes, of those that have a default which others decide."""


def _check(weights: Weights, names: _Names, pieces: dict[str, list[Piece]]) -> None:
    """Everything that headers can tell: nothing missing, nothing unknown, shapes and types."""
    expected = {piece.theirs: piece for held in pieces.values() for piece in held}
    found = {names.of(theirs) for theirs in expected}
    family = names.family
    missing = [theirs for theirs in expected if names.of(theirs) not in weights.tensors]
    shapes, types = [], []
    for theirs, piece in expected.items():
        stored = weights.tensors.get(names.of(theirs))
        if stored is None:
            continue
        if stored.shape != piece.shape:
            shapes.append(f"{names.of(theirs)} is {list(stored.shape)} instead of {list(piece.shape)}")
        if stored.dtype not in DTYPES:
            types.append(f"{names.of(theirs)} is {stored.dtype}")
    unknown = [
        name
        for name in weights.tensors
        if name not in found and name not in family.head and not _is_ignored(name, family)
    ]
    problems = [
        *_told("missing", missing),
        *_told("not of such a model", unknown),
        *_told("of another shape", shapes),
        *_told(f"of a type that is not one of {', '.join(DTYPES)}", types),
    ]
    if problems:
        raise HuggingFaceError(
            f"{weights.directory} does not hold the {family.name} model that its {CONFIG} describes: "
            f"{'; '.join(problems)}"
        )


def _is_ignored(name: str, family: Family) -> bool:
    return re.fullmatch(family.ignored, family.base + name.removeprefix(family.base)) is not None


def _told(what: str, names: list[str]) -> Iterator[str]:
    if names:
        yield f"{what}: {', '.join(names)}"


def _check_head(weights: Weights, names: _Names, embedding: Piece) -> None:
    """A head that is said to be the embedding, and is in the files all the same, has to be it."""
    head = next((name for name in names.family.head if name in weights.tensors), None)
    if head is None:
        return
    own = names.of(embedding.theirs)
    if weights.tensors[head].shape == embedding.shape and all(
        torch.equal(left, right)
        for left, right in zip(_in_rows(weights, head), _in_rows(weights, own), strict=True)
    ):
        return
    raise HuggingFaceError(
        f"{weights.directory}: {CONFIG} says that the head is the embedding (tie_word_embeddings), but {head} and "
        f"{own} differ; set tie_word_embeddings to false there to keep both, or remove {head} from the file"
    )


def _in_rows(weights: Weights, name: str) -> Iterator[Tensor]:
    rows, columns = weights.tensors[name].shape
    step = max(1, _COMPARED // columns)
    for start in range(0, rows, step):
        yield weights.read(name, (slice(start, min(start + step, rows)), slice(0, columns)))
