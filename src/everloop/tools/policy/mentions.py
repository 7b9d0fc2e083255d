"""Whether an address stands word for word in what a person wrote, in what a search found, or on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from ...messages import Message
from ..registry import is_marked

_PAIRS = {"(": ")", "<": ">", "[": "]", "{": "}", '"': '"', "'": "'", "`": "`", ">": "<", "*": "*", "_": "_", "|": "|"}
_PAIRS |= {"“": "”", "„": "“", "«": "»", "‘": "’", "「": "」", "（": "）", "《": "》"}
# May follow an address without belonging to it, if then the word ends.
_AFTER = ".,;:!?)]}>\"'`*_|…。，、；：！？）」》”“’»"
_GLUED = "/=&%#@+-._~$?:\\"  # before an address: it is a part of something longer


def mentioned(url: str, conversation: Sequence[Message]) -> bool:
    """Whether a user's message or the result of a web search has this very address, not only a part of a longer one."""
    if not url or any(character.isspace() for character in url):
        return False
    forms = {url, *same_site(url)}
    return any(_stands(form, text) for text in _texts(conversation) for form in forms if form in text)


def on_a_page(url: str, conversation: Sequence[Message]) -> bool:
    """Whether a page that was fetched has this very address.

    Files, commands and other tools do not count: the model may have written there what it finds there.
    """
    pages = (
        str(message["content"])
        for message in conversation
        if message.get("role") == "tool" and message.get("name") == "web_fetch" and is_marked(message.get("content"))
    )
    forms = {url, *same_site(url)} if url else set()
    return any(_stands(form, page) for page in pages for form in forms if form in page)


def same_site(url: str) -> Iterator[str]:
    """An address of a whole site is the same with and without its slash."""
    try:
        parts = urlsplit(url)
    except ValueError:  # it is no address at all
        return
    if parts.netloc and parts.path in ("", "/") and not parts.query and not parts.fragment and url[-1] not in "?#":
        yield url[:-1] if parts.path else url + "/"


def _texts(conversation: Sequence[Message]) -> Iterator[str]:
    own_words = getattr(conversation, "own_words", {})  # the rest was written by a model, or stands in a skill
    for place, message in enumerate(conversation):
        role, content = message.get("role"), own_words.get(place, message.get("content"))
        # Not what a search that failed says: that may be the model's own words.
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
