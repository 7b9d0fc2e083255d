"""A single GET of a web page, with every address checked before connecting, and with limits on everything.

A name is resolved once per hop, all its addresses are checked, and the connection goes to one of exactly those
addresses, so that DNS rebinding has no effect. No cookie, connection or proxy setting is carried into or out of a
fetch.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from importlib import import_module
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..._version import __version__
from ...threads import in_thread
from ..base import ToolError
from .urls import URL, Address, BadURL, kind_of

if TYPE_CHECKING:
    import aiohttp


MAX_REDIRECTS = 5
PORTS = (80, 443, 8080, 8443)  # web ports; a page has no business with other services on other ports
USER_AGENT = f"Mozilla/5.0 (compatible; Everloop/{__version__})"
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 10.0  # between two chunks of a response
MAX_HEADER = 16_384  # bytes per line; aiohttp accepts at most 128 lines

T = TypeVar("T")
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
_is_word = re.compile(r"[a-z0-9.+-]{1,40}(/[a-z0-9.+-]{1,80})?").fullmatch
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15, "identity": 0, "": 0}  # zlib's window bits


class FetchError(ToolError):
    """A page that was not fetched; the text says why and, if possible, what to do.

    If it was raised after a server had responded, it quotes that server: a media type, the host of a redirect.
    """


class NotPublic(FetchError):
    """The host is neither on the public internet nor listed in the settings."""


class Page(msgspec.Struct, frozen=True):
    """A response. The body is empty unless the status is 200 to 299."""

    url: URL  # after redirects
    status: int
    media_type: str
    charset: str
    body: bytes
    cut: bool = False  # the body was truncated

    @property
    def status_text(self) -> str:
        """The status in words: our own, since a server may send anything there."""
        try:
            return f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            return str(self.status)


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name according to this machine."""
    found = await in_thread(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class Fetcher(msgspec.Struct, kw_only=True):
    """Fetches pages from public hosts, and from listed private hosts: "host" or "host:port", exactly."""

    private_hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = PORTS
    timeout: float = 30.0  # seconds in total, including redirects
    max_bytes: int = 5_000_000  # of a body, both as sent and decompressed
    resolve: Resolver = system_resolver
    _tls: ssl.SSLContext | None = None

    async def get(
        self,
        url: URL,
        *,
        wanted: Callable[[str], bool] = lambda media_type: True,
        headers: Mapping[str, str] | None = None,
        trusted: bool = False,
        redirects: int = MAX_REDIRECTS,
    ) -> Page:
        """Fetch a page whose media type is `wanted`. `trusted`: the person chose this address, wherever it leads."""
        try:
            async with asyncio.timeout(self.timeout):
                return await self._follow(url, wanted, headers or {}, trusted, redirects)
        except TimeoutError:
            raise FetchError(f"{url.host} did not send the page within {self.timeout:g} seconds.") from None

    async def post(self, url: URL, body: bytes, headers: Mapping[str, str]) -> tuple[int, dict[str, str]]:
        """Send a request to a public or listed host, and return the status and headers of the response.

        No redirect is followed, and the response body is not read.
        """
        try:
            async with asyncio.timeout(self.timeout):
                return await self._exchange(url, partial(self._posted, url, body, headers))
        except TimeoutError:
            raise FetchError(f"{url.host} did not answer within {self.timeout:g} seconds.") from None

    async def _posted(
        self, url: URL, body: bytes, headers: Mapping[str, str], aiohttp: Any, addresses: list[Address]
    ) -> tuple[int, dict[str, str]]:
        async with (
            self._client(aiohttp, addresses, headers) as client,
            client.post(_same(url), data=body, allow_redirects=False) as response,
        ):
            return response.status, {name.lower(): value for name, value in response.headers.items()}

    def is_listed(self, url: URL) -> bool:
        """Return whether the person has listed this host and port."""
        return self._is_listed(url)

    async def _follow(
        self, url: URL, wanted: Callable[[str], bool], headers: Mapping[str, str], trusted: bool, redirects: int
    ) -> Page:
        listed = trusted or self._is_listed(url)
        for hop in range(redirects + 1):
            try:
                found = await self._hop(url, listed, wanted, headers)
            except FetchError as error:
                error.untrusted |= hop > 0  # the host was named by a server
                raise
            if isinstance(found, Page):
                return found
            try:
                url = url.join(found)
            except BadURL as error:
                raise FetchError(
                    f"{url.host} redirects to an address that is not followed: {error}.", untrusted=True
                ) from None
            # A listed host may only be reached by a redirect from another listed host: a page on the internet must not
            # open a way into this network that the model was not given.
            listed, headers = listed and self._is_listed(url), {}  # and no key is passed on to another address
        often = f"more than {redirects} times" if redirects else "elsewhere"
        raise FetchError(f"{url.host} redirects {often}: ask for the page by its own address.", untrusted=True)

    def _is_listed(self, url: URL) -> bool:
        """Return whether the person has listed this host and port; without a port, the usual web ports are meant."""
        host = f"[{url.host}]" if ":" in url.host else url.host
        listed = {entry.lower() for entry in self.private_hosts}
        return f"{host}:{url.port}" in listed or (url.port in (80, 443) and not listed.isdisjoint({host, url.host}))

    async def _addresses(self, url: URL, listed: bool) -> list[Address]:
        """Return the addresses to connect to; raise a FetchError if any of them is not allowed."""
        if url.port not in self.ports and not listed:
            known = ", ".join(map(str, self.ports))
            raise NotPublic(f"{url.host}: port {url.port} is not allowed; only {known} are. {_HOW_TO_LIST}")
        if url.address is not None:
            found = [url.address]
        else:
            try:
                found = [ip_address(text) for text in await self.resolve(url.host, url.port)]
            except (OSError, UnicodeError, ValueError):
                found = []
            if not found:
                raise FetchError(f"{url.host} has no address: check the name.")
        for address in found:
            kind = kind_of(address)
            chosen = listed and (kind == "private" or url.address is not None)
            if not chosen and (kind != "public" or (not listed and is_this_machine(address))):
                raise NotPublic(f"{url.host} is not on the public internet. {_HOW_TO_LIST}")
        return found

    async def _hop(
        self, url: URL, listed: bool, wanted: Callable[[str], bool], headers: Mapping[str, str]
    ) -> Page | str:
        """Send one request, and return the page or the address of its redirect."""

        async def got(aiohttp: Any, addresses: list[Address]) -> Page | str:
            async with (
                self._client(aiohttp, addresses, headers) as client,
                client.get(_same(url), allow_redirects=False) as response,
            ):
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location is not None:
                    return location.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                return await self._page(url, response, wanted)

        return await self._exchange(url, got, listed)

    async def _exchange(
        self, url: URL, exchange: Callable[[Any, list[Address]], Awaitable[T]], listed: bool | None = None
    ) -> T:
        """Run an exchange with the checked addresses of a host; raise a readable FetchError if it fails."""
        addresses = await self._addresses(url, self._is_listed(url) if listed is None else listed)
        aiohttp = await in_thread(import_module, "aiohttp")  # takes a fifth of a second the first time
        if url.scheme == "https" and self._tls is None:
            self._tls = await in_thread(certificates)
        try:
            return await exchange(aiohttp, addresses)
        except aiohttp.ClientConnectorCertificateError as error:
            reason = getattr(error.certificate_error, "verify_message", "") or "it is not valid"
            raise FetchError(f"{url.host}: its certificate is refused ({reason}).", untrusted=True) from None
        except aiohttp.ServerTimeoutError:
            raise FetchError(f"{url.host} fell silent for {SILENCE_SECONDS:g} seconds: try again later.") from None
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or "no connection"
            raise FetchError(f"{url.host} cannot be reached: {reason}.") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise FetchError(f"{url.host} sent an invalid response ({type(error).__name__}).") from None

    def _client(self, aiohttp: Any, addresses: list[Address], headers: Mapping[str, str]) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=Pinned(addresses),
            use_dns_cache=False,
            ssl=self._tls or True,
            force_close=True,
            socket_factory=sockets_to(addresses, most=2 * self.max_bytes + 1_000_000),
        )
        own = {"User-Agent": USER_AGENT, "Accept": "text/html,*/*;q=0.8", "Accept-Encoding": "gzip, deflate"}
        return aiohttp.ClientSession(  # type: ignore[no-any-return]
            connector=connector,
            headers={**own, **headers},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS),
            auto_decompress=False,
            max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
        )

    async def _page(self, url: URL, response: aiohttp.ClientResponse, wanted: Callable[[str], bool]) -> Page:
        media_type = response.content_type.lower() if "Content-Type" in response.headers else ""
        charset = response.charset or ""
        if not 200 <= response.status < 300:
            return Page(url, response.status, media_type, charset, b"")
        if not wanted(media_type):
            length = response.content_length
            much = f" ({length} bytes)" if length is not None else ""
            raise FetchError(
                f"{url.host} sent {_named(media_type)}{much}: only pages of text and PDF can be read.", untrusted=True
            )
        encoding = ",".join(response.headers.getall("Content-Encoding", ())).strip().lower()
        if encoding not in _ENCODINGS:
            raise FetchError(
                f"{url.host} compressed the page in a way that was not requested: {_named(encoding)}.", untrusted=True
            )
        pieces: list[bytes] = []
        left = self.max_bytes
        async for piece in response.content.iter_any():
            pieces.append(piece[:left])
            left -= len(piece)
            if left < 0:
                break
        body, more = b"".join(pieces), False
        if bits := _ENCODINGS[encoding]:
            body, more = await in_thread(_unpack, body, bits, self.max_bytes)
        return Page(url, response.status, media_type, charset, body, left < 0 or more)


