"""The file tools: `read_file`, `write_file`, `edit_file`, `list_dir`, `find_files` and `grep`.

Their work on disk runs in threads, the searches and documents in child processes. Paths are relative to the workspace
of the call; `sandbox.reach` decides which are accessible.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace as replace_fields
from itertools import islice
from threading import Lock
from typing import Annotated, Any, BinaryIO

from ...sandbox.reach import FOLDER, READ, Opened, Target, normalized
from ...text import clean, counted
from ...threads import in_thread
from ..base import FunctionTool, Output, Plan, Replay, Tool, ToolError
from ..children import Child, beside_child
from ..context import current_call
from ..trust import digest_of, mark_written, named
from . import find
from .documents import document_kind, read_document
from .edit import Edited, replace_text
from .images import image_kind, read_image
from .paths import (
    MAX_FILE_BYTES,
    MAX_REMEMBERED,
    alone,
    changed_meanwhile,
    check_kind,
    explained,
    marked_output,
    opened_target,
    quoted,
    reach,
    replace,
    shipped,
    size,
    state_of,
)
from .texts import BINARY_HEAD, HEAD, Buffers, Form, form_of, is_binary, text_place

MAX_EDIT_BYTES = 8 * 1024 * 1024
MAX_LINES = 2_000
MAX_OUTPUT = 60_000  # characters of one read
MAX_LINE = 2_000
MAX_ENTRIES = 1_000
MAX_KEPT = 4  # texts of documents


def file_tools(buffers: Buffers | None = None) -> list[Tool]:
    """Return all file tools. They share the record of the files a session has seen.

    With `buffers`, files are read and written as an editor shows them.
    """
    seen = Seen()
    reading, writing = _read_tool(seen, Documents(), buffers), _write_tool(seen, buffers)
    return [reading, writing, _edit_tool(seen, buffers), list_dir, find_files, grep]


class PathTool(FunctionTool[..., Any]):
    """A tool made from a function with a `path` parameter; its plan names that path."""

    writes = False

    def plan(self, arguments: dict[str, Any]) -> Plan:
        path = str(arguments.get("path") or ".")
        shown = self._shown(arguments) if self.writes else ""
        return Plan(shown=shown, paths=(normalized(path, current_call().workspace),), writes=self.writes)

    def _shown(self, arguments: dict[str, Any]) -> str:
        """Show what would be written where, as a diff: with a minus what goes, with a plus what comes."""
        marks = {"old_text": "-", "new_text": "+", "content": "+"}
        texts = [
            f"{marks[name]}{line}"
            for name, value in arguments.items()
            if name in marks and isinstance(value, str)
            for line in value.removesuffix("\n").split("\n")
        ]
        others = [f"{name}: {value}" for name, value in arguments.items() if name != "path" and name not in marks]
        return "\n".join([f"{self.name} {arguments['path']}", *texts, *others])


def path_tool(
    *, replay: Replay = "safe", parallel: bool = True, writes: bool = False, timeout: float | None = None
) -> Callable[[Callable[..., Any]], PathTool]:
    """Like `@tool`, for a function with a `path` parameter."""
    options = {"replay": replay, "parallel": parallel, "writes": writes, "read_only": not writes, "timeout": timeout}
    return lambda function: PathTool(function, {}, **options)


class Seen:
    """The state of each file, on disk or in an editor, when a session last read or wrote it.

    The oldest entries are dropped.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[str, str, str, bool], tuple[int, int, int]] = OrderedDict()
        self._lock = Lock()  # tools run in threads

    def note(self, real: str, now: os.stat_result | str) -> None:
        """Record the current state of a file."""
        with self._lock:
            key = self._key(real, now)
            self._files[key] = state_of(now)
            self._files.move_to_end(key)
            while len(self._files) > MAX_REMEMBERED:
                self._files.popitem(last=False)

    def changed(self, real: str, now: os.stat_result | str) -> bool:
        """Return whether a file has changed since this session last saw it; False if it never did."""
        with self._lock:
            return self._files.get(self._key(real, now), state_of(now)) != state_of(now)

    @staticmethod
    def _key(real: str, now: os.stat_result | str) -> tuple[str, str, str, bool]:
        call = current_call()
        return call.owner, call.session, real, isinstance(now, str)


