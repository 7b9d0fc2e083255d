"""Neutralise images in answers to people: images at addresses that the model composed become plain text.

A client loads an image as soon as it displays it, so an image address can exfiltrate anything the model knows. Ordinary
links are kept: following one is the person's decision.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .. import events

Free = Callable[[str], bool]  # whether an address may be loaded: a person or a search supplied it

MAX_HELD = 8_000  # characters of a stream that may be held back until they can be classified

_TOKEN = re.compile(r"!\[|<(?=[A-Za-z])|https?://|`+|\n", re.IGNORECASE)
_HALF_A_TOKEN = re.compile(r"(?:!|<|`+|h(?:t(?:t(?:p(?:s?(?::/?)?)?)?)?)?)\Z", re.IGNORECASE)
_IMAGE = re.compile(r"!\[[^\[\]<>]*\]\(([^\s()<>]+)\)")
_HALF_AN_IMAGE = re.compile(r"!\[[^\[\]<>]*(?:\](?:\([^\s()<>]*)?)?\Z")
_TAG = re.compile(r"""<([A-Za-z][\w:-]*)((?:"[^"]*(?:"|\Z)|'[^']*(?:'|\Z)|[^'">])*)(>?)""")
_STYLE = re.compile(r"<style\b.*?(?:</style|\Z)", re.IGNORECASE | re.DOTALL)
_LOADS = re.compile(r"//|/\\|\\|&|url\s*\(|@import", re.IGNORECASE)  # an address in attributes, however it is written
_LOADING = re.compile(
    r"\b(?:\w*src|srcset|href|style|data|poster|background|content|action|on\w+|code(?:base)?)\s*=", re.IGNORECASE
)
_NAMESPACE = re.compile(r"""\bxmlns(?::\w+)?\s*=\s*(?:"[^"]*"|'[^']*')""")
_ADDRESS = re.compile(r"https?://[^\s\"'<>()]+", re.IGNORECASE)
_BARE = re.compile(r"https?://[^\s<>()\[\]\"'`|\\^{}]*", re.IGNORECASE)
_OF_AN_IMAGE = re.compile(r"\.(?:a?png|jpe?g|gif|webp|svg|bmp|avif|ico|tiff?)(?:[?#]|\Z)", re.IGNORECASE)
_LOCAL = re.compile(r"[A-Za-z0-9_][\w-]*(?:[./][\w-]+)*|data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")


def plain_images(text: str, free: Free) -> str:
    """Return the text with all images as plain text, except those at free addresses."""
    images = PlainImages(free)
    return images.feed(text) + images.end()


class PlainImages:
    """The streaming version of `plain_images`: text that may be the start of an image is held back."""

    def __init__(self, free: Free) -> None:
        self._free = free
        self._held = ""
        self._line = ""  # the current line so far
        self._fenced = False  # inside a code block
        self._coded = False  # inside inline code

    def feed(self, text: str) -> str:
        """Take the next piece of text, and return what can be shown so far."""
        self._held += text
        return self._take(final=False)

    def end(self) -> str:
        """Return the rest, at the end of the text."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        text, place, done = self._held, 0, []
        while (token := _TOKEN.search(text, place)) is not None:
            done.append(self._pass(text[place : token.start()]))
            place = token.start()
            found = self._decide(text, place, token, final or len(text) - place > MAX_HELD)
            if found is None:
                self._held = text[place:]
                return "".join(done)
            end, shown = found
            done.append(self._pass(shown))
            place = end
        half = None if final else _HALF_A_TOKEN.search(text, place)
        end = half.start() if half is not None else len(text)
        done.append(self._pass(text[place:end]))
        self._held = text[end:]
        return "".join(done)

    def _decide(self, text: str, place: int, token: re.Match[str], final: bool) -> tuple[int, str] | None:
        """Return where a part of the text ends and how it is shown; None if that depends on what follows."""
        match token[0][0]:
            case "!":
                return self._image(text, place, final)
            case "<":
                return self._tag(text, place, final)
            case "`":
                return self._ticks(text, token, final)
            case "\n":
                self._line, self._coded = "", False
                return token.end(), "\n"
        return self._bare(text, place, final)

    def _pass(self, text: str) -> str:
        self._line = (self._line + text.rpartition("\n")[2])[-100:] if "\n" not in text else text.rpartition("\n")[2]
        return text

    def _image(self, text: str, place: int, final: bool) -> tuple[int, str] | None:
        image = _IMAGE.match(text, place)
        if image is not None:
            address = image[1]
            if _LOCAL.fullmatch(address) or self._free(address):
                return image.end(), image[0]
        elif not final and _HALF_AN_IMAGE.match(text, place):
            return None
        return place + 2, "!\\["  # shown literally, not as an image

    def _tag(self, text: str, place: int, final: bool) -> tuple[int, str] | None:
        tag = _STYLE.match(text, place) or _TAG.match(text, place)
        assert tag is not None  # the token guarantees that a letter follows
        whole = tag[0].lower().endswith("</style") if tag.re is _STYLE else bool(tag[3])
        if not final and not whole and tag.end() == len(text):
            return None
        if tag.re is not _STYLE and (tag[1].lower() == "a" or not _LOADING.search(tag[2])):
            return place + 1, "<"
        return place + 1, "<" if self._is_harmless(tag[0][1:]) else "&lt;"

    def _is_harmless(self, attributes: str) -> bool:
        """Return whether the attributes of a tag refer only to free addresses."""
        attributes = _NAMESPACE.sub("", attributes)
        return _LOADS.search(_ADDRESS.sub("", attributes)) is None and all(
            map(self._free, _ADDRESS.findall(attributes))
        )

    def _ticks(self, text: str, token: re.Match[str], final: bool) -> tuple[int, str] | None:
        if not final and token.end() == len(text):
            return None
        if len(token[0]) >= 3 and not self._line.strip():
            self._fenced = not self._fenced
        elif not self._fenced:
            self._coded = not self._coded
        return token.end(), token[0]

    def _bare(self, text: str, place: int, final: bool) -> tuple[int, str] | None:
        """Handle a bare address: some clients show it as an image if it looks like one."""
        bare = _BARE.match(text, place)
        assert bare is not None
        if not final and bare.end() == len(text):
            return None
        address = bare[0].rstrip(".,;:!?*_")
        code = self._fenced or self._coded
        if code or not _OF_AN_IMAGE.search(address) or self._free(address):
            return place + len(address), address
        return place + len(address), f"`{address}`"


class ImageFilter:
    """Forwards the events of a streamed answer, with its text filtered by `PlainImages`."""

    def __init__(self, emit: events.Emit, free: Free) -> None:
        self._emit = emit
        self._free = free
        self._images = PlainImages(free)

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Restarted):
            self._images = PlainImages(self._free)
        elif isinstance(event, events.Text):
            self._show(self._images.feed(event.text))
            return
        self._emit(event)

    def end(self) -> None:
        """Flush the held-back text at the end of the answer."""
        self._show(self._images.end())

    def _show(self, text: str) -> None:
        if text:
            self._emit(events.Text(text))
