"""The programs that the forge forks. Each uses an `AgentLoop` as a user would, and is killed at some point."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp  # noqa: F401 - the forge has it ready for its children

from everloop import AgentLoop, InboundMessage, MessageBus, OutboundMessage, tool
from everloop.config import Config, Rule
from everloop.events import Event, Text, ToolStarted
from everloop.providers.openai import OpenAIProvider
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from everloop.tools.context import current_call
from everloop.tools.message import MessageTool

from . import bugs

PATIENCE = 60.0  # seconds; a program that is not done by then has missed a wake-up
HOLD = "hold"  # the file that keeps the tool `long` running


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def note(folder: Path, name: str, **what: Any) -> None:
    """Append a line to a file that outlives the process; the line is durable when this returns."""
    line = json.dumps({"at": time.time(), "pid": os.getpid(), **what}) + "\n"
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.encode())
    os.close(file)


def make_tools(folder: Path) -> list[Any]:
    """Tools that leave a line for each start and each end of a run."""

    def ran(name: str, text: str, what: str) -> None:
        note(folder, "runs", tool=name, text=text, what=what, key=current_call().idempotency_key)

    def die_once(text: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / f"died-{text.replace('/', '_')}", os.O_CREAT | os.O_EXCL))
            die()

    async def work(name: str, text: str, seconds: float = 0.0, fatal: bool = False) -> str:
        ran(name, text, "start")
        if fatal:
            die_once(text)
        await asyncio.sleep(seconds)
        while name == "long" and (folder / HOLD).exists():
            await asyncio.sleep(0.02)
        ran(name, text, "end")
        return f"{name} did {text}"

    @tool(replay="safe")
    async def safe(text: str) -> str:
        """May be run again."""
        return await work("safe", text, 0.001)

    @tool
    async def never(text: str) -> str:
        """Must not be run again."""
        return await work("never", text, 0.002)

    @tool
    async def slow(text: str) -> str:
        """Takes its time, and must not be run again."""
        return await work("slow", text, 0.03)

    @tool
    async def long(text: str) -> str:
        """Takes long enough to be stopped in the middle, longer where it is held, and must not be run again."""
        return await work("long", text, 0.4)

    @tool(parallel=False)
    async def alone(text: str) -> str:
        """Runs beside nothing else."""
        return await work("alone", text)

    @tool(replay="safe")
    async def fatal_safe(text: str) -> str:
        """Kills its process the first time."""
        return await work("fatal_safe", text, fatal=True)

    @tool
    async def fatal_never(text: str) -> str:
        """Kills its process the first time, and must not be run again."""
        return await work("fatal_never", text, fatal=True)

    @tool
    async def asked(text: str) -> str:
        """Needs approval, and must not be run again."""
        return await work("asked", text)

    return [safe, never, slow, long, alone, fatal_safe, fatal_never, asked]


class Worker(AgentLoop):
    """An agent with the tools of these tests, and no others but `message`."""

    def _register_default_tools(self) -> None:
        for one in (MessageTool(), *make_tools(self.workspace)):
            self.tools.register(one)


def make_loop(folder: Path, url: str, bus: MessageBus, store: SQLiteStore, **options: Any) -> AgentLoop:
    provider = OpenAIProvider(url, model="planned")
    config = Config(home=folder / "home", policy=(Rule(do="ask", tool="asked"),))
    return Worker(bus, provider, folder, store=store, config=config, **options)


def equip(loop: AgentLoop, folder: Path) -> None:
    """Give it the tools of these tests, and no others but `message`."""
    for name in loop.tools.names:
        if name != "message":
            loop.tools.unregister(name)
    for one in make_tools(folder):
        loop.tools.register(one)


def kill_at(store: SQLiteStore, number: int, when: str) -> None:
    """Die at the n-th commit: `before` or `after` it."""
    count = 0

    def hook(what: str) -> None:
        nonlocal count
        count += what == "before"
        if count == number and what == when:
            die()

    store.writer.commit_hooks.add(hook)


def kill_before_delivery(store: SQLiteStore) -> None:
    """Die as soon as an answer reaches the outbox."""

    def hook(what: str) -> None:
        db = sqlite3.connect(store.path)
        if what == "after" and db.execute("SELECT 1 FROM outbox WHERE sent_at IS NULL").fetchone():
            die()
        db.close()

    store.writer.commit_hooks.add(hook)


async def approve(folder: Path, bus: MessageBus) -> None:
    """A user who approves every question, repeatedly until the decision is accepted."""
    sql = "SELECT s.key FROM session s JOIN inbox i ON i.session = s.id WHERE i.state = 'parked'"
    store = Reading(folder)
    while True:
        await asyncio.sleep(0.01)
        for (key,) in store.rows(sql):
            await bus.publish_inbound(InboundMessage("test", "me", key.partition(":")[2], "/approve"))


class Reading:
    """Polls a store on one connection, since opening it takes longer than a query."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "store.db"
        self._db: sqlite3.Connection | None = None

    @property
    def exists(self) -> bool:
        return self._db is not None or self._path.exists()

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query, or none if there is no store or no tables yet."""
        if not self.exists:
            return []
        self._db = self._db or sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            return self._db.execute(sql).fetchall()
        except sqlite3.OperationalError:
            return []


class Idle:
    """Return whether every message is answered and sent."""

    def __init__(self, folder: Path) -> None:
        self.store = Reading(folder)

    def __call__(self, messages: int) -> bool:
        if not self.store.exists:
            return messages == 0
        found = self.store.rows(
            "SELECT (SELECT count(*) FROM inbox), (SELECT count(*) FROM inbox WHERE state <> 'done'),"
            " (SELECT count(*) FROM turn WHERE ended_at IS NULL),"
            " (SELECT count(*) FROM outbox WHERE sent_at IS NULL)"
        )
        return any(all_there >= messages and not any(left) for all_there, *left in found)


def watcher(bus: MessageBus, late: list[dict[str, Any]], die_at_text: int) -> Callable[[str, Event], None] | None:
    """Publishes the late messages when the first tool starts; dies at the n-th piece of text."""
    if not late and not die_at_text:
        return None
    pieces = 0
    tasks: set[asyncio.Task[None]] = set()

    def watch(session: str, event: Event) -> None:
        nonlocal pieces
        if isinstance(event, ToolStarted):
            while late:
                message = InboundMessage(**late.pop(0))
                tasks.add(asyncio.get_running_loop().create_task(bus.publish_inbound(message)))
        elif isinstance(event, Text):
            pieces += 1
            if pieces == die_at_text:
                die()

    return watch


async def agent(
    folder: str,
    url: str,
    bus: str = "memory",
    messages: list[dict[str, Any]] | None = None,
    late: list[dict[str, Any]] | None = None,
    busy: str = "queue",
    die_at: tuple[int, str] | None = None,
    die_at_text: int = 0,
    die_unsent: bool = False,
    plant: str = "",
) -> None:
    """Publish the messages, answer everything, record the answers, and end when no work is left."""
    here = Path(folder)
    bugs.plant(plant)
    store = SQLiteStore(here / "store.db")
    queue = DurableBus(store) if bus == "durable" else MessageBus()
    expected = len(messages or ()) + len(late or ())
    watch = watcher(queue, late or [], die_at_text)
    loop = make_loop(here, url, queue, store, busy=busy, on_event=watch)
    if die_at is not None:
        kill_at(store, *die_at)
    if die_unsent:
        kill_before_delivery(store)
    idle = Idle(here)
    await until_idle(here, loop, queue, messages or [], lambda: idle(expected))


async def until_idle(
    here: Path, loop: AgentLoop, bus: MessageBus, messages: list[dict[str, Any]], idle: Callable[[], bool]
) -> None:
    """Run a loop with a user who reads and approves on its bus, until no work is left."""
    assert isinstance(loop.store, SQLiteStore)
    running = asyncio.create_task(loop.run())
    sending = asyncio.create_task(send(here, bus))
    approving = asyncio.create_task(approve(here, bus))
    for message in messages:
        await bus.publish_inbound(InboundMessage(**message))
        if isinstance(bus, DurableBus):
            note(here, "acknowledged", id=message["id"])
    give_up = time.monotonic() + PATIENCE
    while not idle():
        if time.monotonic() > give_up:
            raise TimeoutError(f"not idle after {PATIENCE} seconds in {here}")
        for task in (running, sending, approving):
            if task.done():
                task.result()
        await asyncio.sleep(0.008)
    commits = loop.store.writer.commits
    approving.cancel()
    loop.stop()
    await running
    sending.cancel()
    await loop.close()
    note(here, "commits", count=commits)


async def send(folder: Path, bus: MessageBus, pause: float = 0.0) -> None:
    """A channel that records each answer and acknowledges it only after a pause."""
    while True:
        message: OutboundMessage = await bus.consume_outbound()
        note(folder, "answers", reply_to=message.reply_to, content=message.content, repeat=message.repeat)
        if isinstance(bus, DurableBus):
            await asyncio.sleep(pause)
            await bus.sent(message)


async def worker(folder: str, url: str, plant: str = "", runtime: str = "") -> None:
    """The equivalent of `everloop worker`: a loop on the durable bus that runs until terminated or killed."""
    if runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
    bugs.plant(plant)
    store = SQLiteStore(Path(folder) / "store.db")
    loop = make_loop(Path(folder), url, DurableBus(store), store)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loop.stop)
    await loop.run()
    await loop.close()


async def direct(folder: str, url: str, content: str) -> None:
    """Another program that talks to the session `test:a` without a bus."""
    here = Path(folder)
    loop = make_loop(here, url, MessageBus(), SQLiteStore(here / "store.db"))
    async with loop, asyncio.timeout(PATIENCE / 2):
        note(here, "told", content=await loop.process_direct(content, session_key="test:a"))


async def sender(folder: str) -> None:
    """A process that only sends answers until it is killed."""
    await send(Path(folder), DurableBus(SQLiteStore(Path(folder) / "store.db")))


async def publisher(folder: str, messages: list[dict[str, Any]], die_at: tuple[int, str] | None = None) -> None:
    """A channel that accepts messages and acknowledges each once it is on disk, without a local worker."""
    store = SQLiteStore(Path(folder) / "store.db")
    bus = DurableBus(store)
    if die_at is not None:
        kill_at(store, *die_at)
    for message in messages:
        await bus.publish_inbound(InboundMessage(**message))
        note(Path(folder), "acknowledged", id=message["id"])
    await store.close()


async def opener(folder: str) -> None:
    """Create the store, or open it while others do."""
    store = SQLiteStore(Path(folder) / "store.db")
    await store.sessions("me")
    await store.accept(InboundMessage("test", "me", "open", "hello", id=str(os.getpid())).addressed())
    await store.close()


async def questioner(folder: str, what: str, at: int = 0) -> None:
    """An agent that asks before it launches a rocket (`ask`, then it is killed) or receives the answer (`answer`).

    It dies before or after the n-th commit.
    """
    here = Path(folder)
    store = SQLiteStore(here / "store.db")
    if at:
        kill_at(store, (at + 1) // 2, "before" if at % 2 else "after")

    @tool
    async def launch(name: str) -> str:
        """Launch a rocket."""
        with open(here / "launched", "a") as file:
            print(name, file=file)
        return f"{name} is up"

    bus = DurableBus(store)
    steps: list[Any] = [call("launch", name="ada")] if what == "ask" else ["it flies"] * 3
    config = Config(home=here / "home", policy=(Rule(do="ask", tool="launch"),))
    agent = AgentLoop(bus, ScriptedProvider(steps), here, store=store, config=config)
    agent.tools.register(launch)
    text = "up!" if what == "ask" else "a"
    await bus.publish_inbound(InboundMessage("test", "ann", "1", text, id=text))
    running = asyncio.create_task(agent.run())
    wanted = "May I" if what == "ask" else "it flies"
    while True:
        message = await bus.consume_outbound()
        await bus.sent(message)
        if wanted in message.content:
            break
    if what == "ask":
        die()
    agent.stop()
    await running
    await agent.close()
