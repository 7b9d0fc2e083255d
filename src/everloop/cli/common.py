"""Shared by several commands: settings, the workspace, the store, the agent, Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..config import Config
from ..errors import ConfigError, EverloopError
from ..text import printable
from .folder import enter, with_own_store

if TYPE_CHECKING:
    import asyncio

    from ..bus import MessageBus
    from ..runtime.agent import AgentLoop
    from ..store.base import Store, TurnInfo
    from .output import Output

OWNER = "me"
LEAVE = ("/exit", "/quit", "exit", "quit")
LEAVE_HELP = "/exit  leave; a running turn is kept and continues at the next start"
FLAGS = ("workspace", "provider", "base_url", "model", "store", "host", "port", "metrics")
MAX_KEY = 200
EXAMPLE = "for example with Ollama: EVERLOOP_BASE_URL=http://127.0.0.1:11434/v1 EVERLOOP_MODEL=qwen3:8b"


def load_config(options: argparse.Namespace) -> Config:
    return Config.load({flag: getattr(options, flag, None) for flag in FLAGS})


def load_with_store(options: argparse.Namespace, *, claim: bool = False) -> Config:
    """Return the settings with the store of their workspace, for commands that look at its sessions.

    With `claim`, the command may create the store.
    """
    return with_own_store(load_config(options), person=at_terminal(sys.stderr), claim=claim)


def is_trusted(options: argparse.Namespace) -> bool:
    """Return whether the command line says that the workspace's files are trusted."""
    return getattr(options, "trust", False)


def session_key(options: argparse.Namespace, default: str) -> str:
    """Return the session key given with --session, or the default."""
    return checked_key(getattr(options, "session", default), "--session")


def checked_key(key: str, where: str) -> str:
    if not key.strip() or not key.isprintable() or len(key) > MAX_KEY:
        raise ConfigError(f"{where} must be one line of text with at most {MAX_KEY} characters, like cli:work")
    return key


def chat_of(key: str) -> tuple[str, str]:
    """Return the channel and chat id of a session's messages."""
    channel, colon, chat_id = key.partition(":")
    return (channel, chat_id) if colon and channel and chat_id else ("cli", key)


def prepare_workspace(folder: Path) -> None:
    """Create the workspace if it is missing; raise a ConfigError if it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"workspace: {folder} is a file; name a folder with --workspace") from None
    except OSError as error:
        raise ConfigError(
            f"workspace: {folder} cannot be created ({error.strerror}); name another folder with --workspace"
        ) from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"workspace: {folder} cannot be written by this user; name another with --workspace")


def open_workspace(config: Config, options: argparse.Namespace, *, person: bool = False) -> Config:
    """Return the settings for work in their workspace, which is created if it is missing.

    A `person` at the terminal is asked whether the folder is trusted. Settings without a model are an error.
    """
    check_model(config)
    prepare_workspace(config.workspace)
    return enter(config, person=person, trust=is_trusted(options))


def at_terminal(output: TextIO) -> bool:
    """Return whether a person can be asked: standard input and this output are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and output.isatty()


def check_model(config: Config) -> None:
    """Refuse settings without a model, with an example that works, and plugins that cannot be used."""
    if missing_model(config):
        what = "no model is set" if not config.model else "no model server is set"
        raise ConfigError(
            f"{what}: set EVERLOOP_BASE_URL and EVERLOOP_MODEL (and EVERLOOP_API_KEY if it needs one), {EXAMPLE}"
        )
    if config.plugin_tools:
        from ..tools.builtin import check_plugins

        check_plugins(config)


def missing_model(config: Config) -> bool:
    """Return whether the settings lack a model or a server for it. A provider plugin may need no model name."""
    if config.provider and not config.model and config.provider != "local":
        from ..providers.endpoints import ENDPOINTS

        if config.provider not in ENDPOINTS:
            return False
    return config.provider != "local" and (
        not config.model or not (config.provider or config.base_url or config.api_key)
    )


def is_local(config: Config) -> bool:
    """Return whether the settings mean the local model: by its name, or because they name nothing else."""
    if config.provider:
        return config.provider == "local"
    if config.base_url or config.api_key:
        return False
    if not config.model:
        return True
    from ..providers.local.catalogue import CATALOGUE
    from ..providers.local.weights import is_path

    return config.model in CATALOGUE or is_path(config.model)


def make_agent(config: Config, bus: MessageBus | None = None, store: Store | None = None) -> AgentLoop:
    """Return the agent that the settings describe. Everything a chat or a run needs is loaded by then."""
    from ..bus import MessageBus
    from ..providers.factory import make_provider
    from ..runtime.agent import AgentLoop

    agent = AgentLoop(bus or MessageBus(), make_provider(config), config.workspace, config=config, store=store)
    gc.freeze()
    gc.enable()
    return agent


async def show_messages(bus: MessageBus, output: Output, watched: str = "") -> None:
    """Show messages that answer no prompt: those of the tool `message`, and answers of turns that another client began.

    Answers of the `watched` session are skipped, since they are streamed.
    """
    while True:
        message = await bus.consume_outbound()
        if message.reply_to is not None and (message.channel, message.chat_id) == chat_of(watched):
            continue
        output.line(
            f"✉ {message.content}" if message.channel == "cli" else f"✉ to {message.channel}: {message.content}"
        )


