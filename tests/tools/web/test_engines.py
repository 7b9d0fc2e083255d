"""The search engines, simulated by real servers on loopback."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from everloop.tools.base import Plan
from tests.support.places import CERTIFICATES
from tests.support.web_servers import Server, Web, answer, proxy_to, redirect, serving

BRAVE = {
    "type": "search",
    "query": {"original": "beans"},
    "web": {
        "type": "search",
        "results": [
            {
                "title": "Beans &amp; <strong>peas</strong>",
                "url": "https://a.example/1",
                "description": "How\n to grow",
            },
            {"title": "Twice", "url": "https://a.example/1", "description": "again"},
            {"title": "Bad", "url": "javascript:alert(1)", "description": "no address"},
            {"title": "Two", "url": "https://b.example/ü?x=1", "description": "x" * 2000, "age": "2 days"},
            {"title": "Three", "url": "https://c.example/"},
        ],
    },
}


def brave(server: Server, key: str = "canary-key", **settings: Any) -> Web:
    return Web(brave_api_key=key, brave_url=f"http://127.0.0.1:{server.port}/search", **settings)


async def test_results_are_a_numbered_list():
    async with serving({"*": answer(json.dumps(BRAVE).encode(), "application/json")}) as server:
        text = await brave(server)("web_search", query=" how to\n grow beans? ", count="2")
    assert (
        "1. Beans & peas\n   https://a.example/1\n   How to grow\n\n2. Two\n   https://b.example/ü?x=1\n   xx" in text
    )
    assert "3." not in text
    assert len(text) < 1500
    [head] = server.requests
    assert parse_qs(urlsplit(server.paths[0]).query) == {"q": ["how to grow beans?"], "count": ["2"]}
    assert "X-Subscription-Token: canary-key" in head


@pytest.mark.parametrize(
    ("status", "told"),
    [(401, "brave_api_key"), (422, "brave_api_key"), (429, "rate limit"), (500, "500 Internal Server Error")],
)
async def test_a_brave_failure_is_explained(status, told):
    async with serving({"*": answer(b"{}", status=status)}) as server:
        message = await brave(server).fails("web_search", query="beans")
    assert told in message
    assert "canary-key" not in message


async def test_an_engine_that_is_down_or_returns_garbage_is_explained():
    async with serving({"*": answer(b"<html>", "application/json")}) as server:
        web = brave(server)
        assert "other than a list of results" in await web.fails("web_search", query="beans")
    assert "Brave cannot be asked" in await web.fails("web_search", query="beans")


async def test_an_empty_result_is_not_an_error():
    async with serving({"*": answer(b'{"query": {}}', "application/json")}) as server:
        assert "found nothing" in await brave(server)("web_search", query="beans")


async def test_no_redirect_is_followed_with_a_key():
    async with serving({"*": answer(b"{}")}) as other, serving() as server:
        for where in (f"http://127.0.0.1:{other.port}/", "/elsewhere"):
            server.answers["*"] = redirect(where)
            assert "redirects elsewhere" in await brave(server).fails("web_search", query="beans")
    assert (server.connections, other.connections) == (2, 0)


@pytest.mark.parametrize("base", ["", "/", "/searx/", "/search"])
async def test_searxng_is_queried_at_its_address(base):
    found = {"query": "q", "results": [{"title": "One", "url": "https://a.example/", "content": None, "engine": "x"}]}
    async with serving({"*": answer(json.dumps(found).encode(), "application/json")}) as server:
        text = await Web(searxng_url=f"http://127.0.0.1:{server.port}{base}")("web_search", query="a&b", count=3)
    assert "1. One\n   https://a.example/" in text
    place = base.rstrip("/").removesuffix("/search") + "/search"
    assert server.paths == [f"{place}?q=a%26b&format=json"]


@pytest.mark.parametrize("answered", [answer(status=403), answer(b"<html>no JSON here", "text/html")])
async def test_a_searxng_without_json_is_explained(answered):
    async with serving({"*": answered}) as server:
        message = await Web(searxng_url=f"http://127.0.0.1:{server.port}").fails("web_search", query="beans")
    assert "search.formats" in message


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "DuckDuckGo"),
        ({"brave_api_key": "k"}, "Brave"),
        ({"searxng_url": "http://x/"}, "SearXNG"),
        ({"brave_api_key": "k", "searxng_url": "http://x/"}, "Brave"),
        ({"brave_api_key": "k", "search": "duckduckgo"}, "DuckDuckGo"),
        ({"brave_api_key": "k", "searxng_url": "http://x/", "search": "searxng"}, "SearXNG"),
        ({"brave_api_key": "k", "searxng_url": "http://x/", "search": "brave"}, "Brave"),
    ],
)
def test_the_settings_choose_the_engine(settings, name):
    plan = Web(**settings).plan("web_search", query="beans")
    assert plan == Plan(shown=f"search {name} for beans")


@pytest.mark.parametrize("search", ["brave", "searxng"])
async def test_an_engine_that_lacks_its_setting_is_explained(search):
    assert "a person must set" in await Web(search=search).fails("web_search", query="beans")


async def test_unusual_queries_are_refused_or_shown():
    web = Web()
    assert "empty" in await web.fails("web_search", query=" \n ")
    assert "Wrong arguments" in await web.fails("web_search", query="x" * 401)
    assert "Wrong arguments" in await web.fails("web_search", query="x", count=0)
    assert web.plan("web_search", query="a\u202eb").shown == "search DuckDuckGo for 'a\\u202eb'"


# --- DuckDuckGo: the real package, with its requests redirected to a local server -----------------------------------

PAGE = """<div class="result web-result"><div class="links_main links_deep result__body">
<h2 class="result__title"><a class="result__a" href="https://a.example/%d">Beans &amp; <b>peas</b> %d</a></h2>
<a class="result__snippet" href="https://a.example/%d">How to <b>grow</b> them</a></div></div>"""


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "duckduckgo.pem")
    monkeypatch.setenv("PRIMP_CA_BUNDLE", str(CERTIFICATES / "search_ca.pem"))
    async with serving(tls=context) as server, proxy_to(server) as proxy:
        monkeypatch.setenv("DDGS_PROXY", f"http://127.0.0.1:{proxy.port}")
        yield server
    assert all(head.startswith("CONNECT html.duckduckgo.com:443 ") for head in proxy.requests)


async def test_duckduckgo_is_searched_without_a_key(engine):
    page = "<html><body>" + "".join(PAGE % (n, n, n) for n in range(5)) + "</body></html>"
    engine.answers["/html/"] = answer(page.encode(), "text/html")
    text = await Web()("web_search", query="beans", count=3)
    assert "1. Beans & peas 0\n   https://a.example/0\n   How to grow them\n\n2. " in text
    assert "4. " not in text
    assert len(engine.requests) == 1


@pytest.mark.parametrize("status", [202, 403, 429])
async def test_an_empty_duckduckgo_result_says_so(engine, status):
    engine.answers["/html/"] = answer(b"<html>", "text/html", status)
    assert "found nothing" in await Web()("web_search", query="beans")


async def test_an_unreachable_duckduckgo_is_explained(monkeypatch):
    async with serving() as server:
        monkeypatch.setenv("DDGS_PROXY", f"http://127.0.0.1:{server.port}")
    assert "DuckDuckGo cannot be reached" in await Web().fails("web_search", query="beans")


async def test_a_slow_duckduckgo_times_out(engine):
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(20)

    engine.answers["/html/"] = slow
    assert "within 1 seconds" in await Web(timeout=1).fails("web_search", query="beans")


async def test_a_search_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddgs", None)
    assert 'pip install "everloop[web]"' in await Web().fails("web_search", query="beans")
