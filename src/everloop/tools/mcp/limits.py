"""Shared parts of the MCP client: message size limits, and errors without secrets."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from urllib.parse import parse_qsl, urlsplit

from ...config import McpServer
from ...text import clean

MAX_MESSAGE = 32 << 20  # bytes per message
_MIN_SECRET = 6


class Unreachable(Exception):
    """The server cannot be used, or not for this call; the text says why."""


def without_hidden(text: str) -> str:
    """Return the text without control characters and the invisible letters that are used to hide instructions."""
    text = clean(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c for c in text if c in "\n\t" or not (unicodedata.category(c) == "Cc" or "\U000e0000" <= c <= "\U000e007f")
    )


def secrets_of(server: McpServer) -> list[str]:
    """Return the secrets in a server's settings: values of its environment and headers, keys in its URL."""
    address = urlsplit(server.url)
    found = {*server.env.values(), *(value for _, value in parse_qsl(address.query))}
    found |= {part for value in server.headers.values() for part in (value, *value.split())}
    found |= {address.username or "", address.password or "", address.query}
    return sorted((value for value in found if len(value) >= _MIN_SECRET), key=len, reverse=True)


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return the text with its secrets hidden."""
    for secret in secrets:
        text = text.replace(secret, "[hidden]")
    return text


def address_of(url: str) -> str:
    """Return a URL that is safe to show: without user, password and query."""
    address = urlsplit(url)
    host = re.sub(r".*@", "", address.netloc)
    return f"{address.scheme}://{host}{address.path}"
