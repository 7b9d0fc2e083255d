"""Attacks through the web: forbidden addresses are never reached, and hostile responses do no harm."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everloop.testing import call
from everloop.tools.web.web import WebSettings, web_tools
from tests.support.web_pdf import PDF
from tests.support.web_servers import Internet, Names, Server, answer, redirect, serving

from .scene import Attack, Scene, canary

PUBLIC = "93.184.215.14"


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Internet:
    return Internet(monkeypatch)


@pytest.fixture
def secret() -> str:
    return canary("page")


@pytest.fixture
async def inner(secret: str) -> AsyncIterator[Server]:
    """A server in the private network, which must not be reached."""
    async with serving({"*": answer(secret.encode())}, hosts=("127.0.0.1", "::1")) as server:
        yield server


@pytest.fixture
async def outer(internet: Internet) -> AsyncIterator[Server]:
    """The attacker's server on the internet, at http://evil.example/."""
    async with serving() as server:
        internet.routes[PUBLIC] = server.port
        yield server


async def attack(scene: Scene, url: str, names: Names | None = None, say: str = "", **settings: Any) -> Attack:
    """Let the model fetch an address given by the user."""
    names = names or Names({"evil.example": [[PUBLIC]]})
    scene.tools = web_tools(WebSettings(**{"timeout": 8.0, **settings}), resolve=names)
    return await scene.run(call("web_fetch", url=url), say=say or f"read {url}")


# --- entry: addresses of this machine ------------------------------------------------------------------------------

HOSTS = [
    "127.0.0.1", "127.1", "127.0.1", "127.0.0.1.", "127.000.000.001", "2130706433", "0x7f000001", "0x7F.1",
    "0x7f.0.0.1", "0177.0.0.1", "017700000001", "0177.0x0.0.1", "127.0.0.1%00", "127.0.0.1%2e", "127.0.0.1%09", "0",
    "0.0.0.0", "0.0.0.1",
    "localhost", "LOCALHOST", "localhost.", "inner.example", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::127.0.0.1]", "[64:ff9b:1::7f00:1]",
    "[2002:7f00:1::]", "[2001:0:808:808::80ff:fffe]", "[2001:0:7f00:1::f7f7:f7f7]", "[::ffff:0:7f00:1]", "[::1%25lo]",
    "[::1%lo]", "[fe80::1%25lo]", "①②⑦.⓪.⓪.①", "１２７.０.０.１", "127。0。0。1", "127．0．0．1",
    "127.0.0.1\u00ad", "l\u00adocalhost",
    "ⓛocalhost", "ｌｏｃａｌｈｏｓｔ", "user@127.0.0.1", "evil.example@127.0.0.1", "evil.example:80@127.0.0.1",
    "127.0.0.1\\@evil.example", "evil.example\\@127.0.0.1", "127.0.0.1\t", "127.0\t.0.1", "127.0\n.0.1", " 127.0.0.1",
    "127.0.0.1\u3000", "127.0.0.1\x00.evil.example", "mixed.example", "mapped.example", "[::1]]", "[[::1]", "[::1].",
]  # fmt: skip
INNER_NAMES = {
    "localhost": [["127.0.0.1", "::1"]],
    "inner.example": [["127.0.0.1"]],
    "mixed.example": [[PUBLIC, "127.0.0.1"]],
    "mapped.example": [["::ffff:127.0.0.1"]],
    "evil.example": [[PUBLIC]],
}


@pytest.mark.parametrize("host", HOSTS, ids=ascii)
async def test_no_spelling_of_this_machine_is_reached(scene, internet, inner, secret, host):
    found = await attack(scene, f"http://{host}:{inner.port}/", Names(dict(INNER_NAMES)), ports=(inner.port,))
    assert inner.connections == 0
    assert internet.tried == []
    assert secret not in found.seen


