"""The evaluation judges right: what is right passes, what is wrong does not, whatever the model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluation.cases import CATEGORIES, SETS, Case, load
from evaluation.judge import Job, Made, Run, World, judge, says
from evaluation.report import by_category, by_model
from evaluation.results import Label, Results, read
from evaluation.runner import Desk, Outcome, run_case
from evaluation.ways import matches

from everloop.agents.cron.schedules import parse_schedule
from everloop.config import Config
from everloop.errors import EverloopError
from everloop.providers.base import ToolCallRequest
from everloop.testing import ScriptedProvider, call
from everloop.testing.openai_server import FakeOpenAI

ROOT = Path(__file__).parent.parent
ALL = {name: load(path) for name, path in SETS.items()}
GROUPS = [
    pytest.param([case for case in cases if case.category == category], id=f"{name}-{category}")
    for name, cases in ALL.items()
    for category in CATEGORIES
]
LEAST = 60


def named(name: str) -> Case:
    return next(case for cases in ALL.values() for case in cases if case.name == name)


def calls_of(case: Case) -> list[ToolCallRequest]:
    return [call(step["tool"], **_arguments(step)) for step in case.solution]


def _arguments(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "tool"}


def before(case: Case) -> World:
    jobs = tuple(Job(job["message"], parse_schedule(at=job["at"], now=1e9)) for job in case.scheduled)
    return World(dict(case.files), frozenset(), jobs)


def did(case: Case, *calls: Made, answer: str, after: World | None = None) -> Run:
    """A run in which nothing changed, or all at once."""
    return Run("/w", before(case), calls, after or before(case), answer)


async def attempt(case: Case, steps: list[Any], folder: Path) -> Outcome:
    return await run_case(case, ScriptedProvider(steps), Config(), Desk(folder / "desk"))


# ---------------------------------------------------------------------------------------------- the sets


@pytest.mark.parametrize("name", list(SETS))
def test_a_set_has_enough_cases_of_every_kind(name):
    assert len(ALL[name]) >= LEAST
    assert {case.category for case in ALL[name]} == set(CATEGORIES)


def test_the_two_sets_are_alike_in_their_mixture():
    for category in CATEGORIES:
        counts = [sum(case.category == category for case in cases) for cases in ALL.values()]
        assert max(counts) - min(counts) <= 1, category


def test_the_two_sets_share_no_name_no_request_and_no_file():
    one, other = ALL.values()
    for fact in ("name", "request"):
        assert not {getattr(case, fact).casefold() for case in one} & {getattr(case, fact).casefold() for case in other}
    texts = [{(path, text) for case in cases for path, text in case.files.items()} for cases in (one, other)]
    assert not {path for path, _ in texts[0]} & {path for path, _ in texts[1]}
    assert not {text for _, text in texts[0]} & {text for _, text in texts[1]}


def test_requests_come_in_several_languages():
    for cases in ALL.values():
        requests = " ".join(case.request for case in cases)
        assert any("\uac00" <= letter <= "\ud7a3" for letter in requests)
        assert any("\u4e00" <= letter <= "\u9fff" for letter in requests)
        assert "¿" in requests
        assert "german" in " ".join(case.name for case in cases)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('[[case]]\nname = "a"\ncategory = "list"\nrequest = "x"\nanswer = "y"\nwrong = 1\n', "wrong"),
        ('[[case]]\nname = "a"\ncategory = "x"\nrequest = "x"\nanswer = "y"\n', "category"),
        ('[[case]]\nname = "a"\ncategory = "list"\nrequest = "x"\nanswer = "y"\n', "right"),
        (
            '[[case]]\nname = "a"\ncategory = "list"\nrequest = "x"\nanswer = "y"\nright = ["eat x"]\nsays = ["y"]\n',
            "sol",
        ),
        ('[[case]]\nname = "a"\ncategory = "list"\nlayout = "b"\n', "layout"),
        ("[[case", "TOML"),
    ],
)
def test_a_case_that_is_not_well_formed_is_an_error_that_says_why(text, word, tmp_path):
    path = tmp_path / "some.toml"
    path.write_text(text)
    with pytest.raises(EverloopError, match=word):
        load(path)


# ---------------------------------------------------------------------------------------------- right and wrong runs


@pytest.mark.parametrize("cases", GROUPS)
async def test_the_right_calls_of_every_case_pass_through_the_real_loop(cases, tmp_path):
    for case in cases:
        outcome = await attempt(case, [*calls_of(case), case.answer], tmp_path)
        assert outcome.right, f"{case.name}: {outcome.calls}"
        assert outcome.end, f"{case.name}: {outcome.problems} {outcome.calls}"
        assert outcome.reason == "answer"


@pytest.mark.parametrize("cases", GROUPS)
def test_a_model_that_does_nothing_fails(cases):
    for case in cases:
        for answer in ("Done.", "", "I have done it: everything is there."):
            verdict = judge(case, did(case, answer=answer))
            assert not verdict.end, case.name
            assert verdict.right != case.needs_tool, case.name
        if case.needs_tool:
            assert not judge(case, did(case, answer=case.answer)).end, f"{case.name}: a guess is no right end"


def test_a_model_that_always_lists_the_folder_fails_nearly_all():
    for cases in ALL.values():
        runs = [did(case, Made("list_dir", {"path": "."}, True, before(case)), answer="Done.") for case in cases]
        verdicts = [judge(case, run) for case, run in zip(cases, runs, strict=True)]
        assert not any(verdict.end for verdict in verdicts)
        assert sum(verdict.right for verdict in verdicts) <= len(cases) / 10


@pytest.mark.parametrize("cases", GROUPS)
def test_the_right_calls_are_not_enough_where_something_must_have_changed_or_be_said(cases):
    for case in cases:
        made = [Made(step["tool"], _arguments(step), not case.fails, before(case)) for step in case.solution]
        verdict = judge(case, did(case, *made, answer="Done."))
        assert not verdict.end, case.name
        assert verdict.right or case.acts, case.name


@pytest.mark.parametrize("cases", GROUPS)
def test_a_file_that_nobody_asked_for_or_a_job_that_is_gone_is_not_right(cases):
    for case in cases:
        start = before(case)
        stray = dataclasses.replace(start, files={**start.files, "stray.txt": "x"})
        worlds = [stray] + [dataclasses.replace(start, jobs=())] * bool(start.jobs)
        for world in worlds:
            made = tuple(Made(step["tool"], _arguments(step), True, world) for step in case.solution)
            verdict = judge(case, Run("/w", start, made, world, case.answer))
            assert not verdict.end, case.name
            assert not (made and verdict.right), case.name


def test_a_call_of_another_case_is_not_right():
    for cases in ALL.values():
        for case in (case for case in cases if "list ." not in case.right):
            others = [other for other in cases if other.category != case.category and other.layout != case.layout]
            for step in (other.solution[0] for other in others if other.solution):
                made = Made(step["tool"], _arguments(step), True, before(case))
                assert not judge(case, did(case, made, answer="Done.")).right, f"{case.name}: {step}"


# ---------------------------------------------------------------------------------------------- the judge in detail


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [
        ("It has 3 eggs.", 3, True),
        ("It has three eggs.", 3, True),
        ("It has 13 eggs.", 3, False),
        ("It is 3.5 long.", 3, False),
        ("It weighs 1.3 kg", 3, False),
        ("3개입니다", 3, True),
        ("About 3,357 metres.", 3357, True),
        ("The file is notes.md.", "notes.md", True),
        ("The file is oldnotes.md.", "notes.md", False),
        ("TOKYO!", "Tokyo", True),
        ("heart", "art", False),
    ],
)
def test_a_number_or_a_word_is_found_as_a_whole(text, wanted, found):
    assert says(text, wanted) is found


@pytest.mark.parametrize(
    ("way", "made", "fits"),
    [
        ("read notes.md", call("read_file", path="./notes.md"), True),
        ("read notes.md", call("read_file", path="/w/notes.md"), True),
        ("read notes.md", call("read_file", path="/etc/notes.md"), False),
        ("read notes.md", call("exec", command="head -3 notes.md"), True),
        ("read notes.md", call("write_file", path="notes.md", content=""), False),
        ("read a/notes.md", call("read_file", path="notes.md"), False),
        ("list .", call("list_dir"), True),
        ("list .", call("list_dir", path="sub"), False),
        ("list .", call("exec", command="ls -la"), True),
        ("list .", call("exec", command="find . -maxdepth 1 -type f | sort"), True),
        ("list .", call("exec", command="ls /w"), True),
        ("list .", call("exec", command="ls /w/sub"), False),
        ("list .", call("exec", command="ls", working_dir="sub"), False),
        ("list sub", call("exec", command="ls", working_dir="sub"), True),
        ("list sub", call("exec", command="ls"), False),
        ("grep onion", call("grep", pattern="Onions?"), True),
        ("grep onion", call("exec", command="grep -ri onion ."), True),
        ("grep onion", call("exec", command="rm onion"), False),
        ("find *.md", call("find_files", pattern="**/*.md"), True),
        ("find *.md", call("find_files", pattern="*.txt"), False),
        ("none", call("list_dir"), False),
        ({"tool": "write_file", "path": ["a", "b"]}, call("write_file", path="b", content="x"), True),
        ({"tool": "write_file", "content": {"re": "x+"}}, call("write_file", path="b", content="axx"), True),
        ({"tool": "write_file", "content": {"re": "x+"}}, call("write_file", path="b", content="a"), False),
        ({"tool": "write_file", "path": ["a", "b"]}, call("write_file", path="c", content="x"), False),
    ],
)
def test_a_way_stands_for_the_calls_that_a_person_would_take_for_it(way, made, fits):
    assert matches(way, made.name, made.arguments, "/w") is fits


async def test_reading_before_changing_is_no_fault_and_another_way_to_the_same_end_is_right(tmp_path):
    case = named("change-port")
    text = case.files["config.ini"].replace("8080", "9000")
    steps: list[Any] = [
        [call("read_file", path="config.ini")],
        [call("write_file", path="config.ini", content=text)],
        [call("read_file", path="config.ini")],
        "Done.",
    ]
    outcome = await attempt(case, steps, tmp_path)
    assert (outcome.right, outcome.end) == (True, True)


async def test_a_wrong_call_that_is_made_good_later_is_a_right_end_but_no_right_call(tmp_path):
    case = named("change-port")
    steps = [
        call("edit_file", path="config.ini", old_text="port: 8080", new_text="port: 9000"),
        call("edit_file", path="config.ini", old_text="8080", new_text="9000"),
        "The port is 9000.",
    ]
    outcome = await attempt(case, steps, tmp_path)
    assert (outcome.right, outcome.end) == (False, True)


async def test_a_claim_that_is_not_true_on_disk_fails(tmp_path):
    outcome = await attempt(named("create-todo"), [call("list_dir"), "I created todo.txt."], tmp_path)
    assert (outcome.right, outcome.end) == (False, False)


async def test_a_call_written_into_the_answer_fails(tmp_path):
    for answer in ('{"name": "none", "arguments": {"x": "Tokyo"}}', "Tokyo <tool_call>"):
        outcome = await attempt(named("capital-of-japan"), [answer], tmp_path)
        assert not outcome.end


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"at": "in 20 minutes"}, True),
        ({"at": "in 1200 s"}, True),
        ({"at": "in 30 minutes"}, False),
        ({"at": "tomorrow 9:00"}, False),
        ({"every": "20m"}, False),
    ],
)
async def test_a_job_is_judged_by_when_it_comes(arguments, fits, tmp_path):
    case = named("remind-in-20-minutes")
    steps = [call("cron", action="add", message="Take the cake out.", **arguments), "I will."]
    outcome = await attempt(case, steps, tmp_path)
    assert (outcome.right, outcome.end) == (fits, fits)


async def test_weekdays_may_be_written_in_any_way(tmp_path):
    case = named("weekday-standup")
    for expression, fits in (("30 8 * * MON-FRI", True), ("30 8 * * *", False), ("30 8 * * 1,2,3,4,5", True)):
        steps = [call("cron", action="add", message="The standup begins.", cron=expression), "I will."]
        assert (await attempt(case, steps, tmp_path)).end is fits


async def test_a_turn_that_takes_too_long_is_stopped_and_fails(tmp_path):
    case = named("capital-of-japan")
    slow = ScriptedProvider([case.answer], delay=30)
    outcome = await run_case(case, slow, Config(), Desk(tmp_path / "desk"), limit=0.3)
    assert not outcome.end
    assert outcome.seconds < 10


async def test_commands_of_a_case_run_in_the_real_sandbox(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("canary-7f3a")
    case = named("run-echo")
    steps: list[Any] = [call("exec", command=f"cat {secret}; echo changed > {secret}; echo bananas"), "bananas"]
    provider = ScriptedProvider(steps)
    await run_case(case, provider, Config(), Desk(tmp_path / "desk"))
    assert "canary-7f3a" not in json.dumps(provider.requests[-1].messages)
    assert secret.read_text() == "canary-7f3a"


# ---------------------------------------------------------------------------------------------- results and command


def outcome(name: str, right: bool = True, end: bool = True) -> Outcome:
    case = named(name)
    usage = {"prompt_tokens": 1000, "completion_tokens": 20}
    return Outcome(name, case.category, case.stamp, right, end, (), "a", "answer", [], 1, 2.0, usage)


def test_results_are_kept_and_read_again_and_a_line_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / "results.jsonl"
    label = Label("heldout", "local", "tiny", ("window=4096",))
    cases = ALL["heldout"]
    results = Results(label, cases, file)
    results.add(outcome("create-todo"))
    results.add(outcome("change-port", end=False))
    with file.open("a") as stream:
        stream.write('{"set": "held')
    assert set(Results(label, cases, file).outcomes) == {"create-todo", "change-port"}
    assert not Results(dataclasses.replace(label, model="other"), cases, file).outcomes
    assert not Results(dataclasses.replace(label, settings=()), cases, file).outcomes
    changed = [dataclasses.replace(case, request="other") for case in cases]
    assert not Results(label, changed, file).outcomes


def test_the_tables_say_how_many_were_right():
    some = [
        outcome("create-todo"),
        outcome("change-port", end=False),
        outcome("two-bertas", right=False, end=False),
    ]
    assert "| all | 3 | 67 % (2) | 33 % (1) | 2.0 | 3,000 | 60 |" in by_category(some)
    label = Label("heldout", "local", "tiny", ("window=4096",))
    table = by_model([(label, one) for one in [*some, outcome("two-bertas")]])  # the last one was run again
    assert "| tiny | window=4096 | heldout | 3 | 100 % (3) | 67 % (2) |" in table


async def evaluate(*arguments: str, **variables: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evaluation", *arguments, cwd=ROOT, env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(50):
        out, err = await process.communicate()
    assert b"Traceback" not in err, err.decode()
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_command_asks_a_model_server_keeps_the_results_and_goes_on_where_it_was(tmp_path):
    file = tmp_path / "results.jsonl"
    cases = ["--cases", "good-morning", "show-files", "--json", str(file)]
    async with FakeOpenAI() as server:
        model = ["--provider", "openai", "--base-url", server.base_url, "--model", "m", "--setting", "max_iterations=3"]
        server.calls(*calls_of(named("show-files")))
        server.reply(named("show-files").answer)
        server.reply("Good morning!")
        status, out, err = await evaluate(*model, *cases, "--at-least", "100", "100")
        assert (status, len(server.replies)) == (0, 0)
        assert "| all | 2 | 100 % (2) | 100 % (2) |" in out
        assert "2/2" in err
        assert {(request.body or {})["temperature"] for request in server.requests} == {0}
        status, again, _ = await evaluate(*model, *cases)  # the server has nothing more to say, and is not asked
        assert (status, again) == (0, out)
    assert [one.case for _, one in read([file])] == ["show-files", "good-morning"]
    status, out, _ = await evaluate("--report", str(file))
    assert (status, "| m | max_iterations=3 | development | 2 |" in out) == (0, True)


async def test_the_command_stops_when_the_model_cannot_be_asked():
    address = ["--provider", "openai", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--setting", "retries=0"]
    status, out, err = await evaluate(*address)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--setting", "retrys=1"],
        ["--setting", "retries"],
        ["--setting", "api_key=canary-1234"],
        ["--setting", "retries=many"],
        ["--cases", "no-such-case"],
        ["--report", "no-such-file.jsonl"],
        ["--provider", "nobody"],
    ],
)
async def test_what_a_person_gets_wrong_is_one_line(arguments):
    status, out, err = await evaluate("--base-url", "http://127.0.0.1:9/v1", "--model", "m", *arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "canary-1234" not in err


async def test_a_bar_that_is_not_reached_is_an_exit_status_and_so_is_time_that_is_over():
    async with FakeOpenAI() as server:
        model = ["--provider", "openai", "--base-url", server.base_url, "--model", "m"]
        server.reply("Done.")
        status, _, _ = await evaluate(*model, "--cases", "good-morning", "--at-least", "100", "50")
        assert status == 1
        status, _, err = await evaluate(*model, "--cases", "good-morning", "--total", "0")
        assert (status, len(err.splitlines())) == (3, 1)
