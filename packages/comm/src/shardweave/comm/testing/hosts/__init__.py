"""Several hosts on one machine: network namespaces with links of a chosen rate, delay and loss.

::

    with Hosts(2, rate="1gbit") as hosts:              @pytest.mark.hosts(2, rate="1gbit")
        run_ranks(work, 8, hosts=hosts)                @pytest.mark.ranks(8)
                                                       def test_work(): ...

Ranks on different hosts have different networks and host names and one file system. Their cores, memory and
clock are this machine's. Needs Linux, root and iproute2; :func:`hosts_unavailable` tells what is missing.
"""

from __future__ import annotations

from .available import HostsUnavailable, hosts_unavailable
from .bench import Hosts
from .counters import INTERFACE, LinkBytes, own_traffic
from .host import Host
from .placement import Place, place

__all__ = [
    "INTERFACE",
    "Host",
    "Hosts",
    "HostsUnavailable",
    "LinkBytes",
    "Place",
    "hosts_unavailable",
    "own_traffic",
    "place",
]
