"""`memory_search` searches past conversations; `remember` adds a point to the file that is part of every prompt."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from ..sandbox.reach import READ, normalized
from ..text import clean, excerpt
from ..threads import in_thread
from .base import Output, Plan, Tool, ToolError, tool
from .context import current_call
from .files.edit import replace_text
from .files.paths import check_kind, explained, opened_target, reach, replace, state_of
from .files.texts import BINARY_HEAD, Form, form_of, is_binary

if TYPE_CHECKING:
    from ..store.base import Found

Search = Callable[[str, str, int], "Awaitable[list[Found]]"]
MEMORY_FOLDER = "memory"
MEMORY_FILE = f"{MEMORY_FOLDER}/MEMORY.md"
MAX_BYTES = 1024 * 1024
MAX_COUNT = 20
MAX_OWN_RESULTS = 50  # maximum results from the running turn itself
LOCK_SECONDS = 10.0

_BULLET = re.compile(r"([ \t]*)[-*+] +(?:\d{4}-\d\d-\d\d: +)?")
_BEGINNING = re.compile(r"[ \t]*(?:[-*+] +(?:\d{4}-\d\d-\d\d: +)?)?")  # the bullet and date of a point


def memory_tools(search: Search, limit: int = 16_000) -> list[Tool]:
    """Return the memory tools; `search` is the store's, `limit` the maximum length of the file in characters."""
    return [_search_tool(search), RememberTool(limit)]


# ---------------------------------------------------------------------------------------------- past conversations


def _search_tool(search: Search) -> Tool:
    @tool(read_only=True)
    async def memory_search(
        query: Annotated[str, "Words to look for; texts that have all of them come first."],
        count: Annotated[int, "How many to show, at most 20."] = 8,
    ) -> Output:
        """Search what the user and you said in all past conversations, also those before /new.

        Use it when the user refers to something that is not in this conversation.
        """
        call = current_call()
        count = max(1, min(count, MAX_COUNT))
        found = await search(call.owner, query, count + MAX_OWN_RESULTS)
        others = [one for one in found if one.turn is None or one.turn != call.turn][:count]
        if not others:
            return Output(
                "Nothing found. Try fewer words, or others that mean the same; only what was said is searched, not "
                "files and not results of tools."
            )
        return Output(await in_thread(_listed, others, query), untrusted=any(one.untrusted for one in others))

    return memory_search


def _listed(found: Sequence[Found], query: str) -> str:
    lines = []
    for number, one in enumerate(found, 1):
        when = time.strftime("%Y-%m-%dT%H:%M", time.localtime(one.at))
        session = " ".join(one.session.split())
        lines.append(f"{number}. {when}, {session}, {one.role}: {excerpt(one.text, query)}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- the file


class RememberTool(Tool):
    """Adds a point to the memory file, or replaces one."""

    name = "remember"
    description = (
        "Keep something that should be known in every later conversation: one short point in memory/MEMORY.md. With "
        "instead_of it takes the place of what is there; with an empty text that is removed."
    )
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "One point, in one line, that can be understood by itself."},
            "instead_of": {
                "type": "string",
                "description": "Text of the file that this replaces, exactly as it stands there, and only once.",
            },
        },
        "required": ["text"],
    }
    replay = "safe"  # adding or replacing a point twice has the effect of doing it once
    parallel = False

    def __init__(self, limit: int = 16_000) -> None:
        self._limit = limit

    def plan(self, arguments: dict[str, Any]) -> Plan:
        text, old = _without_bullet(arguments["text"]), arguments.get("instead_of", "")
        shown = f"remember, in {MEMORY_FILE}:\n{text}" if text else f"remove from {MEMORY_FILE}:"
        shown += f"\ninstead of:\n{old}" if old and text else f"\n{old}"
        paths = (normalized(MEMORY_FILE, current_call().workspace),)
        return Plan(shown=shown, paths=paths, writes=True, steers="the memory")

    async def execute(self, text: str, instead_of: str = "") -> str:
        return await in_thread(
            self._remember, _without_bullet(text), clean(instead_of).replace("\r\n", "\n").strip("\n")
        )

    def _remember(self, text: str, instead_of: str) -> str:
        if not text and not instead_of:
            raise ToolError("There is nothing to remember: give a text, or in instead_of the text to remove.")
        with explained(MEMORY_FILE), _locked():
            return self._change(text, instead_of)

    def _change(self, text: str, instead_of: str) -> str:
        info, form, before = _load()
        after = replaced(before, instead_of, text, form.newline) if instead_of else added(before, text, form.newline)
        if after == before:
            return f"{MEMORY_FILE} already contains it."
        if len(after) > self._limit and len(after) > len(before):
            raise ToolError(
                f"{MEMORY_FILE} has {len(before)} of at most {self._limit} characters, and this would make it "
                f"{len(after)}. Make room first: merge or shorten points with instead_of or edit_file, then try again."
            )
        with opened_target(MEMORY_FILE) as target:
            if (target.old and state_of(target.old)) != (info and state_of(info)):
                raise ToolError(f"{MEMORY_FILE} was changed by another process at the same time: try again.")
            replace(target, form.encode(after))
        return f"{'Remembered' if text else 'Removed'}. {MEMORY_FILE} is {100 * len(after) // self._limit}% full."


