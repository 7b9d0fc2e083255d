"""Web push: notifies an owner's browsers that a turn of the page has ended, or that a question is waiting.

The chat id of a message is its owner. It goes to each browser that the owner has subscribed on the page, encrypted for
that browser alone (RFC 8291) and signed with the server's own key (RFC 8292). A browser shows two notifications with
the same tag once, so a repeat is invisible.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ..errors import ConfigError, EverloopError
from ..messages import encode_json
from ..runtime.owners import OWN
from ..store.base import Store
from ..text import one_line
from ..threads import in_thread
from ..tools.web.fetch import Fetcher, FetchError, NotPublic
from ..tools.web.urls import BadURL, parse_url
from .base import Can, Inbox, Later, Never, Options, Part

NETWORK = "push"
MAX_SUBSCRIPTIONS = 20  # subscriptions of an owner
MAX_ENDPOINT = 2_000
LIFE_SECONDS = 24 * 3600  # after that, a notification is useless
SEEN_SECONDS = 45.0  # a page that reported itself visible within this time is considered visible
SEND_SECONDS = 30.0
TOKEN_SECONDS = 12 * 3600  # lifetime of a signature; push services accept at most 24 hours
REMEMBERED = 200  # messages whose notified subscriptions are kept in memory
MAX_TEXT = 200  # characters of a question or an answer, if the settings include them
MISSING = "web push needs the package pywebpush: pip install 'everloop[push]'"
UNTITLED = "A session without a title"
TITLES = {"question": "A question waits for you", "failed": "A turn has failed", "ended": "A turn has ended"}
_SUBSCRIPTION, _SEEN, _VAPID = "subscription:", "seen:", "vapid"


class Subscription(msgspec.Struct, frozen=True):
    """A browser that has subscribed to notifications."""

    owner: str
    endpoint: str
    p256dh: str
    auth: str
    at: float
    token: str = ""  # the id of the token that its page was logged in with; "" for the person of this machine

    @property
    def key(self) -> str:
        return _SUBSCRIPTION + _short(f"{self.owner}\0{self.endpoint}")


class Seen(msgspec.Struct, frozen=True):
    """A page that was visible to an owner."""

    owner: str
    at: float


class Payload(msgspec.Struct, frozen=True):
    """The payload of a notification. By default it contains nothing of what was said."""

    title: str
    body: str  # the session's title
    session: str
    tag: str


class Subscriptions:
    """The data of web push in the store: subscriptions, the server's key, and which pages are visible."""

    def __init__(self, store: Store, channel: str = NETWORK) -> None:
        self._store = store
        self._channel = channel

    async def of(self, owner: str) -> list[Subscription]:
        state = await self._store.channel_state(self._channel)
        found = [_decode_subscription(value) for key, value in state.items() if key.startswith(_SUBSCRIPTION)]
        return [one for one in found if one.owner == owner]

    async def add(self, one: Subscription) -> None:
        """Add or renew a subscription; beyond the limit the oldest is removed."""
        others = [other for other in await self.of(one.owner) if other.key != one.key]
        for old in sorted(others, key=lambda other: other.at)[: max(len(others) - MAX_SUBSCRIPTIONS + 1, 0)]:
            await self.remove(old)
        await self._store.set_channel_state(self._channel, one.key, encode_json(one).decode())

    async def remove(self, one: Subscription) -> None:
        await self._store.set_channel_state(self._channel, one.key, None)

    async def look(self, owner: str, page: str, visible: bool) -> None:
        """Record that a page is visible or hidden."""
        key = _SEEN + _short(f"{owner}\0{page}")
        value = encode_json(Seen(owner, time.time())).decode() if visible else None
        await self._store.set_channel_state(self._channel, key, value)

    async def is_looking(self, owner: str) -> bool:
        """Return whether a page of the owner is visible. Pages that stopped reporting are removed."""
        state, now = await self._store.channel_state(self._channel), time.time()
        seen = {key: _decode_seen(value) for key, value in state.items() if key.startswith(_SEEN)}
        for key, one in seen.items():
            if now - one.at > SEEN_SECONDS:
                await self._store.set_channel_state(self._channel, key, None)
        return any(one.owner == owner and now - one.at <= SEEN_SECONDS for one in seen.values())

    async def key(self) -> Any:
        """Return the key pair, created on first use and shared by all servers of the store."""
        vapid = (await in_thread(import_module, "py_vapid")).Vapid02
        async with asyncio.timeout(SEND_SECONDS):
            while not (pem := (await self._store.channel_state(self._channel)).get(_VAPID, "")):
                if await self._store.admit(OWN, f"{self._channel}:{_VAPID}", 1, SEND_SECONDS) > 0:
                    await asyncio.sleep(0.1)  # another server is creating it
                    continue
                made = vapid()
                await in_thread(made.generate_keys)
                await self._store.set_channel_state(self._channel, _VAPID, made.private_pem().decode())
        return vapid.from_pem(pem.encode())

    async def public_key(self) -> str:
        """The key that a browser subscribes with."""
        return _public(await self.key())

    async def is_allowed(self, one: Subscription) -> bool:
        """Return whether the login that created a subscription is still valid."""
        if not one.token:
            return True
        return any(token.id == one.token and token.revoked_at is None for token in await self._store.tokens(one.owner))


def is_installed() -> bool:
    return find_spec("pywebpush") is not None


