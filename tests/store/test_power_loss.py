"""What a power loss leaves of a SQLite store, at every moment of a recorded run.

A real run is recorded as the kernel sees it: every write to the store's files, every flush, and every effect on the
outside world. After a power loss, the disk has what was flushed, and any part of what was written since then, in any
order. Such disks are made from the recording, cut at each step, and opened again: the promises of `docs/durability.md`
must hold on all of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from everloop import AgentLoop, InboundMessage, tool
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from everloop.tools.context import current_call

from ..support.places import ROOT

pytestmark = pytest.mark.platform("records system calls with strace")
MESSAGES = 36
SECTOR = 512


# ---------------------------------------------------------------------------------------------- the run


def model(messages, tools):
    """Looks twice, mails, or just answers, depending on the person's last message."""
    said = [message for message in messages if message["role"] == "user"][-1]["content"]
    rounds = len(messages) - 1 - max(n for n, message in enumerate(messages) if message["role"] == "user")
    if "look" in said and rounds < 4:
        return call("look")
    if "mail" in said and rounds < 2:
        return call("mail", to="ada")
    return "done " * 20


async def converse(folder: Path, messages: Sequence[str], witness: int) -> None:
    """Answer the messages from a durable bus, and everything that an earlier process has left."""

    def saw(what: str) -> None:
        os.write(witness, f"{what}\n".encode())

    @tool(read_only=True)
    async def look() -> str:
        """Look."""
        return "a harbour " * 30

    @tool
    async def mail(to: str) -> str:
        """Send a mail."""
        saw(f"mailed {current_call().idempotency_key}")
        return "sent"

    store = SQLiteStore(folder / "store.db")
    bus = DurableBus(store)
    async with AgentLoop(bus, ScriptedProvider([model], repeat_last=True), folder, store=store) as agent:
        for one in (look, mail):
            agent.tools.register(one)
        running = asyncio.create_task(agent.run())
        for number, text in enumerate(messages):
            id = f"m{number}"
            await bus.publish_inbound(InboundMessage("chat", "ada", str(number % 3), text, id=id))
            saw(f"accepted {id}")
            answer = await bus.consume_outbound()
            saw(f"answered {id}")
            await bus.sent(answer)
            saw(f"sent {id}")
        while (now := await store.overview()).waiting or now.open_turns:
            await asyncio.sleep(0.01)
        agent.stop()
        await running


