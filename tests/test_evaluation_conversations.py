"""Conversations of the evaluation: each turn is judged, what is right passes, and what is wrong does not."""

from __future__ import annotations

from typing import Any

import pytest
from evaluation.conversations import CONVERSATIONS, Conversation, Turn, by_subject, load_conversations, run_conversation
from evaluation.runner import Desk

from everloop.config import Config
from everloop.errors import EverloopError
from everloop.providers.base import LLMProvider, LLMResponse
from everloop.providers.local.small.language import paths_in
from everloop.providers.local.small.shaping import SmallShaping
from everloop.testing import ScriptedProvider, call
from everloop.testing.openai_server import FakeOpenAI
from everloop.tools.simple_tools import simplify_call
from tests.support.evaluation_runs import arguments_of
from tests.test_evaluation import evaluate

ALL = {name: load_conversations(path) for name, path in CONVERSATIONS.items()}


def steps_of(turn: Turn) -> list[Any]:
    return [*(call(step["tool"], **arguments_of(step)) for step in turn.solution), turn.answer]


@pytest.mark.parametrize(
    "conversation", [pytest.param(one, id=f"{name}-{one.name}") for name, some in ALL.items() for one in some]
)
async def test_the_right_calls_and_answers_of_every_turn_pass_through_the_real_loop(conversation, tmp_path):
    steps = [step for turn in conversation.turns for step in steps_of(turn)]
    outcomes = await run_conversation(conversation, ScriptedProvider(steps), Config(), Desk(tmp_path / "desk"))
    assert [(one.number, one.problems) for one in outcomes if not one.right] == []
    assert len(outcomes) == len(conversation.turns)


def test_the_sets_are_large_enough_and_share_no_request_and_no_file():
    one, other = ALL["talks"], ALL["talks_heldout"]
    assert len(one) >= 35
    assert sum(len(some.turns) for some in one) >= 200
    assert sum(len(some.turns) for some in other) >= 70
    said = [{turn.request for some in part for turn in some.turns if len(turn.request) > 12} for part in (one, other)]
    assert not said[0] & said[1] - {"what reminders do I have?"}
    assert not {path for some in one for path in some.files} & {path for some in other for path in some.files}


async def _turn(turn: Turn, steps: list[Any], tmp_path: Any, **files: str) -> Any:
    conversation = Conversation("one", "lists", files, (turn,))
    (outcome,) = await run_conversation(conversation, ScriptedProvider(steps), Config(), Desk(tmp_path / "desk"))
    return outcome


async def test_a_call_during_small_talk_is_wrong_and_counted(tmp_path):
    turn = Turn(request="hello", answer="Hi.", talk=True)
    outcome = await _turn(turn, [call("list_dir", path="."), "Hi."], tmp_path)
    assert not outcome.right
    assert "| 1 | 0 % (0) | 0 | 1 |" in by_subject([outcome])


async def test_an_unrequested_file_and_a_false_claim_are_wrong(tmp_path):
    turn = Turn(request="add figs to it", answer="Done.", after={"a.txt": {"is": "figs"}})
    stray = await _turn(turn, [call("write_file", path="b.txt", content="figs"), "Done."], tmp_path)
    claim = await _turn(turn, ["I added figs."], tmp_path)
    assert not stray.right
    assert not claim.right


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[[conversation", "TOML"),
        ('[[conversation]]\nname = "a"\nabout = "x"\nturns = [{ request = "x", answer = "y", odd = 1 }]\n', "odd"),
        ('[[conversation]]\nname = "a"\nabout = "x"\n', "turns"),
        (
            '[[conversation]]\nname = "a"\nabout = "x"\nturns = [{ request = "x", answer = "y", talk = true, '
            'solution = [{ tool = "exec" }] }]\n',
            "talk",
        ),
    ],
)
def test_an_invalid_conversation_is_an_error_with_the_reason(text, word, tmp_path):
    path = tmp_path / "some.toml"
    path.write_text(text)
    with pytest.raises(EverloopError, match=word):
        load_conversations(path)


async def test_the_command_takes_a_conversation_and_reports_each_turn(tmp_path):
    file = tmp_path / "turns.jsonl"
    (talk,) = [one for one in ALL["talks"] if one.name == "small-talk"]
    async with FakeOpenAI() as server:
        for turn in talk.turns:
            server.reply(turn.answer)
        model = ["--provider", "openai", "--base-url", server.base_url, "--model", "m"]
        status, out, err = await evaluate(
            "--set", "talks", *model, "--cases", "small-talk", "--json", str(file), "--at-least", "0", "100"
        )
    assert status == 0
    assert f"| all | {len(talk.turns)} | 100 % ({len(talk.turns)}) | 0 | 0 |" in out
    assert err.count("small-talk/") == len(talk.turns)
    assert len(file.read_text().splitlines()) == len(talk.turns)


async def test_a_missing_conversation_is_a_one_line_error():
    status, out, err = await evaluate("--set", "talks", "--provider", "openai", "--model", "m", "--cases", "none")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


# ---------------------------------------------------------------------------------------------- small models


class IdealSmallModel(LLMProvider):
    """The shaping of small models around a model that always makes the right call if the grammar allows it."""

    default_model = "ideal"

    def __init__(self, conversation: Conversation) -> None:
        self._turns = iter(conversation.turns)
        self._turn = conversation.turns[0]
        self._left: list[dict[str, Any]] = []
        self.hindered: list[str] = []

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None, **_: Any) -> LLMResponse:
        if messages[-1]["role"] == "user":
            self._turn = next(self._turns)
            self._left = list(self._turn.solution)
        request = SmallShaping().prepare(messages, tools)
        if isinstance(request, LLMResponse):  # it is certain without the model
            if request.tool_calls and self._left and self._left[0]["tool"] == request.tool_calls[0].name:
                self._left.pop(0)
            return request
        if not self._left or (request["_step"].is_talk and not request["_step"].code_file):
            needs_a_look = request["_step"].expected == "call" and messages[-1]["role"] == "user"
            named = paths_in(self._turn.request)
            return self._call("read_file", path=named[0]) if needs_a_look and named else LLMResponse(self._turn.answer)
        step = self._left.pop(0)
        if not request["_step"].code_file:
            self._check(request, *simplify_call(step["tool"], arguments_of(step)))
        return self._call(step["tool"], **arguments_of(step))

    def _call(self, name: str, **arguments: Any) -> LLMResponse:
        return LLMResponse(None, [call(name, **arguments)], finish_reason="tool_calls")

    def _check(self, request: dict[str, Any], tool: str, arguments: dict[str, Any]) -> None:
        allowed = request["_step"].values.get(tool, {}).get("path")
        offered = {one["name"] for one in request["_step"].tools}
        fits = tool in offered and (not allowed or arguments.get("path", "") in allowed)
        if not fits or request["_step"].expected == "words":
            self.hindered.append(f"{self._turn.request!r}: {tool}({arguments}) cannot be written")


@pytest.mark.parametrize("conversation", [pytest.param(one, id=one.name) for one in ALL["talks"]])
async def test_a_small_model_that_knows_the_answer_is_not_hindered_by_shaping(conversation, tmp_path):
    model = IdealSmallModel(conversation)
    outcomes = await run_conversation(conversation, model, Config(), Desk(tmp_path / "desk"))
    assert [(one.request, one.problems) for one in outcomes if not one.right] == []
    assert model.hindered == []
