"""One side of one measurement, in a process of its own: `driver.py raw|everloop SCENARIO BASE_URL [N] [SIZE]`.

`raw` is the lower bound: a hand-written loop on aiohttp with no framework, no validation and no disk. `everloop` is a
durable turn. They and their scenarios are those of `peers`, which has other runtimes too; what is here is only measured
of these two. Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import drive_everloop
import drive_raw
from common import SCENARIOS as SHARED
from common import Peer, Scenario, check, echo, prompt

JSON = {"Content-Type": "application/json"}


class Streaming(Protocol):
    """A side that tells of an answer's text as it comes."""

    async def stream(self, session: str, text: str, on_text: Callable[[], None]) -> str: ...


class Raw(drive_raw.Raw):
    """The hand-written loop."""

    async def stream(self, session: str, text: str, on_text: Callable[[], None]) -> str:
        messages = [drive_raw.SYSTEM, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "stream": True}
        parts = []
        async with self.http.post(f"{self.base_url}/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        if piece := choice["delta"].get("content"):
                            on_text()
                            parts.append(piece)
        return "".join(parts)


class Written(Raw):
    """The hand-written loop with the writes of a durable turn and nothing else: what our promises cost at least.

    The message and the end are flushed to the disk in a thread; each step in between is written at once.
    """

    async def start(self) -> None:
        from everloop.store.sqlite.schema import migrate

        await super().start()
        self.thread = ThreadPoolExecutor(1)
        path = Path(self.folder) / "written.db"
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.db.executescript("PRAGMA page_size = 1024; PRAGMA journal_mode = WAL")
        migrate(self.db)

    async def turn(self, session: str, text: str) -> str:
        loop = asyncio.get_running_loop()
        row = await loop.run_in_executor(self.thread, self._begin, session, text)
        messages = [drive_raw.SYSTEM, {"role": "user", "content": text}]
        self.db.executescript("PRAGMA synchronous = NORMAL; PRAGMA wal_autocheckpoint = 0")
        while True:
            body = {"model": self.model, "messages": messages, "tools": [drive_raw.TOOL]}
            async with self.http.post(f"{self.base_url}/chat/completions", json=body) as response:
                message = (await response.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                await loop.run_in_executor(self.thread, self._end, row, len(messages), message)
                return str(message["content"])
            self._write(row, len(messages), message)
            for call in message["tool_calls"]:
                result = await echo(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                self._write(row, len(messages), messages[-1])

    def _begin(self, session: str, text: str) -> int:
        now = time.time()
        self.db.executescript("PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 1024; BEGIN IMMEDIATE")
        made = self.db.execute(
            "INSERT INTO session (owner, key, created_at, updated_at) VALUES ('me', ?, ?, ?)", (session, now, now)
        )
        row = int(made.lastrowid or 0)
        self.db.execute(
            "INSERT INTO inbox (owner, session, kind, state, data, at) VALUES ('me', ?, 'message', 'taken', ?, ?)",
            (row, text, now),
        )
        self._write(row, 1, {"role": "user", "content": text})
        self.db.execute("COMMIT")
        return row

    def _write(self, session: int, seq: int, message: Mapping[str, object]) -> None:
        self.db.execute(
            "INSERT INTO entry (session, seq, kind, data, at) VALUES (?, ?, 'answer', ?, ?)",
            (session, seq, json.dumps(message), time.time()),
        )

    def _end(self, session: int, seq: int, message: dict[str, object]) -> None:
        self.db.executescript("PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 1024; BEGIN IMMEDIATE")
        self._write(session, seq, message)
        self.db.execute("UPDATE inbox SET state = 'done' WHERE session = ?", (session,))
        self.db.execute("COMMIT")

    async def close(self) -> None:
        await super().close()
        self.thread.shutdown()
        self.db.close()


class Everloop(drive_everloop.Everloop):
    """The same turn, durable."""

    async def stream(self, session: str, text: str, on_text: Callable[[], None]) -> str:
        from everloop.events import Text

        def watch(event: object) -> None:
            if isinstance(event, Text):
                on_text()

        return await self.agent.process_direct(text, session_key=f"bench:{session}", on_event=watch)


class Effects(Everloop):
    """Its calls have effects, so each answer with one is flushed to the disk."""

    read_only = False


class Bytes(Raw):
    """Only sends, four times a turn, a body encoded beforehand. What is left is the cost of the bytes."""

    async def start(self) -> None:
        await super().start()
        self.bodies: dict[str, bytes] = {}

    async def turn(self, session: str, text: str) -> str:
        if session not in self.bodies:
            messages = [*self.sessions.get(session, [drive_raw.SYSTEM]), {"role": "user", "content": text}]
            asked = {"model": self.model, "messages": messages, "tools": [drive_raw.TOOL]}
            self.bodies[session] = json.dumps(asked).encode()
        for _ in range(4):
            url = f"{self.base_url}/chat/completions"
            async with self.http.post(url, data=self.bodies[session], headers=JSON) as response:
                await response.json()
        return f"done:{text.rpartition(':')[2]}"  # what was asked is always the same, and so is the answer


SIDES: dict[str, type[Peer]] = {
    "raw": Raw,
    "written": Written,
    "everloop": Everloop,
    "effects": Effects,
    "bytes": Bytes,
}


async def first_token(side: Streaming, n: int, size: int) -> dict[str, float]:
    """Milliseconds from the call to the first text at the caller."""
    waits = []
    for i in range(n + 5):
        seen: list[float] = []
        started = time.perf_counter()
        answer = await side.stream(f"s{i}", prompt(f"s{i}"), lambda seen=seen: seen.append(time.perf_counter()))  # type: ignore[misc]
        check(answer, f"s{i}")
        waits.append(seen[0] - started)
    return {"first_text_ms": statistics.median(waits[5:]) * 1e3}


SCENARIOS: dict[str, tuple[str, Scenario]] = {
    "turn": ("tools-3x1", SHARED["turn"]),
    "at_once": ("tools-3x1-d200", SHARED["at_once"]),
    "history": ("tools-3x1", SHARED["history"]),
    "first_token": ("tools-0x0-n20", first_token),  # type: ignore[dict-item]
}


async def main() -> None:
    name, scenario, base_url, *rest = sys.argv[1:]
    n, size = (*map(int, rest), 100, 0)[:2] if len(rest) < 2 else map(int, rest[:2])
    model, measure = SCENARIOS[scenario]
    with tempfile.TemporaryDirectory() as folder:
        side = SIDES[name](base_url, model, folder, stored=False)
        await side.start()
        try:
            print(json.dumps(await measure(side, n, size)))
        finally:
            await side.close()


if __name__ == "__main__":
    asyncio.run(main())