def recorded_run() -> None:
    folder = Path(sys.argv[1])
    witness = os.open(folder / "witness", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    kinds = ("just talk", "look around", "mail her")
    asyncio.run(converse(folder, [kinds[n % 3] for n in range(MESSAGES)], witness))


# ---------------------------------------------------------------------------------------------- the recording


class Op(NamedTuple):
    """A system call on one of the store's files, or on the witness."""

    name: str
    path: str
    data: bytes = b""
    offset: int = 0


FILE, NAMED = r"(\d+)<([^>]*)>", r'"([^"]*)"'
LINE = re.compile(rf'^\d+ +(\w+)\((?:{FILE}|{NAMED})(?:, "([^"]*)"(?:, (\d+))?(?:, (\d+))?)?(?:, (\d+))?\)? *(?:=|<)')


def decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def parsed(trace: Path, folder: Path) -> Iterator[Op]:
    for line in trace.read_text().splitlines():
        if (found := LINE.match(line)) is None:
            continue
        name, _, at, named, data, _, offset, size = found.groups()
        path = decoded(at or named or "").decode()
        if not path.startswith(f"{folder}/") or path.endswith("-shm"):
            continue
        path = path.removeprefix(f"{folder}/")
        if name == "ftruncate":
            yield Op("truncate", path, offset=int(size))
        elif name in ("fsync", "fdatasync"):
            yield Op("flush", path)
        elif name == "unlink":
            yield Op("unlink", path)
        else:
            assert data is not None, line
            yield Op("write", path, decoded(data), int(offset or 0))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> list[Op]:
    folder = tmp_path_factory.mktemp("run").resolve()
    trace = folder.with_suffix(".trace")
    calls = "trace=write,pwrite64,ftruncate,fsync,fdatasync,unlink"
    program = [sys.executable, "-c", f"from {__name__} import recorded_run; recorded_run()", str(folder)]
    strace = ["strace", "-f", "-y", "-xx", "-s", "100000", "-e", calls, "-o", str(trace)]
    subprocess.run([*strace, *program], cwd=ROOT, check=True, timeout=55)
    ops = list(parsed(trace, folder))
    assert sum(op.name == "flush" for op in ops) > 2 * MESSAGES
    assert any(op.name == "write" and op.path == "store.db" for op in ops)  # at least one checkpoint
    return ops


# ---------------------------------------------------------------------------------------------- disks


@dataclass
class File:
    flushed: bytearray = field(default_factory=bytearray)
    pending: list[Op] = field(default_factory=list)

    def apply(self, content: bytearray, ops: Sequence[Op]) -> bytearray:
        for op in ops:
            if op.name == "truncate":
                del content[op.offset :]
                content.extend(bytes(op.offset - len(content)))
            else:
                end = op.offset + len(op.data)
                content.extend(bytes(max(0, end - len(content))))
                content[op.offset : end] = op.data
        return content

    def after_power_loss(self, choice: random.Random, share: float) -> bytes:
        """Everything that was flushed, and each sector written since then with a certain probability."""
        kept = [part for op in self.pending for part in _sectors(op) if choice.random() < share]
        return bytes(self.apply(bytearray(self.flushed), kept))


def _sectors(op: Op) -> list[Op]:
    if op.name != "write":
        return [op]
    return [op._replace(data=op.data[at : at + SECTOR], offset=op.offset + at) for at in range(0, len(op.data), SECTOR)]


class Disk(NamedTuple):
    files: dict[str, bytes]
    witness: list[str]  # what the outside world had seen by then


def disks(ops: Sequence[Op], seed: int) -> Iterator[Disk]:
    """Yield the disks after a power loss at every step of the recording, one or two for each."""
    choice = random.Random(seed)
    files: dict[str, File] = {}
    witness = ""
    for op in ops:
        if op.path == "witness":
            witness += op.data.decode()
        elif op.name == "unlink":
            files.pop(op.path, None)
        else:
            file = files.setdefault(op.path, File())
            if op.name == "flush":
                file.apply(file.flushed, file.pending)
                file.pending.clear()
            else:
                file.pending.append(op)
        if "accepted m0" in witness and (op.path == "witness" or op.name == "flush" or choice.random() < 0.05):
            share = choice.choice([0.0, 0.5, 0.9, 1.0])
            yield Disk({p: f.after_power_loss(choice, share) for p, f in files.items()}, witness.split("\n")[:-1])


def written(disk: Disk, folder: Path) -> Path:
    folder.mkdir()
    for name, content in disk.files.items():
        (folder / name).write_bytes(content)
    return folder / "store.db"


def seen(disk: Disk, what: str) -> list[str]:
    return [line.removeprefix(f"{what} ") for line in disk.witness if line.startswith(f"{what} ")]


# ---------------------------------------------------------------------------------------------- the promises


def breaches(disk: Disk, database: Path) -> list[str]:
    """Return what the outside world has seen and the disk does not have."""
    with closing(sqlite3.connect(database)) as db:
        found = [f"damaged: {text}" for (text,) in db.execute("PRAGMA integrity_check") if text != "ok"]
        states = dict(db.execute("SELECT message_id, state FROM inbox"))
        begun = "".join(data for (data,) in db.execute("SELECT data FROM entry WHERE kind = 'begun'"))
        sent = {data for (data,) in db.execute("SELECT turn FROM outbox WHERE sent_at IS NOT NULL")}
        turns = dict(db.execute("SELECT message_id, turn FROM inbox"))
    found += [f"{id} was accepted" for id in seen(disk, "accepted") if id not in states]
    found += [f"{id} was answered" for id in seen(disk, "answered") if states.get(id) != "done"]
    found += [f"{id} was sent" for id in seen(disk, "sent") if turns.get(id) not in sent]
    found += [f"{key} was mailed" for key in seen(disk, "mailed") if key.split("/")[1] not in begun]
    return found


def test_nothing_that_the_outside_world_has_seen_is_missing(recording, tmp_path):
    number = 0
    for number, disk in enumerate(disks(recording, 1), 1):
        folder = tmp_path / str(number)
        assert breaches(disk, written(disk, folder)) == [], f"disk {number}"
        for file in folder.iterdir():
            file.unlink()
    assert number > 150


def test_the_next_start_continues_and_repeats_no_effect(recording, tmp_path, caplog):
    every = list(disks(recording, 3))
    for number, disk in enumerate(every[:: len(every) // 12]):
        folder = tmp_path / str(number)
        written(disk, folder)
        witness = os.open(folder / "witness", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        asyncio.run(converse(folder, [], witness))
        os.close(witness)
        again = (folder / "witness").read_text().split("\n")
        assert not set(seen(disk, "mailed")) & {line.removeprefix("mailed ") for line in again}
        with closing(sqlite3.connect(folder / "store.db")) as db:
            assert set(seen(disk, "accepted")) <= {id for (id,) in db.execute("SELECT message_id FROM inbox")}
            assert db.execute("SELECT count(*) FROM inbox WHERE state <> 'done'").fetchone() == (0,)
    assert "commits are missing" not in caplog.text


def test_a_disk_that_ignores_flushes_is_caught(recording, tmp_path):
    """The check can fail: without the flushes, promises are broken."""
    lying = [op for op in recording if op.name != "flush" or op.path != "store.db-wal"]
    broken = 0
    for number, disk in enumerate(disks(lying, 1)):
        try:
            broken += breaches(disk, written(disk, tmp_path / str(number))) != []
        except sqlite3.DatabaseError:
            broken += 1
        if broken:
            return
    raise AssertionError("no disk was found wanting")
