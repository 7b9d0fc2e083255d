"""The judge of the evaluation, case by case: what a person would accept, and what not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from evaluation.cases import Case
from evaluation.judge import Made, Run, World, judge, says
from evaluation.runner import Desk, run_case
from evaluation.ways import matches

from everloop.config import Config
from everloop.testing import ScriptedProvider, call
from tests.support.evaluation_runs import attempt, before, did, named


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
def test_an_expected_call_stands_for_all_calls_that_a_person_would_accept(way, made, fits):
    assert matches(way, made.name, made.arguments, "/w") is fits


async def test_reading_before_a_change_is_accepted_and_so_is_another_way_to_the_same_result(tmp_path):
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


async def test_a_wrong_call_corrected_later_counts_as_a_right_result_but_not_as_a_right_call(tmp_path):
    case = named("change-port")
    steps = [
        call("edit_file", path="config.ini", old_text="port: 8080", new_text="port: 9000"),
        call("edit_file", path="config.ini", old_text="8080", new_text="9000"),
        "The port is 9000.",
    ]
    outcome = await attempt(case, steps, tmp_path)
    assert (outcome.right, outcome.end) == (False, True)


async def test_a_right_call_undone_later_counts_as_a_right_call_but_not_as_a_right_result(tmp_path):
    case = named("create-todo")
    texts = ("water the plants", "water the cat")
    steps = [call("write_file", path="todo.txt", content=text) for text in texts]
    outcome = await attempt(case, [*steps, "Done."], tmp_path)
    assert (outcome.right, outcome.end) == (True, False)
    outcome = await attempt(case, [*reversed(steps), "Done."], tmp_path)
    assert (outcome.right, outcome.end) == (False, True)


async def test_a_claim_that_is_false_on_disk_fails(tmp_path):
    outcome = await attempt(named("create-todo"), [call("list_dir"), "I created todo.txt."], tmp_path)
    assert (outcome.right, outcome.end) == (False, False)


async def test_a_call_written_into_the_answer_fails(tmp_path):
    for answer in ('{"name": "none", "arguments": {"x": "Tokyo"}}', "Tokyo <tool_call>"):
        outcome = await attempt(named("capital-of-japan"), [answer], tmp_path)
        assert (outcome.right, outcome.end) == (False, False)


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
async def test_a_job_is_judged_by_its_time(arguments, fits, tmp_path):
    case = named("remind-in-20-minutes")
    steps = [call("cron", action="add", message="Take the cake out.", **arguments), "I will."]
    outcome = await attempt(case, steps, tmp_path)
    assert (outcome.right, outcome.end) == (fits, fits)


async def test_weekdays_may_be_written_in_any_way(tmp_path):
    case = named("weekday-standup")
    for expression, fits in (("30 8 * * MON-FRI", True), ("30 8 * * *", False), ("30 8 * * 1,2,3,4,5", True)):
        steps = [call("cron", action="add", message="The standup begins.", cron=expression), "I will."]
        assert (await attempt(case, steps, tmp_path)).end is fits


def looked(case: Case, tool: str, ok: bool = True, **arguments: Any) -> Made:
    """A call that changed nothing."""
    return Made(tool, arguments, ok, before(case))


def test_a_failed_call_is_wrong_unless_it_must_fail():
    case = named("which-port")
    assert not judge(case, did(case, looked(case, "read_file", False, path="config.ini"), answer=case.answer)).right
    case = named("create-todo")
    world = World({**case.files, "todo.txt": "water the plants"})
    for ok in (True, False):  # a command, say, that was done when it timed out
        run = Run("/w", before(case), (Made("exec", {"command": "x"}, ok, world),), world, case.answer)
        assert judge(case, run).right is ok


def test_reading_the_wrong_file_first_is_wrong_if_reading_is_the_task():
    case = named("which-port")
    calls = [looked(case, "read_file", path=path) for path in ("README.md", "config.ini")]
    verdict = judge(case, did(case, *calls, answer=case.answer))
    assert (verdict.right, verdict.end) == (False, True)


def test_searching_folder_by_folder_is_right_if_it_sufficed():
    case = named("find-markdown")
    calls = [looked(case, "list_dir", path=path) for path in (".", "recipes", "letters")]
    assert judge(case, did(case, *calls, answer=case.answer)).right
    assert not judge(case, did(case, *calls, answer="Done.")).right


def test_forbidden_words_are_wrong():
    case = named("last-line-journal")
    made = looked(case, "read_file", path="journal.log")
    assert judge(case, did(case, made, answer="18:00 close")).end
    assert not judge(case, did(case, made, answer="08:02 WARN paper low, 18:00 close")).end


def test_a_turn_that_was_cut_short_is_not_a_right_result():
    case = named("which-port")
    run = did(case, looked(case, "read_file", path="config.ini"), answer=case.answer)
    assert judge(case, run).end
    assert not judge(case, dataclasses.replace(run, reason="max_rounds")).end


def test_a_program_that_was_only_written_was_not_run():
    case = named("write-and-run")
    world = World({"seven.py": "print(7 * 11)"})
    written = Made("write_file", {"path": "seven.py", "content": "print(7 * 11)"}, True, world)
    ran = Made("exec", {"command": "python3 seven.py"}, True, world)
    for calls, end in (((written,), False), ((written, ran), True)):
        verdict = judge(case, Run("/w", before(case), calls, world, case.answer))
        assert (verdict.right, verdict.end) == (True, end)


async def test_an_extra_or_unrelated_job_is_not_a_right_result(tmp_path):
    case = named("remind-in-20-minutes")
    for messages in (["Take the cake out.", "Take the cake out now."], ["Do it."]):
        steps = [call("cron", action="add", message=message, at="in 20 minutes") for message in messages]
        assert not (await attempt(case, [*steps, "I will."], tmp_path)).end


async def test_a_turn_that_takes_too_long_is_stopped_and_fails(tmp_path):
    case = named("capital-of-japan")
    slow = ScriptedProvider([case.answer], delay=30)
    outcome = await run_case(case, slow, Config(), Desk(tmp_path / "desk"), limit=0.3)
    assert not outcome.end
    assert outcome.seconds < 25  # it would take thirty


async def test_commands_of_a_case_run_in_the_real_sandbox(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("canary-7f3a")
    case = named("run-echo")
    steps: list[Any] = [call("exec", command=f"cat {secret}; echo changed > {secret}; echo bananas"), "bananas"]
    provider = ScriptedProvider(steps)
    await run_case(case, provider, Config(), Desk(tmp_path / "desk"))
    assert "canary-7f3a" not in json.dumps(provider.requests[-1].messages)
    assert secret.read_text() == "canary-7f3a"
