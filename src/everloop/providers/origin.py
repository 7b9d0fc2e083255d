"""Where requests go: the parts of a URL that a connection needs."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit


@dataclass(slots=True, frozen=True)
class Origin:
    """Where requests go: a server, and the path and query of every request to it."""

    scheme: str
    host: str
    port: int
    target: str
    user: str = ""  # "name:password" of the URL

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def origin_of(url: str) -> Origin:
    """The origin of an http(s) URL; a ValueError if it is none."""
    if any(ord(letter) <= 32 for letter in url):  # urlsplit would leave line ends out unseen
        raise ValueError("a URL has no spaces, line ends or control characters")
    parts: SplitResult = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it does not begin with http:// or https:// and a host")
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(ord(letter) > 126 for letter in host + target):
        raise ValueError("it has characters that no URL may have")
    if any(not 0 < len(label) < 64 for label in host.removesuffix(".").split(".")) and ":" not in host:
        raise ValueError("it has no possible host name")
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}" if parts.username else ""
    return Origin(parts.scheme, host, port, target, user)
