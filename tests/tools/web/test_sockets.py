"""Sockets for a single request."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import pytest

from everloop.tools.web.fetch import is_this_machine, sockets_to
from tests.support.web_servers import answer, serving

HERE = ip_address("127.0.0.1")
TCP = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")


def test_a_socket_connects_only_to_the_checked_address():
    make = sockets_to([HERE], 100)
    make((*TCP, ("127.0.0.1", 80))).close()
    for other in ("127.0.0.2", "1.1.1.1", "::1"):
        with pytest.raises(OSError, match="not checked"):
            make((*TCP, (other, 80)))


@pytest.mark.parametrize("into", [False, True])
async def test_a_socket_fails_if_it_receives_more_than_allowed(into):
    whole = answer(b"x" * 1000)
    async with serving({"/": whole}) as server:
        for most in (len(whole), len(whole) - 1):
            with sockets_to([HERE], most)((*TCP, ("127.0.0.1", server.port))) as sock:
                sock.setblocking(False)
                assert await _all_of(sock, server.port, into) == (len(whole) if most == len(whole) else -1)


async def _all_of(sock: socket.socket, port: int, into: bool) -> int:
    """Return how many bytes are received, or -1 if the socket fails."""
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\n\r\n")
    count = 0
    try:
        while (
            piece := await loop.sock_recv_into(sock, bytearray(300)) if into else len(await loop.sock_recv(sock, 300))
        ):
            count += piece
    except ConnectionAbortedError:
        return -1
    return count


def test_a_machine_knows_its_own_addresses():
    assert is_this_machine(HERE)
    assert not is_this_machine(ip_address("1.1.1.1"))  # no connection is made; the guard of the tests stops even this