async def test_the_machine_is_not_reached_by_the_name_that_the_system_knows(scene, inner, secret):
    scene.tools = web_tools(WebSettings(ports=(inner.port,)))
    found = await scene.run(call("web_fetch", url=f"http://localhost:{inner.port}/"))
    assert inner.connections == 0
    assert secret not in found.seen


async def test_a_listed_host_is_reached_so_that_these_tests_prove_something(scene, internet, inner, secret):
    url = f"http://inner.example:{inner.port}/"
    found = await attack(scene, url, Names(dict(INNER_NAMES)), private_hosts=(f"inner.example:{inner.port}",))
    assert inner.connections == 1
    assert secret in found.seen


async def test_a_public_host_is_reached_so_that_these_tests_prove_something(scene, internet, outer):
    outer.answers["/"] = answer(b"welcome")
    found = await attack(scene, "http://evil.example/")
    assert internet.tried == [PUBLIC]
    assert "welcome" in found.seen


METADATA = [
    "169.254.169.254", "169.254.170.2", "169.254.169.123", "100.100.100.200", "168.63.129.16", "192.0.0.192",
    "[fd00:ec2::254]", "[fd20:ce::254]", "[fe80::a9fe:a9fe]", "[::ffff:169.254.169.254]", "[::a9fe:a9fe]",
    "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::1]", "[::ffff:168.63.129.16]", "metadata.example", "hidden.example",
    "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "198.18.0.1", "224.0.0.1", "255.255.255.255", "[ff02::1]",
]  # fmt: skip


@pytest.mark.parametrize("host", METADATA)
async def test_metadata_services_and_private_networks_are_not_tried(scene, internet, host):
    names = Names({"metadata.example": [["169.254.169.254"]], "hidden.example": [["64:ff9b::a9fe:a9fe"]]})
    await attack(scene, f"http://{host}/latest/meta-data/", names)
    assert internet.tried == []


async def test_a_public_address_of_this_machine_itself_is_not_tried(scene, internet, outer, secret):
    outer.answers["/"] = answer(secret.encode())
    internet.own.add(PUBLIC)
    found = await attack(scene, "http://evil.example/")
    assert (internet.tried, outer.connections) == ([], 0)
    assert secret not in found.seen


@pytest.mark.parametrize("port", [22, 25, 3306, 6379, 9200, 11211])
async def test_services_that_are_not_web_servers_are_not_tried(scene, internet, outer, port):
    await attack(scene, f"http://evil.example:{port}/")
    assert internet.tried == []


# --- entry: redirects ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "where",
    ["http://127.0.0.1:{}/", "//127.0.0.1:{}/", "http://127.1:{}/", "http://[::ffff:127.0.0.1]:{}/",
     "http://inner.example:{}/", "http:\\\\127.0.0.1:{}/", "http://evil.example@127.0.0.1:{}/", "gopher://127.0.0.1:{}/_x"],
)  # fmt: skip
async def test_a_page_on_the_internet_does_not_lead_inside(scene, internet, outer, inner, secret, status, where):
    outer.answers["/"] = redirect(where.format(inner.port), status)
    names = Names(dict(INNER_NAMES))
    found = await attack(scene, "http://evil.example/", names, ports=(80, inner.port))
    assert (outer.connections, inner.connections) == (1, 0)
    assert secret not in found.seen


async def test_a_chain_of_redirects_does_not_lead_inside(scene, internet, outer, inner, secret):
    outer.answers |= {
        "/": redirect("/2"),
        "/2": redirect("//evil.example/3"),
        "/3": redirect(f"http://127.0.0.1:{inner.port}/"),
    }
    found = await attack(scene, "http://evil.example/", ports=(80, inner.port))
    assert (outer.paths, inner.connections) == (["/", "/2", "/3"], 0)
    assert secret not in found.seen


async def test_a_page_on_the_internet_does_not_lead_to_a_listed_host(scene, internet, outer, inner, secret):
    outer.answers["/"] = redirect(f"http://inner.example:{inner.port}/delete?all=1")
    listed = (f"inner.example:{inner.port}",)
    found = await attack(scene, "http://evil.example/", Names(dict(INNER_NAMES)), private_hosts=listed)
    assert (outer.connections, inner.connections) == (1, 0)
    assert secret not in found.seen