async def show_undelivered(agent: AgentLoop, key: str, output: Output, shown: str | None = None) -> None:
    """Show messages that arrived in this chat while no client was connected, except an answer just `shown`."""
    while rows := await agent.undelivered(*chat_of(key)):
        for message in (row.message for row in rows):
            if message.content != shown:
                repeated = " (possibly a repeat)" if message.repeat else ""
                output.line(f"✉ while you were away{repeated}: {message.content}")
        await output.print()
        await agent.store.sent([row.id for row in rows])  # only once it is on the screen


@contextlib.contextmanager
def seen_ending(agent: AgentLoop, key: str) -> Iterator[set[str]]:
    """Collect the answers and questions of turns that end or park in the body: they are already on the screen."""
    from .. import events
    from ..commands import with_how_to_answer

    said: set[str] = set()

    def see(event: events.Event) -> None:
        if isinstance(event, events.TurnEnded):
            said.add(event.text)
        elif isinstance(event, events.Asked):
            said.add(with_how_to_answer(event.question))

    unwatch = agent.watch(key, see)
    try:
        yield said
    finally:
        unwatch()


def with_leaving(line: str, text: str) -> str:
    """Return the answer to a command; that to /help also names the one that only works in the terminal."""
    from ..commands import command_of

    return f"{text}\n{LEAVE_HELP}" if command_of(line) == "help" else text


def hush() -> None:
    """Keep log records of the library off the screen; the command itself reports what the user must know."""
    import logging

    logging.getLogger("everloop").addHandler(logging.NullHandler())
    logging.getLogger("everloop").propagate = False

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(f"everloop: {printable(record.getMessage())}", file=sys.stderr)

    # A server that cannot be used, a broken skill: problems that only the user can fix.
    for room in (
        "everloop.tools.mcp",
        "everloop.context.prompt",
        "everloop.runtime.compactor",
        "everloop.observability",
    ):
        logging.getLogger(room).addHandler(Tell(logging.WARNING))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


@contextlib.asynccontextmanager
async def opened_store(config: Config) -> AsyncIterator[Store]:
    """Open the store of the settings; it is created if it is missing."""
    from ..store.location import store_at

    store = store_at(config.store, config)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def reading(config: Config) -> AsyncIterator[Store]:
    """Open the store, for commands that need an existing one."""
    if not config.store.exists():
        raise EverloopError(
            f"there is no store at {config.store} yet: the first turn creates it; or name another with --store"
        )
    async with opened_store(config) as store:
        yield store


async def prune_requests(store: Store, config: Config) -> None:
    """Delete old requests periodically, until cancelled."""
    import logging

    from ..store.deletion import prune

    try:
        await prune(store, config.keep_requests_seconds, partial(forget_outputs, config.home))
    except Exception as error:
        logging.getLogger(__name__).error("old requests were not pruned: %s", error)


async def unless(hurry: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await the work until it ends or `hurry` is set."""
    import asyncio
    import logging

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception):
            logging.getLogger(__name__).warning("%s", error)


async def forget_outputs(home: Path, sessions: Iterable[tuple[str, str]]) -> None:
    """Remove the long results that were saved in files for these sessions, which are (owner, key)."""
    import shutil

    from ..threads import in_thread
    from ..tools.registry import outputs_folder

    for owner, key in sessions:
        await in_thread(partial(shutil.rmtree, outputs_folder(home, owner, key), ignore_errors=True))


async def left_behind(store: Store, key: str) -> str:
    """Return a hint about other sessions that a crash left with unfinished turns; "" if there are none."""
    from ..bus import EXECUTOR

    waiting = [place for place in await store.ready("") if place != (OWNER, key)]
    others = [other for _, other in waiting if not other.startswith(f"{EXECUTOR}:")]  # `run --agent` resumes those
    if not others:
        return ""
    first = f"`everloop --session {shlex.quote(others[0])}` continues it"
    if len(others) == 1:
        return f"The session {others[0]} has an interrupted turn: {first}."
    return f"{len(others)} other sessions have interrupted turns: `everloop worker` finishes them all."


async def find_turn(store: Store, prefix: str, owner: str = OWNER) -> TurnInfo:
    """Return the only turn of an owner whose id starts with the prefix."""
    known = prefix and prefix.isascii() and prefix.isalnum()
    turns = await store.turns(owner, prefix=prefix, limit=6) if known else []
    if not turns:
        raise EverloopError(f'there is no turn "{prefix[:60]}": `everloop log` shows the turns of a session')
    exact = [turn for turn in turns if turn.id == prefix]
    if len(turns) > 1 and not exact:
        ids = ", ".join(turn.id for turn in turns[:5]) + (", …" if len(turns) > 5 else "")
        raise EverloopError(f'the turn "{prefix}" may be one of {ids}: write more of its id')
    return (exact or turns)[0]


class CtrlC:
    """The first Ctrl-C stops the turn that is running or about to start; the second leaves immediately."""

    def __init__(self, agent: AgentLoop, key: str, leave: Callable[[], object]) -> None:
        import asyncio
        import signal

        self.pressed = False
        self._waiting: asyncio.Future[Any] | None = None  # for input, while no turn runs
        self._agent = agent
        self._key = key
        self._leave = leave
        self._tasks: set[asyncio.Task[str]] = set()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._press)

    def stop(self) -> None:
        """Stop the running turn; its log is closed."""
        import asyncio

        task = asyncio.create_task(self._agent.process_direct("/stop", self._key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.contextmanager
    def idle(self, waiting: asyncio.Future[Any]) -> Iterator[None]:
        """Cancel this wait for input instead, while no turn runs."""
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None

    def _press(self) -> None:
        if self.pressed:
            self._leave()
        self.pressed = True
        if self._waiting is not None:
            self._waiting.cancel()
        else:
            self.stop()
