"""Every test runs on its own: no outside settings, no outside network, and nothing may block the event loop."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import blockbuster.blockbuster as _blockbuster
import hypothesis
import pytest
import pytest_asyncio

import everloop
from everloop.providers.endpoints import ENDPOINTS

from .support.in_memory import keep_in_memory
from .support.precompiled import precompile
from .support.unflushed import leave_out_flushes

if TYPE_CHECKING:
    from everloop.testing.openai_server import FakeOpenAI

    from .crash.forge import Forge
    from .support.desk import Desk
    from .support.skill_bench import Bench

_OUR_CODE = str(Path(everloop.__file__).parent) + os.sep
_OUR_TESTS = str(Path(__file__).parent) + os.sep
_IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
_LOOPBACK_NAMES = {"localhost", "ip6-localhost", "::1", "", "0.0.0.0", "::"}

# A shared machine may stall for longer than hypothesis' deadline; each test's timeout is enough.
hypothesis.settings.register_profile("everloop", deadline=None, derandomize=_IN_CI, database=None)
hypothesis.settings.load_profile("everloop")


def pytest_configure(config: pytest.Config) -> None:
    """Undo what a parent process may have turned off, here and for the programs under test, which inherit it.

    These are SIGINT, which `make test &` and `nohup` ignore, and byte code: without it, each program compiles itself.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    keep_in_memory()
    leave_out_flushes()
    gc.disable()  # until everything is collected: nothing of it is garbage


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt the collected tests from garbage collection, which would scan them again and again."""
    gc.freeze()
    gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Tests mostly wait for processes and clocks, so more workers than cores finish sooner."""
    return len(os.sched_getaffinity(0)) + 3


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    precompile(config)


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own home, and remove every setting of the person who runs it."""
    keys = {known.key for known in ENDPOINTS.values()}
    for name in list(os.environ):
        if name.startswith("EVERLOOP_") or name.lower() in _PROXY_VARIABLES or name in keys:
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("EVERLOOP_HOME", str(home / ".everloop"))
    monkeypatch.setenv("EVERLOOP_TITLES", "words")  # no model call that a test does not expect


_RUNNING = (asyncio.base_events.__file__, "_run_once")  # below it on the stack is what runs the loop, and no call


class _Guard:
    """Watches for blocking calls of Everloop's own code inside the event loop, while a test wants it.

    It is set up once: wrapping all blocking functions anew for each test takes longer than most tests.
    """

    def __init__(self) -> None:
        self.watching = False
        self.blocked: list[str] = []
        guard = self

        class Blocked(_blockbuster.BlockingError):
            def __init__(self, func: str) -> None:
                super().__init__(func)
                guard.blocked.append(f"{func} at {_first_line_of_ours()}")

        wrapped = _blockbuster.BlockBuster(everloop)
        for function in wrapped.functions.values():
            function.can_block_predicate = self._either(function.can_block_predicate)
        for name in ("sqlite3.Connection.execute", "sqlite3.Connection.executescript", "os.stat"):
            # A few pages into the kernel's cache, on a connection that waits for nothing: tests/store/test_writer.py.
            wrapped.functions[name].can_block_in("everloop/store/sqlite/writer.py", "_write_here")
        _blockbuster.BlockingError = Blocked  # type: ignore[misc]
        wrapped.activate()

    def _either(self, allowed: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args, **kwargs: not self.watching or allowed(*args, **kwargs) or _called_from_a_test()


@functools.cache
def _guard() -> _Guard:
    return _Guard()


def _called_from_a_test() -> bool:
    """True if the blocking call was made by test code (a fake tool, say) rather than by Everloop itself.

    Writing a log line is allowed: the program chooses its destination, and pytest's is a file.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == logging.__file__:
            return True
        if name.startswith(_OUR_CODE):
            return False
        if name.startswith(_OUR_TESTS) and name != __file__:
            return True
        if (name, frame.f_code.co_name) == _RUNNING:
            return True
        frame = frame.f_back
    return True


def _first_line_of_ours() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(_OUR_CODE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(_OUR_CODE)}:{frame.f_lineno}"


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which Everloop's own code makes a blocking call inside the event loop.

    The error is raised at the call and remembered, since a turn turns exceptions into replies.
    """
    if request.node.get_closest_marker("may_block"):
        yield
        return
    guard = _guard()
    guard.blocked.clear()
    guard.watching = True
    try:
        yield
    finally:
        guard.watching = False
    if guard.blocked:
        pytest.fail("the event loop was blocked by " + "; ".join(dict.fromkeys(guard.blocked)), pytrace=False)


def _is_loopback(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a Unix socket's path
    host = str(address[0])
    return host in _LOOPBACK_NAMES or host.startswith(("127.", "::ffff:127."))


@pytest.fixture(autouse=True)
def _no_outside_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that would leave the machine."""
    if request.node.get_closest_marker("network"):
        return

    def guarded(method: Any) -> Any:
        def connect(self: socket.socket, address: Any) -> Any:
            if not _is_loopback(address):
                raise OSError(f"a test tried to reach {address!r}: only loopback is allowed in tests")
            return method(self, address)

        return connect

    monkeypatch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))


def _refuse_skip(report: Any) -> None:
    report.outcome = "failed"
    report.longrepr = f"skipped, but in CI nothing may be missing: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """In CI a skip is a failure: the machine lacks something. Tests marked `platform` may still be skipped."""
    report = yield
    if _IN_CI and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("platform"):
        _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Fail a file that is skipped as a whole during collection in CI."""
    report = yield
    if _IN_CI and report.skipped and not collector.get_closest_marker("platform"):
        _refuse_skip(report)
    return report


# ---------------------------------------------------------------------------------------------- for the crash tests


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    """A warm process that forks the programs to be killed."""
    from .crash.forge import Forge

    forge = Forge()
    yield forge
    forge.close()


@pytest.fixture(params=["some", pytest.param("every", marks=pytest.mark.chaos)])
def step(request: pytest.FixtureRequest) -> int:
    """The distance between the commits at which a program is killed: with `make chaos`, every one."""
    return 1 if request.param == "every" else 2


@pytest_asyncio.fixture
async def model() -> AsyncIterator[FakeOpenAI]:
    """A model whose plan is the marker of the message."""
    from .crash.model import planned

    async with planned(keep_bodies=False) as server:
        yield server


# ---------------------------------------------------------------------------------------------- for the file tools


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty workspace."""
    place = tmp_path / "workspace"
    place.mkdir()
    return place


@pytest.fixture
def desk(folder: Path) -> Desk:
    """The workspace's file tools."""
    from .support.desk import Desk

    return Desk(folder)


@pytest.fixture
def bench(folder: Path, tmp_path: Path) -> Bench:
    """A workspace with skills."""
    from .support.skill_bench import Bench

    return Bench(folder, tmp_path / "shipped")
