"""The web page's static files: read once, sent compressed, with the headers that confine the page."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import web

from .errors import not_found

FOLDER = Path(__file__).parent / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
WORKER = "/web/offline.js"
# Nothing is ever set as HTML; the browser enforces that: the only Trusted Types policy returns the service worker's
# path.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types everloop-worker",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
_COMMENT = re.compile(r"^[ \t]*(?:/\*\*(?:[^*]|\*(?!/))*\*/|//[^\n]*)[ \t]*$", re.MULTILINE)
SMALL = 500  # bytes below which compression is not worthwhile


@dataclass(slots=True, frozen=True)
class File:
    body: bytes
    gzipped: bytes
    type: str
    etag: str


@cache
def files() -> Mapping[str, File]:
    """Return all files of the page by path; `/` is the page itself. Reads from disk: call it before requests arrive."""
    found: dict[str, File] = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in TYPES:
            body = path.read_bytes()
            if path.suffix == ".js" and path.parent == FOLDER:
                body = without_comments(body.decode()).encode()
            etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            name = path.relative_to(FOLDER).as_posix()
            file = File(body, gzip.compress(body, 9, mtime=0), TYPES[path.suffix], etag)
            found["/" if name == "index.html" else f"/web/{name}"] = file
    return found


def without_comments(source: str) -> str:
    """Return our own JavaScript without comments on lines of their own, preserving line numbers."""
    return _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), source)


def is_file(path: str) -> bool:
    """Return whether this is the path of the page or of one of its files, which need no login."""
    return path == "/" or path.startswith("/web/")


async def serve(request: web.Request) -> web.Response:
    file = files().get(request.path)
    if file is None:
        raise not_found("there is nothing at this path", code="unknown_url")
    headers = {**HEADERS, "ETag": file.etag}
    if request.path == WORKER:
        headers["Service-Worker-Allowed"] = "/"
    if file.etag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    body = file.body
    if "gzip" in request.headers.get("Accept-Encoding", "").lower() and len(body) > SMALL:
        body = file.gzipped
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, headers={**headers, "Content-Type": file.type})