class Documents:
    """Reads documents and caches the last few texts, since a long one is requested page by page."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[int, ...], bytes] = OrderedDict()
        self._lock = Lock()  # tools run in threads

    def read(self, child: Child, descriptor: int, info: os.stat_result, kind: str, path: str) -> bytes:
        """Return the text of an open document as UTF-8."""
        key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        with self._lock:
            text = self._texts.get(key)
        if text is None:
            text = read_document(child, descriptor, kind, path)
        with self._lock:
            self._texts[key] = text
            self._texts.move_to_end(key)
            while len(self._texts) > MAX_KEPT:
                self._texts.popitem(last=False)
        return text


def _read_tool(seen: Seen, documents: Documents, buffers: Buffers | None) -> Tool:
    @path_tool()
    async def read_file(
        path: Annotated[str, "The file, relative to the workspace."],
        offset: Annotated[int, "The first line to show; lines count from 1."] = 1,
        limit: Annotated[int, "How many lines to show at most."] = MAX_LINES,
    ) -> Any:
        """Read a text file, or the text of a PDF, DOCX or XLSX file, or see an image.

        Lines come with their numbers; a long file comes in pages.
        """
        if offset < 1 or limit < 1:
            raise ToolError("offset and limit must be at least 1.")
        limit = min(limit, MAX_LINES)
        place = await in_thread(text_place, path) if buffers is not None else None
        text = await buffers.read(place[0]) if buffers is not None and place is not None else None
        if place is not None and text is not None:
            return marked_output(path, await in_thread(_shown_buffer, seen, path, *place, text, offset, limit))
        return marked_output(path, await beside_child(_read, seen, documents, path, offset, limit))

    return read_file


def _read(child: Child, seen: Seen, documents: Documents, path: str, offset: int, limit: int) -> Output:
    with explained(path), reach().open(path) as opened:
        info = os.fstat(opened.descriptor)
        check_kind(info, path)
        output = _shown(child, seen, documents, path, opened, info, offset, limit)
        return replace_fields(output, contents=()) if shipped(opened.real) else output


def _shown(
    child: Child,
    seen: Seen,
    documents: Documents,
    path: str,
    opened: Opened,
    info: os.stat_result,
    offset: int,
    limit: int,
) -> Output:
    with open(opened.descriptor, "rb", closefd=False) as file:
        head = file.read(BINARY_HEAD) or b""  # None where there is nothing yet, as in /proc/kmsg
        file.seek(0)
        if image_kind(head):
            digest = digest_of(opened.descriptor, MAX_FILE_BYTES)
            return replace_fields(read_image(child, opened.descriptor, path), contents=(digest,))
        if document := document_kind(head, path):
            digest = digest_of(opened.descriptor, MAX_FILE_BYTES)
            try:
                text = documents.read(child, opened.descriptor, info, document, path)
            except ToolError as error:
                error.contents = (digest,)  # the reason may quote the document
                raise
            return Output(_pages(io.BytesIO(text), path, offset, limit), contents=(digest,))
        if is_binary(head):
            raise ToolError(f"{path} is a binary file: only text, PDF, DOCX, XLSX and images can be read.")
        seen.note(opened.real, info)
        form = form_of(head)
        whole = _Limited(opened.descriptor, form.mark)
        page = _pages(_as_utf8(whole, form), path, offset, limit)
        return Output(page, contents=(whole.digest,))


def _shown_buffer(seen: Seen, path: str, real: str, form: Form, text: str, offset: int, limit: int) -> Output:
    seen.note(real, text)
    digest = hashlib.sha256(form.encode(form.with_newlines(text))).hexdigest()  # that of the file, once it is saved
    return Output(_pages(io.BytesIO(text.encode("utf-8", "replace")), path, offset, limit), contents=(digest,))


class _Limited(io.RawIOBase):
    """An open file, read up to the size limit: it may grow, and some files in /proc are endless."""

    def __init__(self, descriptor: int, mark: bytes) -> None:
        self._descriptor, self._room = descriptor, MAX_FILE_BYTES
        os.lseek(descriptor, len(mark), os.SEEK_SET)
        self._hash = hashlib.sha256(mark)

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes that were read, which is that of the file once all of it was."""
        return self._hash.hexdigest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.read(self._descriptor, min(len(buffer), self._room))
        buffer[: len(data)] = data
        self._room -= len(data)
        self._hash.update(data)
        return len(data)