def checked(owner: str, endpoint: str, p256dh: str, auth: str, token: str, fetcher: Fetcher) -> Subscription:
    """Validate a browser's subscription; raise a one-line `EverloopError` if it is invalid."""
    try:
        url = parse_url(endpoint)
    except BadURL as error:
        raise EverloopError(f"endpoint: {error}") from None
    if len(endpoint) > MAX_ENDPOINT or (url.scheme != "https" and not fetcher.is_listed(url)):
        raise EverloopError("endpoint: must be an https address of a push service")
    if len(_bytes(p256dh)) != 65 or not _bytes(p256dh).startswith(b"\x04") or len(_bytes(auth)) != 16:
        raise EverloopError("keys: must be a public key of P-256 and 16 bytes of authentication, as browsers give them")
    return Subscription(owner, str(url), p256dh, auth, time.time(), token)


class Push:
    """Sends to the browsers of an owner. Nothing is received."""

    can = Can(text=1_000, repeats="key", ids=False)

    def __init__(self, options: Options, store: Store | None = None) -> None:
        self.name = options.name
        self._contact = options.text("contact")
        self._content = options.flag("content", False)
        if urlsplit(self._contact).scheme not in ("mailto", "https"):
            raise options.problem('contact must be an address such as "mailto:you@example.org": push services want one')
        if not is_installed():
            raise ConfigError(MISSING)
        self._fetcher = fetcher_of(options)
        self._store = store
        self._told: OrderedDict[str, set[str]] = OrderedDict()  # message → the subscriptions that were notified

    async def receive(self, inbox: Inbox) -> None:
        await inbox.ready()
        await asyncio.Event().wait()

    async def send(self, part: Part, key: str) -> str:
        assert self._store is not None
        subscriptions = Subscriptions(self._store, self.name)
        at = part.extra.get("at", "")
        age = time.time() - (float(at) if at.replace(".", "", 1).isdecimal() else 0.0)
        if age > LIFE_SECONDS or await subscriptions.is_looking(part.chat):
            return key
        wanted = await subscriptions.of(part.chat)
        if not wanted:
            return key
        payload, vapid = await self._payload(part, key), await subscriptions.key()
        told = self._told.setdefault(key, set())
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        problems: list[Exception] = []
        for one in wanted:
            if one.key in told:
                continue
            try:
                if not await subscriptions.is_allowed(one) or not await self._tell(one, payload, vapid, part, age):
                    await subscriptions.remove(one)
                told.add(one.key)
            except (Later, Never, OSError, FetchError) as error:
                problems.append(error)
        _raise(problems)
        self._told.pop(key, None)
        return key

    async def show(self, chat: str, key: str, text: str) -> None:
        """Do nothing: there is no chat to show it in."""

    async def _payload(self, part: Part, key: str) -> bytes:
        assert self._store is not None
        session = part.extra.get("session", "")
        info = await self._store.session(part.chat, session)
        body = one_line((info.title if info is not None else "") or UNTITLED, 100)
        if self._content and part.plain.strip():
            body = f"{body}: {one_line(part.plain, MAX_TEXT)}"
        return encode_json(Payload(TITLES.get(part.extra.get("kind", ""), TITLES["ended"]), body, session, key))

    async def _tell(self, one: Subscription, payload: bytes, vapid: Any, part: Part, age: float) -> bool:
        """Notify a browser. Return False if the push service no longer knows it."""
        url = parse_url(one.endpoint)
        if url.scheme != "https" and not self._fetcher.is_listed(url):
            return False
        push = await in_thread(import_module, "pywebpush")
        given = {"endpoint": one.endpoint, "keys": {"p256dh": one.p256dh, "auth": one.auth}}
        body = await in_thread(lambda: push.WebPusher(given).encode(payload, "aes128gcm")["body"])
        audience = f"{url.scheme}://{url.authority}"
        claims = {"sub": self._contact, "aud": audience, "exp": int(time.time()) + TOKEN_SECONDS}
        headers = {
            **vapid.sign(claims),
            "Content-Type": "application/octet-stream",
            "Content-Encoding": "aes128gcm",
            "TTL": str(int(LIFE_SECONDS - age)),
            "Urgency": "high" if part.extra.get("kind") == "question" else "normal",
            "Topic": _short(part.extra.get("session", "")),  # a newer one replaces it until it is delivered
        }
        try:
            status, answered = await self._fetcher.post(url, bytes(body), headers)
        except NotPublic:
            return False
        if status in (404, 410):
            return False
        if status == 429 or (status == 503 and "retry-after" in answered):
            wait = answered.get("retry-after", "")
            raise Later(min(float(wait), 3600.0) if wait.isdecimal() else 30.0, f"HTTP {status}")
        if status >= 500:
            raise OSError(f"HTTP {status}")
        if not 200 <= status < 300:
            raise Never(f"the push service refuses it: HTTP {status}")
        return True


def fetcher_of(options: Options) -> Fetcher:
    """Return the client for push services, which may be at public addresses and those listed in the settings."""
    return Fetcher(private_hosts=options.texts("private_hosts"), timeout=SEND_SECONDS)


def _raise(problems: Sequence[Exception]) -> None:
    """Raise the most important problem: one that a retry may solve takes precedence over a refusal."""
    for kind in (OSError, FetchError, Later, Never):
        for error in problems:
            if isinstance(error, kind):
                raise error


def _public(vapid: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    point = vapid.public_key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    return base64.urlsafe_b64encode(point).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    with contextlib.suppress(ValueError):
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return b""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


_decode_subscription = msgspec.json.Decoder(Subscription).decode
_decode_seen = msgspec.json.Decoder(Seen).decode
