"""Which number format each kind of data is kept in.

"bf16 training" names the format of the parameters and leaves open what decides whether a run converges: in
which format micro-batches are added up (bf16 stops counting at 256), what goes over the wire, and where the
update is accumulated. Here each is a field of its own with a safe default, and what was chosen can be read
back.

::

    parameters   what the module computes with            as the module has it
    gradients    adding up micro-batches; what is reduced float32, or the parameters' own where wider
    reduction    on the wire between data ranks           as gradients
    masters      the copy that the optimizer updates      float32, or the parameters' own where wider

float16 needs a loss scale besides, or small gradients vanish before anything here sees them: `loss_scale`.

Where ``masters`` equals ``parameters`` there is no second copy: the optimizer updates the parameters in place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

__all__ = ["Formats", "MixedPrecision"]


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The four formats in force for the parameters of one dtype; see the module's table."""

    parameters: torch.dtype
    gradients: torch.dtype
    reduction: torch.dtype
    masters: torch.dtype

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates a copy in another format instead of the parameters themselves."""
        return self.masters != self.parameters


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Formats of parameters, gradients, wire and master copy. ``None`` takes the default named below.

    With fp32 or fp64 parameters and no field set, everything stays in the parameters' format and no copy is
    made. Sums over the ranks of an axis are taken in float32 or wider, whatever the wire carries, and rounded once, to
    ``gradients``; so are norms. A step converts a unit's reduced gradients to ``masters`` before it clips and updates.
    """

    parameters: torch.dtype | None = None
    """What the module computes with. Given, the optimizer converts the parameters when it is built (masters
    are taken before that, so they keep the bits that conversion drops). Default: as they are."""
    gradients: torch.dtype | None = None
    """In which micro-batches are added up and gradients are kept, reduced or not. Default: float32 for narrower
    parameters, else theirs. With bf16 they take half as much, and stop counting at 256 micro-batches."""
    reduction: torch.dtype | None = None
    """What travels between data ranks. Default: as ``gradients``."""
    masters: torch.dtype | None = None
    """What the optimizer updates. Default: float32 for narrower parameters, else theirs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(
                    f"MixedPrecision({field.name}={value!r}): give a floating-point torch.dtype such as "
                    f"torch.bfloat16, or None for the default"
                )

    def resolve(self, dtype: torch.dtype) -> Formats:
        """The formats in force for parameters that the module holds in ``dtype``."""
        parameters = self.parameters or dtype
        wide = torch.promote_types(parameters, torch.float32)
        gradients = self.gradients or wide
        return Formats(
            parameters=parameters,
            gradients=gradients,
            reduction=self.reduction or gradients,
            masters=self.masters or wide,
        )