def _as_utf8(whole: _Limited, form: Form) -> BinaryIO:
    """Return a text file as UTF-8 bytes, without a byte-order mark."""
    file = io.BufferedReader(whole, 1 << 16)
    if form.encoding == "utf-8":
        return file
    return io.BytesIO(file.read().decode(form.encoding, "replace").encode("utf-8", "replace"))


def _pages(file: BinaryIO, path: str, offset: int, limit: int) -> str:
    """Return one page of a text, followed by a line that says how to continue."""
    shown, total = _page(file, offset, limit)
    last = offset + len(shown) - 1
    if total == 0:
        return "(empty file)"
    if not shown:
        raise ToolError(f"{path} has only {counted(total, 'line')}: choose a smaller offset than {offset}.")
    text = "\n".join(shown)
    if len(shown) == total:
        return text
    more = f"; continue with offset={last + 1}" if last < total else ""
    return f"{text}\n[lines {offset} to {last} of {total}{more}]"


def _page(file: BinaryIO, offset: int, limit: int) -> tuple[list[str], int]:
    """Return the numbered lines of one page, as many as fit, and the total number of lines."""
    shown: list[str] = []
    room, number = MAX_OUTPUT, 0
    for number, raw in enumerate(file, 1):
        if number < offset:
            continue
        line = raw[: MAX_LINE * 4].decode("utf-8", "replace").rstrip("\r\n")
        if len(line) > MAX_LINE:
            line = f"{line[:MAX_LINE]} [… the line has {len(raw)} bytes]"
        room -= len(line) + 8
        if len(shown) == limit or (room < 0 and shown):
            break
        shown.append(f"{number:>6}\t{line}")
    return shown, number + _count_lines(file)


def _count_lines(file: BinaryIO) -> int:
    """Count the lines from the current position to the end."""
    count, last = 0, b"\n"
    while chunk := file.read(1 << 20):
        count += chunk.count(b"\n")
        last = chunk[-1:]
    return count + (last != b"\n")


def _write_tool(seen: Seen, buffers: Buffers | None) -> Tool:
    # Safe to repeat: the call contains the whole content, so a second run has the same result.
    @path_tool(parallel=False, writes=True)
    async def write_file(
        path: Annotated[str, "The file, relative to the workspace."],
        content: Annotated[str, "The whole new content."],
    ) -> str:
        """Write a text file, replacing its content. Missing folders are created.

        An existing file keeps its mode, byte-order mark and line endings.
        """
        text = clean(content)
        real, created, form, data, digest = await in_thread(_encoded, path, text)
        await mark_written(digest, real, current_call())  # before the content is there for others to read
        if buffers is not None and await buffers.write(real, whole := form.with_newlines(text)):
            await in_thread(seen.note, real, whole)
        else:
            created = await in_thread(_written, seen, path, form, data)
        lines = text.count("\n") + (not text.endswith("\n") and bool(text))
        many = "1 line" if lines == 1 else f"{lines} lines"
        return f"{'Created' if created else 'Replaced'} {path} ({many}, {size(len(data))})."

    return write_file


