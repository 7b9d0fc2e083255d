"""`python -m evaluation`: runs a set of cases against a model, or makes the table of several runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from everloop.config import KEYS, Config, sources
from everloop.errors import ConfigError, EverloopError
from everloop.providers.base import LLMProvider
from everloop.providers.factory import make_provider
from everloop.providers.local.engine import Engine
from everloop.providers.local.provider import local_provider

from .ablation import HELPS, without
from .cases import SETS, Case, load
from .conversations import CONVERSATIONS, TurnOutcome, by_subject, load_conversations, run_conversation, told
from .recording import RecordedEngine, Recording
from .report import by_category, by_model, share
from .results import Label, Results, read
from .runner import Desk, Outcome, run_case

FROM_THE_PERSON = ("provider", "local")  # sections of the settings that count; all else is as for everybody
UNFINISHED = 3  # the exit status when the time was over before the cases
BROKEN = 3


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.report:
            print(by_model(read(options.report)), end="")
            return 0
        with without(*options.without):
            return asyncio.run((_converse if options.set in CONVERSATIONS else _evaluate)(options))
    except EverloopError as error:
        print(f"evaluation: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evaluation: stopped; with --json, the same command goes on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation", description=__doc__)
    parser.add_argument(
        "--set", choices=[*SETS, *CONVERSATIONS], default="development", help="which requests (development)"
    )
    parser.add_argument("--provider", help="as for everloop")
    parser.add_argument("--base-url", help="as for everloop")
    parser.add_argument("--model", help="as for everloop")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="any setting, repeatable")
    parser.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="only these, by name or category")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once (1)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one case (120)")
    parser.add_argument("--total", type=float, default=4 * 3600.0, help="seconds for all of them (14400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results here, and go on from what it has")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="local models: answer from this recording, and add what it lacks"
    )
    parser.add_argument(
        "--without",
        choices=sorted(HELPS),
        nargs="+",
        default=[],
        metavar="HELP",
        help="a small model without these helps",
    )
    parser.add_argument("--at-least", type=float, nargs=2, metavar=("RIGHT", "END"), help="percent, or the exit is 1")
    parser.add_argument("--verbose", action="store_true", help="tell of each case that fails what it did")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="only make the table of these results")
    return parser


# ---------------------------------------------------------------------------------------------- settings


def settings(options: argparse.Namespace) -> Config:
    """The person's settings of the provider with those of the command line over them; the rest is as shipped."""
    flags = {name: getattr(options, name) for name in ("provider", "base_url", "model")}
    loaded = Config.load(flags)
    kept = {key.attribute: getattr(loaded, key.attribute) for key in KEYS if key.section in FROM_THE_PERSON}
    given: dict[str, str] = {}
    known = {key.attribute: key for key in KEYS}
    for setting in options.setting:
        name, equals, value = setting.partition("=")
        if not equals or name not in known or known[name].secret:  # a secret would end up in the results
            raise ConfigError(f'--setting takes NAME=VALUE of a setting that is no secret, not "{name[:60]}"')
        on_off = {"on": "true", "off": "false"} if known[name].kind == "bool" else {}
        given[name] = on_off.get(value, value)
    over = sources.from_flags(given, [key._replace(flag=True) for key in KEYS])
    return Config(home=loaded.home, **{**kept, **over})


def chosen(cases: list[Case], wanted: list[str]) -> list[Case]:
    """The cases of these names and categories; all where none is named."""
    known = {case.name for case in cases} | {case.category for case in cases}
    if unknown := [name for name in wanted if name not in known]:
        raise EverloopError(f"there is no case or category {', '.join(unknown)} in this set")
    return [case for case in cases if not wanted or {case.name, case.category} & set(wanted)]


