"""`everloop sessions` lists the sessions, shows, renames, exports or deletes one, or adopts those of a vanished folder;
`everloop fork` creates a session from the first entries of another.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys

from msgspec.structs import asdict

from ..config import Config
from ..errors import EverloopError
from ..log import Logged
from ..store.base import Busy, Removed, SessionInfo, Store
from ..text import counted, one_line, printable
from ..threads import in_thread
from .common import OWNER, checked_key, forget_outputs, load_config, load_with_store, reading
from .folder import adopt
from .output import as_json, table
from .session_list import TITLE, Listed, adopt_titles, age, first_words, list_sessions, money

MAX_SEARCHED = 1000  # sessions that are searched by title


def command(options: argparse.Namespace) -> int:
    if options.adopt is not None:
        adopt(load_config(options), options.adopt)
    config = load_with_store(options)
    match options.action:
        case "show":
            _show(asyncio.run(find_session(config, options.key)))
        case "rename":
            session, title = asyncio.run(_rename(config, options.key, one_line(options.title, TITLE)))
            print(f"{printable(session.info.key)} is now {title!r}" if title else "The title is removed.")
        case "export":
            _export(config, options)
        case "delete":
            return _delete(config, options)
        case _:
            return _list(config, options)
    return 0


def _list(config: Config, options: argparse.Namespace) -> int:
    found = asyncio.run(_read(config, options.n)) if config.store.exists() else []
    if options.json:
        for one in found:
            print(as_json(_facts(one, config)))
    elif found:
        print(_table(found, config))
    else:
        print("everloop: no sessions yet: `everloop` starts one", file=sys.stderr)
    return 0


async def _read(config: Config, limit: int) -> list[Listed]:
    async with reading(config) as store:
        return await list_sessions(store, config, OWNER, limit)


def _facts(one: Listed, config: Config) -> dict[str, object]:
    facts: dict[str, object] = {**asdict(one.info), "title": one.title}
    if one.totals is not None:
        facts["turns"] = one.totals.turns
        facts |= {
            ours: one.totals.count(name)
            for ours, name in (
                ("input_tokens", "prompt_tokens"),
                ("cached_tokens", "cached_tokens"),
                ("output_tokens", "completion_tokens"),
            )
        }
        facts["cost"] = one.totals.cost(config)
    return facts


def _table(found: list[Listed], config: Config) -> str:
    rows = [("session", "title", "turns", "cost", "updated", "")]
    for one in found:
        open_turn = "waits for you" if one.info.parked else "interrupted or running" if one.info.open_turn else ""
        turns, cost = ("", "") if one.totals is None else (str(one.totals.turns), money(one.totals.cost(config)))
        rows.append((printable(one.info.key), one.title, turns, cost, age(one.info.updated_at), open_turn))
    return table(rows)


async def find_session(config: Config, wanted: str) -> tuple[Listed, list[Logged]]:
    """Return the session with this key, or the only one whose title has these words; with its log."""
    async with reading(config) as store:
        await adopt_titles(store, config)
        info = await store.session(OWNER, wanted)
        if info is not None:
            entries = await store.read_log(info.id)
            return Listed(info, info.title or first_words(entries), None), entries
        listed = await list_sessions(store, config, OWNER, MAX_SEARCHED)
        fitting = [one for one in listed if wanted.lower() in one.title.lower()]
        if len(fitting) != 1:
            what = "no session" if not fitting else f"more than one session ({len(fitting)})"
            hint = "`everloop sessions` lists them"
            raise EverloopError(f'{what} has the key or title "{one_line(wanted, 60)}": {hint}')
        return fitting[0], await store.read_log(fitting[0].info.id)


async def _rename(config: Config, wanted: str, title: str) -> tuple[Listed, str]:
    session, _ = await find_session(config, wanted)
    async with reading(config) as store:
        await store.set_title(OWNER, session.info.key, title)
    return session, title


def _delete(config: Config, options: argparse.Namespace) -> int:
    session, entries = asyncio.run(find_session(config, options.key))
    key = printable(session.info.key)
    what = f"{key} “{session.title}”" if session.title else key
    if not options.yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise EverloopError(f"{what} would be deleted for good: pass --yes")
        question = f"Delete {what} with {counted(len(entries), 'entry', 'entries')}? It cannot be undone. [y/N] "
        if input(question).strip().lower() not in ("y", "yes"):
            print("Nothing is deleted.")
            return 1
    removed = asyncio.run(_remove(config, session.info.key))
    kept = asyncio.run(_jobs_of(config, session.info.key))
    parts = [
        counted(removed.turns, "turn"),
        counted(removed.entries, "entry of the log", "entries of the log"),
        counted(removed.messages, "message"),
    ]
    if len(removed.keys) > 1:
        parts.append(counted(len(removed.keys) - 1, "session of sub-agents", "sessions of sub-agents"))
    print(f"Deleted {what}: {', '.join(parts)}.")
    if kept:
        print(f"{counted(kept, 'scheduled job')} will write to it again: `everloop cron list` shows the jobs.")
    return 0


async def _remove(config: Config, key: str) -> Removed:
    from .turn_changes import SavedTurns

    async with reading(config) as store:
        try:
            removed = await store.delete_session(OWNER, key)
        except Busy:
            raise EverloopError(
                f"{printable(key)} is running: stop its turn with /stop, or wait until it ends, and try again"
            ) from None
    if removed is None:
        raise EverloopError(f"{printable(key)} is already gone")
    await forget_outputs(config.home, [(OWNER, one) for one in removed.keys])
    await in_thread(SavedTurns(config.home, config.workspace, key).forget)
    return removed


async def _jobs_of(config: Config, key: str) -> int:
    """Return how many scheduled jobs write to a session."""
    from ..cron.service import CronService

    async with reading(config) as store:
        jobs = await CronService(store, owner=OWNER).list()
        return sum(job.session_key == key for job in jobs)


def _show(found: tuple[Listed, list[Logged]]) -> None:
    from .format import described

    session, entries = found
    print(f"{session.title or '(untitled)'} · {printable(session.info.key)} · {age(session.info.updated_at)}\n")
    for one in entries:
        print(printable(described(one.entry)))


def _export(config: Config, options: argparse.Namespace) -> None:
    from ..config.redaction import Secrets
    from .export import exported

    session, entries = asyncio.run(find_session(config, options.key))
    text = exported(entries, session.title or session.info.key, options.format, Secrets(config).redact)
    if options.output is None:
        sys.stdout.write(text)
        return
    with open(options.output, "x", encoding="utf-8") as file:
        file.write(text)


# ---------------------------------------------------------------------------------------------- fork


def fork(options: argparse.Namespace) -> int:
    source = checked_key(options.source, "SESSION[@N]")
    new_key = checked_key(options.new_key, "--as") if options.new_key is not None else None
    made = asyncio.run(_fork(load_with_store(options), source, new_key))
    print(made.key)
    under_way = " and finishes the open turn" if made.open_turn else ""
    given = ((name, getattr(options, name, None)) for name in ("workspace", "store"))
    flags = "".join(f"--{name} {shlex.quote(value)} " for name, value in given if value)
    go_on = f"everloop {flags}--session {shlex.quote(made.key)}"
    print(f"It has {counted(made.entries, 'entry', 'entries')}. `{go_on}` continues from there{under_way}.")
    return 0


async def _fork(config: Config, source: str, new_key: str | None) -> SessionInfo:
    async with reading(config) as store:
        key, until = await _split(store, source)
        return await store.fork(OWNER, key, until, new_key or await _free_key(store, key))


async def _split(store: Store, source: str) -> tuple[str, int | None]:
    """Split SESSION@N. A key may contain an @ itself."""
    key, at, number = source.rpartition("@")
    if at and number.isascii() and number.isdecimal() and await store.session(OWNER, key) is not None:
        if not 0 < len(number.lstrip("0")) < 18:
            raise EverloopError(f'the session "{key}" has no entry {number[:20]}: `everloop log` shows their numbers')
        return key, int(number)
    if await store.session(OWNER, source) is not None:
        return source, None
    if at and await store.session(OWNER, key) is not None:
        raise EverloopError(f'"{number}" is not an entry of "{key}": N is a number that `everloop log` shows')
    missing = key if at and number.isdecimal() else source
    raise EverloopError(f'there is no session "{missing}": `everloop sessions` lists them')


async def _free_key(store: Store, key: str) -> str:
    name, number = f"{key}-fork", 1
    while await store.session(OWNER, name) is not None:
        number += 1
        name = f"{key}-fork{number}"
    return name
