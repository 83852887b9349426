"""Tests on several ranks, in about a tenth of a second each.

Two ways, both with real processes and real gloo over the loopback device::

    @pytest.mark.ranks(4)                     def total(x):
    def test_sum(tmp_path):                       return comm.all_reduce(...).tolist()
        mesh = Mesh(tp=4)
        ...                                   assert run_ranks(total, 4, x) == [...] * 4

Ranks are forked by a zygote (:mod:`shardweave.comm.zygote`) that starts with pytest. A hang ends at the
timeout with the stack of every rank that was still running; a failure shows the traceback of the rank that
failed first, not of those that lost their peer.

With :mod:`.hosts` the ranks are spread over several hosts, whose links have a chosen rate and delay.
"""

from __future__ import annotations

from .errors import RankError
from .harness import run_ranks

__all__ = ["RankError", "run_ranks"]
