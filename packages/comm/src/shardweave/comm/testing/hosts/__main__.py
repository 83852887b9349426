"""Runs a command on every host of a bench, all at once: ``python -m shardweave.comm.testing.hosts``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from .available import HostsUnavailable
from .bench import Hosts


def main(arguments: Sequence[str] | None = None) -> int:
    """The status of the first host whose command failed, as a shell shows it; 0 if none did, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m shardweave.comm.testing.hosts",
        description="Run COMMAND on each of N hosts (network namespaces node0, node1, ...), all at once. "
        "{index} and {name} in it become the host's. Needs root and iproute2.",
    )
    parser.add_argument("number", type=int, metavar="N", help="how many hosts")
    parser.add_argument("--rate", help="what each host can send, as in 200mbit; default: unshaped")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way; default: none")
    parser.add_argument("--loss", type=float, default=0.0, help="the part of packets lost; default: none")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    options = parser.parse_args(arguments)
    try:
        bench = Hosts(options.number, rate=options.rate, delay_ms=options.delay_ms, loss=options.loss)
        with bench as hosts:
            return _run_everywhere(hosts, options.command)
    except KeyboardInterrupt:
        return 130
    except (ValueError, HostsUnavailable) as error:
        parser.error(str(error))


def _run_everywhere(hosts: Hosts, command: Sequence[str]) -> int:
    processes = []
    for index, name in enumerate(hosts.names):
        argv = [word.replace("{index}", str(index)).replace("{name}", name) for word in command]
        processes.append(subprocess.Popen(hosts.command(index, argv), stdin=subprocess.DEVNULL))
    statuses = [process.wait() for process in processes]
    failed = next((status for status in statuses if status != 0), 0)
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    sys.exit(main())
