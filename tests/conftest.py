"""Every test runs on its own: no outside settings, no outside network, and nothing may block the event loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

_IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
_LOOPBACK_NAMES = {"localhost", "ip6-localhost", "::1", "", "0.0.0.0", "::"}


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test its own home and take away every setting of the person who runs it."""
    for name in list(os.environ):
        if name.startswith("EVERLOOP_") or name.lower() in _PROXY_VARIABLES:
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("EVERLOOP_HOME", str(home / ".everloop"))


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """Fail a test in which Everloop's own code makes a blocking call inside the event loop."""
    if request.node.get_closest_marker("may_block"):
        yield None
        return
    with blockbuster_ctx("everloop") as guard:
        yield guard


def _is_loopback(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a Unix socket's path
    host = str(address[0])
    return host in _LOOPBACK_NAMES or host.startswith("127.") or host.startswith("::ffff:127.")


@pytest.fixture(autouse=True)
def _no_outside_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that would leave the machine."""
    if request.node.get_closest_marker("network"):
        return

    def guarded(method: Any) -> Any:
        def connect(self: socket.socket, address: Any) -> Any:
            if not _is_loopback(address):
                raise OSError(f"test tried to reach {address!r}: only loopback is allowed in tests")
            return method(self, address)

        return connect

    monkeypatch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """In CI a skip is a failure: the machine lacks something. Tests marked `platform` may still be skipped."""
    report = yield
    if _IN_CI and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("platform"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where nothing may be missing: {report.longrepr}"
    return report
