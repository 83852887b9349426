"""Tensor parallelism: each rank holds a slice of every large weight.

======================  =====================================================================================
linear                  :class:`ColumnParallelLinear`, :class:`RowParallelLinear`
fused                   :class:`FusedColumnLinear`, :class:`FusedLayers`, :func:`fused_linear`: several
                        column-parallel layers over one input, in one product
embedding               :class:`VocabParallelEmbedding`
cross_entropy           :func:`vocab_parallel_cross_entropy`: the loss without gathering logits
head_loss               :func:`vocab_parallel_head_loss`: output product and loss, never holding all logits
attention               :class:`ParallelAttention`, with :class:`Rotary`, :class:`Alibi`
cache                   :class:`LayerCache`: keys and values of the tokens before, to continue a text
rotary_scaling          :class:`RotaryScaling`, :func:`rotary_frequencies`: rotary for longer sequences than trained on
context                 :func:`cut_context`, :func:`gather_context`, :func:`context_positions`,
                        :func:`check_context`: who holds which tokens of a sequence
documents               :func:`document_positions`, :func:`document_targets`: several texts in one row
experts                 :class:`MixtureOfExperts`, with :class:`TopKRouter` and :class:`StackedLinear`; its losses:
                        :func:`balance_loss`, :func:`router_z_loss`; :func:`within_capacity`
parallelize             :func:`parallelize`: split the layers of a module that exists, by a plan of names
plans, public_plans     :class:`Plan`, :func:`plan_for`: what a plan says; plans for models of transformers
gather                  :func:`gather`: the module as it was, with the weights that it has now
replicas                :func:`mark_partial`, :func:`assert_replicas_equal`: parameters that are not split
features                :class:`FeatureSplit`, :func:`split_features`, :func:`split_heads`: who holds what
overlap                 :class:`Overlap`, :func:`overlap_for`, :class:`ProductSpeed`, :func:`measure_products`: whether
                        a product pays to be computed in pieces while the others travel
products                :func:`column_linear`, :func:`row_linear`: the products as functions of given weights
kept                    :class:`Kept`: results that a region keeps though it is computed again in backward
layer                   :class:`ParallelLayer`: base of the layers, keeps sharding records alive
======================  =====================================================================================

Layers take the one axis whose ranks share their weights; ``sequence_dim`` turns sequence parallelism on.
"""

from __future__ import annotations

from ._version import __version__
from .alibi import Alibi, alibi_bias, alibi_slopes
from .attention import ParallelAttention
from .cache import LayerCache
from .context import check_context, context_positions, cut_context, gather_context
from .cross_entropy import vocab_parallel_cross_entropy
from .documents import check_documents, document_positions, document_targets
from .embedding import VocabParallelEmbedding
from .experts import (
    MixtureOfExperts,
    Routed,
    Routing,
    StackedLinear,
    TopKRouter,
    balance_loss,
    router_z_loss,
    within_capacity,
)
from .features import FeatureSplit, split_features, split_heads
from .fused import FusedColumnLinear, FusedLayers, fused_linear
from .gather import gather
from .head_loss import vocab_parallel_head_loss
from .kept import ATTENTION, LINEAR, Kept
from .layer import ParallelLayer
from .linear import ColumnParallelLinear, RowParallelLinear
from .overlap import Overlap, ProductSpeed, measure_products, overlap_for
from .parallelize import parallelize
from .plans import Cut, Plan
from .products import column_linear, row_linear
from .public_plans import plan_for
from .replicas import assert_replicas_equal, check_replicas, mark_partial
from .rotary import Rotary
from .rotary_scaling import RotaryScaling, rotary_frequencies
from .token_loss import Losses

__all__ = [
    "ATTENTION",
    "LINEAR",
    "Alibi",
    "ColumnParallelLinear",
    "Cut",
    "FeatureSplit",
    "FusedColumnLinear",
    "FusedLayers",
    "Kept",
    "LayerCache",
    "Losses",
    "MixtureOfExperts",
    "Overlap",
    "ParallelAttention",
    "ParallelLayer",
    "Plan",
    "ProductSpeed",
    "Rotary",
    "RotaryScaling",
    "Routed",
    "Routing",
    "RowParallelLinear",
    "StackedLinear",
    "TopKRouter",
    "VocabParallelEmbedding",
    "__version__",
    "alibi_bias",
    "alibi_slopes",
    "assert_replicas_equal",
    "balance_loss",
    "check_context",
    "check_documents",
    "check_replicas",
    "column_linear",
    "context_positions",
    "cut_context",
    "document_positions",
    "document_targets",
    "fused_linear",
    "gather",
    "gather_context",
    "mark_partial",
    "measure_products",
    "overlap_for",
    "parallelize",
    "plan_for",
    "rotary_frequencies",
    "router_z_loss",
    "row_linear",
    "split_features",
    "split_heads",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_head_loss",
    "within_capacity",
]