@contextmanager
def _locked() -> Iterator[None]:
    """Lock the memory folder, created if necessary, against other writers in this and other processes.

    Any process that can open the folder can hold it, also a command in the sandbox, so the wait has a limit.
    """
    # Resolved by the path of a file that is never created, since the real one may be replaced meanwhile. The policy
    # is applied to the real one when it is written.
    with dataclasses.replace(reach(), guard=None).target(f"{MEMORY_FOLDER}/.everloop-lock") as place:
        give_up = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(place.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ToolError("Another process has locked the memory folder: try again later.") from None
                time.sleep(0.005)
        yield


def _load() -> tuple[os.stat_result | None, Form, str]:
    """Read the file: its state, its form and its text."""
    try:
        with reach().open(MEMORY_FILE, READ) as opened, open(opened.descriptor, "rb", closefd=False) as file:
            info = os.fstat(opened.descriptor)
            check_kind(info, MEMORY_FILE, MAX_BYTES)
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None, Form(), ""
    form = form_of(data)
    try:
        if is_binary(data[:BINARY_HEAD]):
            raise ToolError(f"{MEMORY_FILE} is not a text file: tell the user.")
        return info, form, form.decode(data)
    except UnicodeDecodeError:
        raise ToolError(f"{MEMORY_FILE} is not valid {form.encoding.upper()}: tell the user.") from None


# ---------------------------------------------------------------------------------------------- its points


def added(content: str, text: str, newline: str = "\n") -> str:
    """Return the file with a point added, unless it is there already."""
    if text in map(_text_of_point, content.splitlines()):
        return content
    gap = newline if content and not content.endswith("\n") else ""
    return f"{content}{gap}{_point(text)}{newline}"


def replaced(content: str, old: str, text: str, newline: str = "\n") -> str:
    """Return the file with a text replaced. A replaced point gets today's date."""
    plain = content.replace("\r\n", "\n")
    if text and _done(plain, old, text):
        return content
    start = plain.find(old)
    if start < 0:
        raise ToolError(
            f"{MEMORY_FILE} does not contain that text: give instead_of exactly as it is there. It may have been "
            "changed already."
        )
    if plain.find(old, start + 1) >= 0:
        raise ToolError(f"{MEMORY_FILE} contains that text more than once: give more of its line in instead_of.")
    start, end, new = _part(plain, start, start + len(old), text)
    if not _done(plain[:start] + new + plain[end:], old, text):  # repeating the call would change it again
        raise ToolError("The result would contain that text again: give the whole line in instead_of.")
    return content if plain[start:end] == new else replace_text(content, plain[start:end], new, newline=newline).text


def _done(plain: str, old: str, text: str) -> bool:
    """Return whether a text was replaced already: the old one occurs only inside the new one, if at all."""
    core = _text_of_point(old)
    return text in plain and (old not in plain or (core in text and core not in plain.replace(text, "\0")))


def _part(plain: str, start: int, end: int, text: str) -> tuple[int, int, str]:
    """Return what to replace and by what: a whole point with its bullet and date, or the text as given."""
    first, last = plain.rfind("\n", 0, start) + 1, plain.find("\n", end)
    last = len(plain) if last < 0 else last
    bullet = _BULLET.match(plain, first)
    if bullet is None or not _BEGINNING.fullmatch(plain, first, start) or plain[end:last].strip():
        return start, end, text
    if not text:
        return first, min(last + 1, len(plain)), ""
    return first, last, bullet[1] + _point(text)


def _point(text: str) -> str:
    return f"- {_today()}: {text}"


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _text_of_point(line: str) -> str:
    return _BULLET.sub("", line, count=1).strip()


def _without_bullet(text: str) -> str:
    """Return a text as one line, without a bullet of its own."""
    return re.sub(r"^(?:[-*+•] +)+", "", " ".join(clean(text).split()))
