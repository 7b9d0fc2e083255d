"""`everloop doctor`: what is used, what is missing, and the command that fixes it."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from .._version import __version__
from ..config import Config
from ..config.sources import DSN
from ..errors import EverloopError
from ..text import printable
from .common import OWNER, is_local, load_with_store, reading
from .output import as_json, minute

if TYPE_CHECKING:
    from ..store.base import Store
    from ..store.overview import Lease, Overview, Unheld

REACH_SECONDS = 3.0
SECOND_LOOK_SECONDS = 2.0
_SHOWN = 3  # sessions that are named


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was checked, what was found, and the command or setting that fixes it."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def command(options: argparse.Namespace) -> int:
    if hasattr(options, "checked_model"):
        return _model_command(options)
    checks, work = asyncio.run(_look(load_with_store(options)))
    well = all(check.ok for check in checks)
    if options.json:
        told = {"ok": well, "checks": [{**asdict(check), "fix": _fix(check)} for check in checks]}
        if work is not None:
            told["work"] = {**to_builtins(work), "stuck": to_builtins(work.stuck_sessions())}
        print(as_json(told))
        return 0 if well else 1
    wide = max(len(check.name) for check in checks)
    for check in checks:
        print(_line(check, wide))
    from .completion import HOW

    shell = os.path.basename(os.environ.get("SHELL", ""))
    print(f"Tab completion of commands: {HOW.get(shell, HOW['bash'])}")
    return 0 if well else 1


def _model_command(options: argparse.Namespace) -> int:
    """Ask the model of the settings, or the named one."""
    from .common import check_model, load_config
    from .model_checks import NEEDED
    from .setup import with_model

    if options.checked_model:
        options.model = options.checked_model
    config = with_model(load_config(options))
    check_model(config)
    checks = asyncio.run(_examined(config, quiet=options.json))
    passed = sum(check.ok for check in checks)
    usable = all(check.ok for check in checks if check.name in NEEDED)
    if options.json:
        told = [{**asdict(check), "fix": _fix(check)} for check in checks]
        print(as_json({"ok": usable, "model": config.model, "passed": passed, "checks": told}))
    else:
        verdict = "it can work as an agent" if usable else "it can hardly work as an agent"
        print(printable(f"{config.model}: {passed} of 10; {verdict}"))
    return 0 if usable else 1


async def _examined(config: Config, *, quiet: bool) -> list[Check]:
    from .model_checks import examine

    checks = []
    async for check in examine(config):
        checks.append(check)
        if not quiet:
            print(_line(check, 16), flush=True)
    return checks


def _line(check: Check, width: int) -> str:
    fix = f": {_fix(check)}" if _fix(check) else ""
    return printable(f"{'✓' if check.ok else '✗'} {check.name:<{width}}  {check.found}{fix}")


def _fix(check: Check) -> str:
    return "" if check.ok else check.fix


async def _look(config: Config) -> tuple[list[Check], Overview | None]:
    of_store, work = await _store(config)
    return [*await _installation(config), *of_store, *await _channels(config)], work


async def checks_of(config: Config, store: Store) -> list[Check]:
    """Return the checks for a server, with the store that it has open."""
    of_store = [_place(config), *await _replication(store), *_checks(await work_in(store))]
    return [*await _installation(config), *of_store]


async def _installation(config: Config) -> list[Check]:
    """Check everything but the store and the channels."""
    return [
        Check("everloop", True, f"{__version__}, Python {platform.python_version()}, home {config.home}"),
        *(await _model(config)),
        await asyncio.to_thread(_workspace, config.workspace),
        await asyncio.to_thread(_sandbox, config),
    ]


# ------------------------------------------------------------------------------------------------------ the model


async def _model(config: Config) -> list[Check]:
    if is_local(config):
        return await asyncio.to_thread(_local, config)
    from ..providers.factory import make_provider

    name = config.provider or "openai"
    try:
        await make_provider(config).close()
    except EverloopError as error:
        return [Check("provider", False, f"{name} cannot be used", str(error))]
    models = ", then ".join((config.model, *config.fallbacks))
    return [await _reached(name, config), Check("model", True, models)]


def _local(config: Config) -> list[Check]:
    from ..providers.base import ProviderError
    from ..providers.local.choice import default_model
    from ..providers.local.engine import WINDOW, installed
    from ..providers.local.machine import cores
    from ..providers.local.memory import check_memory, needs
    from ..providers.local.weights import Weights, megabytes

    there = installed()
    what = f"local, llama.cpp on {cores()} cores" if there else "local, but llama.cpp is not installed"
    found = [Check("provider", there, what, 'pip install "everloop[local]"')]
    name, window = config.model, config.window or WINDOW
    try:
        weights = Weights.of(config)
        name = name or default_model(weights).name
        path = weights.find(name)
        if path is None:
            return [*found, Check("model", False, weights.missing(name), f"everloop model pull {name}")]
        needed = megabytes(needs(path, window, config.slots).total)
        check_memory(path, window, config.slots)
        found.append(Check("model", True, f"{name}, {needed} of memory for {window} tokens, {path}"))
    except (EverloopError, ProviderError) as error:
        found.append(Check("model", False, f"{name} cannot be loaded", str(error)))
    except OSError as error:  # another user's folder, a missing disk
        why = f"{error.filename} cannot be read ({error.strerror})"
        found.append(Check("model", False, why, "set EVERLOOP_MODELS, or EVERLOOP_WEIGHTS, to a readable folder"))
    return found


async def _reached(name: str, config: Config) -> Check:
    """Check whether the provider can be reached. This only opens a connection; nothing is sent."""
    from ..providers.endpoints import ENDPOINTS, key_for
    from ..providers.http import origin_of, proxy_for

    known = ENDPOINTS.get(name)
    address = config.base_url or (known.base_url if known else "")
    if not address:
        return Check("provider", True, name)
    origin = origin_of(address)
    where = f"{name} at {origin}, {'with a' if config.api_key or key_for(address, os.environ) else 'without a'} key"
    if proxy_for(origin):
        return Check("provider", True, f"{where}, through a proxy")
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _, writer = await asyncio.open_connection(origin.host, origin.port)
        writer.transport.abort()
    except (OSError, TimeoutError) as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else "no answer"
        return Check("provider", False, f"{where} cannot be reached ({why})", "start it, or set EVERLOOP_BASE_URL")
    return Check("provider", True, where)


# ------------------------------------------------------------------------------------------------------ the machine


def _workspace(folder: Path) -> Check:
    if (missing := _missing("workspace", folder)) is not None:
        return missing
    if folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return Check("workspace", True, str(folder))
    return Check("workspace", False, f"{folder} cannot be used as a folder by this user", "set EVERLOOP_WORKSPACE")


def _missing(name: str, place: Path | DSN) -> Check | None:
    """Return whether something missing can be created by the first turn; None if it exists."""
    try:
        if isinstance(place, DSN) or place.exists():
            return None
        above = next(folder for folder in place.parents if folder.exists())
        usable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        why = "" if usable else f"{above} cannot be written by this user"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        return Check(name, False, f"{place} cannot be created ({why})", f"set EVERLOOP_{name.upper()}")
    return Check(name, True, f"the first turn creates {place}")


def _sandbox(config: Config) -> Check:
    from ..sandbox.launch import NoSandbox, choose_backend, guarantees

    if config.sandbox == "off" or not config.restrict_to_workspace:
        return Check("sandbox", True, "off: commands run with your rights, without a sandbox")
    try:
        backend = choose_backend(config.sandbox)
        return Check("sandbox", True, "; ".join([f"{backend} works here", *guarantees(backend)]))
    except NoSandbox as error:
        return Check("sandbox", False, " ".join(str(error).split()), "apt install bubblewrap")


# ------------------------------------------------------------------------------------------------------ the store


async def _store(config: Config) -> tuple[list[Check], Overview | None]:
    if (missing := await asyncio.to_thread(_missing, "store", config.store)) is not None:
        return [missing], None
    try:
        async with reading(config) as store:
            replicated = await _replication(store)
            work = await work_in(store)
    except EverloopError as error:
        return [Check("store", False, f"{config.store} cannot be read", str(error))], None
    return [_place(config), *replicated, *_checks(work)], work


def _place(config: Config) -> Check:
    pool = f", through the pooler {config.store_pool}" if config.store_pool and isinstance(config.store, DSN) else ""
    return Check("store", True, f"{config.store}{pool}")


async def _replication(store: Store) -> list[Check]:
    """Check the standbys of a PostgreSQL store; return nothing for a server without any."""
    seen = await store.standbys()
    if seen is None:
        return []
    if seen.waiting and seen.seconds > 1:
        wait = "1 write waits" if seen.waiting == 1 else f"{seen.waiting} writes wait"
        what = f"{wait} for a synchronous standby that does not confirm, the first for {_span(seen.seconds)}"
        return [Check("standbys", False, what, f"start it again; synchronous_standby_names is {seen.names!r}")]
    if not seen.standbys:
        missing = Check(
            "standbys", False, f"none is connected, and writes wait for {seen.names!r}", "start the standby"
        )
        return [missing] if seen.names else []
    if not seen.is_visible:
        hidden = f"{len(seen.standbys)} connected; this user may not see their state (GRANT pg_monitor)"
        return [Check("standbys", True, hidden)]
    named = [f"{one.name} ({one.sync}, {one.state}, {(one.behind or 0) / 1e6:.1f} MB behind)" for one in seen.standbys]
    safe = any(one.is_synchronous for one in seen.standbys)
    fix = "a failover to an asynchronous standby loses what it has not received: set synchronous_standby_names"
    return [Check("standbys", safe, ", ".join(named), fix)]


async def _channels(config: Config) -> list[Check]:
    """Check each channel's settings, its worker's status, and whether it has dead letters."""
    if not config.channels:
        return []
    from .channels import facts_of

    checks = []
    for facts in await facts_of(config):
        name = f"channel {facts['name']}"
        if facts["error"]:
            fix = f"see [channels.{facts['name']}] and `everloop channels test {facts['name']}`"
            checks.append(Check(name, False, facts["error"], fix))
        elif facts["dead"]:
            dead = f"{facts['dead']} could not be delivered"
            checks.append(Check(name, False, dead, f"everloop channels dead {facts['name']}"))
        else:
            process = facts["process"]
            run = f"run by process {process}" if process else "not running; `everloop serve` runs it"
            checks.append(Check(name, True, f"{facts['network']}, {run}"))
    return checks


async def work_in(store: Store) -> Overview:
    """Check the store's overview.

    Sessions that seem stuck while a worker is alive are checked twice, because the work of a worker that has just died
    is taken over within a moment.
    """
    work = await store.overview()
    if work.processes and work.stuck:
        await asyncio.sleep(SECOND_LOOK_SECONDS)
        work = await store.overview()
    return work


def _checks(work: Overview) -> list[Check]:
    silent = max((worker.silent for worker in work.workers), default=0.0)
    heard = f", one of them silent for {_span(silent)}" if work.processes and silent >= 1 else ""
    oldest = f", the oldest for {_span(work.waiting_seconds)}" if work.waiting else ""
    unsent = f", the oldest for {_span(work.unsent_seconds)}" if work.unsent else ""
    waiting = "1 message waits" if work.waiting == 1 else f"{work.waiting} messages wait"
    answers = "1 answer is" if work.unsent == 1 else f"{work.unsent} answers are"
    holders = {worker.id: worker.process for worker in work.workers}
    leases = [f"{_name(lease)} by process {holders[lease.worker]}" for lease in work.leases]
    stuck = [f"{_name(one)} for {_span(work.at - one.since)}" for one in work.stuck_sessions()]
    held = f"{work.held} held{_some(leases, work.held)}"
    found = f"{work.stuck} have work that no worker takes{_some(stuck, work.stuck)}"
    checks = [
        Check("workers", True, f"{work.processes} at work{heard}"),
        Check("leases", True, held),
        Check("queue", True, f"{waiting}{oldest}; {answers} not sent{unsent}"),
        Check("turns", True, f"{work.open_turns} open, {work.parked_turns} wait for an answer"),
        Check("sessions", not work.stuck, found if work.stuck else f"{work.sessions}, none stuck", "everloop worker"),
    ]
    if work.damaged:
        one = "1 row cannot" if work.damaged == 1 else f"{work.damaged} rows cannot"
        repair = "look at SELECT id, damaged, data FROM outbox WHERE damaged IS NOT NULL"
        checks.append(Check("outbox", False, f"{one} be decoded and will not be sent", repair))
    if work.damaged_incoming:
        one = "1 row cannot" if work.damaged_incoming == 1 else f"{work.damaged_incoming} rows cannot"
        repair = "look at SELECT id, damaged, data FROM inbox WHERE damaged IS NOT NULL"
        checks.append(Check("inbox", False, f"{one} be decoded and will not be answered", repair))
    if work.lost_at is not None:
        count = "1 commit was" if work.lost_commits == 1 else f"{work.lost_commits} commits were"
        lost = f"{count} missing when it was opened on {minute(work.lost_at)}"
        accept = "once you know what is missing, UPDATE commit_mark SET lost_at = NULL"
        checks.append(Check("losses", False, lost, accept))
    return checks


def _name(session: Lease | Unheld) -> str:
    return session.key if session.owner == OWNER else f"{session.key} of {session.owner}"


def _some(named: list[str], count: int) -> str:
    """Return the first few, in parentheses."""
    return f" ({', '.join(named[:_SHOWN])}{', …' if count > _SHOWN else ''})" if named else ""


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.0f} h"