_HOW_TO_LIST = 'A person can allow it by adding "host:port" to private_hosts in the settings.'


def _named(said: str) -> str:
    """Return a server's word for use in a message; anything longer than a word is not quoted."""
    return said if _is_word(said) else "something unknown"


def _same(url: URL) -> Any:
    """Return the address for aiohttp, which must parse it as we did."""
    import yarl

    asked = yarl.URL(str(url), encoded=True)
    if (asked.scheme, asked.raw_host, asked.port, str(asked)) != (url.scheme, url.host, url.port, str(url)):
        raise FetchError(f"{url.host}: the address can be read in two ways.")
    return asked


def _unpack(data: bytes, bits: int, limit: int) -> tuple[bytes, bool]:
    """Return the first `limit` decompressed bytes, and whether there are more."""
    for window in (bits, -15) if bits == 15 else (bits,):  # some servers send deflate without the zlib wrapper
        unpacker = zlib.decompressobj(window)
        try:
            out = unpacker.decompress(data, limit)
        except zlib.error:
            continue
        return out, bool(unpacker.unconsumed_tail)
    raise FetchError("The page's compression is invalid, so it cannot be read.")


class Pinned(msgspec.Struct):
    """A resolver for aiohttp that returns the checked addresses of the host."""

    addresses: list[Address]

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        return [
            {
                "hostname": host,
                "host": str(address),
                "port": port,
                "proto": socket.IPPROTO_TCP,
                "family": _family(address),
                "flags": socket.AI_NUMERICHOST,
            }
            for address in self.addresses
        ]

    async def close(self) -> None:
        pass


