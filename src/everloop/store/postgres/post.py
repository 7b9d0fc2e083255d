"""What waits to be sent to another process: it goes out in batches, cut into pieces that a notice can hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

WAITING_LIMIT = 512_000  # bytes that wait for one address; beyond it the oldest are dropped
PIECE = 7_800  # bytes: PostgreSQL allows less than 8,000 in one notice


class Post:
    """What waits to be sent to one address. One batch is under way at a time, so that no queue gathers behind it."""

    def __init__(self, send: Callable[[list[str], Callable[[], None]], None], sender: str) -> None:
        self._send = send
        self._sender = sender
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._under_way = False

    def put(self, line: bytes) -> None:
        self._waiting.append(line)
        self._bytes += len(line)
        while self._bytes > WAITING_LIMIT and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft())

    def drop(self) -> None:
        """What waits is said no more."""
        self._waiting.clear()
        self._bytes = 0

    def send(self) -> bool:
        """Send what waits, unless something is under way. False when there is nothing to do."""
        if self._under_way:
            return True
        if not self._waiting:
            return False
        data = b"".join(self._waiting)
        self.drop()
        texts = list(pieces(data))
        self._under_way = True
        self._send(
            [f"{self._sender} {number} {len(texts)}\n{text}" for number, text in enumerate(texts)],
            self._sent,
        )
        return True

    def _sent(self) -> None:
        self._under_way = False
        self.send()


def pieces(data: bytes, size: int = PIECE) -> Iterator[str]:
    """The text in pieces of at most so many bytes, cut between characters."""
    start = 0
    while start < len(data):
        end = min(start + size, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        yield data[start:end].decode()
        start = end
