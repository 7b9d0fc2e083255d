from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from everloop.tools.shell import processes
from everloop.tools.shell.shell import ShellSettings

from .desks import Desk


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    return place


@pytest_asyncio.fixture(params=["bubblewrap", "landlock", "off"])
async def desk(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    """With each backend in turn."""
    desk = Desk(folder, ShellSettings(mode=request.param))
    yield desk
    await desk.close()


@pytest_asyncio.fixture
async def desk_with(folder: Path) -> AsyncIterator[Callable[..., Desk]]:
    """Return a factory of desks with custom settings; commands still running end with the test."""
    made: list[Desk] = []

    def make(**settings: Any) -> Desk:
        made.append(Desk(folder, ShellSettings(**settings)))
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


@pytest_asyncio.fixture
async def one(folder: Path, tmp_path: Path) -> AsyncIterator[Desk]:
    """A desk with this machine's default backend, for tests where the backend makes no difference."""
    desk = Desk(folder, ShellSettings(), outputs=tmp_path / "outputs")
    yield desk
    await desk.close()
