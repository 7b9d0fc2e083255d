"""The evaluation judges correctly: what is right passes, what is wrong does not, whatever the model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from itertools import combinations
from pathlib import Path

import pytest
from evaluation.cases import CATEGORIES, SETS, load
from evaluation.judge import Made, Run, judge
from evaluation.report import by_category, by_model
from evaluation.results import Label, Results, read
from evaluation.runner import Outcome

from everloop.errors import EverloopError
from everloop.testing.openai_server import FakeOpenAI
from tests.support.evaluation_runs import ALL, GROUPS, arguments_of, attempt, before, calls_of, did, named

ROOT = Path(__file__).parent.parent
LEAST = 60


# ---------------------------------------------------------------------------------------------- the sets


@pytest.mark.parametrize("name", list(SETS))
def test_a_set_has_enough_cases_of_every_kind(name):
    assert len(ALL[name]) >= LEAST
    assert {case.category for case in ALL[name]} == set(CATEGORIES)


def test_the_development_set_and_the_held_out_one_have_the_same_mix():
    for category in CATEGORIES:
        counts = [sum(case.category == category for case in ALL[name]) for name in ("development", "heldout")]
        assert max(counts) - min(counts) <= 1, category


@pytest.mark.parametrize(("first", "second"), list(combinations(SETS, 2)))
def test_two_sets_share_no_name_no_request_and_no_file(first, second):
    one, other = ALL[first], ALL[second]
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
def test_an_invalid_case_is_an_error_with_the_reason(text, word, tmp_path):
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
def test_right_calls_are_not_enough_if_a_change_or_an_answer_is_missing(cases):
    for case in cases:
        made = [Made(step["tool"], arguments_of(step), not case.fails, before(case)) for step in case.solution]
        verdict = judge(case, did(case, *made, answer="Done."))
        assert not verdict.end, case.name
        assert verdict.right or case.acts, case.name


@pytest.mark.parametrize("cases", GROUPS)
def test_an_unrequested_file_or_a_missing_job_is_wrong(cases):
    for case in cases:
        start = before(case)
        stray = dataclasses.replace(start, files={**start.files, "stray.txt": "x"})
        worlds = [stray] + [dataclasses.replace(start, jobs=())] * bool(start.jobs)
        for world in worlds:
            made = tuple(Made(step["tool"], arguments_of(step), True, world) for step in case.solution)
            verdict = judge(case, Run("/w", start, made, world, case.answer))
            assert not verdict.end, case.name
            assert not (made and verdict.right), case.name


def test_another_cases_call_is_wrong():
    for cases in ALL.values():
        for case in (case for case in cases if "list ." not in case.right):
            others = [other for other in cases if other.category != case.category and other.layout != case.layout]
            for step in (other.solution[0] for other in others if other.solution):
                made = Made(step["tool"], arguments_of(step), True, before(case))
                assert not judge(case, did(case, made, answer="Done.")).right, f"{case.name}: {step}"


# ---------------------------------------------------------------------------------------------- results and command


def outcome(name: str, right: bool = True, end: bool = True) -> Outcome:
    case = named(name)
    usage = {"prompt_tokens": 1000, "completion_tokens": 20}
    return Outcome(name, case.category, case.stamp, right, end, (), "a", "answer", [], 1, 2.0, usage)


def test_results_are_kept_and_read_again_and_a_truncated_line_is_skipped(tmp_path):
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


def test_the_tables_show_how_many_were_right():
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


async def test_the_command_asks_a_model_server_keeps_the_results_and_resumes(tmp_path):
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
        status, again, _ = await evaluate(*model, *cases)  # the server has no more answers, and is not asked
        assert (status, again) == (0, out)
    assert [one.case for _, one in read([file])] == ["show-files", "good-morning"]
    status, out, _ = await evaluate("--report", str(file))
    assert (status, "| m | max_iterations=3 | development | 2 |" in out) == (0, True)


async def test_the_command_stops_when_the_model_cannot_be_asked(tmp_path):
    file = tmp_path / "results.jsonl"
    async with FakeOpenAI() as server:
        for _ in range(5):
            server.fail(400)
        model = ["--provider", "openai", "--base-url", server.base_url, "--model", "m"]
        status, out, err = await evaluate(*model, "--json", str(file))
        assert len(server.requests) == 3
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert not file.exists()  # so these cases are run the next time


async def test_a_secret_is_not_among_the_settings_in_the_results(tmp_path):
    file = tmp_path / "results.jsonl"
    async with FakeOpenAI() as server:
        server.reply("Good morning!")
        model = ["--provider", "openai", "--base-url", server.base_url, "--model", "m", "--cases", "good-morning"]
        said = await evaluate(*model, "--json", str(file), "--setting", "api_key=canary-1234")
        assert not server.requests
    assert said[0] == 2
    assert "canary-1234" not in said[1] + said[2]
    assert not file.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--setting", "retrys=1"],
        ["--setting", "retries"],
        ["--setting", "retries=many"],
        ["--cases", "no-such-case"],
        ["--report", "no-such-file.jsonl"],
        ["--provider", "nobody"],
    ],
)
async def test_a_users_mistake_is_a_one_line_error(arguments):
    status, out, err = await evaluate("--base-url", "http://127.0.0.1:9/v1", "--model", "m", *arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


async def test_a_missed_target_and_a_timeout_set_the_exit_status():
    async with FakeOpenAI() as server:
        model = ["--provider", "openai", "--base-url", server.base_url, "--model", "m"]
        server.reply("Done.")
        status, _, _ = await evaluate(*model, "--cases", "good-morning", "--at-least", "100", "50")
        assert status == 1
        status, _, err = await evaluate(*model, "--cases", "good-morning", "--total", "0")
        assert (status, len(err.splitlines())) == (3, 1)