def _encoded(path: str, text: str) -> tuple[str, bool, Form, bytes, str]:
    """Return the real path of a file to write, whether it is new, its form, and the text in it with its digest."""
    with explained(path), opened_target(path) as target:
        form = _form_of_old(target)
        data = form.encode(form.with_newlines(text))
        return target.real, target.old is None, form, data, hashlib.sha256(data).hexdigest()


def _written(seen: Seen, path: str, form: Form, data: bytes) -> bool:
    """Put the content in place. Return whether the file is new."""
    with explained(path), opened_target(path) as target, alone(target):
        if _form_of_old(target) != form:
            raise changed_meanwhile(path)
        seen.note(target.real, replace(target, data))
        return target.old is None


def _form_of_old(target: Target) -> Form:
    """Return the text form of the old file, or the default if it is unreadable or binary."""
    if target.old is None:
        return Form()
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(target.name, flags, dir_fd=target.folder)
    except PermissionError:
        return Form()
    try:
        head = os.read(descriptor, HEAD)
    finally:
        os.close(descriptor)
    return Form() if is_binary(head) else form_of(head)


def _edit_tool(seen: Seen, buffers: Buffers | None) -> Tool:
    """Return the tool, which refuses to edit a file that has changed since the session last saw it."""

    # Not safe to repeat: after an interrupted edit, the old text is gone, or occurs inside the new one.
    @path_tool(replay="never", parallel=False, writes=True)
    async def edit_file(
        path: Annotated[str, "The file, relative to the workspace."],
        old_text: Annotated[str, "The text to replace, as it is in the file, without line numbers."],
        new_text: Annotated[str, "The text to put in its place."],
        replace_all: Annotated[bool, "Replace all occurrences instead of the only one."] = False,
    ) -> str:
        """Replace a text in a file. It must stand there exactly once, unless replace_all is set."""
        buffer = await _buffer(buffers, path)
        real, info, old, data, edited = await in_thread(_edited, seen, path, old_text, new_text, replace_all, buffer)
        # Before the content is there for others to read.
        await mark_written(hashlib.sha256(data).hexdigest(), real, current_call(), old)
        if buffers is not None and buffer is not None:
            await in_thread(_check_target, path, real)
            if not await buffers.write(real, edited.text):
                raise changed_meanwhile(path)
            await in_thread(seen.note, real, edited.text)
        else:
            await in_thread(_replaced, seen, path, info, data)
        places = f"{len(edited.lines)} places, lines" if len(edited.lines) > 1 else "line"
        numbers = ", ".join(map(str, edited.lines[:20])) + (", …" if len(edited.lines) > 20 else "")
        ignored = f" The old text was found when ignoring {edited.ignored}." if edited.ignored else ""
        return f"Edited {path} in {places} {numbers}.{ignored}"

    return edit_file


async def _buffer(buffers: Buffers | None, path: str) -> str | None:
    """Return the text of a file that the editor will write; None if the file on disk is edited."""
    if buffers is None:
        return None
    place = await in_thread(text_place, path)
    return await buffers.read(place[0], to_write=True) if place is not None else None


def _check_target(path: str, real: str) -> None:
    """Raise ToolError unless the running call may write the file and its path still leads to this place."""
    with explained(path), opened_target(path) as target:
        if target.real != real:
            raise changed_meanwhile(path)


def _edited(
    seen: Seen, path: str, old_text: str, new_text: str, replace_all: bool, buffer: str | None
) -> tuple[str, os.stat_result, str, bytes, Edited]:
    """Return the real path of a file, its state, the digest of its content, and the new content."""
    with explained(path):
        real, info, data = _load(seen, path, buffer)
    form = form_of(data)
    if buffer is not None:
        data = form.encode(form.with_newlines(buffer))
    digest = hashlib.sha256(data).hexdigest()
    try:
        text = form.decode(data)
    except UnicodeDecodeError:
        raise ToolError(f"{path} is not valid {form.encoding.upper()}: it cannot be edited.") from None
    try:
        edited = replace_text(text, clean(old_text), clean(new_text), replace_all, form.newline)
    except ToolError as error:  # it may show lines of the file
        raise ToolError(str(error), error.advice, contents=(digest,)) from None
    return real, info, digest, form.encode(edited.text), edited


