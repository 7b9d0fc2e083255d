"""Access to the web page: one-time links, token logins, and the session cookies that they set.

A cookie is signed with a key in the home folder, which no agent's tool can read. Browsers send it to every server on
the host, whatever the port, so it is not sufficient on its own: with each request, a page must also prove that it has
the page key, which only this server's own pages can store and read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from ..errors import ConfigError
from ..runtime.owners import OWN
from ..store.base import Store, Token
from ..store.tokens import PREFIX, USE, hash_of
from ..threads import in_thread

LINK_SECONDS = 600
COOKIE_SECONDS = 30 * 24 * 3600
PAGE_KEY = "X-Everloop-Page"
KEY_FILE = "page.key"


@dataclass(slots=True, frozen=True)
class Visitor:
    """The user of the page: the person of this machine, or the owner of a token."""

    owner: str
    token: Token | None = None


@dataclass(slots=True, frozen=True)
class Login:
    """A new login: the cookie's value, and the page key for the page that logged in."""

    cookie: str
    page_key: str
    owner: str


class Access:
    """Creates and verifies links, cookies and page keys."""

    def __init__(
        self, store: Store, home: Path, find_token: Callable[[str], Awaitable[Token | None]] | None = None
    ) -> None:
        """`find_token` looks up a token by its hash; it is needed if tokens may be in another database."""
        self._store = store
        self._find_token = find_token or store.token
        self._path = home / KEY_FILE
        self._key = b""

    async def new_link(self) -> str:
        """Return a code that logs its bearer in as the person of this machine, once, within ten minutes."""
        about = f"{int(time.time()) + LINK_SECONDS}.{secrets.token_hex(8)}"
        return f"{about}.{await self._sign('link', about)}"

    async def redeem(self, code: str) -> Login | None:
        """Log in with the code of a link; None if it is invalid, expired, or was used on any server of the store."""
        about, _, signature = code.rpartition(".")
        if not await self._is_signed("link", about, signature) or _expiry(about) < time.time():
            return None
        if await self._store.admit(OWN, f"link:{about}", 1, 2 * LINK_SECONDS) > 0:
            return None
        return await self._login(OWN, OWN)

    async def login(self, token: str) -> Login | None:
        """Log in with a token; None if it is unknown, revoked, or may not use the API."""
        token = token.strip()
        found = await self._find_token(hash_of(token)) if token.startswith(PREFIX) else None
        return await self._login(hash_of(token), found.owner) if found is not None and USE in found.rights else None

    async def visitor(self, request: web.Request) -> Visitor | None:
        """Return the visitor who sent a request, if its cookie and page key are valid."""
        cookie, page_key = request.cookies.get(cookie_name(request)), request.headers.get(PAGE_KEY)
        if not cookie or not page_key:
            return None
        about, _, signature = cookie.rpartition(".")
        if not await self._is_signed("cookie", about, signature) or _expiry(about) < time.time():
            return None
        if not await self._is_signed("page", cookie, page_key):
            return None
        subject = about.split(".")[-1]
        if subject == OWN:
            return Visitor(OWN)
        token = await self._store.token(subject)  # read every time, so that revoking it takes effect at once
        return Visitor(token.owner, token) if token is not None and USE in token.rights else None

    async def _login(self, subject: str, owner: str) -> Login:
        about = f"{int(time.time()) + COOKIE_SECONDS}.{secrets.token_hex(8)}.{subject}"
        cookie = f"{about}.{await self._sign('cookie', about)}"
        return Login(cookie, await self._sign("page", cookie), owner)

    async def _is_signed(self, use: str, text: str, signature: str) -> bool:
        expected = await self._sign(use, text)
        return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogatepass"))

    async def _sign(self, use: str, text: str) -> str:
        self._key = self._key or await in_thread(_read_key, self._path)
        return hmac.new(self._key, f"{use}:{text}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def cookie_name(request: web.Request) -> str:
    """Return the name of the cookie; it includes the port because browsers send cookies to all servers of a host."""
    _, _, port = request.host.rpartition(":")
    return f"everloop_{port if port.isdecimal() else 'web'}"


def set_cookie(request: web.Request, response: web.Response, login: Login | None) -> None:
    """Set the cookie of a login, or remove it."""
    secure = request.headers.get("Origin", "").lower().startswith("https://")
    value, age = (login.cookie, COOKIE_SECONDS) if login is not None else ("", 0)
    response.set_cookie(
        cookie_name(request), value, max_age=age, path="/", httponly=True, samesite="Strict", secure=secure
    )


def _expiry(about: str) -> float:
    first = about.partition(".")[0]
    return float(first) if first.isdecimal() else 0.0


def _read_key(path: Path) -> bytes:
    """Return the key in the home folder, creating it on first use. Two processes that create one agree on the first."""
    try:
        with contextlib.suppress(FileNotFoundError):
            return _checked(path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(new, path)
        finally:
            new.unlink()
        return _checked(path)
    except OSError as error:
        raise ConfigError(f"cannot use the page's key {path}: {error.strerror}") from error


def _checked(path: Path) -> bytes:
    key = path.read_bytes().strip()
    if len(key) < 32:
        raise ConfigError(f"{path} is too short for a key: remove it, and all visitors log in again")
    return key
