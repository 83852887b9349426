"""Whether this machine lets us make hosts, and if not, why."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

__all__ = ["HostsUnavailable", "hosts_unavailable"]

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}

_TRIAL = """
set -e
mount --bind /etc/hosts /etc/hosts
cat /proc/sys/kernel/hostname > /proc/sys/kernel/hostname
ip link add weave0 type veth peer name p0
ip link add br0 type bridge mcast_snooping 0
tc qdisc add dev weave0 root tbf rate 1mbit burst 20000 limit 20000
"""  # in namespaces that end with it


class HostsUnavailable(RuntimeError):
    """This machine, or this user, cannot make hosts; the text says what is missing."""


def hosts_unavailable(*, relay: bool = False) -> str | None:
    """Why :class:`.Hosts` cannot work here, in one sentence as for a skipped test; None if it can.

    ``relay``: whether delay or loss is wanted, which takes a TUN device besides.
    """
    if sys.platform != "linux":
        return f"several hosts on one machine are Linux namespaces; this is {sys.platform}"
    if os.geteuid() != 0:
        return "several hosts on one machine need root (network namespaces); this is another user"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"several hosts on one machine need the program {program!r} (Debian: {package})"
    if relay and not os.path.exists("/dev/net/tun"):
        return "a link with delay or loss needs /dev/net/tun (modprobe tun; in a container, --device it)"
    return _trial()


@functools.cache  # what a kernel allows does not change under a running process
def _trial() -> str | None:
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _TRIAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode == 0:
        return None
    return f"several hosts on one machine need rights that root lacks here: {done.stderr.strip()}"