def _replaced(seen: Seen, path: str, info: os.stat_result, data: bytes) -> None:
    with explained(path), opened_target(path) as target, alone(target):
        now = os.stat(target.name, dir_fd=target.folder, follow_symlinks=False)
        if state_of(now) != state_of(info):
            raise changed_meanwhile(path)
        seen.note(target.real, replace(target, data))


def _load(seen: Seen, path: str, buffer: str | None) -> tuple[str, os.stat_result, bytes]:
    with reach().open(path, READ) as opened:
        info = os.fstat(opened.descriptor)
        check_kind(info, path, MAX_EDIT_BYTES)
        if seen.changed(opened.real, info if buffer is None else buffer):
            raise ToolError(f"{path} has changed since you last saw it: read it again, then edit it.")
        with open(opened.descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_EDIT_BYTES + 1)
    if is_binary(data[:BINARY_HEAD]):
        raise ToolError(f"{path} is a binary file: only text can be edited.")
    return opened.real, info, data


@path_tool()
def list_dir(path: Annotated[str, "The folder, relative to the workspace."] = ".") -> Output:
    """List a folder: its folders first, then its files with their sizes."""
    path = path or "."
    with explained(path), reach().open(path, FOLDER) as opened, os.scandir(opened.descriptor) as entries:
        found = list(islice(entries, MAX_ENTRIES * 10))
        more = next(entries, None) is not None
        folders = sorted((entry.name for entry in found if _is_folder(entry)), key=str.casefold)
        files = sorted((entry for entry in found if not _is_folder(entry)), key=lambda entry: entry.name.casefold())
        folders = folders[:MAX_ENTRIES]
        files = files[: MAX_ENTRIES - len(folders)]
        lines = [f"{quoted(name)}/" for name in folders]
        lines += [f"{quoted(entry.name)}  {_size_of(entry)}" for entry in files]
        contents = () if shipped(opened.real) else named([*folders, *(entry.name for entry in files)])
    if len(found) > len(lines):
        count = f"more than {len(found)}" if more else str(len(found))
        lines.append(f"[{len(lines)} of {count} entries shown]")
    return Output(clean("\n".join(lines)) or "(empty folder)", contents=contents)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder itself. Links are not followed: their target may be inaccessible."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _size_of(entry: os.DirEntry[str]) -> str:
    try:
        info = entry.stat(follow_symlinks=False)
    except OSError:
        return "?"
    if stat.S_ISREG(info.st_mode):
        return size(info.st_size)
    return "(link)" if stat.S_ISLNK(info.st_mode) else "(special)"


@path_tool()
async def find_files(
    pattern: Annotated[str, "A glob: `*.py` for a name in any folder, `src/**/*.py` for a path."],
    path: Annotated[str, "The folder to look in, relative to the workspace."] = ".",
) -> Output:
    """Find files by their names. Folders such as .git and node_modules are left out unless `path` leads into them."""
    return await beside_child(find.find_names, pattern, path or ".")


@path_tool()
async def grep(
    pattern: Annotated[str, "A regular expression, matched against each line."],
    path: Annotated[str, "The file or folder to look in, relative to the workspace."] = ".",
    glob: Annotated[str, "Only files that match, such as `*.py` or `!*.min.js`."] = "",
    ignore_case: Annotated[bool, "Ignore case."] = False,
    context: Annotated[int, "How many lines to show before and after each match."] = 0,
    literal: Annotated[bool, "The pattern is plain text."] = False,
) -> Output:
    """Find lines in text files. Folders such as .git and node_modules are left out unless `path` leads into them."""
    wanted = find.Wanted(pattern, glob, ignore_case, context, literal)
    return marked_output(path, await beside_child(find.find_lines, wanted, path or "."))
