"""Workspace files for the page, including memory and skills.

For the policy, each request counts as a tool call: what the tools may not read or write, the page may not either. Paths
are confined to the workspace, whatever the settings allow the tools.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import web

from ..commands import COMMANDS
from ..context.pictures import user_content
from ..context.skills import SHIPPED
from ..log import Call, CallEnded, Logged, ModelAnswered
from ..runtime.agent import AgentLoop
from ..runtime.owners import Owners
from ..sandbox.reach import FOLDER, OutOfReach, Reach, normalized, within
from ..text import clean
from ..threads import in_thread
from ..tools.base import ToolError
from ..tools.context import CallContext
from ..tools.files.images import image_kind
from ..tools.files.texts import BINARY_HEAD, form_of, is_binary
from ..tools.policy.steering import steers
from .errors import ApiError, bad_request, conflict, forbidden, not_found
from .guard import OWNER
from .page_routes import Parameter, json_response, operation, read_body, read_text

T = TypeVar("T")
MAX_ENTRIES = 1_000
MAX_TEXT = 1_000_000  # bytes of a file that is shown
MAX_UPLOAD = 20_000_000  # bytes
WRITING = frozenset({"write_file", "edit_file"})
HISTORY, HISTORY_SESSIONS, HISTORY_ENTRIES = 50, 50, 1_000  # changes shown; sessions examined, and entries of each
SHOWN = 20_000  # characters of a change
MAX_TYPED = 200  # characters of a path
CHUNK = 256 * 1024
EDITABLE = ("memory", "skills")
UPLOADS = "uploads"
Kind = Literal["folder", "file", "link", "other"]
PATH = Parameter("path", "A path relative to the workspace.", required=True)
FOLDER_PATH = Parameter("path", "A folder relative to the workspace; without one, the workspace.")
# A downloaded file must never act as a page of this server.
HEADERS = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}


class FileItem(msgspec.Struct):
    name: str
    kind: Kind
    size: int
    modified_at: float


class FileList(msgspec.Struct):
    path: str
    entries: list[FileItem]
    more: bool  # there are more


class FileText(msgspec.Struct):
    path: str
    text: str | None  # None for a file that is not text
    picture: bool
    size: int
    modified_at: float
    digest: str  # of the whole file; "" for one that is too large to edit here
    cut: bool  # only the beginning is shown


class MemoryItem(msgspec.Struct):
    path: str
    kind: Literal["memory", "skill"]
    name: str
    about: str
    problem: str
    editable: bool


class MemoryList(msgspec.Struct):
    files: list[MemoryItem]


class MemoryText(msgspec.Struct):
    text: str
    digest: str


class MemoryChange(msgspec.Struct):
    """A call of the agent that wrote a file of the memory or of a skill."""

    at: float
    session: str
    seq: int
    status: str
    before: str  # the replaced text; "" if the whole file was written
    after: str


class MemoryHistory(msgspec.Struct):
    changes: list[MemoryChange]  # latest first


class SaveBody(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    text: str
    digest: str  # of the version that was read; "" for a new file


class Saved(msgspec.Struct):
    digest: str


class UploadBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    data: str  # in base64


class Uploaded(msgspec.Struct):
    path: str  # for `media` of a message
    size: int


class FileNames(Protocol):
    """Finds files of a workspace by name."""

    def matching(self, typed: str) -> list[str]:
        """Return the paths that match the typed text, best match first. Reads from disk."""
        ...


class MatchingFiles(msgspec.Struct):
    paths: list[str]


class CommandItem(msgspec.Struct):
    name: str
    about: str


class CommandList(msgspec.Struct):
    commands: list[CommandItem]


class NoFileNames:
    """The default, which finds no files."""

    def __init__(self, workspace: Path) -> None:
        pass

    def matching(self, typed: str) -> list[str]:
        return []


async def attached(
    agent: AgentLoop, text: str, uploaded: Sequence[str], named: Sequence[str]
) -> str | list[dict[str, Any]]:
    """Return a message with its uploaded files and those that it mentions: images by content, other files by path.

    A mentioned file that may not be read remains plain text.
    """
    paths: list[str] = []
    reach: Reach | None = None
    for path in uploaded:
        context = await _admitted(agent, Call(secrets.token_hex(8), "read_file", {"path": path}))
        reach = _confined(context)
        if _relative(path, context).split("/")[0] != UPLOADS:
            raise bad_request(f"media: {clean(path)[:200]} was not uploaded", "media")
        await _in_thread(path, _check_regular, reach, path)
        paths.append(path)
    for path in named:
        with suppress(ApiError):
            context = await _admitted(agent, Call(secrets.token_hex(8), "read_file", {"path": path}))
            await _in_thread(path, _check_regular, _confined(context), path)
            reach = _confined(context)
            paths.append(path)
    return await in_thread(user_content, text, paths, reach) if reach is not None else text


class FilesApi:
    """The workspace of an owner: list, read, download and upload files; edit memory and skills."""

    def __init__(self, owners: Owners, file_names: Callable[[Path], FileNames]) -> None:
        self._owners = owners
        self._file_names = file_names
        self._names: dict[Path, FileNames] = {}  # by workspace

    @operation("GET", "/api/commands", "commands", "The commands that work in every chat.", CommandList)
    async def commands(self, request: web.Request) -> web.Response:
        return json_response(CommandList([CommandItem(name, about) for name, about in sorted(COMMANDS.items())]))

    @operation(
        "GET",
        "/api/files/matching",
        "matching_files",
        "Files of the workspace whose paths have these characters in this order, the best first.",
        MatchingFiles,
        None,
        Parameter("q", "The typed part of a path."),
    )
    async def matching(self, request: web.Request) -> web.Response:
        typed = request.query.get("q", "")
        if len(typed) > MAX_TYPED:
            raise bad_request(f"q: must have at most {MAX_TYPED} characters", "q")
        reach = await self._reach(request, "list_dir", ".")
        names = self._names.setdefault(reach.workspace, self._file_names(reach.workspace))
        return json_response(MatchingFiles([clean(path) for path in await in_thread(names.matching, typed)]))

    @operation("GET", "/api/files", "files", "List a folder of the workspace.", FileList, None, FOLDER_PATH)
    async def files(self, request: web.Request) -> web.Response:
        path = _path(request)
        reach = await self._reach(request, "list_dir", path)
        return json_response(await _in_thread(path, _listed, reach, path))

    @operation("GET", "/api/files/text", "file", "Read a text file of the workspace.", FileText, None, PATH)
    async def text(self, request: web.Request) -> web.Response:
        path = read_text(request, "path")
        reach = await self._reach(request, "read_file", path)
        return json_response(await _in_thread(path, _text, reach, path))

    @operation(
        "GET",
        "/api/files/data",
        "download",
        "Download a file of the workspace.",
        None,
        None,
        PATH,
        media="application/octet-stream",
    )
    async def data(self, request: web.Request) -> web.StreamResponse:
        path = read_text(request, "path")
        reach = await self._reach(request, "read_file", path)
        descriptor, size = await _in_thread(path, _opened, reach, path)
        try:
            name = quote(os.path.basename(path.rstrip("/")), safe="")
            response = web.StreamResponse(headers=HEADERS)
            response.content_type = "application/octet-stream"
            response.content_length = size
            response.headers["Content-Disposition"] = f"attachment; filename*=UTF-8''{name}"
            await response.prepare(request)
            left = size
            while left and (chunk := await in_thread(os.read, descriptor, min(CHUNK, left))):
                await response.write(chunk)
                left -= len(chunk)
            await response.write_eof()
            return response
        finally:
            os.close(descriptor)

    @operation("POST", "/api/files/uploads", "upload", "Put a file into the workspace.", Uploaded, UploadBody)
    async def upload(self, request: web.Request) -> web.Response:
        body = await read_body(request, UploadBody)
        try:
            data = base64.b64decode(body.data, validate=True)
        except ValueError:  # also raised for non-ASCII characters
            raise bad_request("data: must be base64", "data") from None
        if len(data) > MAX_UPLOAD:
            raise bad_request(f"data: must have at most {MAX_UPLOAD:,} bytes", "data")
        path = f"{UPLOADS}/{_upload_name(body.name)}"
        reach = await self._reach(request, "write_file", path, content="")
        await _in_thread(path, _put, reach, path, data)
        return json_response(Uploaded(path, len(data)))

    # ------------------------------------------------------------------------------------------ memory and skills

    @operation("GET", "/api/memory", "memory", "The files of the memory, and the skills.", MemoryList)
    async def memory(self, request: web.Request) -> web.Response:
        agent = await self._owners.agent(request[OWNER])
        reach = await self._reach(request, "list_dir", "memory")
        return json_response(MemoryList(await in_thread(_memory, agent, reach)))

    @operation(
        "GET", "/api/memory/text", "memory_text", "Read a file of the memory or of a skill.", MemoryText, None, PATH
    )
    async def memory_text(self, request: web.Request) -> web.Response:
        path = read_text(request, "path")
        reach = await self._reach(request, "read_file", path)
        if os.path.isabs(path) and within(normalized(path, reach.workspace), str(SHIPPED)):
            reach = dataclasses.replace(reach, readable=(SHIPPED,))
        found = await _in_thread(path, _text_or_nothing, reach, path)
        if found.text is None or found.cut:
            raise bad_request(f"{path} is not text, or too long to show", "path")
        return json_response(MemoryText(found.text, found.digest))

    @operation(
        "GET",
        "/api/memory/history",
        "memory_history",
        "What the agent wrote into a file of the memory or of a skill, from the logs of the latest sessions.",
        MemoryHistory,
        None,
        PATH,
    )
    async def memory_history(self, request: web.Request) -> web.Response:
        path, owner = read_text(request, "path"), request[OWNER]
        workspace = (await self._reach(request, "read_file", path)).workspace
        found: list[MemoryChange] = []
        for info in await self._owners.store.sessions(owner, HISTORY_SESSIONS):
            logged = await self._owners.store.read_log(info.id, max(info.entries - HISTORY_ENTRIES, 0))
            found += _writes(logged, info.key, normalized(path, workspace), workspace)
        return json_response(MemoryHistory(sorted(found, key=lambda one: -one.at)[:HISTORY]))

    @operation("POST", "/api/memory", "save_memory", "Write a file of the memory or of a skill.", Saved, SaveBody)
    async def save(self, request: web.Request) -> web.Response:
        body = await read_body(request, SaveBody)
        agent = await self._owners.agent(request[OWNER])
        call = Call(secrets.token_hex(8), "write_file", {"path": body.path, "content": body.text})
        context = await _admitted(agent, call)
        path = _relative(body.path, context)
        if path.split("/")[0] not in EDITABLE or not path.endswith(".md"):
            raise forbidden(f"{clean(body.path)[:200]}: only Markdown files in memory/ and skills/ are edited here")
        reach = _confined(context)
        if await _in_thread(path, _digest, reach, path) != body.digest:
            raise conflict("the file has changed in the meantime: read it again", code="changed")
        result = await agent.tools.run(call, dataclasses.replace(context, restricted=True, approved=False))
        if result.status != "ok":
            raise forbidden(clean(result.content)[:1_000], "not_allowed")
        return json_response(Saved(await _in_thread(path, _digest, reach, path)))

    async def _reach(self, request: web.Request, tool: str, path: str, **arguments: Any) -> Reach:
        """Return the reach of the page for this path: what a call of this tool would be allowed."""
        agent = await self._owners.agent(request[OWNER])
        call = Call(secrets.token_hex(8), tool, {"path": path, **arguments})
        return _confined(await _admitted(agent, call))


def _writes(logged: Sequence[Logged], session: str, path: str, workspace: Path) -> Iterator[MemoryChange]:
    """Return the calls in these entries that wrote a file."""
    calls: dict[str, Call] = {}
    for one in logged:
        if isinstance(one.entry, ModelAnswered):
            calls |= {call.id: call for call in one.entry.calls if call.name in WRITING}
        elif isinstance(one.entry, CallEnded) and (call := calls.pop(one.entry.id, None)) is not None:
            given = call.arguments
            if normalized(str(given.get("path", "")), workspace) == path:
                before = clean(str(given.get("old_text", "")))
                after = clean(str(given.get("content", given.get("new_text", ""))))
                yield MemoryChange(one.at, session, one.seq, one.entry.status, before[:SHOWN], after[:SHOWN])


async def _admitted(agent: AgentLoop, call: Call) -> CallContext:
    try:
        return await agent.tools.admit(call)
    except ToolError as error:
        raise forbidden(str(error), "not_allowed") from None


def _confined(call: CallContext) -> Reach:
    """Return the reach of a call, confined to the workspace whatever else the settings allow."""
    return Reach(call.workspace, protected=call.protected, frozen=call.frozen, guard=call.guard, steers=steers)


def _relative(path: str, call: CallContext) -> str:
    """Return a path relative to the workspace; an absolute one if it leads outside."""
    return normalized(path, call.workspace).removeprefix(f"{call.workspace}/")


def _path(request: web.Request) -> str:
    path = request.query.get("path", ".")
    if len(path) > 4_000:
        raise bad_request("path: must have at most 4,000 characters", "path")
    return path or "."


async def _in_thread(path: str, work: Callable[..., T], *arguments: object) -> T:
    """Run file work in a thread, and convert its failure to an error about the path."""
    shown = clean(path)[:200]
    try:
        return await in_thread(work, *arguments)
    except OutOfReach as error:
        raise forbidden(str(error), "out_of_reach") from None
    except ToolError as error:  # the policy's guard
        raise forbidden(str(error), "not_allowed") from None
    except FileNotFoundError:
        raise not_found(f"{shown} does not exist", "path", "file_not_found") from None
    except (NotADirectoryError, IsADirectoryError):
        raise bad_request(f"{shown} is a folder where a file is needed, or vice versa", "path") from None
    except OSError as error:
        raise ApiError(403, f"{shown}: {error.strerror}", param="path", code="not_readable") from None


# ---------------------------------------------------------------------------------------------- on the disk


def _listed(reach: Reach, path: str) -> FileList:
    with reach.open(path, FOLDER) as opened, os.scandir(opened.descriptor) as entries:
        found = [_item(entry) for entry in islice(entries, MAX_ENTRIES)]
        more = next(entries, None) is not None
    found.sort(key=lambda one: (one.kind != "folder", one.name.casefold()))
    return FileList(path, found, more)


def _item(entry: os.DirEntry[str]) -> FileItem:
    try:
        info = entry.stat(follow_symlinks=False)
    except OSError:
        return FileItem(clean(entry.name), "other", 0, 0.0)
    kind: Kind = "other"
    for name, test in (("folder", stat.S_ISDIR), ("file", stat.S_ISREG), ("link", stat.S_ISLNK)):
        if test(info.st_mode):
            kind = name  # type: ignore[assignment]
    return FileItem(clean(entry.name), kind, info.st_size, info.st_mtime)


@contextmanager
def _regular(reach: Reach, path: str) -> Iterator[tuple[int, os.stat_result]]:
    with reach.open(path) as opened:
        info = os.fstat(opened.descriptor)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError
        if not stat.S_ISREG(info.st_mode):
            raise OutOfReach(f"{path} is a pipe, socket or device: only regular files can be read.")
        yield opened.descriptor, info


def _text(reach: Reach, path: str) -> FileText:
    with _regular(reach, path) as (descriptor, info):
        data = os.read(descriptor, MAX_TEXT + 1)
        while len(data) <= MAX_TEXT and (more := os.read(descriptor, MAX_TEXT + 1 - len(data))):
            data += more
    cut = len(data) > MAX_TEXT
    data = data[:MAX_TEXT]
    picture = bool(image_kind(data[:BINARY_HEAD]))
    text = None if picture or is_binary(data[:BINARY_HEAD]) else _decoded(data)
    digest = "" if cut else hashlib.sha256(data).hexdigest()
    return FileText(path, text, picture, info.st_size, info.st_mtime, digest, cut)


def _text_or_nothing(reach: Reach, path: str) -> FileText:
    """Read a text file; return an empty one for a memory file that does not exist yet."""
    try:
        return _text(reach, path)
    except FileNotFoundError:
        if path.split("/")[0] not in EDITABLE:
            raise
        return FileText(path, "", False, 0, 0.0, "", False)


def _decoded(data: bytes) -> str:
    form = form_of(data)
    return clean(data[len(form.mark) :].decode(form.encoding, "replace"))


def _opened(reach: Reach, path: str) -> tuple[int, int]:
    with _regular(reach, path) as (descriptor, info):
        return os.dup(descriptor), info.st_size


def _check_regular(reach: Reach, path: str) -> None:
    with _regular(reach, path):
        return


def _digest(reach: Reach, path: str) -> str:
    """Return the digest of a file; "" if there is none."""
    try:
        return _text(reach, path).digest
    except FileNotFoundError:
        return ""


def _put(reach: Reach, path: str, data: bytes) -> None:
    """Write a new file."""
    with reach.target(path) as target:
        if target.old is not None:
            raise OutOfReach(f"{path} is there already.")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(target.name, flags, 0o644, dir_fd=target.folder), "wb") as file:
            file.write(data)


def _upload_name(name: str) -> str:
    """Return a file name of our own making, from the client's name and the time, so that no file is replaced."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(clean(name))).strip("-.")[-80:] or "file"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}-{base}"


def _memory(agent: AgentLoop, reach: Reach) -> list[MemoryItem]:
    found = []
    try:
        with reach.open("memory", FOLDER) as opened, os.scandir(opened.descriptor) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES) if entry.name.endswith(".md"))
    except (OSError, OutOfReach, ToolError):
        names = []
    for name in dict.fromkeys(["MEMORY.md", *names]):
        about = "Part of every prompt." if name == "MEMORY.md" else ""
        found.append(MemoryItem(f"memory/{clean(name)}", "memory", clean(name), about, "", True))
    rules = dataclasses.replace(reach, restricted=agent.restrict_to_workspace, guard=None)
    for skill in agent.context.skills.all(rules):
        problem = clean(skill.problem or skill.missing)
        about = clean(skill.description)
        found.append(MemoryItem(clean(skill.path), "skill", skill.name, about, problem, not skill.shipped))
    return found
