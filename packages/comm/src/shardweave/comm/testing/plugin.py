"""The pytest markers ``ranks(n, timeout=60, imports=())``: the body of the test runs on ``n`` ranks; and
``hosts(n, rate=...)``: beside the former on ranks that are spread over ``n`` hosts, alone with these hosts as the
fixture ``hosts``.

pytest sets the fixtures up in its own process, once; what the test asks for is pickled and handed to every
rank (``tmp_path``, parametrized values, data). The zygote starts before the tests are collected, while this
process has only imported: a fork of one that has run a parallel region would hang.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ..zygote import Entry, EntryError
from .errors import RankError
from .harness import end_zygote, import_ahead, run_entry, warm_zygote
from .hosts import Hosts, HostsUnavailable

__all__ = ["hosts", "pytest_addoption", "pytest_configure", "pytest_pyfunc_call", "pytest_unconfigure"]

_MARKER = (
    "ranks(n, timeout=60, imports=()): run the test's body on n ranks, each a process with torch.distributed "
    "initialised (gloo, loopback); fails with the first failing rank's traceback, or after timeout seconds; the "
    "modules of imports are imported once, before the ranks are forked"
)
_HOSTS_MARKER = (
    "hosts(n, rate=None, delay_ms=0, loss=0, mtu=9000): n hosts, network namespaces with links between them, for "
    "this test: its ranks are spread over them, or it asks for the fixture hosts; skipped, with the reason, "
    "where the machine cannot"
)

_IMPORTS = (
    "modules that are imported once, if they are installed, by the process that all ranks are forked from, instead of "
    "for every test"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("ranks_imports", _IMPORTS, type="args")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.addinivalue_line("markers", _HOSTS_MARKER)
    if not (config.option.help or config.option.collectonly or _hands_tests_out(config)):
        gc.freeze()  # what is imported so far is no garbage: looking through it again and again took a second a session
        import_ahead(config.getini("ranks_imports"))
        warm_zygote()


def pytest_unconfigure(config: pytest.Config) -> None:
    end_zygote()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a marked test on its ranks instead of here."""
    marker = pyfuncitem.get_closest_marker("ranks")
    on_hosts = pyfuncitem.get_closest_marker("hosts")
    if marker is None:
        if on_hosts is not None and "hosts" not in pyfuncitem.fixturenames:
            pytest.fail(
                "@pytest.mark.hosts(n) alone does nothing: add @pytest.mark.ranks(m), or ask for the fixture "
                "'hosts'",
                pytrace=False,
            )
        return None
    number, timeout, imports = _read_marker(*marker.args, **marker.kwargs)
    with contextlib.nullcontext() if on_hosts is None else _bench(on_hosts) as bench:
        error = _outcome(pyfuncitem, number, timeout, imports, bench)
    if isinstance(error, RankError) and error.fault is not None and error.fault.type == "Skipped":
        pytest.skip(error.fault.message)
    if error is not None:
        pytest.fail(str(error), pytrace=False)  # the traceback that matters is in the text
    return True


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """The running hosts of a test that is marked ``hosts(n, ...)``, for tests that hold the links in their hand."""
    marker = request.node.get_closest_marker("hosts")
    if marker is None:
        pytest.fail("the fixture 'hosts' is for tests with @pytest.mark.hosts(n, ...)", pytrace=False)
    with _bench(marker) as bench:
        yield bench


def _hands_tests_out(config: pytest.Config) -> bool:
    """Whether this is the controller of pytest-xdist, whose workers run the tests."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


@contextlib.contextmanager
def _bench(marker: pytest.Mark) -> Iterator[Hosts]:
    """The hosts that a test asks for; skips the test where there can be none."""
    with contextlib.ExitStack() as stack:
        try:
            bench = stack.enter_context(Hosts(*marker.args, **marker.kwargs))
        except HostsUnavailable as reason:
            pytest.skip(str(reason))
        yield bench


def _outcome(
    item: pytest.Function, ranks: int, timeout: float, imports: Sequence[str], hosts: Hosts | None
) -> RankError | EntryError | None:
    fixtures = _fixtures(item)
    try:
        run_entry(_entry(item), ranks, (), fixtures, timeout=timeout, imports=imports, hosts=hosts)
    except (RankError, EntryError) as error:
        return error
    return None


def _read_marker(
    n: int, timeout: float = 60.0, imports: Sequence[str] = ()
) -> tuple[int, float, Sequence[str]]:
    return n, timeout, imports


def _entry(item: pytest.Function) -> Entry:
    name = item.originalname
    if item.cls is not None:
        name = f"{item.cls.__qualname__}.{name}"
    return Entry(item.module.__name__, name, str(item.path))


def _fixtures(item: pytest.Function) -> dict[str, Any]:
    """The arguments of the test, each of which must survive the way to another process."""
    wanted = {
        name: item.funcargs[name] for name in inspect.signature(item.obj).parameters if name in item.funcargs
    }
    for name, value in wanted.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(f"fixture {name!r} cannot be sent to the ranks of this test: {error}", pytrace=False)
    return wanted
