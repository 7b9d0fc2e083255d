"""Calls that need approval after untrusted text was read.

Exits could send data out, and plants could steer later sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from urllib.parse import urlsplit

import msgspec

from ...messages import Message
from ..base import Plan
from ..context import CallContext
from ..registry import is_marked
from ..web.urls import BadURL, parse_url

READ_BEFORE = "untrusted content was read before, and"
PAGE_READ_BEFORE = "untrusted content was read before, such as a web page or a command's output, and"
FILE_READ_BEFORE = "a file that the agent did not write was read before, and"


class Objection(msgspec.Struct, frozen=True):
    """Why a call needs approval, and what a person's answer grants the session."""

    why: str
    always: tuple[str, ...] = ()  # granted by "always"
    once: tuple[str, ...] = ()  # granted by a plain yes


def objection(
    plan: Plan,
    context: CallContext,
    conversation: Sequence[Message],
    settings: Collection[str],
    steers: Callable[[Plan, CallContext], str],
) -> Objection | None:
    """Return the objection to a call after untrusted text was read; None if it may run.

    `settings` are the addresses in the settings; `steers` returns why a file that a plan writes must not be planted, or
    "".
    """
    if plan.url is not None and plan.sends:
        return _against_address(plan.url, context, conversation, settings)
    if plan.sends:
        return Objection(f"{READ_BEFORE} this call could send data out")
    # Outside of a sandbox, every command has network access. If only the person's own files were read, this does not
    # turn every command into a question.
    if plan.unconfined and getattr(conversation, "outside", True):
        return Objection(f"{READ_BEFORE} a command outside of any sandbox could send data out")
    if plan.steers:
        read = FILE_READ_BEFORE if context.own_files else PAGE_READ_BEFORE
        return Objection(
            f"{read} this changes {plan.steers}, which steers later sessions",
            (f"steers:{plan.steers}",),
        )
    if plan.writes and (why := steers(plan, context)):
        return Objection(f"{READ_BEFORE} of this file: {why}", tuple(f"steers:{path}" for path in plan.paths))
    if plan.command is not None and (why := steers(plan, context)):
        # No "always": an approved command may write anything in the workspace.
        return Objection(f"{READ_BEFORE} this command writes {why}")
    return None


def is_free(url: str, conversation: Sequence[Message], settings: Collection[str]) -> bool:
    """Return whether an address cannot carry anything that untrusted text put there.

    It must occur in the person's own words, in the settings or in search results.
    """
    return mentioned(url, conversation) or not {url, *same_site(url)}.isdisjoint(settings)


def _against_address(
    url: str, context: CallContext, conversation: Sequence[Message], settings: Collection[str]
) -> Objection | None:
    if is_free(url, conversation, settings):
        return None
    why = f"{READ_BEFORE} this address could carry data away"
    try:
        host = parse_url(url).authority
    except BadURL:
        return Objection(why)
    fetch, link = f"fetch:{host}", f"link:{host}"
    found = on_a_page(url, conversation)
    if fetch in context.granted or (found and link in context.granted):
        return None
    if found:
        why = f"{READ_BEFORE} this link was found on a page: a yes also allows other links to {host} found on pages"
    return Objection(why, (fetch,), (link,) if found else ())


_PAIRS = {"(": ")", "<": ">", "[": "]", "{": "}", '"': '"', "'": "'", "`": "`", ">": "<", "*": "*", "_": "_", "|": "|"}
_PAIRS |= {"“": "”", "„": "“", "«": "»", "‘": "’", "「": "」", "（": "）", "《": "》"}
# May follow an address without being part of it, if the word ends after that.
_AFTER = ".,;:!?)]}>\"'`*_|…。，、；：！？）」》”“’»"
_GLUED = "/=&%#@+-._~$?:\\"  # before an address: it is part of something longer


def mentioned(url: str, conversation: Sequence[Message]) -> bool:
    """Return whether a user message or a web search result contains exactly this address, not as part of another."""
    if not url or any(character.isspace() for character in url):
        return False
    forms = {url, *same_site(url)}
    return any(_stands(form, text) for text in _texts(conversation) for form in forms if form in text)


def on_a_page(url: str, conversation: Sequence[Message]) -> bool:
    """Return whether a fetched page contains exactly this address.

    Files, commands and other tools do not count: the model itself may have written what it finds there.
    """
    pages = (
        str(message["content"])
        for message in conversation
        if message.get("role") == "tool" and message.get("name") == "web_fetch" and is_marked(message.get("content"))
    )
    forms = {url, *same_site(url)} if url else set()
    return any(_stands(form, page) for page in pages for form in forms if form in page)


def same_site(url: str) -> Iterator[str]:
    """Yield the same address with or without the trailing slash, if it is that of a whole site."""
    try:
        parts = urlsplit(url)
    except ValueError:  # not an address at all
        return
    if parts.netloc and parts.path in ("", "/") and not parts.query and not parts.fragment and url[-1] not in "?#":
        yield url[:-1] if parts.path else url + "/"


def _texts(conversation: Sequence[Message]) -> Iterator[str]:
    own_words = getattr(conversation, "own_words", {})  # the rest was written by a model, or comes from a skill
    for place, message in enumerate(conversation):
        role, content = message.get("role"), own_words.get(place, message.get("content"))
        # Exclude failed searches: their text may be the model's own words.
        if (role == "user" and not is_marked(content)) or (
            role == "tool" and message.get("name") == "web_search" and is_marked(content)
        ):
            if isinstance(content, str):
                yield content
            elif isinstance(content, list):
                yield from (part["text"] for part in content if isinstance(part, dict) and _is_text(part))


def _is_text(part: dict[str, object]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _stands(url: str, text: str) -> bool:
    start = text.find(url)
    while start >= 0:
        if _delimited(text, start, start + len(url)):
            return True
        start = text.find(url, start + 1)
    return False


def _delimited(text: str, start: int, end: int) -> bool:
    before = text[start - 1 : start]
    if before and not before.isspace():
        if before in _PAIRS and text[end : end + 1] == _PAIRS[before]:
            return True
        word = text[max(text.rfind(space, 0, start) for space in " \n\t\r") + 1 : start]
        if before in _GLUED or (before.isascii() and before.isalnum()) or "://" in word:
            return False
    while text[end : end + 1] and text[end] in _AFTER:
        end += 1
    return end == len(text) or text[end].isspace()
