"""The shape of a transformer as one frozen value.

Everything that has to know the model before it exists (parameter and FLOP counts, the partitioner, the dry
run, the planner) reads this value, so it holds no tensors. Optional fields stay ``None`` when they are not given and
are resolved by properties: ``dataclasses.replace(config, heads=4)`` then derives the rest again instead of carrying
numbers of the old shape along.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from shardweave.tensor_parallel import RotaryScaling

__all__ = ["Activation", "Norm", "Position", "TransformerConfig"]

Position = Literal["learned", "rotary", "alibi"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "position": get_args(Position),
    "norm": get_args(Norm),
    "activation": get_args(Activation),
}
_COUNTS = ("layers", "hidden", "heads", "vocab", "sequence", "kv_heads", "ffn", "head_dim")
_GATED_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A GPT-style pre-norm transformer; every value is checked when the object is made.

    Raises:
        ValueError: for a value that cannot be built; the text names the field, the value, the rule and the
            way out.
    """

    layers: int
    """Number of transformer blocks, over all pipeline stages."""

    hidden: int
    """Width of the hidden states."""

    heads: int
    """Number of query heads."""

    vocab: int
    """Number of tokens: the real one. It is never padded, whatever the layout."""

    sequence: int
    """Longest sequence trained on; the length of the table of learned positions."""

    kv_heads: int | None = None
    """Key and value heads (grouped-query attention); ``None``: as many as ``heads``."""

    ffn: int | None = None
    """Inner width of the MLP, or of each expert. ``None``: ``4 * hidden``; for swiglu ``8/3 * hidden`` (the same number
    of parameters with three matrices instead of two), rounded up to a multiple of ``min(256, hidden)``, which is
    Llama's rule."""

    head_dim: int | None = None
    """Width of one head; ``None``: ``hidden / heads``."""

    position: Position = "learned"
    """``learned``: a table added to the embedding; ``rotary``: RoFormer (arXiv 2104.09864); ``alibi``: arXiv
    2108.12409."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""

    rotary_fraction: float = 1.0
    """Which part of a head's features, from the first on, is rotated (GPT-NeoX-20B: a quarter); an even number."""

    rotary_scaling: RotaryScaling | None = None
    """How rotary frequencies are slowed down for sequences longer than those trained on before (Llama 3.1)."""

    norm: Norm = "layernorm"
    """``layernorm``, or ``rmsnorm`` (arXiv 1910.07467), which has no bias."""

    norm_eps: float = 1e-5
    """Added to the variance (mean square) in every norm."""

    embedding_norm: bool = False
    """A norm right after the embedding, as BLOOM has (arXiv 2211.05100, section 3.1.2)."""

    qk_norm: bool = False
    """A norm of each head's queries and of its keys, before rotary, as Qwen3 has: scores stay bounded however large the
    projections grow (arXiv 2302.05442, section 2). One for all query heads of a layer, and one for all key heads."""

    parallel_residual: bool = False
    """Whether a block's MLP reads what its attention reads, each through a norm of its own, and both are added at once:
    ``x + attention(norm(x)) + mlp(norm(x))``, as GPT-NeoX has it (arXiv 2204.06745, section 2.1)."""

    activation: Activation = "gelu"
    """``gelu`` (by erf), ``gelu_tanh`` (the approximation GPT-2 and BLOOM use), ``relu`` (OPT) or ``swiglu`` (arXiv
    2002.05202)."""

    tie_embeddings: bool = True
    """Whether the output head multiplies by the embedding's own weight."""

    dropout: float = 0.0
    """Probability of dropping an element of the embedding, of the attention's and of the MLP's output."""

    attention_dropout: float = 0.0
    """Probability of dropping an attention weight."""

    bias: bool | None = None
    """Whether linear layers have a bias; ``None``: with layernorm yes, with rmsnorm no. The output head never
    has one."""

    attention_bias: bool | None = None
    """Whether the four projections of attention have one; ``None``: as ``bias`` says."""

    mlp_bias: bool | None = None
    """Whether the matrices of the MLP have one; ``None``: as ``bias`` says."""

    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    head_z_loss: float = 0.0
    """What the mean z-loss of a valid token is multiplied by, which is trained on beside the loss and keeps the logits
    from drifting away together (arXiv 2204.02311, section 5, with 1e-4); 0: there is none."""

    experts: int = 0
    """Feed-forward networks of each block, of which a router chooses for each token; 0: one network, without a router.
    They and the router have no bias, whatever ``bias`` says."""

    experts_per_token: int = 2
    """How many of them a token goes through."""

    expert_capacity: float | None = None
    """Tokens of a sequence that an expert takes, as a multiple of an even share of a sequence of ``sequence`` tokens;
    what comes later in the sequence is left out of that expert. ``None``: all are taken."""

    balance_loss: float = 0.01
    """What the mean balance loss of a sequence is multiplied by, added up over layers; see
    :func:`~shardweave.tensor_parallel.balance_loss`."""

    router_z_loss: float = 0.0
    """What the mean z-loss of a token is multiplied by, added up over layers; see
    :func:`~shardweave.tensor_parallel.router_z_loss`."""

    router_bias: bool = False
    """Whether routers have a bias that balances the experts without a loss: it is no parameter, and
    :meth:`.Transformer.move_router_biases` moves it."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._check_count(name)
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: {value} is not a probability below 1; use 0 <= {name} < 1")
        for name in ("norm_eps", "rotary_base", "init_std"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: {value} must be a positive finite number")
        self._check_heads()
        self._check_rotary()
        self._check_experts()

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        optional = next(field for field in fields(self) if field.name == name).default is None
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            remedy = ", or leave it out for the default" if optional else ""
            raise ValueError(f"{name}: {value!r} must be a whole number of at least 1{remedy}")

    def _check_heads(self) -> None:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"heads: {self.heads} does not divide hidden: {self.hidden}; use {_divisors(self.hidden)}, "
                "or set head_dim"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"kv_heads: {self.kv_heads} does not divide heads: {self.heads}; use {_divisors(self.heads)}"
            )

    def _check_rotary(self) -> None:
        if self.position != "rotary":
            for name, nothing in (("rotary_fraction", 1.0), ("rotary_scaling", None)):
                if getattr(self, name) != nothing:
                    raise ValueError(
                        f"{name}: {getattr(self, name)} is for rotary positions, and position is {self.position}; set "
                        f"position to rotary, or {name} to {nothing}"
                    )
            return
        if self.head_size % 2:
            raise ValueError(
                f"position: rotary turns pairs of numbers, so the width of a head must be even, and it is "
                f"{self.head_size} (hidden {self.hidden}, heads {self.heads}); change heads or set head_dim"
            )
        turned = int(self.head_size * self.rotary_fraction) if math.isfinite(self.rotary_fraction) else 0
        if turned % 2 or not 2 <= turned <= self.head_size:
            raise ValueError(
                f"rotary_fraction: {self.rotary_fraction} of a head of {self.head_size} is {turned}, which must be "
                f"even and between 2 and {self.head_size}; use a multiple of {2 / self.head_size:g} up to 1"
            )

    def _check_experts(self) -> None:
        for name, least in (("experts", 0), ("experts_per_token", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: {value!r} must be a whole number of at least {least}")
        for name in ("balance_loss", "router_z_loss", "head_z_loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value} must be a finite number of at least 0, which turns it off")
        room = self.expert_capacity
        if room is not None and not (math.isfinite(room) and room > 0):
            raise ValueError(
                f"expert_capacity: {room} is a multiple of an even share; use a number above 0, or None to take all"
            )
        if self.experts == 0:
            for name, nothing in (("expert_capacity", None), ("router_z_loss", 0.0), ("router_bias", False)):
                if getattr(self, name) != nothing:
                    raise ValueError(
                        f"{name}: {getattr(self, name)} is for experts, and experts is 0; set experts, or leave it out"
                    )
            return
        if self.mlp_bias:
            raise ValueError(
                f"mlp_bias: {self.mlp_bias}, but experts: {self.experts} have no bias; leave mlp_bias out"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token: {self.experts_per_token} of {self.experts} experts; use at most {self.experts}"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def query_size(self) -> int:
        """Width of all query heads together, ``heads * head_size``."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_size

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate matrix beside the one that goes up."""
        return self.activation == "swiglu"

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        if self.ffn is not None:
            return self.ffn
        if not self.gated:
            return 4 * self.hidden
        multiple = min(_GATED_MULTIPLE, self.hidden)
        return math.ceil(8 * self.hidden / (3 * multiple)) * multiple

    @property
    def use_attention_bias(self) -> bool:
        """Whether the projections of attention have a bias."""
        return self._use_bias if self.attention_bias is None else self.attention_bias

    @property
    def use_mlp_bias(self) -> bool:
        """Whether the matrices of the MLP have a bias; experts never have one."""
        return not self.experts and (self._use_bias if self.mlp_bias is None else self.mlp_bias)

    @property
    def _use_bias(self) -> bool:
        return self.bias if self.bias is not None else self.norm == "layernorm"

    @property
    def tensor_sizes(self) -> list[int]:
        """Sizes of a tensor axis that can share the attention heads; everything else may be split unevenly.

        Ranks hold whole query heads; key and value heads are split, or copied over neighbouring ranks.
        """
        kv = self.num_kv_heads
        return [n for n in range(1, self.heads + 1) if self.heads % n == 0 and (kv % n == 0 or n % kv == 0)]

    @property
    def residual_std(self) -> float:
        """Initial deviation of the two matrices per block that write to the residual stream.

        ``init_std / sqrt(2 * layers)`` (GPT-2 report, section 2.3) with the layers of the whole model: a
        pipeline stage must not scale by its own few.
        """
        return self.init_std / math.sqrt(2 * self.layers)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    nearest = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{name}: {value!r} is not one of {', '.join(choices)}{hint}")


def _divisors(number: int) -> str:
    found = [str(n) for n in range(1, number + 1) if number % n == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
