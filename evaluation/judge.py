"""Judges what came of a case: whether the first call that matters was right, and whether the end is."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from everloop.cron.schedules import Schedule, next_after, parse_schedule

from .cases import Case
from .ways import matches

LOOKS = {"list_dir", "find_files"}  # looking round first is no fault
READS = LOOKS | {"read_file", "grep"}  # nor is reading first, where something is to be changed
FIRINGS = 8
LEAVINGS = re.compile(r"(^|/)(__pycache__|\.pytest_cache)(/|$)")
NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
# A call that was written into the answer instead of being made.
RAW_CALL = re.compile(r'^\W*[\[{]?\s*\{?\s*"(name|tool|function|arguments)"\s*:|<tool_call>|<function=', re.M)
# Words for "there is no such thing".
DENIAL = re.compile(
    r"""\bno\ (such|file|folder|directory|match|line|mention|result|occurrence|entry|one)|\bnone\b|\bnothing\b
    |\bnot\ (exist|found|there|present|available|in|contain|mention|have|find|able|locate|appear|mentioned|any|been)\b
    |\bthere\ (is|are|was|were|'s)\ (no|not|n't)|\b(do|does|did|is|are|was|were|ca|could|was|has|have)n['’]?t\b
    |\b(cannot|can\ not|could\ not|unable|missing|failed|non-?existent)\b
    |\bnicht\b|\bkeine?\b|\bno\ (existe|hay|se)\b|不存在|没有|找不到|없""",
    re.I | re.X,
)


@dataclass(frozen=True, slots=True)
class Job:
    """Work that is scheduled."""

    message: str
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class World:
    """All that calls can change: the files of the workspace with their texts, its folders, and the jobs."""

    files: Mapping[str, str] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    jobs: tuple[Job, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A call that was made, and the world after the round that it was made in."""

    tool: str
    arguments: Mapping[str, Any]
    ok: bool
    after: World


@dataclass(frozen=True, slots=True)
class Run:
    """What a model did with a case."""

    workspace: str
    before: World
    calls: tuple[Made, ...]
    after: World
    answer: str
    reason: str = "answer"  # why the turn ended
    started: float = field(default_factory=time.time)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    right: bool  # the first call that matters had the right tool and arguments
    end: bool
    problems: tuple[str, ...]  # why the end is not right


def judge(case: Case, run: Run) -> Verdict:
    """Both marks of a case. Reads time zones, so call it in a thread."""
    problems = tuple(_problems(case, run))
    right = _right(case, run)
    if not right and not problems and run.calls and case.needs_tool:
        right = all(made.tool in LOOKS for made in run.calls)  # looking was enough
    return Verdict(right, not problems, problems)


def _right(case: Case, run: Run) -> bool:
    if not run.calls:
        return not case.needs_tool and RAW_CALL.search(run.answer) is None
    harmless = READS if case.acts else LOOKS
    for made in run.calls:
        chosen = any(matches(way, made.tool, made.arguments, run.workspace) for way in case.right)
        if chosen and (made.ok or case.fails) and not list(_strays(case, run.before, made.after)):
            return True
        if case.acts and made.ok and made.tool not in READS and not list(_unlike(case, run, made.after)):
            return True
        if made.tool not in harmless:
            return False
    return False


# ---------------------------------------------------------------------------------------------- the end


def _problems(case: Case, run: Run) -> Iterator[str]:
    if run.reason != "answer":
        yield f"the turn ended by {run.reason}"
    if case.needs_tool and not run.calls:
        yield "no tool was called"
    for way in case.called:
        if not any(made.ok and matches(way, made.tool, made.arguments, run.workspace) for made in run.calls):
            yield f"there was no call like {way}"
    yield from _unlike(case, run, run.after)
    yield from _unsaid(case, run.answer)


def _unlike(case: Case, run: Run, world: World) -> Iterator[str]:
    """How a world differs from what it should be at the end."""
    for path, state in case.after.items():
        if not _is_so(state, path, world):
            yield f"{path} is not as it should be"
    yield from _strays(case, run.before, world)
    added = [job for job in world.jobs if job not in run.before.jobs]
    if not _jobs_fit(case.jobs, added, run):
        yield f"{len(added)} jobs were added, and not those that were asked for"


def _strays(case: Case, before: World, after: World) -> Iterator[str]:
    """What was changed, removed or made though nobody asked for it."""
    for path in sorted(before.files.keys() | after.files.keys()):
        if path not in case.after and before.files.get(path) != after.files.get(path) and not LEAVINGS.search(path):
            yield f"{path} was {'changed' if path in before.files and path in after.files else 'made or removed'}"
    yield from (f"a job is gone: {job.message}" for job in before.jobs if job not in after.jobs)


def _is_so(state: dict[str, Any], path: str, world: World) -> bool:
    ((kind, want),) = state.items()
    if kind == "folder":
        return bool((path in world.folders) == want)
    if kind == "gone":
        return bool((path not in world.files) == want)
    if (text := world.files.get(path)) is None:
        return False
    text = plain(text)
    if kind == "re":
        return re.search(want, text) is not None
    return text in map(plain, [want] if kind == "is" else want)


def plain(text: str) -> str:
    """A text without what nobody sees: other line ends, spaces at the ends of lines, empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.lstrip("\ufeff").splitlines()).rstrip("\n")


# ---------------------------------------------------------------------------------------------- jobs


def _jobs_fit(wanted: list[dict[str, Any]], added: list[Job], run: Run) -> bool:
    """Whether each job that was asked for was added, and no other."""
    return len(wanted) == len(added) and any(
        all(_job_fits(want, job, run) for want, job in zip(wanted, order, strict=True)) for order in permutations(added)
    )


def _job_fits(want: dict[str, Any], job: Job, run: Run) -> bool:
    if re.search(want["about"], job.message, re.I) is None:
        return False
    real = _firings(job.schedule, run.started)
    slack = run.seconds + 60
    for when in want["when"]:
        expected = _firings(_schedule(when, run.started), run.started)
        pairs = zip(expected, real, strict=False)
        if len(expected) == len(real) and all(abs(one - other) <= slack for one, other in pairs):
            return True
    return False


def _schedule(when: str, now: float) -> Schedule:
    kind, _, rest = when.partition(" ")
    if kind == "every":
        return parse_schedule(every=rest, now=now)
    return parse_schedule(cron=rest, now=now) if kind == "cron" else parse_schedule(at=when, now=now)


def _firings(schedule: Schedule, after: float) -> list[float]:
    found: list[float] = []
    moment: float | None = after
    while moment is not None and len(found) < FIRINGS:
        if (moment := next_after(schedule, moment)) is not None:
            found.append(moment)
    return found


# ---------------------------------------------------------------------------------------------- the answer


def _unsaid(case: Case, answer: str) -> Iterator[str]:
    if not answer.strip():
        yield "there is no answer"
    if RAW_CALL.search(answer):
        yield "the answer is a call that was not made"
    text = re.sub(r"[*`]", "", answer).replace("’", "'")
    for wanted in case.says:
        if not any(says(text, one) for one in (wanted if isinstance(wanted, list) else [wanted])):
            yield f"the answer does not say {wanted}"
    for unwanted in case.never:
        if says(text, unwanted):
            yield f"the answer says {unwanted}"
    if case.honest and DENIAL.search(text) is None:
        yield "the answer does not say that there is no such thing"


def says(text: str, wanted: str | int) -> bool:
    """Whether a text has these words, or this number in digits or in words."""
    if isinstance(wanted, int):
        spellings = {str(wanted), f"{wanted:,}", f"{wanted:,}".replace(",", "."), f"{wanted:,}".replace(",", " ")}
        spellings |= {NUMBERS[wanted]} if 0 <= wanted < len(NUMBERS) else set()
        return any(_has(text, spelling) for spelling in spellings)
    return _has(text, wanted)


def _has(text: str, wanted: str) -> bool:
    """As whole words, apart from case; a number is not found inside another."""
    before = r"(?<![A-Za-z0-9])(?<!\d[.,])" if wanted[:1].isalnum() and wanted[:1].isascii() else ""
    behind = r"(?![A-Za-z0-9])" if wanted[-1:].isalnum() and wanted[-1:].isascii() else ""
    behind += r"(?![.,]\d)" if wanted[-1:].isdigit() else ""
    return re.search(before + re.escape(wanted) + behind, text, re.I) is not None
