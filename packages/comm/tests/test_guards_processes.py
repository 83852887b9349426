"""Whether another process lives, asked of the kernel."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path

from shardweave.comm.guards.processes import Process, own_process


def of_child(child: subprocess.Popen[bytes]) -> Process:
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return Process(child.pid, started, own_process().machine)


def reaches(process: Process, state: str) -> bool:
    """Within a second."""
    for _ in range(100):
        if process.state() == state:
            return True
        time.sleep(0.01)
    return False


def test_this_process_runs() -> None:
    assert own_process().pid == os.getpid()
    assert own_process().state() == "running"


def test_a_child_is_running_then_stopped_then_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        process = of_child(child)
        assert process.state() == "running"
        child.send_signal(signal.SIGSTOP)
        assert reaches(process, "stopped")
        child.kill()
        assert reaches(process, "ended")  # not waited for: a zombie
    finally:
        child.kill()
        child.wait()
    assert process.state() == "ended"


def test_a_later_process_of_the_same_number_is_another() -> None:
    earlier = dataclasses.replace(own_process(), started=1)
    assert earlier.state() == "ended"


def test_of_another_machine_nothing_is_known() -> None:
    assert dataclasses.replace(own_process(), machine="elsewhere").state() == "unknown"
    assert dataclasses.replace(own_process(), started=0).state() == "unknown"