@contextlib.contextmanager
def desks(home: Path, count: int) -> Iterator[list[Desk]]:
    """Places to work at that no other evaluation has, the same ones each time if they are free."""
    folder = home / "evaluation"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as held:
        found: list[Desk] = []
        number = 0
        while len(found) < count:
            number += 1
            lock = held.enter_context((folder / f"{number}.lock").open("w"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(Desk(folder / str(number)))
        yield found


# ---------------------------------------------------------------------------------------------- running


def _provider(config: Config, options: argparse.Namespace) -> LLMProvider:
    if options.record is None:
        return make_provider(config)
    if config.provider != "local":
        raise ConfigError("--record is for --provider local: only of a local model the prompts are known")
    recording = Recording(options.record)
    return local_provider(config, engine=lambda made: RecordedEngine(recording, Engine(made)))


async def _evaluate(options: argparse.Namespace) -> int:
    config = settings(options)
    cases = chosen(load(SETS[options.set]), options.cases)
    provider = _provider(config, options)
    label = Label(
        options.set, config.provider or "openai", config.model or provider.get_default_model(), tuple(options.setting)
    )
    results = Results(label, cases, options.json)
    try:
        with desks(config.home, max(1, options.jobs)) as places:
            await _run_all(cases, provider, config, places, results, options)
    finally:
        await provider.close()
    return _conclude(cases, results, options)


async def _converse(options: argparse.Namespace) -> int:
    """Take the conversations of a set, one after another: each turn depends on the ones before it."""
    config = settings(options)
    conversations = [
        one
        for one in load_conversations(CONVERSATIONS[options.set])
        if not options.cases or {one.name, one.about} & set(options.cases)
    ]
    if not conversations:
        raise EverloopError(f"there is no conversation {', '.join(options.cases)} in this set")
    provider = _provider(config, options)
    outcomes: list[TurnOutcome] = []
    until = time.monotonic() + options.total
    left = len(conversations)
    try:
        with desks(config.home, 1) as (desk,):
            for conversation in conversations:
                if time.monotonic() > until:
                    break
                found = await run_conversation(conversation, provider, config, desk, options.limit)
                outcomes += found
                left -= 1
                for outcome in found:
                    _record(outcome, options)
    finally:
        await provider.close()
    print(f"{config.model or provider.get_default_model()}, {options.set}\n\n{by_subject(outcomes)}", end="")
    if left:
        print(f"evaluation: the time is over, {left} conversations are left", file=sys.stderr)
        return UNFINISHED
    if options.at_least is None or not outcomes:
        return 0
    return 0 if 100 * sum(one.right for one in outcomes) / len(outcomes) >= options.at_least[1] else 1


def _record(outcome: TurnOutcome, options: argparse.Namespace) -> None:
    for line in told(outcome):
        if options.verbose or not line.startswith(" "):
            print(line, file=sys.stderr, flush=True)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"set": options.set, **asdict(outcome)}, ensure_ascii=False) + "\n")


async def _run_all(
    cases: list[Case],
    provider: LLMProvider,
    config: Config,
    places: list[Desk],
    results: Results,
    options: argparse.Namespace,
) -> None:
    waiting = [case for case in cases if case.name not in results.outcomes]
    bar = Bar(len(cases), sys.stderr)
    until = time.monotonic() + options.total
    broken: list[Outcome] = []  # cases in a row that ended with an error: perhaps it is not the model's fault

    async def work(desk: Desk) -> None:
        while waiting and time.monotonic() < until and len(broken) < BROKEN:
            outcome = await run_case(waiting.pop(0), provider, config, desk, options.limit)
            if outcome.reason == "error":
                broken.append(outcome)
            else:
                _keep([*broken, outcome], results, bar, options.verbose)
                broken.clear()

    async with asyncio.TaskGroup() as group:
        for desk in places:
            group.create_task(work(desk))
    if len(broken) >= BROKEN:
        bar.close()
        raise EverloopError(f"{len(broken)} cases in a row ended with an error, the last one with: {broken[-1].answer}")
    _keep(broken, results, bar, options.verbose)
    bar.close()


def _keep(outcomes: list[Outcome], results: Results, bar: Bar, verbose: bool) -> None:
    for outcome in outcomes:
        results.add(outcome)
        bar.show(outcome, list(results.outcomes.values()), verbose)


def _conclude(cases: list[Case], results: Results, options: argparse.Namespace) -> int:
    outcomes = [results.outcomes[case.name] for case in cases if case.name in results.outcomes]
    print(f"{results.label.words}, {results.label.set} set\n\n{by_category(outcomes)}", end="")
    if len(outcomes) < len(cases):
        print(f"evaluation: the time is over, {len(cases) - len(outcomes)} cases are left", file=sys.stderr)
        return UNFINISHED
    if options.at_least is None:
        return 0
    right, end = (100 * sum(marks) / len(outcomes) for marks in zip(*((o.right, o.end) for o in outcomes), strict=True))
    return 0 if right >= options.at_least[0] and end >= options.at_least[1] else 1


class Bar:
    """How far it is: a bar that moves on a terminal, a line for each case elsewhere."""

    def __init__(self, count: int, stream: TextIO) -> None:
        self._count = count
        self._stream = stream
        self._moves = stream.isatty()

    def show(self, last: Outcome, outcomes: list[Outcome], verbose: bool) -> None:
        done = len(outcomes)
        right, end = (share(sum(getattr(one, mark) for one in outcomes), done) for mark in ("right", "end"))
        marks = f"{'right' if last.right else 'WRONG'} call, {'right' if last.end else 'WRONG'} end"
        line = f"{done}/{self._count} right {right} end {end}  {last.case}: {marks}, {last.seconds:.1f} s"
        if self._moves:
            full = 20 * done // self._count
            self._stream.write(f"\r\x1b[K[{'#' * full}{'.' * (20 - full)}] {line}"[:200])
        else:
            self._stream.write(f"{line}\n")
        if verbose and not (last.right and last.end):
            calls = "; ".join(
                f"{call['tool']}({call['arguments']}){'' if call['ok'] else ' failed'}" for call in last.calls
            )
            what = f"\n    calls: {calls or 'none'}\n    answer: {last.answer!r}\n    {'; '.join(last.problems)}\n"
            self._stream.write(what)
        self._stream.flush()

    def close(self) -> None:
        if self._moves:
            self._stream.write("\n")
