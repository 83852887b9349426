"""The store and the transports listen on the address they were told, and on no other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from shardweave.comm.store import PREFIX, environment_store, is_loopback, open_listener, serve_store
from shardweave.comm.testing.listeners import listeners, open_to_others

RANK = """
import os
import torch
from shardweave import comm
from shardweave.comm.testing.listeners import listeners, open_to_others
comm.init(timeout=60)
mesh = comm.Mesh(dp=2, options=comm.CommOptions(debug=True, background=True))
assert comm.all_reduce(torch.ones(2), mesh.dp).tolist() == [2, 2]
serves = ("127.0.0.1", int(os.environ["MASTER_PORT"])) in listeners(os.getpid())
print(sorted(open_to_others(os.getpid())), serves)
mesh.close()
comm.shutdown()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_store_is_on_one_address() -> None:
    before = listeners(os.getpid())
    store = serve_store(open_listener(), timeout=5)
    ((address, port),) = listeners(os.getpid()) - before
    assert (address, port) == ("127.0.0.1", store.port)
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)
    del store
    assert listeners(os.getpid()) == before


def test_other_addresses_are_seen_as_open_to_others() -> None:
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert open_to_others(os.getpid()) == {("0.0.0.0", everywhere.getsockname()[1])}
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as own:
        assert ("::1", own.getsockname()[1]) in listeners(os.getpid())
        assert open_to_others(os.getpid()) == set()


def test_why_an_address_or_port_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is taken by another process"):
            open_listener(port=port)
    with pytest.raises(OSError, match="port 70000 does not exist; ports go from 1 to 65535"):
        open_listener(port=70_000)
    with pytest.raises(OSError, match=r"on 198\.51\.100\.7 cannot be used"):
        open_listener("198.51.100.7")


def test_loopback_addresses() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("127.3.2.1")
    assert is_loopback("localhost")
    assert not is_loopback("198.51.100.7")
    assert not is_loopback("no.such.host.invalid")


def environment(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    for name, value in {"MASTER_ADDR": address, "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_an_address_of_another_machine_is_listened_on_everywhere_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment(monkeypatch, "198.51.100.7")
    with pytest.warns(UserWarning, match=r"MASTER_ADDR=198\.51\.100\.7 is not an address of this machine"):
        store = environment_store(timeout=5)
    assert [address for address, _ in open_to_others(os.getpid())] == ["0.0.0.0"]
    del store


def test_the_store_of_torchruns_agent_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert environment_store(timeout=5) is None


def test_ranks_of_a_later_attempt_have_a_part_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = open_listener()
    environment(monkeypatch, "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    served = serve_store(listener, timeout=5)
    for attempt in ("attempt-0", "attempt-1"):
        monkeypatch.setenv(PREFIX, attempt)
        store = environment_store(timeout=5)
        assert store is not None
        assert not store.check(["key"])
        store.set("key", attempt)
        assert served.get(f"{attempt}/key").decode() == attempt


def test_ranks_that_meet_on_the_loopback_address_listen_on_nothing_else() -> None:
    """Started by something that sets the four variables only: the store, gloo, and what debug mode adds."""
    shared = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    shared |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    shared.pop("LOCAL_WORLD_SIZE", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert outputs == ["[] True\n", "[] False\n"]
    assert [process.returncode for process in ranks] == [0, 0]
