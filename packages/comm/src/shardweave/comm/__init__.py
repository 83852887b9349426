"""Shardweave's base: who is who, and how they talk.

======================  =====================================================================================
mesh                    :class:`Mesh`, :class:`Axis`: the world's ranks as a grid with named axes
runtime                 :func:`init`, :func:`shutdown`, :func:`session`: how a rank begins and ends
collectives             :func:`all_reduce`, :func:`all_gather`, :func:`reduce_scatter`, :func:`all_to_all`,
                        :func:`broadcast`, :func:`barrier`, :func:`send`, :func:`receive`, :func:`exchange`;
                        each also as ``start_...``, which returns a :class:`Pending`
autograd                :func:`copy_to`, :func:`reduce_from`, :func:`gather_for`, ...: pairs of forward and backward
sharding                :class:`Sharding`: how one parameter is laid out; written by one, read by all
rectangles              :class:`Rectangle`, :func:`flat_rectangles`: a flat range of a slice, named without a layout
values                  :func:`gather_values`, :func:`broadcast_value`: small JSON values, for decisions of all ranks
gradients               :func:`sum_partial_gradients`, :func:`gradient_norm`, :func:`clip_gradients`
statistics              :class:`TensorStatistics`: rms, largest value and zeros of tensors in parts
readiness               :func:`gradient_work`, :class:`WeightGradients`: when a gradient is final
compression             :class:`CompressedReduction` with :class:`OneBit`, :class:`TwoBit`, :class:`EightBit`,
                        :class:`TopK` or :class:`PowerSGD`: gradients in few bytes, what was not sent is kept
ledger                  :class:`Ledger`: every byte, by axis, kind and link
random                  :func:`named_generator`, :func:`keyed_dropout`: random numbers that do not know the layout
random_streams          :class:`RandomStreams`: torch's own random numbers, apart on some ranks and alike on others
testing                 :func:`shardweave.comm.testing.run_ranks`, ``@pytest.mark.ranks(n)``
======================  =====================================================================================
"""

from __future__ import annotations

from . import costs
from ._version import __version__
from .autograd import (
    copy_to,
    exchange_between,
    exchange_rows,
    gather_for,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from .axis import Axis
from .beside import start_reduce_to_shard
from .buckets import (
    BackgroundReduction,
    BucketMemory,
    FlatLayout,
    GradientBuckets,
    OrderedReduction,
    Reducible,
    compressing_axis,
    flat_layout,
    plan_buckets,
)
from .collectives import (
    all_gather,
    all_reduce,
    all_reduce_computed,
    all_to_all,
    all_to_all_uneven,
    barrier,
    broadcast,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_reduce_computed,
    start_all_to_all,
    start_all_to_all_uneven,
    start_broadcast,
    start_reduce_scatter,
)
from .compression import (
    CompressedReduction,
    Compression,
    EightBit,
    OneBit,
    PowerSGD,
    Residual,
    Segment,
    TopK,
    TwoBit,
    clip_segments,
    consecutive_segments,
    redistribute_residuals,
)
from .costs import Fabric
from .gradients import clip_gradients, gradient_norm, sum_partial_gradients
from .grid import mesh_ranks
from .guards import CollectiveMismatch
from .ledger import Ledger, LedgerKey, Traffic
from .ledger_table import ledger_dict, ledger_table
from .links import ASSUMED, Link, Links
from .mesh import Mesh
from .options import CommOptions
from .p2p import Message, exchange, receive, send, start_receive, start_send
from .partition import split_range, split_sizes
from .pending import Pending, wait_when_dropped
from .probe import measure_links
from .random import (
    DropoutStreams,
    combine_keys,
    keyed_dropout,
    keyed_uniform,
    named_generator,
    named_seed,
)
from .random_streams import RandomFork, RandomStreams
from .readiness import GradientWork, Subscription, WeightGradients, gradient_work
from .rectangles import Rectangle, flat_rectangles, part_rectangles, rectangle_views
from .runtime import init, session, shutdown
from .sharding import (
    Sharding,
    Split,
    counts_here,
    full_index,
    name_parameters,
    set_sharding,
    sharding_of,
)
from .statistics import TensorStatistics, add_parts, empty_parts, join_parts, measure_part
from .topology import Topology
from .values import broadcast_value, gather_values

__all__ = [
    "ASSUMED",
    "Axis",
    "BackgroundReduction",
    "BucketMemory",
    "CollectiveMismatch",
    "CommOptions",
    "CompressedReduction",
    "Compression",
    "DropoutStreams",
    "EightBit",
    "Fabric",
    "FlatLayout",
    "GradientBuckets",
    "GradientWork",
    "Ledger",
    "LedgerKey",
    "Link",
    "Links",
    "Mesh",
    "Message",
    "OneBit",
    "OrderedReduction",
    "Pending",
    "PowerSGD",
    "RandomFork",
    "RandomStreams",
    "Rectangle",
    "Reducible",
    "Residual",
    "Segment",
    "Sharding",
    "Split",
    "Subscription",
    "TensorStatistics",
    "TopK",
    "Topology",
    "Traffic",
    "TwoBit",
    "WeightGradients",
    "__version__",
    "add_parts",
    "all_gather",
    "all_reduce",
    "all_reduce_computed",
    "all_to_all",
    "all_to_all_uneven",
    "barrier",
    "broadcast",
    "broadcast_value",
    "clip_gradients",
    "clip_segments",
    "combine_keys",
    "compressing_axis",
    "consecutive_segments",
    "copy_to",
    "costs",
    "counts_here",
    "empty_parts",
    "exchange",
    "exchange_between",
    "exchange_rows",
    "flat_layout",
    "flat_rectangles",
    "full_index",
    "gather_for",
    "gather_from",
    "gather_values",
    "gradient_norm",
    "gradient_work",
    "init",
    "join_parts",
    "keyed_dropout",
    "keyed_uniform",
    "ledger_dict",
    "ledger_table",
    "measure_links",
    "measure_part",
    "mesh_ranks",
    "name_parameters",
    "named_generator",
    "named_seed",
    "part_rectangles",
    "plan_buckets",
    "receive",
    "rectangle_views",
    "redistribute_residuals",
    "reduce_from",
    "reduce_scatter",
    "reduce_scatter_to",
    "scatter_to",
    "send",
    "session",
    "set_sharding",
    "sharding_of",
    "shutdown",
    "split_range",
    "split_sizes",
    "start_all_gather",
    "start_all_reduce",
    "start_all_reduce_computed",
    "start_all_to_all",
    "start_all_to_all_uneven",
    "start_broadcast",
    "start_receive",
    "start_reduce_scatter",
    "start_reduce_to_shard",
    "start_send",
    "sum_partial_gradients",
    "wait_when_dropped",
]
