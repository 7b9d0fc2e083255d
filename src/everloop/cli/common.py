"""What several commands need: settings, the workspace, the store, the agent, Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import ConfigError, EverloopError
from ..text import printable

if TYPE_CHECKING:
    from ..bus import MessageBus
    from ..runtime.agent import AgentLoop
    from ..store.base import Store, TurnInfo
    from .output import Paper

OWNER = "me"
FLAGS = ("workspace", "provider", "base_url", "model", "store", "host", "port", "metrics")
LONGEST_KEY = 200
EXAMPLE = "for example with Ollama: EVERLOOP_BASE_URL=http://127.0.0.1:11434/v1 EVERLOOP_MODEL=qwen3:8b"


def load_config(options: argparse.Namespace) -> Config:
    return Config.load({flag: getattr(options, flag, None) for flag in FLAGS})


def session_key(options: argparse.Namespace, default: str) -> str:
    """The session that was asked for."""
    return checked_key(getattr(options, "session", default), "--session")


def checked_key(key: str, where: str) -> str:
    if not key.strip() or not key.isprintable() or len(key) > LONGEST_KEY:
        raise ConfigError(f"{where} must be one line of text with at most {LONGEST_KEY} characters, like cli:work")
    return key


def chat_of(key: str) -> tuple[str, str]:
    """(channel, chat id) that a session's messages come from."""
    channel, colon, chat_id = key.partition(":")
    return (channel, chat_id) if colon and channel and chat_id else ("cli", key)


def prepare_workspace(folder: Path) -> None:
    """Make the workspace if it is missing; an error in one line if it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"workspace: {folder} is a file; name a folder with --workspace") from None
    except OSError as error:
        raise ConfigError(
            f"workspace: {folder} cannot be made ({error.strerror}); name another folder with --workspace"
        ) from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"workspace: {folder} cannot be written by this user; name another with --workspace")


def check_model(config: Config) -> None:
    """Refuse settings that name no model to ask, with an example that works."""
    if missing_model(config):
        what = "no model is set" if not config.model else "no model server is set"
        raise ConfigError(
            f"{what}: set EVERLOOP_BASE_URL and EVERLOOP_MODEL (and EVERLOOP_API_KEY if it needs one), {EXAMPLE}"
        )


def missing_model(config: Config) -> bool:
    """Whether the settings lack what is needed to ask a model at all."""
    return config.provider != "local" and (
        not config.model or not (config.provider or config.base_url or config.api_key)
    )


def make_agent(config: Config, bus: MessageBus | None = None, store: Store | None = None) -> AgentLoop:
    """The agent that the settings describe. All that a chat or a run needs is loaded after this."""
    from ..bus import MessageBus
    from ..providers.factory import make_provider
    from ..runtime.agent import AgentLoop

    agent = AgentLoop(
        bus or MessageBus(),
        make_provider(config),
        config.workspace,
        model=config.model,
        max_iterations=config.max_iterations,
        restrict_to_workspace=config.restrict_to_workspace,
        config=config,
        store=store,
    )
    gc.freeze()
    gc.enable()
    return agent


async def show_messages(bus: MessageBus, paper: Paper, watched: str = "") -> None:
    """Show what the agent says in between: with the tool `message`, or in a turn that nobody here began. The answers of
    the session that is watched are shown as they come."""
    while True:
        message = await bus.consume_outbound()
        if message.reply_to is not None and (message.channel, message.chat_id) == chat_of(watched):
            continue
        paper.line(f"✉ {message.content}" if message.channel == "cli" else f"✉ to {message.channel}: {message.content}")


async def show_undelivered(agent: AgentLoop, key: str, paper: Paper, shown: str | None = None) -> None:
    """Show what was said in this chat while nobody was there, but for an answer that was `shown` just now."""
    while rows := await agent.undelivered(*chat_of(key)):
        for message in (row.message for row in rows):
            if message.content != shown:
                repeated = " (perhaps once more)" if message.repeat else ""
                paper.line(f"✉ while you were away{repeated}: {message.content}")
        await paper.print()
        await agent.store.sent([row.id for row in rows])  # not before it is there to be read


@contextlib.contextmanager
def seen_ending(agent: AgentLoop, key: str) -> Iterator[set[str]]:
    """What the turns of a session say that come to their end here, or to a question, meanwhile: it is shown by then."""
    from .. import events

    said: set[str] = set()

    def see(event: events.Event) -> None:
        if isinstance(event, events.TurnEnded):
            said.add(event.text)
        elif isinstance(event, events.Asked):
            said.add(event.question)

    unwatch = agent.watch(key, see)
    try:
        yield said
    finally:
        unwatch()


def hush() -> None:
    """Keep the log of the rooms below off the screen: what a person must know, the command says itself."""
    import logging

    logging.getLogger("everloop").addHandler(logging.NullHandler())
    logging.getLogger("everloop").propagate = False

    class Tell(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(f"everloop: {printable(record.getMessage())}", file=sys.stderr)

    # A server that could not be used, a skill that is broken: things that only their owner can mend.
    for room in ("everloop.tools.mcp", "everloop.context", "everloop.runtime.compactor", "everloop.telemetry"):
        logging.getLogger(room).addHandler(Tell(logging.WARNING))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


@contextlib.asynccontextmanager
async def reading(config: Config) -> AsyncIterator[Store]:
    """The store, for commands that only make sense when there is one."""
    from ..store.opening import store_at

    if not config.store.exists():
        raise EverloopError(f"there is no store at {config.store} yet: it is made by the first turn; or name --store")
    store = store_at(config.store, config)
    try:
        yield store
    finally:
        await store.close()


async def left_behind(store: Store, key: str) -> str:
    """What to tell of other sessions that a crash left with work to do; "" if there are none."""
    others = [other for owner, other in await store.ready("") if (owner, other) != (OWNER, key)]
    if not others:
        return ""
    first = f"`everloop --session {shlex.quote(others[0])}` goes on with it"
    if len(others) == 1:
        return f"The session {others[0]} has a turn that was cut off: {first}."
    return f"{len(others)} other sessions have turns that were cut off: `everloop worker` finishes them all."


async def find_turn(store: Store, prefix: str, owner: str = OWNER) -> TurnInfo:
    """The one turn of an owner whose id begins so."""
    known = prefix and prefix.isascii() and prefix.isalnum()
    turns = await store.turns(owner, prefix=prefix, limit=6) if known else []
    if not turns:
        raise EverloopError(f'there is no turn "{prefix[:60]}": `everloop log` shows the turns of a session')
    exact = [turn for turn in turns if turn.id == prefix]
    if len(turns) > 1 and not exact:
        ids = ", ".join(turn.id for turn in turns[:5]) + (", …" if len(turns) > 5 else "")
        raise EverloopError(f'the turn "{prefix}" may be one of {ids}: write more of its id')
    return (exact or turns)[0]
