"""Limits on size, number and patience, and what comes of bytes that are not quite HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from .house import House, answers_in, opened_house

JSON = "Content-Type: application/json\r\n"


@pytest.fixture
async def house(tmp_path) -> AsyncIterator[House]:
    async with opened_house(tmp_path, body_limit=1000, at_once=3, at_once_each=2, body_seconds=0.5) as found:
        yield found


def head(first: str = "POST /echo", *lines: str) -> str:
    return "\r\n".join([f"{first} HTTP/1.1", "Host: localhost", *lines, "", ""])


# ---------------------------------------------------------------------------------------------- size


async def test_a_body_may_be_as_large_as_allowed_and_not_a_byte_more(house):
    assert (await house.ask(body=b"x" * 1000)).status == 200
    answer = await house.ask(body=b"x" * 1001)
    assert (answer.status, answer.header("connection")) == (413, "close")
    assert answer.error["code"] == "request_too_large"
    assert house.bodies == [b"x" * 1000]


async def test_a_chunked_body_has_the_same_limit(house):
    chunked = head("POST /echo", JSON + "Transfer-Encoding: chunked", "Connection: close")
    (answer,) = await house.raw(chunked, *["64\r\n" + "x" * 100 + "\r\n"] * 10, "0\r\n\r\n")
    assert answer.status == 200
    assert house.bodies == [b"x" * 1000]
    (answer,) = await house.raw(chunked, *["64\r\n" + "x" * 100 + "\r\n"] * 11)  # and no end of it in sight
    assert (answer.status, answer.header("connection")) == (413, "close")
    assert len(house.entered) == 1


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent(house):
    (answer,) = await house.raw(head("POST /echo", JSON + "Content-Length: 100000000000", "Expect: 100-continue"))
    assert answer.status == 413
    assert house.entered == []


async def test_a_client_that_expects_100_continue_gets_it(house):
    reader, writer = await house.connect()
    writer.write(head("POST /echo", JSON + "Content-Length: 2", "Expect: 100-continue").encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 100")
    writer.write(b"{}")
    await reader.readline()
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert house.bodies == [b"{}"]


async def test_headers_that_are_too_large_are_refused(house):
    for lines in (["X: " + "a" * 20_000], [f"X{n}: 1" for n in range(500)], ["X" * 20_000 + ": 1"]):
        (answer,) = await house.raw(head("GET /read", *lines))
        assert answer.status in (400, 431)
        assert answer.error
    (answer,) = await house.raw(head("GET /read?" + "a" * 20_000))
    assert answer.error
    assert house.entered == []


# ---------------------------------------------------------------------------------------------- number


async def until(house: House, entered: int) -> None:
    async with asyncio.timeout(20):
        while len(house.entered) < entered:
            await asyncio.sleep(0.01)


async def test_concurrent_requests_are_limited_per_token(house):
    anna, berta = await house.token("anna"), await house.token("berta")
    waiting = [asyncio.create_task(house.ask("POST", "/wait", authorization=f"Bearer {anna}")) for _ in range(2)]
    await until(house, 2)
    refused = await house.ask(authorization=f"Bearer {anna}")
    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    assert int(refused.header("retry-after")) >= 1
    assert (await house.ask(authorization=f"Bearer {berta}")).status == 200
    house.gate.set()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]
    assert (await house.ask(authorization=f"Bearer {anna}")).status == 200
    assert house.guard.running == 0


async def test_concurrent_requests_of_all_tokens_are_limited_and_health_checks_are_not_counted(house):
    tokens = [await house.token(name) for name in ("anna", "berta", "carla", "dora")]
    waiting = [asyncio.create_task(house.ask("POST", "/wait", authorization=f"Bearer {one}")) for one in tokens[:3]]
    await until(house, 3)
    refused = await house.ask(authorization=f"Bearer {tokens[3]}")
    assert (refused.status, len(house.entered)) == (429, 3)
    assert refused.header("retry-after")
    assert (await house.ask("GET", "/healthz")).status == 200
    house.gate.set()
    await asyncio.gather(*waiting)
    assert (await house.ask(authorization=f"Bearer {tokens[3]}")).status == 200


async def test_a_slot_is_free_again_however_a_request_ended(house):
    for _ in range(4):
        await house.ask("POST", "/broken")
        await house.ask("POST", "/broken_stream")
        await house.ask("GET", "/nothing")
        await house.ask(body=b"x" * 2000)
        _, writer = await house.connect()
        writer.write(head("POST /wait", JSON + "Content-Length: 2").encode() + b"{}")
        entered = len(house.entered)
        await until(house, entered + 1)
        writer.close()
    async with asyncio.timeout(20):
        while house.guard.running:
            await asyncio.sleep(0.01)
    assert house.ended == 4  # the handlers of clients that went away were cancelled
    assert (await house.ask()).status == 200


# ---------------------------------------------------------------------------------------------- patience


async def test_a_slow_body_times_out_and_its_rest_is_never_parsed_as_a_request(house):
    began = time.monotonic()
    dribble = [head("POST /echo", JSON + "Content-Length: 900"), *["x"] * 8, head("GET /read")]
    answers = await house.raw(*dribble, pause=0.1)
    assert time.monotonic() - began < 15  # the whole body may have 900 bytes, and the server does not wait for them
    assert [answer.status for answer in answers] == [408]
    assert answers[0].error["code"] == "request_timeout"
    assert house.entered == []


async def test_a_body_that_ends_in_bad_chunks_runs_nothing(house):
    chunked = head("POST /echo", JSON + "Transfer-Encoding: chunked")
    answers = await house.raw(chunked + "2\r\n{}\r\n", "ZZ\r\n\r\n" + head("GET /read"), pause=0.05)
    assert all(answer.status in (400, 408) and answer.error for answer in answers)
    assert house.entered == []


async def test_a_steady_body_may_take_longer_than_the_limit_for_silence(tmp_path):
    async with opened_house(tmp_path, body_limit=1_000_000, body_seconds=0.6) as house:
        pieces = [b"x" * 16_000] * 8
        start = head("POST /echo", JSON + f"Content-Length: {16_000 * 8}", "Connection: close")
        (answer,) = await house.raw(start, *pieces, pause=0.1)
        assert answer.status == 200
        assert len(house.bodies[0]) == 128_000


async def closed_after(house: House, *pieces: bytes, pause: float = 0.1) -> float:
    """Seconds until the server closes a connection on which this is written, and then nothing."""
    began = time.monotonic()
    reader, writer = await house.connect()

    async def write() -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)

    writing = asyncio.create_task(write())
    async with asyncio.timeout(40):
        while await reader.read(65536):
            pass
    writing.cancel()
    writer.close()
    return time.monotonic() - began


async def test_a_slow_head_and_a_silent_connection_are_closed(tmp_path):
    dribble = [b"GET /read HTTP/1.1\r\nHost: localhost\r\n", *[b"X: 1\r\n"] * 50]
    async with opened_house(tmp_path, head_seconds=0.4, idle_seconds=30) as house:
        assert 0.3 < await closed_after(house, *dribble) < 20
        again = [head("GET /read").encode(), *dribble]  # also when the first request was a good one
        assert 0.3 < await closed_after(house, *again) < 20
        assert len(house.entered) == 1
    async with opened_house(tmp_path, head_seconds=30, idle_seconds=1.2) as house:
        assert 1.1 < await closed_after(house) < 20


async def test_the_time_limit_for_heads_does_not_affect_a_request_in_progress(tmp_path):
    async with opened_house(tmp_path, head_seconds=0.2, idle_seconds=0.3) as house:
        waiting = asyncio.create_task(house.raw(head("POST /wait", JSON + "Content-Length: 2"), b"{", b"}", pause=0.05))
        await until(house, 1)
        await asyncio.sleep(0.8)
        house.gate.set()
        assert [answer.status for answer in await waiting] == [200]


async def test_a_client_that_does_not_read_is_disconnected(tmp_path):
    async with opened_house(tmp_path, send_seconds=0.4) as house:
        _, writer = await house.connect()
        writer.write(head("GET /endless").encode())
        await until(house, 1)
        async with asyncio.timeout(30):
            while not house.ended:
                await asyncio.sleep(0.02)
        assert house.guard.running == 0
        writer.close()


async def test_a_slow_client_that_reads_is_not_disconnected(tmp_path):
    async with opened_house(tmp_path, send_seconds=1.0) as house:
        reader, writer = await house.connect()
        writer.write(head("GET /endless").encode())
        began, read = time.monotonic(), 0
        while time.monotonic() - began < 3.0:
            read += len(await reader.read(1_000_000))
            await asyncio.sleep(0.001)
        assert house.ended == 0
        writer.close()


# ---------------------------------------------------------------------------------------------- not quite HTTP

LAST = head("GET /read", "Connection: close")
NEXT = head("GET /read")  # what a front server may have taken for a body
STRANGE = {
    "no host": "GET /read HTTP/1.1\r\n\r\n",
    "no host in HTTP/1.0": "GET /read HTTP/1.0\r\n\r\n",
    "two hosts": head("GET /read", "Host: evil.test"),
    "the same host twice": head("GET /read", "Host: localhost"),
    "a host on two lines": "GET /read HTTP/1.1\r\nHost: localhost\r\n evil.test\r\n\r\n",
    "lines without returns": "GET /read HTTP/1.1\nHost: localhost\n\n",
    "length and chunks": head("POST /echo", JSON + "Content-Length: 5", "Transfer-Encoding: chunked")
    + f"0\r\n\r\n{NEXT}",
    "chunks and length": head("POST /echo", JSON + "Transfer-Encoding: chunked", "Content-Length: 5")
    + f"0\r\n\r\n{NEXT}",
    "two encodings": head("POST /echo", JSON + "Transfer-Encoding: chunked", "Transfer-Encoding: identity")
    + f"0\r\n\r\n{NEXT}",
    "an unknown encoding": head("POST /echo", JSON + "Transfer-Encoding: xchunked") + f"0\r\n\r\n{NEXT}",
    "chunked before another": head("POST /echo", JSON + "Transfer-Encoding: chunked, gzip") + f"0\r\n\r\n{NEXT}",
    "two lengths": head("POST /echo", JSON + "Content-Length: 2", "Content-Length: 3") + "{}",
    "a list of lengths": head("POST /echo", JSON + "Content-Length: 2, 2") + "{}",
    "a signed length": head("POST /echo", JSON + "Content-Length: +2") + "{}",
    "a negative length": head("POST /echo", JSON + "Content-Length: -2") + "{}",
    "a space before the colon": head("POST /echo", JSON + "Content-Length : 2") + "{}",
    "a chunk with a signed size": head("POST /echo", JSON + "Transfer-Encoding: chunked") + "+2\r\n{}\r\n0\r\n\r\n",
    "a chunk of 2**64 bytes": head("POST /echo", JSON + "Transfer-Encoding: chunked")
    + f"{2**64:x}\r\n{{}}\r\n0\r\n\r\n",
    "a zero byte": head("GET /read", "X: a\0b"),
    "a target without a slash": head("GET read"),
    "a tunnel": head("CONNECT localhost:80") + NEXT,
    "an unknown version": "GET /read HTTP/3.7\r\nHost: localhost\r\n\r\n",
    "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "lone surrogates in a header": LAST.encode()[:-2] + b"X-Session: \xff\xed\xa0\x80\r\n\r\n",
    "bytes in the path": b"GET /read\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", STRANGE)
async def test_an_ambiguous_request_runs_nothing_and_its_error_has_openais_format(house, name):
    answers = await house.raw(STRANGE[name])
    assert house.entered == []
    assert answers, "the client gets no error"
    for answer in answers:
        assert 400 <= answer.status < 500
        assert answer.error


async def test_text_beyond_ascii_in_a_header_is_allowed_if_it_is_valid(house):
    (answer,) = await house.raw(head("GET /read", "X-Session: Jürgen", "Connection: close"))
    assert answer.status == 200


async def test_pipelined_requests_pass_the_guard_one_by_one(house):
    answers = await house.raw(head("GET /read") + head("GET /read", "Origin: http://evil.test") + LAST)
    assert [answer.status for answer in answers] == [200, 403, 200]
    assert len(house.entered) == 2


async def test_a_request_after_an_ignored_upgrade_passes_the_guard_too(house):
    upgrade = head("GET /read", "Connection: Upgrade", "Upgrade: websocket")
    answers = await house.raw(upgrade + "GET /read HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n")
    assert [answer.status for answer in answers] == [200, 403]
    assert len(house.entered) == 1


async def test_large_bodies_share_a_limit_and_small_ones_always_pass(tmp_path):
    async with opened_house(tmp_path, body_limit=1_000_000, bodies_limit=1_500_000) as house:
        large = b" " * 700_000
        working = [asyncio.create_task(house.ask("POST", "/wait", large)) for _ in range(2)]
        async with asyncio.timeout(20):
            while len(house.entered) < 2:
                await asyncio.sleep(0.01)
        for _ in range(3):
            refused = await house.ask(body=large)
            assert refused.status == 429
            assert refused.header("retry-after")
            assert (await house.ask(body=b" " * 200_000)).status == 200
        house.gate.set()
        assert [answer.status for answer in await asyncio.gather(*working)] == [200] * 2
        for _ in range(4):
            assert (await house.ask(body=large)).status == 200
        assert (await house.ask(body=large + large)).status == 413
        assert house.guard._held == 0


# ---------------------------------------------------------------------------------------------- many connections


async def test_idle_connections_do_not_block_new_ones_and_active_ones_stay(tmp_path):
    async with opened_house(tmp_path, connections=10) as house:
        working = [asyncio.create_task(house.ask("POST", "/wait")) for _ in range(3)]
        async with asyncio.timeout(20):
            while len(house.entered) < 3:
                await asyncio.sleep(0.01)
        silent = [await house.connect() for _ in range(30)]
        for _, writer in silent[-3:]:
            writer.write(b"POST /echo HTTP/1.1\r\nHost: loc")  # a head that never ends
        for _ in range(20):
            assert (await house.ask()).status == 200
        async with asyncio.timeout(20):
            assert [await reader.read() for reader, _ in silent[:20]] == [b""] * 20
        house.gate.set()
        assert [answer.status for answer in await asyncio.gather(*working)] == [200] * 3
        for _, writer in silent:
            writer.close()


async def test_if_every_connection_is_busy_a_new_one_is_told_so(tmp_path):
    async with opened_house(tmp_path, connections=3) as house:
        working = [asyncio.create_task(house.ask("POST", "/wait")) for _ in range(3)]
        async with asyncio.timeout(20):
            while len(house.entered) < 3:
                await asyncio.sleep(0.01)
        reader, writer = await house.connect()
        (answer,) = await answers_in(reader)
        writer.close()
        assert answer.status == 503
        assert answer.error["code"] == "unavailable"
        assert answer.header("retry-after")
        house.gate.set()
        assert [answer.status for answer in await asyncio.gather(*working)] == [200] * 3
        assert (await house.ask()).status == 200


def test_the_limit_of_open_files_is_raised_as_far_as_possible():
    program = """
import resource
from everloop.server.connections import connection_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
assert connection_limit(2000) == 1920, connection_limit(2000)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (4096, 4096)
assert connection_limit(100) == 1100
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
assert connection_limit(2000) == 22
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