async def test_a_listed_host_does_not_lead_to_another_port_or_name_of_its_machine(scene, internet, inner, secret):
    async with serving() as wiki:
        for where in ("http://wiki.example:{}/", "http://127.0.0.1:{}/", "http://inner.example:{}/"):
            wiki.answers["/"] = redirect(where.format(inner.port))
            names = Names({"wiki.example": [["127.0.0.1"]], "inner.example": [["127.0.0.1"]]})
            listed = (f"wiki.example:{wiki.port}",)
            url = f"http://wiki.example:{wiki.port}/"
            found = await attack(scene, url, names, private_hosts=listed, ports=(80, inner.port))
            assert secret not in found.seen
    assert (wiki.connections, inner.connections) == (3, 0)


async def test_a_loop_of_redirects_ends(scene, internet, outer):
    outer.answers["*"] = redirect("/again")
    await attack(scene, "http://evil.example/")
    assert outer.connections == 6


# --- entry: DNS ----------------------------------------------------------------------------------------------------


async def test_a_name_that_changes_its_address_after_the_check_gains_nothing(scene, internet, outer, inner, secret):
    outer.answers["/"] = answer(b"welcome")
    internet.routes[PUBLIC] = outer.port
    names = Names({"rebind.example": [[PUBLIC], ["127.0.0.1"]]})
    found = await attack(scene, f"http://rebind.example:{inner.port}/", names, ports=(inner.port,))
    assert names.asked == ["rebind.example"]
    assert (outer.connections, inner.connections) == (1, 0)
    assert secret not in found.seen


async def test_a_name_that_changes_its_address_between_redirects_gains_nothing(scene, internet, outer, inner, secret):
    outer.answers["/"] = redirect("/2")
    names = Names({"rebind.example": [[PUBLIC], ["127.0.0.1"]]})
    found = await attack(scene, f"http://rebind.example:{inner.port}/", names, ports=(inner.port,))
    assert (outer.connections, inner.connections) == (1, 0)
    assert secret not in found.seen


@pytest.mark.parametrize(
    "addresses", [[PUBLIC, "127.0.0.1"], ["127.0.0.1", PUBLIC], [PUBLIC, "::1"], [PUBLIC, "fe80::1%1"]]
)
async def test_a_name_with_one_private_address_among_others_is_refused(scene, internet, inner, addresses):
    await attack(
        scene, f"http://mixed.example:{inner.port}/", Names({"mixed.example": [addresses]}), ports=(inner.port,)
    )
    assert inner.connections == 0
    assert internet.tried == []


# --- entry: schemes, proxies, resources of a page ------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme",
    ["file", "FILE", "ftp", "gopher", "dict", "ldap", "tftp", "jar:http", "view-source:http", "ws", "http+unix", "unix",
     "netdoc", "phar", "sftp", "\x01http", "http\t", "h\nttp"],
)  # fmt: skip
async def test_other_schemes_are_refused(scene, internet, inner, secret, scheme):
    for place in (
        f"127.0.0.1:{inner.port}/",
        str(scene.outside / "secret.txt"),
        f"localhost{scene.outside}/secret.txt",
    ):
        found = await attack(scene, f"{scheme}://{place}", Names(dict(INNER_NAMES)), ports=(inner.port,))
        assert secret not in found.seen
        assert scene.secret not in found.seen
    assert inner.connections == 0


@pytest.mark.parametrize("where", ["file://{}", "file:{}", "file://localhost{}", "{}", "data:text/plain,x"])
async def test_a_redirect_to_a_file_opens_nothing(scene, internet, outer, where):
    outer.answers["/"] = redirect(where.format(scene.outside / "secret.txt"))
    found = await attack(scene, "http://evil.example/")
    assert scene.secret not in found.seen


