"""A push service on loopback that is as strict as those of browsers.

With its own code it checks the signature (RFC 8292) and decrypts a browser's messages (RFC 8291).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .commands import until

CURVE = ec.SECP256R1()


@dataclass
class Browser:
    """A subscribed browser. `answers` are the statuses of the next responses, followed by 201."""

    endpoint: str
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(CURVE))
    auth: bytes = field(default_factory=lambda: os.urandom(16))
    answers: list[int] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)  # payloads, including those answered by an error
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def public(self) -> bytes:
        return point_of(self.key.public_key())

    @property
    def subscription(self) -> dict[str, str]:
        """The subscription as the page's API gets it."""
        return {"endpoint": self.endpoint, "p256dh": encoded(self.public), "auth": encoded(self.auth)}

    async def has(self, count: int) -> list[dict[str, Any]]:
        """Wait for this many payloads."""
        await until(lambda: len(self.told) >= count)
        assert len(self.told) == count
        return self.told


class PushService:
    def __init__(self) -> None:
        self.origin = ""
        self.key = ""  # used by subscribed browsers; requests signed with another one are refused
        self.browsers: dict[str, Browser] = {}
        self.problems: list[str] = []

    def browser(self) -> Browser:
        name = f"/send/{len(self.browsers)}"
        self.browsers[name] = Browser(self.origin + name)
        return self.browsers[name]

    async def take(self, request: web.Request) -> web.Response:
        browser, body = self.browsers[request.path], await request.read()
        try:
            self._check(request)
            payload = json.loads(decrypted(browser, body))
        except (InvalidSignature, InvalidTag, ValueError, KeyError, AssertionError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            return web.Response(status=403)
        browser.told.append(payload)
        browser.headers.append(dict(request.headers))
        return web.Response(status=browser.answers.pop(0) if browser.answers else 201)

    def _check(self, request: web.Request) -> None:
        assert request.headers["Content-Encoding"] == "aes128gcm"
        assert 0 <= int(request.headers["TTL"]) <= 24 * 3600
        scheme, _, rest = request.headers["Authorization"].partition(" ")
        given = dict(one.strip().split("=", 1) for one in rest.split(","))
        assert scheme == "vapid"
        assert self.key in ("", given["k"]), "another key than the browser subscribed with"
        head, claims, signature = given["t"].split(".")
        assert json.loads(decoded(head))["alg"] == "ES256"
        told = json.loads(decoded(claims))
        assert told["aud"] == self.origin
        assert told["sub"].startswith("mailto:")
        assert time.time() < told["exp"] <= time.time() + 24 * 3600
        raw = decoded(signature)
        key = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, decoded(given["k"]))
        both = encode_dss_signature(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big"))
        key.verify(both, f"{head}.{claims}".encode(), ec.ECDSA(hashes.SHA256()))


@contextlib.asynccontextmanager
async def push_service() -> AsyncIterator[PushService]:
    service, app = PushService(), web.Application()
    app.router.add_post("/send/{name}", service.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    service.origin = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield service
    finally:
        await runner.cleanup()
    assert service.problems == []


def decrypted(browser: Browser, body: bytes) -> bytes:
    """Return the plain text of one aes128gcm record (RFC 8188) for this browser."""
    salt, size, length = body[:16], int.from_bytes(body[16:20], "big"), body[20]
    sender, record = body[21 : 21 + length], body[21 + length :]
    assert len(record) <= size
    shared = browser.key.exchange(ec.ECDH(), ec.EllipticCurvePublicKey.from_encoded_point(CURVE, sender))
    secret = derived(browser.auth, shared, b"WebPush: info\0" + browser.public + sender, 32)
    key = derived(salt, secret, b"Content-Encoding: aes128gcm\0", 16)
    nonce = derived(salt, secret, b"Content-Encoding: nonce\0", 12)
    plain = AESGCM(key).decrypt(nonce, record, None).rstrip(b"\0")
    assert plain.endswith(b"\x02"), "no last record"
    return plain[:-1]


def derived(salt: bytes, secret: bytes, info: bytes, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, salt, info).derive(secret)


def point_of(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
