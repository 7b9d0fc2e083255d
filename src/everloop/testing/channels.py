"""A conformance kit for channels: kills the process at every write, and checks that nothing is lost or duplicated.

A test describes its network as a `Network`, and `conform` does the rest: it runs the channel with an agent that answers
every message, in a separate process that is killed with SIGKILL and restarted. Between accepting a message and
acknowledging it, and between sending a part and marking it as sent, there is always a write, and the process is killed
before and after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from ..channels.base import Can, make_channel
from ..channels.files import refusal, saver
from ..channels.runner import STATUS, ChannelRunner, chat_of, follower
from ..channels.text import MARK, render, split
from ..config import ChannelConfig, Config
from ..providers.base import LLMProvider, LLMResponse, ToolCallRequest
from ..runtime.agent import agent_of
from ..runtime.owners import Owners
from ..store.sqlite import SQLiteStore
from ..store.sqlite.writer import SYNCHRONOUS
from ..tools.message import OutgoingFiles

PATIENCE = 60.0  # time limit for a process to finish its work
AT_ONCE = 2  # scenes that run concurrently
SETTLE_SECONDS = 2.0  # grace period for a network without ids to deliver what it still has
LONG = "long"  # a message with this word gets an answer in several parts
FILE = "file"  # a message with this word gets two files before its answer
FILES = {"beans.csv": b"name,metres\nbean,2\n", "peas.csv": b"name,metres\npea,1\n"}


class Network(Protocol):
    """What the kit needs to know about a network.

    An optional method `id_of` maps a chat of the test to its id on the network.
    """

    settings: dict[str, Any]  # the [channels.NAME] table, with `name` and with `allow` or `groups`

    async def say(self, chat: str, text: str) -> None:
        """Post a person's message in a chat; return when the network no longer needs to be told again."""
        ...

    def heard(self, chat: str) -> list[str]:
        """Return the texts received in a chat, in order, as a person sees them; a file as formatted by `shown_file`."""
        ...

    async def disturb(self) -> None:
        """Drop the connections of the channel."""
        ...


NewNetwork = Callable[[], AbstractAsyncContextManager[Network]]


@dataclass(slots=True)
class Report:
    """The results. `problems` describes what went wrong."""

    messages: int = 0
    kills: int = 0
    marked: int = 0  # duplicate parts that were marked as repeats
    problems: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.messages += other.messages
        self.kills += other.kills
        self.marked += other.marked
        self.problems += other.problems


async def conform(
    new: NewNetwork, folder: Path, *, chats: Sequence[str] = ("1", "2"), step: int = 1, files: bool = False
) -> Report:
    """Kill a channel before and after every write of a short conversation, each time with a fresh network.

    With `step`, it is only killed at every `step`-th of these points. With `files`, the agent also sends two files.
    """
    said = [(chats[0], f"first {LONG}"), (chats[-1], f"second {FILE if files else ''}".strip())]
    report = Report()
    async with Forker() as forker:
        whole = Scene(forker, new, folder / "whole", said)
        report.add(await whole.run([]))
        slots = asyncio.Semaphore(AT_ONCE)

        async def killed(number: int, when: str) -> Report:
            async with slots:
                scene = Scene(forker, new, folder / f"{when}-{number}", said)
                return await scene.run([(number, when)])

        places = [(number, when) for number in range(1, whole.commits + 1) for when in ("before", "after")]
        for one in await asyncio.gather(*(killed(*place) for place in places[::step])):
            report.add(one)
    return report


