"""The folders of an agent: its workspace, and the runtime's own files, which tools must not touch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import EverloopError
from ..sandbox.reach import Reach
from ..store.base import Store
from ..threads import in_thread


class Places(NamedTuple):
    """Resolved paths of an agent.

    The workspace is given as configured and with symlinks resolved. `protected` are the runtime's own files, which
    tools must not touch in a restricted workspace; `frozen` is its code, which they must never change.
    """

    workspace: Path
    real_workspace: Path
    protected: tuple[Path, ...]
    frozen: tuple[Path, ...]


class WorkspaceError(EverloopError):
    """The workspace is missing or is not a folder."""


class Workspace(msgspec.Struct):
    """An agent's workspace, resolved once."""

    path: Path
    home: Path  # the runtime's own folder
    restricted: bool  # to the workspace
    store: Store
    _places: Places | None = None
    _is_checked: bool = False

    def __str__(self) -> str:
        return f"{self.path}{' (restricted)' if self.restricted else ''}"

    async def check(self) -> None:
        """On first use, create the folder if only the last path component is missing, or raise a `WorkspaceError`."""
        if not self._is_checked:
            await in_thread(self._check)
            self._is_checked = True

    async def places(self) -> Places:
        if self._places is None:
            self._places = await in_thread(self._resolve)
        return self._places

    def reach(self) -> Reach:
        """Return the files that may be read for the prompt, as for any tool. Reads from disk: call it in a thread."""
        places = self._places or self._resolve()
        return Reach(places.workspace, self.restricted, protected=places.protected)

    def _check(self) -> None:
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            what = "is not a folder" if self.path.exists() else f"cannot be created ({error.strerror})"
            where = os.path.abspath(self.path)
            raise WorkspaceError(f"the workspace {where} {what}: create the folder, or configure another one") from None

    def _resolve(self) -> Places:
        protected = [self.home.resolve(), *self.store.files()]
        frozen = Path(__file__).resolve().parents[1], Path(sys.prefix).resolve()
        return Places(Path(os.path.abspath(self.path)), self.path.resolve(), tuple(protected), frozen)
