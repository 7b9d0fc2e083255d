"""The HTTP sources of a model's file: the user's own mirror, then the publisher's hub."""

from __future__ import annotations

import base64
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import IO, Protocol

from ..._version import __version__
from ...errors import ConfigError
from .catalogue import ModelCard
from .partial_file import CHUNK, PartialFile
from .progress import Progress, ProgressReporter

TIMEOUT = 30.0  # seconds without a byte
CONNECT_SECONDS = 10.0  # to connect, over all addresses of a host
MAX_ATTEMPTS = 3  # consecutive attempts that each brought less than 1 % of the file
PAUSES = (0.2, 1.0, 3.0)
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_NUMBER = re.compile(r"[0-9]{1,18}")  # a longer one is not a size, and Python refuses to parse very long ones
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")


class SourceError(Exception):
    """This source cannot provide the file, but another one may. The message says why."""


class ConnectionLost(Exception):
    """The connection ended before the file was complete: worth a retry."""


class ConnectFailed(ConnectionLost):
    """No connection could be made: worth a retry only if there was one before."""


class Source(Protocol):
    """A source that can complete a partial file."""

    @property
    def name(self) -> str: ...

    def room(self, card: ModelCard) -> int:
        """Return the bytes of disk space that it needs in addition to the file."""
        ...

    def fetch(self, card: ModelCard, part: PartialFile, reporter: ProgressReporter) -> None:
        """Complete the partial file from its end. Raises SourceError if it cannot."""
        ...


class HttpSource:
    """A file at a URL. An interrupted download is resumed if the server supports ranges."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url, self._secret = _without_secret(url)
        self._opener = urllib.request.build_opener(_Redirects)

    def room(self, card: ModelCard) -> int:
        return 0

    def fetch(self, card: ModelCard, part: PartialFile, reporter: ProgressReporter) -> None:
        failures = 0
        reached = False
        reporter.report(Progress("download", part.done, card.size, self.name))
        if part.done < card.size:
            _check_reachable(self._url)
        while part.done < card.size:
            before = part.done
            try:
                self._download(card, part, reporter)
            except ConnectionLost as error:
                reached = reached or not isinstance(error, ConnectFailed)
                failures = 0 if (part.done - before) * 100 >= card.size else failures + 1
                if failures >= MAX_ATTEMPTS or not reached:
                    raise SourceError(str(error)) from None
                reporter.pause(PAUSES[failures])

    def _download(self, card: ModelCard, part: PartialFile, reporter: ProgressReporter) -> None:
        """Make one request, which starts at the end of the partial file."""
        with self._ask(part) as response:
            self._check(response, card, part)
            while part.done < card.size:
                try:
                    data = response.read1(CHUNK)  # returns what has arrived, without waiting for more
                except (OSError, HTTPException) as error:
                    raise ConnectionLost(f"ended after {part.done} of {card.size} bytes ({_why(error)})") from None
                if not data:
                    raise ConnectionLost(f"ended after {part.done} of {card.size} bytes")
                part.write(data)
                reporter.report(Progress("download", part.done, card.size, self.name))

    def _ask(self, part: PartialFile) -> HTTPResponse:
        request = urllib.request.Request(self._url, headers={"User-Agent": f"everloop/{__version__}"})
        if self._secret:  # not sent to the target of a redirect
            request.add_unredirected_header("Authorization", self._secret)
        if part.done:
            request.add_header("Range", f"bytes={part.done}-")
            if version := part.tags.get(self._url):
                request.add_header("If-Range", version)
        try:
            response: HTTPResponse = self._opener.open(request, timeout=TIMEOUT)
            return response
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:  # range not satisfiable: the partial file is of another version
                part.truncate(0)
            said = f"answers {error.code} {' '.join(str(error.reason).split())[:200]}".rstrip()
            if error.code in _TRANSIENT or error.code == 416:
                raise ConnectionLost(said) from None
            raise SourceError(said) from None
        except urllib.error.URLError as error:
            raise ConnectFailed(f"cannot be reached ({_why(error.reason)})") from None
        except (OSError, HTTPException, ValueError) as error:
            raise ConnectionLost(f"sent an invalid response ({_why(error)})") from None

    def _check(self, response: HTTPResponse, card: ModelCard, part: PartialFile) -> None:
        """Reject a response that is not the rest of this file before any of its bytes are kept."""
        start, total = 0, response.headers.get("Content-Length", "")
        if _NUMBER.fullmatch(total) is None:
            total = ""
        if response.status == 206:
            found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != part.done:
                raise SourceError("sent another range than the one requested")
            start = part.done
            total = str(start + int(total)) if total else ""
            if found[2] not in ("*", str(card.size)):
                total = found[2]
        elif response.status != 200:
            raise SourceError(f"answers {response.status}")
        if total != str(card.size):
            raise SourceError(f"has {total or 'an unknown number of'} bytes there, not {card.size}: another file")
        part.truncate(start)  # a server without ranges starts from the beginning
        version = response.headers.get("ETag", "")
        if version and not version.startswith("W/"):  # a weak ETag does not identify the bytes
            part.tag(self._url, version)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to other hosts, as hubs use them, but not out of HTTPS and not to other schemes."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme != "https" and (req.type == "https" or scheme != "http"):
            raise SourceError(f"leads away from {req.type} to {scheme}")
        fp.close()  # otherwise its body would be read to the end, and it may be endless
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_reachable(url: str) -> None:
    """Connect with a short timeout: a firewall that drops packets would otherwise cost minutes."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return  # only the proxy must be reachable
    end = time.monotonic() + CONNECT_SECONDS
    try:
        found = socket.getaddrinfo(host, parts.port or parts.scheme, type=socket.SOCK_STREAM)
        for n, (*_, address) in enumerate(found):
            try:
                left = max(end - time.monotonic(), 0.1)
                socket.create_connection(
                    (str(address[0]), address[1]), left if n == len(found) - 1 else left / 3
                ).close()
                return
            except OSError:
                if n == len(found) - 1 or time.monotonic() >= end:
                    raise
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot be reached ({_why(error)})") from None


def mirrored(mirror: str, card: ModelCard) -> HttpSource:
    """Return the source of the model's file on the user's own mirror."""
    try:
        parts = urllib.parse.urlsplit(mirror)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:  # the message omits it: it may contain a password
        raise ConfigError("[local] mirror must be the http:// or https:// address of a folder")
    path = f"{parts.path.rstrip('/')}/{urllib.parse.quote(card.file)}"
    return HttpSource(f"the mirror {parts.hostname}", parts._replace(path=path, fragment="").geturl())


def hub(card: ModelCard) -> HttpSource:
    return HttpSource(f"the hub {urllib.parse.urlsplit(card.hub).hostname}", card.hub)


def _without_secret(url: str) -> tuple[str, str]:
    """Return the URL without its user name and password, and those as a header."""
    parts = urllib.parse.urlsplit(url)
    if parts.username is None:
        return url, ""
    name, password = (urllib.parse.unquote(text or "") for text in (parts.username, parts.password))
    header = f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), header


def _why(reason: object) -> str:
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return " ".join(text.split())[:200] or type(reason).__name__