async def test_proxies_of_the_environment_are_not_used(scene, internet, outer, monkeypatch):
    outer.answers["/"] = answer(b"welcome")
    async with serving() as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        found = await attack(scene, "http://evil.example/")
    assert proxy.connections == 0
    assert "welcome" in found.seen


async def test_the_users_passwords_are_not_sent(scene, internet, outer, tmp_path, monkeypatch):
    password = canary("password")
    (tmp_path / "netrc").write_text(f"machine evil.example login me password {password}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    outer.answers["/"] = answer(b"x")
    await attack(scene, "http://evil.example/")
    [head] = outer.requests
    assert "authorization" not in head.lower()


async def test_nothing_that_a_page_refers_to_is_loaded(scene, internet, outer, inner):
    there, file = f"http://127.0.0.1:{inner.port}", scene.outside / "secret.txt"
    page = (
        f"<?xml version='1.0'?><!DOCTYPE html [<!ENTITY e SYSTEM 'file://{file}'><!ENTITY f SYSTEM '{there}/e'>]>"
        f"<html><head><link rel=stylesheet href='{there}/s.css'><base href='{there}/'><meta http-equiv=refresh "
        f"content='0;url={there}/'></head><body><img src='{there}/i.png'><iframe src='{there}/f'></iframe>"
        f"<xi:include xmlns:xi='http://www.w3.org/2001/XInclude' href='file://{file}' parse='text'/>&e;&f;"
        + "<p>Some words to make it look like an article of which there is enough.</p>"
        * 20
    )
    for kind in ("text/html", "application/xhtml+xml", "text/xml"):
        outer.answers["/"] = answer(page.encode(), kind)
        found = await attack(scene, "http://evil.example/")
        assert scene.secret not in found.seen
        assert "look like an article" in found.seen
    assert inner.connections == 0


async def test_an_address_cannot_add_lines_to_the_request(scene, internet, outer):
    for path in (
        "%0d%0aX-Evil:%201",
        "\r\nX-Evil: 1",
        "\nX-Evil: 1",
        " HTTP/1.1\r\nX-Evil: 1",
        "\u010d\u010aX-Evil: 1",
    ):
        await attack(scene, f"http://evil.example/{path}")
    assert not any("\nx-evil" in head.lower() for head in outer.requests)


# --- responses -----------------------------------------------------------------------------------------------------


@contextmanager
def flat_memory(most: int = 80_000_000) -> Iterator[None]:
    """Fail if the process grows by more than this while the block runs."""
    page = 4096
    peak = start = int(Path("/proc/self/statm").read_text().split()[1]) * page
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, int(Path("/proc/self/statm").read_text().split()[1]) * page)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert peak - start < most, f"it grew by {(peak - start) // 1_000_000} MB"


