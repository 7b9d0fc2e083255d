"""Files accessed through the editor: the agent reads unsaved changes, and the editor writes the files."""

from __future__ import annotations

from collections.abc import Callable

from acp import RequestError
from acp.interfaces import Client
from acp.schema import FileSystemCapabilities

from ..sandbox.reach import within
from ..text import one_line
from ..tools.base import ToolError
from ..tools.context import current_call

ABSENT = (-32002, -32601)  # the editor does not have the file, or does not support the request: use the file on disk


class EditorFiles:
    """Access to the files of an editor's folder, used by the agent's file tools.

    The tools have already checked that the call may access the path. The editor itself is not confined, though: while a
    confined command runs in the folder, which could replace a parent folder by a link, the agent accesses the disk
    directly. `folder` is a real path, `session` returns the session to name for a call, and `is_busy` returns whether
    such a command is running.
    """

    def __init__(
        self,
        client: Client,
        offered: FileSystemCapabilities,
        folder: str,
        session: Callable[[str], str | None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._client = client
        self._offered = offered
        self._folder = folder
        self._session = session
        self._is_busy = is_busy

    async def read(self, real: str, *, to_write: bool = False) -> str | None:
        session = self._session_for(real)
        if not self._offered.read_text_file or (to_write and not self._offered.write_text_file) or session is None:
            return None
        try:
            return (await self._client.read_text_file(session_id=session, path=real)).content
        except RequestError as error:
            if error.code in ABSENT:
                return None
            raise _refused("read", real, error) from None  # the user may have refused

    async def write(self, real: str, text: str) -> bool:
        session = self._session_for(real)
        if not self._offered.write_text_file or session is None:
            return False
        try:
            await self._client.write_text_file(session_id=session, path=real, content=text)
        except RequestError as error:
            raise _refused("write", real, error) from None
        return True

    def _session_for(self, real: str) -> str | None:
        """Return the session to name to the editor; None if the editor is not asked for this file."""
        if not within(real, self._folder) or self._is_busy():
            return None
        return self._session(current_call().session)


def _refused(what: str, real: str, error: RequestError) -> ToolError:
    details = error.data.get("details") if isinstance(error.data, dict) else None
    return ToolError(f"The editor did not {what} {real}: {one_line(str(details or error), 200)}")
