"""The web tools, called as a model calls them, against real servers on loopback."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import Any

import pytest

from everloop import Config
from everloop.tools.base import Plan
from everloop.tools.web import markdown
from everloop.tools.web.fetch import MAX_REDIRECTS, SILENCE_SECONDS
from everloop.tools.web.web import PAGE_SECONDS, WebSettings, read_html
from tests.support.places import DOCS
from tests.support.web_pdf import PDF
from tests.support.web_servers import Web, answer, redirect, serving

ARTICLE = (
    "<html><head><title>The &amp; Garden</title><script>evil()</script></head><body><nav><a href='/home'>Home</a></nav>"
    "<article><h1>Beans</h1>"
    + "".join(
        f"<p>Bean number {n} wants <b>water</b> and a <a href='../pole?n={n}'>pole</a> that is taller than it.</p>"
        for n in range(9)
    )
    + "<ul><li>one</li><li>two</li></ul></article></body></html>"
)


# --- web_fetch -----------------------------------------------------------------------------------------------------


async def fetched(body: bytes, kind: str, **settings: Any) -> str:
    async with serving({"/a/page": answer(body, kind)}) as server:
        return await Web(server, **settings)("web_fetch", url=f"http://wiki.example:{server.port}/a/page")


async def test_a_page_is_read_as_markdown():
    text = await fetched(ARTICLE.encode(), "text/html; charset=utf-8")
    assert "Title: The & Garden\nURL: http://wiki.example:" in text
    assert "# Beans" in text
    assert "wants **water** and a [pole](http://wiki.example:" in text
    assert "/pole?n=3) that is taller" in text
    assert "- one\n- two" in text
    assert "evil" not in text
    assert "Home" not in text


async def test_a_page_that_is_not_an_article_is_read_in_full():
    links = "".join(f"<li><a href='/{n}'>Thing <i>{n}</i></a><script>evil()</script> by\n them</li>" for n in range(5))
    text = await fetched(f"<title>List</title><h2>All</h2><a href=/empty> </a><ul>{links}</ul>".encode(), "text/html")
    assert "## All" in text
    assert "/empty" not in text
    assert "- [Thing 3](http://wiki.example:" in text
    assert "/3) by them" in text
    assert "evil" not in text


def test_a_page_that_is_shorter_than_an_article_is_read_whole_without_looking_for_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    title, text = markdown.read_page("<title>A gate</title><body><p>Closed <b>today</b>.", "http://garden/")
    assert (title, text) == ("A gate", "Closed today.")
    with pytest.raises(ImportError):
        markdown.read_page("<body><p>" + "Closed today. " * 30, "http://garden/")


async def test_a_page_without_text_says_so():
    assert "has no text" in await fetched(b"<html><body><script>app()</script></body></html>", "text/html")
    assert "has no text" in await fetched(b"", "text/html")


@pytest.mark.parametrize(
    ("body", "kind", "shown"),
    [
        (b'{"a": [1, 2]}', "application/json", '{"a": [1, 2]}'),
        (b"<feed><title>x</title></feed>", "application/atom+xml", "<feed><title>x</title></feed>"),
        ("grün".encode("latin-1"), "text/plain; charset=iso-8859-1", "grün"),
        ("grün".encode("latin-1"), "text/plain", "grün"),
        ("grün".encode(), "text/markdown", "grün"),
        ("grünü".encode()[:-1], "text/plain", "grün\n"),
        ("grün".encode("utf-16"), "text/plain", "grün"),
        ("日本".encode("shift_jis"), "text/plain; charset=Shift_JIS", "日本"),
        ("grün".encode(), "text/plain; charset=zlib", "grün"),
        ("grün".encode(), "text/plain; charset=punycode", "grün"),
        (b"no type", "", "no type"),
        (b"<!DOCTYPE html><title>Typeless</title><p>para", "", "Title: Typeless"),
        ("<meta charset=koi8-r><p>день".encode("koi8-r"), "text/html", "день"),
    ],
)
async def test_texts_of_all_kinds_are_read(body, kind, shown):
    assert shown in await fetched(body, kind)


@pytest.mark.parametrize("kind", ["application/pdf", "", "text/plain"])
async def test_a_pdf_is_read(kind):
    text = await fetched(PDF, kind)
    assert "Beans want water" in text
    assert "/Type" not in text  # it is not shown in its raw form


async def test_a_truncated_pdf_is_not_read():
    async with serving({"/": answer(PDF, "application/pdf")}) as server:
        web = Web(server, max_bytes=len(PDF) - 1)
        assert "bigger than" in await web.fails("web_fetch", url=f"http://wiki.example:{server.port}/")


@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "video/mp4", "application/zip"])
async def test_content_that_is_not_text_is_refused_with_its_type_and_size(kind):
    async with serving({"/": answer(b"\0" * 123, kind)}) as server:
        message = await Web(server).fails("web_fetch", url=f"http://wiki.example:{server.port}/")
    assert kind in message
    assert "123 bytes" in message


async def test_bytes_without_a_type_are_refused():
    async with serving({"/": answer(b"\x7fELF\0\0\0", "")}) as server:
        assert "not text" in await Web(server).fails("web_fetch", url=f"http://wiki.example:{server.port}/")


async def test_the_address_after_redirects_is_reported():
    async with serving({"/": redirect("/2"), "/2": answer(b"here")}) as server:
        text = await Web(server)("web_fetch", url=f"http://wiki.example:{server.port}")
    base = f"http://wiki.example:{server.port}"
    assert f"URL: {base}/2 (redirected from {base}/)\n\nhere" in text


async def test_a_truncated_page_says_so():
    text = await fetched(b"x" * 2000, "text/plain", max_bytes=1000)
    assert "was not read" in text
    assert "x" * 1001 not in text


@pytest.mark.parametrize(
    ("url", "told"), [("ftp://a/", "http://"), ("a.example", "http://"), ("http://127.1/", "four decimal numbers")]
)
async def test_an_invalid_address_is_explained(url, told):
    assert told in await Web().fails("web_fetch", url=url)


async def test_a_missing_page_is_explained():
    async with serving() as server:
        message = await Web(server).fails("web_fetch", url=f"http://wiki.example:{server.port}/")
    assert "404 Not Found" in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (" HTTP://Example.com/a b#c ", "GET http://example.com/a%20b"),
        ("http://example.com/\u0430", "GET http://example.com/%D0%B0 (written as 'http://example.com/\\u0430')"),
        ("http://\u0430pple.com/", "GET http://xn--pple-43d.com/ (written as 'http://\\u0430pple.com/')"),
        ("http://a\u202e\x1b[2J/", "'http://a\\u202e\\x1b[2J/' (written as 'http://a\\u202e\\x1b[2J/')"),
    ],
)
async def test_the_approval_question_shows_every_character_that_is_sent(url, shown):
    plan = Web().plan("web_fetch", url=url)
    assert plan == Plan(shown=shown, sends=True, url=url.strip())


# --- hostile pages -------------------------------------------------------------------------------------------------


async def test_parsing_a_hostile_page_times_out():
    hostile = "<html><body><p " + " ".join(f"a{n}=1" for n in range(100_000)) + ">x</p>"
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticker = asyncio.create_task(tick())
    start = time.monotonic()
    with pytest.raises(Exception, match="too much to read"):
        await read_html(hostile.encode(), "http://a.example/", seconds=0.8)
    assert 1 < time.monotonic() - start < 20
    ticker.cancel()
    assert ticks > 20  # nothing waited for it


async def test_many_links_on_a_page_with_a_long_address_do_not_blow_up_the_result():
    body = "<a href=x>z</a>" * 20_000
    read = await read_html(body.encode(), f"http://a.example/{'y' * 7000}/")
    assert len(read.text) <= 2_000_000
    assert read.cut


async def test_a_page_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("everloop.tools.web.web.PYTHON", (sys.executable, "-I", "-S"))  # without site-packages
    async with serving({"/": answer(b"<p>x", "text/html")}) as server:
        message = await Web(server).fails("web_fetch", url=f"http://wiki.example:{server.port}/")
    assert 'pip install "everloop[web]"' in message


async def test_the_parser_process_knows_no_secret_and_loads_nothing_from_its_folder(tmp_path, monkeypatch):
    (tmp_path / "trafilatura.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "Beans" in (await read_html(ARTICLE.encode(), "http://a.example/")).text
    assert not (tmp_path / "ran").exists()


# --- both tools ----------------------------------------------------------------------------------------------------


def test_both_are_replay_safe_and_parallel_and_return_untrusted_data():
    for tool in Web().tools:
        assert (tool.read_only, tool.parallel, tool.untrusted) == (True, True, True)


def test_the_key_is_not_in_the_repr_of_the_settings():
    assert "canary" not in repr(WebSettings(brave_api_key="canary"))


async def test_creating_the_tools_loads_nothing_heavy():
    code = (
        "import sys; from everloop.tools.web.web import *; web_tools(WebSettings()); "
        "print([m for m in ('aiohttp', 'trafilatura', 'lxml', 'ddgs', 'primp', 'idna') if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"


# --- the docs ------------------------------------------------------------------------------------------------------


def block(language: str) -> str:
    page = DOCS / "web.md"
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)
    return found


async def test_the_program_in_the_docs_does_what_it_says(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", block("python"),
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    expected = ".*".join(re.escape(part) for part in block("text").split("…"))
    assert re.fullmatch(expected, out.decode()), out.decode()


def test_the_settings_in_the_docs_exist(tmp_path):
    (tmp_path / "config.toml").write_text(block("toml"))
    config = Config.load(home=tmp_path)
    assert (config.search, config.web_timeout) == ("searxng", 20)
    assert config.private_hosts == ("wiki.example.internal", "127.0.0.1:8000")


def test_the_limits_in_the_docs_match_the_code():
    page = (DOCS / "web.md").read_text()
    settings = WebSettings()
    assert f"`timeout`, {settings.timeout:g} seconds; {SILENCE_SECONDS:g} seconds of silence" in page
    assert f"| {settings.max_bytes // 1_000_000} MB;" in page
    assert f"| redirects | {MAX_REDIRECTS} |" in page
    assert f"| {PAGE_SECONDS * 1.5:g} seconds, in a process" in page
    assert "| ports | {}, {}, {} and {} |".format(*settings.ports) in page
