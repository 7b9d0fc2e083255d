"""Search engines: Brave with a key, SearXNG with an address, DuckDuckGo without either."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterable
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec

from ...text import clean
from ...threads import in_thread
from ..base import ToolError
from .fetch import Fetcher, FetchError, Page
from .urls import URL, BadURL, parse_url

BRAVE_URL = "https://api.search.brave.com/res/v1/web/search"
MAX_QUERY = 400  # characters; Brave accepts no more
MAX_COUNT = 20
_TAG = re.compile(r"<[^<>]{0,200}>")


class Found(msgspec.Struct, frozen=True):
    """A search result, as plain text."""

    title: str
    url: str
    snippet: str


class Engine(Protocol):
    """A web search engine."""

    @property
    def name(self) -> str: ...

    async def search(self, query: str, count: int) -> list[Found]:
        """Return at most `count` results, best first; raise a ToolError if the engine cannot be queried."""
        ...


class _BraveResult(msgspec.Struct):
    title: str = ""
    url: str = ""
    description: str = ""


class _BraveResults(msgspec.Struct):
    results: list[_BraveResult] = []


class _BraveAnswer(msgspec.Struct):
    web: _BraveResults | None = None


class _SearxngResult(msgspec.Struct):
    title: str | None = ""
    url: str | None = ""
    content: str | None = ""


class _SearxngAnswer(msgspec.Struct):
    results: list[_SearxngResult]


class Brave(msgspec.Struct, frozen=True):
    """The Brave Search API."""

    fetcher: Fetcher
    key: str
    url: str = BRAVE_URL
    name: str = "Brave"

    async def search(self, query: str, count: int) -> list[Found]:
        headers = {"X-Subscription-Token": self.key, "Accept": "application/json"}
        page = await _ask(self, self.fetcher, self.url, {"q": query, "count": count}, headers)
        if page.status in (401, 403, 422):  # 422: an invalid key, or a query that Brave does not accept
            raise ToolError("Brave refused to search: a person must check brave_api_key in the settings.")
        _check_status(self, page)
        try:
            answer = msgspec.json.decode(page.body, type=_BraveAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ToolError("Brave returned something other than a list of results: try again later.") from None
        results = answer.web.results if answer.web else []
        return _tidy((result.title, result.url, result.description) for result in results)[:count]


class Searxng(msgspec.Struct, frozen=True):
    """A SearXNG server, usually self-hosted."""

    fetcher: Fetcher
    url: str
    name: str = "SearXNG"

    async def search(self, query: str, count: int) -> list[Found]:
        where = self.url.rstrip("/").removesuffix("/search") + "/search"
        page = await _ask(self, self.fetcher, where, {"q": query, "format": "json"}, {"Accept": "application/json"})
        if page.status == 403:
            raise ToolError(_NO_JSON)
        _check_status(self, page)
        try:
            answer = msgspec.json.decode(page.body, type=_SearxngAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ToolError(_NO_JSON) from None
        return _tidy((result.title, result.url, result.content) for result in answer.results)[:count]


_NO_JSON = (
    "The SearXNG server does not return JSON: a person must add json to search.formats in its settings.yml, "
    "or check searxng_url in the settings."
)


class DuckDuckGo(msgspec.Struct, frozen=True):
    """DuckDuckGo through the ddgs package, which has its own HTTP client and imitates a browser."""

    seconds: float = 20.0
    name: str = "DuckDuckGo"

    async def search(self, query: str, count: int) -> list[Found]:
        try:
            async with asyncio.timeout(self.seconds + 1):
                results = await in_thread(self._search, query, count)
        except TimeoutError:
            raise ToolError(f"DuckDuckGo did not answer within {self.seconds:g} seconds: try again later.") from None
        return _tidy((entry.get("title"), entry.get("href"), entry.get("body")) for entry in results)[:count]

    def _search(self, query: str, count: int) -> list[dict[str, Any]]:
        try:
            from ddgs import DDGS
            from ddgs.exceptions import DDGSException, RatelimitException, TimeoutException
        except ImportError:
            raise ToolError('Searching needs a person to run: pip install "everloop[web]", or a Brave key.') from None
        try:
            engine = DDGS(timeout=max(int(self.seconds), 1))
            return list(engine.text(query, max_results=count, backend="duckduckgo"))
        except TimeoutException:
            raise TimeoutError from None
        except RatelimitException:
            raise ToolError(_limited("DuckDuckGo")) from None
        except DDGSException as error:
            if "No results found" in str(error):  # also reported for a refusal
                return []
            raise ToolError("DuckDuckGo cannot be reached: try again later, or fetch a page you know.") from None


async def _ask(engine: Engine, fetcher: Fetcher, url: str, query: dict[str, Any], headers: dict[str, str]) -> Page:
    """Query an engine at the configured address, which may be private. Its key is sent nowhere else."""
    try:
        place: URL = parse_url(f"{url}?{urlencode(query)}")
    except BadURL as error:
        raise ToolError(f"The address of {engine.name} in the settings cannot be used: {error}.") from None
    try:
        return await fetcher.get(place, headers=headers, trusted=True, redirects=0)
    except FetchError as error:
        raise ToolError(f"{engine.name} cannot be asked: {error}") from None


def _check_status(engine: Engine, page: Page) -> None:
    if page.status == 429:
        raise ToolError(_limited(engine.name))
    if not 200 <= page.status < 300:
        raise ToolError(f"{engine.name} answered {page.status_text}: try again later.")


def _limited(name: str) -> str:
    return f"{name} accepts no more searches for now (its rate limit): continue without, or try again in a minute."


def _tidy(results: Iterable[tuple[str | None, str | None, str | None]]) -> list[Found]:
    """Return the results with valid addresses, without markup, on few lines each, and without duplicates."""
    found: dict[str, Found] = {}
    for title, url, snippet in results:
        try:
            parse_url(url or "")
        except BadURL:
            continue
        address = (url or "").strip()
        found.setdefault(address, Found(_plain(title, 200), address, _plain(snippet, 500)))
    return list(found.values())


def _plain(text: str | None, limit: int) -> str:
    plain = " ".join(html.unescape(_TAG.sub("", (text or "")[: 20 * limit])).split())
    return clean(plain if len(plain) <= limit else plain[: limit - 1] + "…")