async def storm(new: NewNetwork, folder: Path, *, chats: Sequence[str], each: int, kills: int, seed: int = 0) -> Report:
    """Send many messages in many chats, while the process is killed repeatedly at random writes."""
    chance = random.Random(seed)
    said = [(chat, f"message {number} {LONG if chance.random() < 0.1 else ''}".strip())
            for number in range(each) for chat in chats]  # fmt: skip
    share = max(2 * len(said) // max(kills, 1), 4)
    async with Forker() as forker:
        dies = [(chance.randrange(2, share), chance.choice(("before", "after"))) for _ in range(kills)]
        return await Scene(forker, new, folder / "storm", said, paced=True).run(dies)


async def take_over(
    new: NewNetwork, folder: Path, *, chats: Sequence[str] = ("1", "2"), forker: Forker | None = None
) -> Report:
    """Run two workers of one account: kill the one that polls, and check that the other takes over."""
    if forker is None:
        async with Forker() as forker:
            return await take_over(new, folder, chats=chats, forker=forker)
    said = [(chats[0], "first"), (chats[-1], "second")]
    return await Scene(forker, new, folder, said).run_two()


# ------------------------------------------------------------------------------------------------------- one scene


class Scene:
    """A network, a store, and a process that is killed at some writes."""

    def __init__(
        self,
        forker: Forker,
        new: NewNetwork,
        folder: Path,
        said: Sequence[tuple[str, str]],
        patience: float = PATIENCE,
        *,
        paced: bool = False,
    ) -> None:
        """With `paced`, messages are held back until a process runs, if the network would lose them otherwise."""
        self._paced = paced
        self._shares: list[asyncio.Event] = []  # batches of messages: each is posted when its event is set
        self._patience = patience + len(said) / 5
        self._forker = forker
        self._new = new
        self._folder = folder
        self._said = [(chat, f"{folder.name} {text}") for chat, text in said]
        self.commits = 0
        self._may_lose = False  # a process was killed, and the network has no ids to tell what it had received
        self._settled = 0.0  # when no further message can be expected

    async def run(self, dies: Sequence[tuple[int, str]]) -> Report:
        """Post the messages and kill the process at each of these writes in turn; then let it finish."""
        await asyncio.to_thread(self._folder.mkdir, parents=True)
        report = Report(len(self._said))
        async with self._new() as network:
            if self._paced and not make_can(network.settings).ids:
                self._shares = [asyncio.Event() for _ in range(len(dies) + 1)]
                dies = [(2 + number % 20, when) for number, when in dies]  # early, while its batch arrives
            talk = asyncio.create_task(self._talk(network))
            try:
                for number, die_at in enumerate(dies):
                    started_at = time.time()
                    child = await self._start(network, die_at)
                    await self._say_share(number, child, started_at)
                    if await self._until(child, talk):  # everything was done before the write was reached
                        await child.stop()
                    elif child.status == -signal.SIGKILL:
                        report.kills += 1
                        self._may_lose = not make_can(network.settings).ids
                        await network.disturb()
                    else:
                        raise AssertionError(f"{self._folder.name}: the process ended with {child.status}")
                started_at = time.time()
                child = await self._start(network, None)
                await self._say_share(-1, child, started_at)
                self._settled = time.monotonic() + SETTLE_SECONDS
                if not await self._until(child, talk):
                    raise AssertionError(f"{self._folder.name}: the process ended with {child.status}")
                await child.stop()
                await self._settle(network, report)
                self.commits = await asyncio.to_thread(child.read_commits)
            finally:
                talk.cancel()
                await asyncio.gather(talk, return_exceptions=True)
        return report

    async def run_two(self) -> Report:
        """Start two processes, and kill the one that polls between two messages."""
        await asyncio.to_thread(self._folder.mkdir, parents=True)
        report = Report(len(self._said))
        everything = self._said
        async with self._new() as network:
            polling = await self._start(network, None)
            if not await self._holds(polling):
                raise AssertionError(f"{self._folder.name}: the process does not poll")
            waiting = await self._start(network, None)
            try:
                for number, (chat, text) in enumerate(everything, 1):
                    self._said = everything[:number]
                    talk = asyncio.create_task(network.say(chat, text))
                    if not await self._until(waiting, talk):
                        raise AssertionError(f"{self._folder.name}: the process ended with {waiting.status}")
                    if number == 1 and await asyncio.to_thread(self._holder) != polling.pid:
                        report.problems.append(f"{self._folder.name}: the second process polls beside the first")
                    if number == 1:
                        killed_at = time.time()
                        polling.kill()
                        report.kills += 1
                        if not make_can(network.settings).ids:  # a message posted to a dead process is lost
                            await self._connects(waiting, killed_at)
                if await asyncio.to_thread(self._holder) != waiting.pid:
                    report.problems.append(f"{self._folder.name}: the second process has not taken over")
                await self._settle(network, report)
            finally:
                polling.kill()
                await waiting.stop()
        return report

    async def _say_share(self, number: int, child: Child, since: float) -> None:
        """Post the batch of messages for this process."""
        if self._shares:
            await self._connects(child, since)
            self._shares[number].set()

    async def _holds(self, child: Child) -> bool:
        """Wait until a process polls; return False if it ends before that."""
        return await self._until_true(child, lambda: self._holder() == child.pid)

    async def _connects(self, child: Child, since: float) -> bool:
        """Wait until a process connects to the network after this time; return False if it ends before that."""
        return await self._until_true(child, lambda: self._holder() == child.pid and self._works_since() > since)

    async def _until_true(self, child: Child, check: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline and not child.ended.is_set():
            if await asyncio.to_thread(check):
                return True
            await asyncio.sleep(0.02)
        return False

    def _works_since(self) -> float:
        """Return when the channel reported that it works; 0 if it has not."""
        with closing(sqlite3.connect(self._folder / "store.db")) as db, contextlib.suppress(sqlite3.OperationalError):
            for (value,) in db.execute("SELECT value FROM channel_state WHERE key = ?", (STATUS,)):
                status = json.loads(value)
                return 0.0 if status.get("error") else float(status["at"])
        return 0.0

    def _holder(self) -> int:
        """Return the process that holds the lease; 0 if there is none."""
        with closing(sqlite3.connect(self._folder / "store.db")) as db, contextlib.suppress(sqlite3.OperationalError):
            found = db.execute("SELECT worker FROM channel_lease WHERE name LIKE 'channel:%'").fetchall()
            return int(found[0][0].split(".")[2]) if found else 0
        return 0

    async def _start(self, network: Network, die_at: tuple[int, str] | None) -> Child:
        child = await asyncio.to_thread(self._forker.start, network.settings, self._folder, die_at)
        return child

    async def _talk(self, network: Network) -> None:
        async with asyncio.TaskGroup() as tasks:
            for chat in dict.fromkeys(chat for chat, _ in self._said):
                tasks.create_task(self._talk_in(network, chat))

    async def _talk_in(self, network: Network, chat: str) -> None:
        for number, (where, text) in enumerate(self._said):
            if where == chat:
                if self._shares:
                    await self._shares[number * len(self._shares) // len(self._said)].wait()
                await network.say(chat, text)

    async def _until(self, child: Child, talk: asyncio.Task[None]) -> bool:
        """Wait until every message is posted and answered, or the process has ended.

        Return whether everything is done.
        """
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            if child.ended.is_set():
                return False
            if talk.done():
                talk.result()
                if await asyncio.to_thread(self._is_quiet):
                    return True
            await asyncio.sleep(0.02)
        inbox, outbox = await asyncio.to_thread(self._state)
        open_rows = [message for message, state in inbox if state != "done"]
        raise AssertionError(
            f"{self._folder.name}: not done within {self._patience:g} s: {len(inbox)} of {len(self._said)} messages "
            f"were accepted, {len(open_rows)} are not answered ({open_rows[:3]}), {len(outbox)} not sent ({outbox[:3]})"
        )

    def _is_quiet(self) -> bool:
        inbox, outbox = self._state()
        is_complete = len(inbox) >= len(self._said) or (self._may_lose and time.monotonic() > self._settled)
        return is_complete and all(state == "done" for _, state in inbox) and not outbox

    def _state(self) -> tuple[list[tuple[dict[str, Any], str]], list[str]]:
        """Return the inbox messages with their states, and the contents of the outbox."""
        path = self._folder / "store.db"
        if not path.exists():
            return [], []
        with closing(sqlite3.connect(path)) as db, contextlib.suppress(sqlite3.OperationalError):
            rows = db.execute("SELECT data, state FROM inbox ORDER BY id").fetchall()
            unsent = [data for (data,) in db.execute("SELECT data FROM outbox WHERE sent_at IS NULL")]
            return [(json.loads(data), state) for data, state in rows], unsent
        return [], []

    async def _settle(self, network: Network, report: Report) -> None:
        """Check what people have received; the network may lag a moment behind."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            checked = Report()
            await asyncio.to_thread(self._check, network, checked)
            if not checked.problems or time.monotonic() > deadline:
                report.add(checked)
                return
            await asyncio.sleep(0.05)

    def _check(self, network: Network, report: Report) -> None:
        can = make_can(network.settings)
        inbox, _ = self._state()
        messages = [(chat_of(message["chat_id"], can.threads)[0], message["content"]) for message, _ in inbox]
        times = Counter(messages)
        id_of: Callable[[str], str] = getattr(network, "id_of", str)
        for chat, text in self._said:
            if (count := times[id_of(chat), text]) != 1 and not (count == 0 and self._may_lose):
                report.problems.append(f"{self._folder.name}: {text!r} in {chat} was accepted {count} times")
        for chat in dict.fromkeys(chat for chat, _ in self._said):
            taken = [text for where, text in messages if where == id_of(chat)]
            wanted = [part for text in taken for part in parts_of(text, can)]
            self._check_chat(chat, wanted, network.heard(chat), can, report)

    def _check_chat(self, chat: str, wanted: list[str], heard: list[str], can: Can, report: Report) -> None:
        seen: list[str] = []
        for text in heard:
            marked = text.startswith(MARK)
            plain = text.removeprefix(MARK).strip()
            if plain not in seen:
                seen.append(plain)
            elif marked and can.repeats != "key":
                report.marked += 1
            else:
                report.problems.append(f"{self._folder.name}: {plain[:60]!r} was sent to {chat} twice without a mark")
        if seen != wanted:
            lost = [text[:40] for text in wanted if text not in seen]
            what = f"lost {lost}" if lost else f"in another order: {[text[:40] for text in seen]}"
            report.problems.append(f"{self._folder.name}: to {chat}: {what}")


def answer_to(text: str, can: Can) -> str:
    """Return the answer of the kit's agent."""
    if LONG not in text.split():
        return f"re: {text}"
    size = max(can.text // 2, 8)
    words = [f"{text} {letter}{'x' * max(size - len(text) - 3, 1)}" for letter in "abc"]
    return "\n\n".join(words)


def parts_of(text: str, can: Can) -> list[str]:
    """Return the parts of that answer as people see them."""
    answer = answer_to(text, can)
    parts = [render(piece.text, can.form).strip() for piece in split(answer, can)]
    if FILE not in text.split():
        return parts
    note = f"file: {text}"
    if can.attaches:
        return [note, *parts]
    return [note, *(shown_file(name) if can.media else refusal(name) for name in FILES), *parts]


def shown_file(name: str, caption: str = "") -> str:
    """Return the text that `Network.heard` must return for a file, with its caption, which marks a repeat."""
    return f"{caption} [file {name}]".strip()


def make_can(settings: dict[str, Any]) -> Can:
    return make_channel(config_of(settings))[0].can


def config_of(settings: dict[str, Any]) -> ChannelConfig:
    """Build the settings of a channel from the keys of its table."""
    known = {one.name for one in fields(ChannelConfig)} - {"options"}
    own: dict[str, Any]
    own = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items() if key in known}
    own.setdefault("per_minute", 0)
    return ChannelConfig(**own, options={key: value for key, value in settings.items() if key not in known})


# ------------------------------------------------------------------------------------------------------- processes


class Answerer(LLMProvider):
    """Answers every message at once."""

    default_model = "kit"

    def __init__(self, can: Can) -> None:
        self._can = can

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        said = next(message["content"] for message in reversed(messages) if message["role"] == "user")
        text = (said if isinstance(said, str) else said[0]["text"]).partition("\n")[0]
        if FILE in text.split() and messages[-1]["role"] == "user":
            arguments = {"content": f"file: {text}", "media": list(FILES)}
            return LLMResponse(None, [ToolCallRequest("call-1", "message", arguments)])
        return LLMResponse(answer_to(text, self._can))


async def _work(settings: dict[str, Any], folder: Path, die_at: tuple[int, str] | None) -> None:
    """Run the channel with an agent until SIGTERM, or until it is killed at a write."""
    config = config_of(settings)
    store = SQLiteStore(folder / "store.db")
    count = 0

    def hook(what: str) -> None:
        nonlocal count
        count += what == "before"
        if die_at is not None and [count, what] == list(die_at):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    store.writer.commit_hooks.add(hook)
    channel, options = await asyncio.to_thread(make_channel, config, store)
    home = Config(home=folder / "home", workspace=folder, sandbox="off", channels=(config,))
    owners = Owners(home, store, Answerer(channel.can), agent_of)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    runner = ChannelRunner(store, [(config, channel, options)], outgoing=OutgoingFiles(home.home))
    tasks: list[Coroutine[Any, Any, None]] = [owners.run(), runner.run()]
    running = [asyncio.create_task(task) for task in tasks]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    waiting = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({waiting, *running}, return_when=asyncio.FIRST_COMPLETED)
    (folder / "commits").write_text(str(count))
    for task in done - {waiting}:
        task.result()
    os._exit(0)


class Child:
    """A process of the kit."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._folder = folder
        self.ended = threading.Event()
        self.status = 0

    def read_commits(self) -> int:
        """Return its number of commits; 0 if it was stopped before it started."""
        path = self._folder / "commits"
        return int(path.read_text()) if path.exists() else 0

    async def stop(self) -> None:
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        if not await asyncio.to_thread(self.ended.wait, PATIENCE):
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"{self._folder.name}: the process did not end")

    def kill(self) -> None:
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Forker:
    """A warm process that forks the others: importing takes half a second, forking a few milliseconds."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._started: dict[str, Child] = {}
        self._news = threading.Condition()

    async def __aenter__(self) -> Forker:
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._close)

    def _open(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "everloop.testing.channels"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(30)
        self._process.stdout.close()

    def start(self, settings: dict[str, Any], folder: Path, die_at: tuple[int, str] | None) -> Child:
        name = os.urandom(8).hex()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, settings, str(folder), die_at]) + "\n")
        with self._news:
            if not self._news.wait_for(lambda: name in self._started, PATIENCE):
                raise AssertionError("the kit's process does not fork")
            return self._started.pop(name)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, what, value = json.loads(line)
            with self._news:
                if what == "pid":
                    folder = Path(name[1])
                    self._started[name[0]] = self._children[value] = Child(value, folder)
                    self._news.notify_all()
                else:
                    child = self._children[what]
                    child.status = value
                    child.ended.set()


