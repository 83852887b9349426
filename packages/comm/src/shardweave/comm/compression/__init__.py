"""Gradient compression with error feedback: fewer bytes between nodes, and nothing of the gradient lost.

===============================  ==============================================================================
options                          :class:`OneBit`, :class:`TwoBit`, :class:`EightBit`, :class:`TopK`,
                                 :class:`PowerSGD`: what is sent, and from which step on
reduction                        :class:`CompressedReduction`: reduces one flat buffer, keeps what was not sent
segments                         :class:`Segment`: which parameters lie where in the buffer
residuals                        :class:`Residual`: what is owed, by parameter and range;
                                 :func:`redistribute_residuals`: for another number of workers
kept                             state that a skipped step takes back
averaging, swapping              bits: all-to-all, average, all-gather of records; of two workers, one all-gather
records, blocks, bits            what both stand on: records of packed bits
units                            what an element's gradients usually amount to, learnt in the warm-up
velocity                         momentum before compression
gathering, sparse                top-k: all-gather of places and values
lowrank                          PowerSGD: all-reduces of thin matrices
===============================  ==============================================================================
"""

from __future__ import annotations

from .options import Compression, EightBit, OneBit, PowerSGD, TopK, TwoBit
from .reduction import CompressedReduction
from .residuals import Residual
from .residuals import redistribute as redistribute_residuals
from .segments import Segment, clip_segments, consecutive_segments

__all__ = [
    "CompressedReduction",
    "Compression",
    "EightBit",
    "OneBit",
    "PowerSGD",
    "Residual",
    "Segment",
    "TopK",
    "TwoBit",
    "clip_segments",
    "consecutive_segments",
    "redistribute_residuals",
]