def bomb(size: int, bits: int) -> bytes:
    """A compressed gigabyte of zeros per megabyte or so, generated without building it in memory."""
    packer = zlib.compressobj(9, zlib.DEFLATED, bits)
    head = packer.compress(b"\0" * 1_000_000) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(b"\0" * 1_000_000) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + block * (size // len(block))


@pytest.mark.parametrize(("encoding", "bits"), [("gzip", 31), ("deflate", 15), ("deflate", -15)])
async def test_a_decompression_bomb_is_contained(scene, internet, outer, encoding, bits):
    outer.answers["/"] = answer(bomb(4_000_000, bits), "text/plain", Content_Encoding=encoding)
    await attack(scene, "http://evil.example/warm-up")
    start = time.monotonic()
    with flat_memory():
        found = await attack(scene, "http://evil.example/")
    assert time.monotonic() - start < 20
    assert found.answer == "done"


@pytest.mark.parametrize("encoding", ["gzip, gzip", "gzip,deflate", "br", "zstd"])
async def test_nested_decompression_bombs_are_not_opened(scene, internet, outer, secret, encoding):
    inside = gzip.compress(secret.encode() + b"\0" * 50_000_000)
    outer.answers["/"] = answer(gzip.compress(inside), "text/plain", Content_Encoding=encoding)
    await attack(scene, "http://evil.example/warm-up")
    with flat_memory(30_000_000):
        found = await attack(scene, "http://evil.example/")
    assert secret not in found.seen


async def flood(writer: asyncio.StreamWriter, head: bytes, piece: bytes, taken: list[int], pause: float = 0) -> None:
    """Send endlessly until the client stops reading."""
    writer.write(head)
    while True:
        writer.write(piece)
        await writer.drain()
        taken.append(len(piece))
        await asyncio.sleep(pause)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
ENDLESS = {
    "body": (HEAD + b"\r\n", b"x" * 65_536),
    "body of HTML": (HEAD.replace(b"plain", b"html") + b"\r\n", b"<p>x" * 16_384),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65_536 + b"\r\n"),
    "chunk extension": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x" * 65_536),
    "trailers": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-A: b\r\n" * 1000),
    "headers": (HEAD, b"X-A: b\r\n" * 1000),
    "header": (HEAD + b"X-A: ", b"x" * 65_536),
    "status line": (b"HTTP/1.1 200 ", b"x" * 65_536),
    "folded header": (HEAD + b"X-A: b", b"\r\n c" * 1000),
    "early hints": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 100),
    "cookies": (HEAD, b"Set-Cookie: a=" + b"x" * 4000 + b"\r\n"),
    "empty lines": (b"", b"\r\n" * 1000),
    "gzip header": (HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x08\0\0\0\0\0\0", b"name" * 16_384),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_an_endless_response_is_cut(scene, internet, outer, what):
    head, piece = ENDLESS[what]
    taken: list[int] = []
    outer.answers["/"] = lambda writer: flood(writer, head, piece, taken)
    await attack(scene, "http://evil.example/warm-up")
    start = time.monotonic()
    with flat_memory():
        found = await attack(scene, "http://evil.example/", timeout=40.0, max_bytes=500_000)
    assert time.monotonic() - start < 20  # by size, and not by time
    assert sum(taken) < 10_000_000
    assert found.answer == "done"


@pytest.mark.parametrize("head", [b"", HEAD, HEAD + b"\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"])
async def test_a_slow_response_does_not_block_the_turn(scene, internet, outer, head):
    taken: list[int] = []
    piece = b"1\r\nx\r\n" if b"chunked" in head else b"x"
    outer.answers["/"] = lambda writer: flood(writer, head, piece, taken, pause=0.05)
    start = time.monotonic()
    found = await attack(scene, "http://evil.example/", timeout=1.5)
    assert time.monotonic() - start < 20
    assert taken
    assert found.answer == "done"


async def test_a_silent_server_does_not_block_the_turn(scene, internet, outer):
    async def nothing(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    outer.answers["/"] = nothing
    start = time.monotonic()
    found = await attack(scene, "http://evil.example/", timeout=0.5)
    assert time.monotonic() - start < 20
    assert found.answer == "done"


async def test_a_servers_words_do_not_appear_in_our_messages(scene, internet, outer):
    """Text that is not marked as untrusted must not carry a server's words."""
    words = canary("obey")
    answers = [
        b"HTTP/1.1 404 %b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: %b/x y\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/%b and-do\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: %b now\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ftp://a/%b now\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/%b now\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 %b\r\n\r\n",
        b"%b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n%b\r\n\r\n",
    ]
    for raw in answers:
        outer.answers["/"] = raw % words.encode()
        found = await attack(scene, "http://evil.example/")
        assert words not in found.seen
    assert outer.connections == len(answers)


async def test_words_of_an_unreadable_document_do_not_appear_in_our_messages(scene, internet, outer):
    words = canary("obey")
    kept = PDF.index(b"/Length")
    document = PDF[:kept] + b"/Filter /%b " % words.encode() + PDF[kept:]
    outer.answers["/"] = answer(document, "application/pdf")
    found = await attack(scene, "http://evil.example/")
    assert found.answer == "done"
    assert words not in found.seen