def main() -> None:
    """Fork processes on request from standard input, and report pids and exit statuses on standard output."""
    # What a process has written survives its death, whether or not it is on disk yet.
    SYNCHRONOUS.update(dict.fromkeys(SYNCHRONOUS, "OFF"))

    def tell(*news: Any) -> None:
        os.write(1, json.dumps(news).encode() + b"\n")

    children: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(children, tell))
    while line := _read_line():
        name, settings, folder, die_at = json.loads(line)
        with contextlib.suppress(Exception):  # the child reports the error
            make_channel(config_of(settings))  # imports what the children need
        # The parent must know about the child before it is notified of its end.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if (pid := os.fork()) == 0:
            _become(settings, Path(folder), die_at)
        children.add(pid)
        tell([name, folder], "pid", pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return b""
        line += byte
    return line


def _reap(children: set[int], tell: Callable[..., None]) -> None:
    for pid in list(children):
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # a signal handler ran in between and has already reported this one
            continue
        if ended:
            children.discard(pid)
            tell(None, pid, os.waitstatus_to_exitcode(status))


def _become(settings: dict[str, Any], folder: Path, die_at: tuple[int, str] | None) -> None:
    """Run the child in the forked process."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        asyncio.run(_work(settings, folder, die_at))
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@asynccontextmanager
async def running(
    settings: dict[str, Any] | Sequence[dict[str, Any]],
    folder: Path,
    provider: LLMProvider | None = None,
    **more: Any,
) -> AsyncIterator[SQLiteStore]:
    """Run a channel, or several, with an agent in this process, for tests that kill nothing; `more` are fields of
    `Config`."""
    configs = [config_of(one) for one in ([settings] if isinstance(settings, dict) else settings)]
    made = [(one, *await asyncio.to_thread(make_channel, one)) for one in configs]
    store = SQLiteStore(folder / "store.db")
    home = Config(home=folder / "home", workspace=folder, sandbox="off", channels=tuple(configs), **more)
    owners = Owners(home, store, provider or Answerer(made[0][1].can), agent_of)
    outgoing = OutgoingFiles(home.home)
    hears = bool(home.transcription_model)
    runner = ChannelRunner(store, made, follower(owners), None, home.links, saver(owners), outgoing, hears)
    tasks = [asyncio.create_task(owners.run()), asyncio.create_task(runner.run())]
    try:
        yield store
    finally:
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await owners.close()


if __name__ == "__main__":
    main()