class Metered(socket.socket):
    """A socket that breaks the connection when more has arrived than allowed.

    Much that a server may send endlessly never reaches the code that counts the bytes of a body: early hints, headers,
    chunk framing.
    """

    left: int

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0, /) -> int:
        count = super().recv_into(buffer, size, flags)
        self._count(count)
        return count

    def _count(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise ConnectionAbortedError("more was sent than is accepted")


def sockets_to(addresses: Sequence[Address], most: int) -> Callable[[Any], socket.socket]:
    """Return a socket factory for exactly these addresses: whatever happens above, no other address is connected to."""

    def make(info: Any) -> socket.socket:
        family, kind, protocol, _, place = info
        if ip_address(place[0]) not in addresses:
            raise OSError(f"{place[0]} was not checked")
        made = Metered(family, kind, protocol)
        made.left = most
        return made

    return make


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def is_this_machine(address: Address) -> bool:
    """Return whether a public address is this machine: it may offer services that a firewall hides from others."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.setblocking(False)
            probe.connect((str(address), 9))  # sends nothing; the system only selects the route
            return bool(ip_address(probe.getsockname()[0]) == address)
    except OSError:
        return False


def certificates() -> ssl.SSLContext:
    """Return a TLS context with this machine's trusted authorities, or certifi's if it has none."""
    context = ssl.create_default_context()
    known = ssl.get_default_verify_paths()
    if not known.cafile and not (known.capath and os.listdir(known.capath)):
        try:
            import certifi
        except ImportError:
            return context
        context.load_verify_locations(certifi.where())
    return context
