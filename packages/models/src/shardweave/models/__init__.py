"""GPT-style transformers as configurations, the same training run under every layout.

======================  =====================================================================================
config                  :class:`TransformerConfig`: every number of a model, checked when it is made
presets                 :func:`preset`: published configurations; :data:`PRESETS` lists them; :func:`check_preset_sizes`
transformer             :class:`Transformer`: whole, split over a tensor axis, or one part of a pipeline
parts                   :class:`Part`, :func:`layer_costs`, :func:`parts_from_ranges`: what a stage holds
initialize              :func:`initial_rule`: initial values from (seed, canonical name) alone; :func:`fill`
huggingface             :func:`from_huggingface`, :func:`to_huggingface`: weights of published models in and out
shapes                  :func:`parameter_shapes`, :func:`count_parameters`: names and sizes, nothing built
kinds                   :func:`parameter_kinds`: parameters by what they are for
flops                   :func:`flops`: operations of a step; :class:`FlopCount`
memory                  :func:`memory`: bytes of one rank by kind; :class:`MemoryUse`
recompute               :class:`Recompute`: what the backward pass computes again instead of keeping it
routers                 :class:`StepRouters`: losses of mixtures of experts, and what their routers did
statistics              :func:`watch`: what the parts put out, while somebody watches
generate                :func:`generate`: continue a text; :func:`continue_texts` with a forward pass of one's own
cache                   :func:`make_cache`: keys and values of the tokens before; :func:`cache_bytes`
======================  =====================================================================================

The parts of a block (``norms``, ``mlp``, ``mixture``, ``block``, ``embedding``, ``dropout``) and how sequences are cut
(``sequence``) have their own modules.
"""

from __future__ import annotations

from ._version import __version__
from .cache import Cache, cache_bytes, make_cache
from .config import TransformerConfig
from .flops import FlopCount, ForwardFlops, flops, forward_flops
from .generate import TextWindow, continue_text, continue_texts, generate
from .huggingface import (
    FromHuggingFace,
    HuggingFaceError,
    from_huggingface,
    huggingface_config,
    load_huggingface,
    to_huggingface,
)
from .initialize import Constant, Drawn, Normal, Source, fill, initial_rule
from .kinds import KINDS, parameter_kinds
from .memory import MemoryUse, RankLayout, memory
from .parts import Part, layer_costs, parts_from_ranges
from .presets import PRESETS, check_preset_sizes, preset
from .recompute import OPERATIONS, Recompute
from .routers import MicroBatchRouters, RouterStatistics, StepRouters
from .shapes import ParameterShape, count_parameters, local_shape, parameter_shapes
from .statistics import Watched, watch, watched_parts
from .transformer import Transformer

__all__ = [
    "KINDS",
    "OPERATIONS",
    "PRESETS",
    "Cache",
    "Constant",
    "Drawn",
    "FlopCount",
    "ForwardFlops",
    "FromHuggingFace",
    "HuggingFaceError",
    "MemoryUse",
    "MicroBatchRouters",
    "Normal",
    "ParameterShape",
    "Part",
    "RankLayout",
    "Recompute",
    "RouterStatistics",
    "Source",
    "StepRouters",
    "TextWindow",
    "Transformer",
    "TransformerConfig",
    "Watched",
    "__version__",
    "cache_bytes",
    "check_preset_sizes",
    "continue_text",
    "continue_texts",
    "count_parameters",
    "fill",
    "flops",
    "forward_flops",
    "from_huggingface",
    "generate",
    "huggingface_config",
    "initial_rule",
    "layer_costs",
    "load_huggingface",
    "local_shape",
    "make_cache",
    "memory",
    "parameter_kinds",
    "parameter_shapes",
    "parts_from_ranges",
    "preset",
    "to_huggingface",
    "watch",
    "watched_parts",
]
