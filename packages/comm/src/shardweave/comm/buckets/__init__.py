"""Gradients in flat buckets, reduced while the backward pass runs.

================  =========================================================================================
layout            which gradients share a buffer, and where they lie in it; pure
memory            :class:`BucketMemory`: one bucket's buffer; gradients arrive in it, ``.grad`` are views
order             :class:`OrderedReduction`: which bucket is reduced when, in one order on all ranks
reduction         :class:`BackgroundReduction`: a bucket's all-reduce with compression, between nodes only
gradient_buckets  :class:`GradientBuckets`: all of it, for a loop of one's own
================  =========================================================================================
"""

from __future__ import annotations

from .gradient_buckets import GradientBuckets
from .layout import FlatLayout, flat_layout, plan_buckets
from .memory import BucketMemory
from .order import OrderedReduction, Reducible
from .reduction import BackgroundReduction, compressing_axis

__all__ = [
    "BackgroundReduction",
    "BucketMemory",
    "FlatLayout",
    "GradientBuckets",
    "OrderedReduction",
    "Reducible",
    "compressing_axis",
    "flat_layout",
    "plan_buckets",
]
