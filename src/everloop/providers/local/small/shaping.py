"""Shape requests for small models: a short prompt with worked examples, few tools, and a grammar for the answer.

A model of about one billion parameters gets lost in long prompts and many tools, but copies examples well. So it gets a
prompt of its own, and its answers are converted back to the usual format. The prompt begins with the part that never
changes; the examples most similar to the request and the conversation follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from ....tools.simple_tools import READ_ONLY_TOOLS, SIMPLE_TOOLS, is_failure, quote_result, short_result, to_command
from ...base import LLMResponse, ToolCallRequest
from ...openai import read_usage
from . import prompt
from .answers import final_sentence, leaked_text, report_pattern, sentence, uses_unknown_file
from .conversation import Message, Turn, current_turn, referenced_file, text_of
from .examples import TOOLS_WITH_EXAMPLES, Example, Tool, introduction, is_answered_by, names_of, nearest, select_tools
from .grammar import Expected, Values, argument_values, grammar
from .language import Request, language_of
from .routing import certain_call, code_file, fenced_code, next_step, route, with_listed_file

LARGE = 3_000_000_000  # bytes of a model's file: one of this size (about four billion parameters) needs no help
PROMPT_TOKENS = 1_500  # of the examples and the context that precede a conversation
NEAREST_SHOWN = 2  # examples in the prompt besides the fixed ones
_CALL = re.compile(r'\{\s*"\w+"\s*:\s*("(?:[^"\\]|\\.)*")\s*,?')
_OPTIONS: Mapping[str, Any] = {"temperature": 0, "max_tokens": 600, "cache_prompt": True}


def shaping_for(setting: str, size: int) -> SmallShaping | None:
    """Return the shaping for a model file of `size` bytes; `setting` is `auto`, `on` or `off`."""
    small = setting == "on" or (setting != "off" and size < LARGE)
    return SmallShaping() if small else None


@dataclass(frozen=True)
class Step:
    """The facts that an answer is checked against; kept in the request as `_step`."""

    turn: Turn
    expected: Expected = "words"
    tools: Sequence[Tool] = ()
    values: Values = field(default_factory=dict)
    without_examples: Sequence[Message] = ()
    known: Sequence[str] = ()  # the texts from which names and values may come
    is_talk: bool = False
    code_file: str = ""  # the file that the answer is saved to
    retried: bool = False
    retried_without_examples: bool = False


class SmallShaping:
    """Shapes requests for a small model. It is stateless: the same conversation gives the same bytes."""

    prompt_tokens = PROMPT_TOKENS
    may_skip_model = True  # whether an answer may be given without the model

    def for_json(self, form: Mapping[str, Any]) -> SmallJson:
        return SmallJson(form)

    def prepare(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> dict[str, Any] | LLMResponse:
        """Return the request for llama.cpp: messages, a grammar, and how many of the first messages never change; or
        the answer, if it is certain without the model."""
        offered = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), dict)]
        if "exec" in names_of(offered):
            offered += SIMPLE_TOOLS.values()
        turn = current_turn(messages)
        if offered and not TOOLS_WITH_EXAMPLES & names_of(offered):  # a client's own tools
            own = prompt.conversation_messages(turn.messages, prompt.RESULT_LIMIT)
            return _constrained_request(Step(turn, "either", offered), prompt.client_prefix(turn.system, offered), own)
        routed = route(turn, offered) if offered else turn
        if routed is None and not turn.calls:
            return _plain_request(Step(turn, tools=offered, is_talk=True))
        return self._prepare_task(routed or turn, offered)

    def _prepare_task(self, turn: Turn, offered: Sequence[Tool]) -> dict[str, Any] | LLMResponse:
        """Prepare a step of a turn that may need tools: a certain call, or a request with examples and a grammar."""
        turn, names = with_listed_file(turn), names_of(offered)
        if names and (first := certain_call(turn, names)):
            return LLMResponse(None, [_tool_call(*first)], finish_reason="tool_calls")
        if self.may_skip_model and not turn.calls and "write_file" in names and (file := code_file(turn.request)):
            wish = f"\n\nAnswer with the code of {file} alone, in one fenced block."
            return _plain_request(Step(turn, is_talk=True, code_file=file), wish)
        chosen = select_tools(offered, turn.request, turn.called)
        values = argument_values(turn)
        expected, possible = next_step(turn, chosen, offered, values)
        if self.may_skip_model and expected != "call" and (done := final_sentence(turn)):
            return LLMResponse(done)
        if turn.calls and is_answered_by(turn.request, names_of(possible), turn.called[-1]):
            values["words"] = {"begin": quote_result(*turn.calls[-1])}
        # Examples for all chosen tools, not only for the possible ones: the same in each round, so they stay cached.
        near = nearest(turn.request, names_of(chosen), NEAREST_SHOWN) if possible else []
        own = prompt.task_messages(turn, introduction(chosen))
        return _constrained_request(Step(turn, expected, possible, values), prompt.shared_prefix(names), own, near)

    def visible(self, text: str) -> str:
        """Return the text to show so far: words as they are written, but no call."""
        return "" if text.lstrip()[:1] in ("{", "") else text.lstrip()

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        """Convert llama.cpp's answer, or return the request to make instead if it cannot be right.

        Each kind of retry happens once: the user sees the calls.
        """
        usage, step = read_usage(answer.get("usage")), request["_step"]
        text, reason = _text_of_answer(answer)
        if step.code_file and reason == "stop":
            saved = _tool_call("write_file", {"path": step.code_file, "content": fenced_code(text) or f"{text}\n"})
            return LLMResponse(text, [saved], finish_reason="tool_calls", usage=usage)
        if step.is_talk:
            if step.tools and report_pattern().match(text):  # talk cannot report a call
                file = referenced_file(step.turn.text, step.turn.workspace_before)
                return self._prepare_task(replace(step.turn, file=file), step.tools)
            return LLMResponse(text, finish_reason=reason, usage=usage)
        call = _parsed_call(text)
        written = [text] if call is None else [json.dumps(call.arguments, ensure_ascii=False)]
        if not step.retried and (retry := _retry_if_false(text, call, request)):
            return retry
        unknown = call is not None and uses_unknown_file(call.name, call.arguments, step.turn.request, step.known)
        if not step.retried_without_examples and (unknown or leaked_text(written, step.known)):
            retried = replace(step, retried=True, retried_without_examples=True)
            return {**request, "messages": step.without_examples, "_step": retried}
        if unknown:
            return LLMResponse(sentence("unsure", language_of(step.turn.text)), usage=usage)
        if call is not None:
            call = _tool_call(call.name, call.arguments, call.error)
            return LLMResponse(None, [call], finish_reason="tool_calls", usage=usage)
        return LLMResponse(text, finish_reason=reason, usage=usage)


def _plain_request(step: Step, wish: str = "") -> dict[str, Any]:
    """Return a request in the model's own template, without grammar, tools and examples."""
    *before, last = prompt.merge_roles(prompt.talk_messages(step.turn))
    shown = [*before, {**last, "content": last["content"] + wish}]
    return {**_OPTIONS, "messages": shown, "stable": 0, "_step": step}


def _constrained_request(
    step: Step, stable: Sequence[Message], own: Sequence[Message], near: Sequence[Example] = ()
) -> dict[str, Any]:
    """Return a request with a grammar for the answer.

    The `stable` messages are the same for all conversations, the `own` ones belong to this one. The examples come
    between them: after the conversation, "the list" and "it" would refer to theirs.
    """
    turn = step.turn
    texts = [text_of(message) for message in turn.messages if message.get("role") != "assistant"]
    step = replace(
        step,
        known=[turn.system, *texts, *turn.workspace.files],
        without_examples=prompt.merge_roles([*stable[:1], *own]),
    )
    return {
        **_OPTIONS,
        "messages": prompt.merge_roles([*stable, *prompt.example_messages(reversed(near)), *own]),
        "stable": len(stable),
        "grammar": grammar(step.tools, step.expected, step.values),
        "_step": step,
    }


def _text_of_answer(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of llama.cpp's answer, and why it ended."""
    choice = (answer.get("choices") or [{}])[0]
    text = str((choice.get("message") or {}).get("content") or "").strip()
    return text, str(choice.get("finish_reason") or "stop")


def _parsed_call(text: str) -> ToolCallRequest | None:
    """Return the call in an answer, if it is one. An argument may be named `tool`, too."""
    if not text.startswith("{"):
        return None
    try:
        named = _CALL.match(text)
        name, arguments = (json.loads(named[1]), json.loads(f"{{{text[named.end() :]}")) if named else ("", None)
    except ValueError:
        arguments = None
    if arguments is None:
        return ToolCallRequest("", "unknown", {}, error="the call was cut off: make it shorter")
    return ToolCallRequest("", name, arguments)


def _tool_call(name: str, arguments: dict[str, Any], error: str | None = None) -> ToolCallRequest:
    """Return a tool call; a call of a simple tool becomes the command that it stands for."""
    if name in SIMPLE_TOOLS:
        name, arguments = "exec", {"command": to_command(name, arguments)}
    return ToolCallRequest(f"call_{uuid4().hex[:12]}", name, arguments, error)


def _retry_if_false(text: str, call: ToolCallRequest | None, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request to make instead if an answer repeats a call, or claims a change that no call has made."""
    step: Step = request["_step"]
    calls = step.turn.calls
    if call is not None:
        repeated = (call.name, call.arguments) in [(name, arguments) for name, arguments, _ in calls]
        return _retry(request, "words") if repeated else None
    done = any(name not in READ_ONLY_TOOLS and not is_failure(result) for name, _, result in calls)
    if done or not step.tools or not Request(text).matches("claim"):
        return None
    if calls and is_failure(calls[-1].result):
        told = f"That was not done. The result was:\n{short_result('', calls[-1].result, prompt.OLD_LIMIT)}\nSay so."
        return _retry(request, "words", {"role": "assistant", "content": text}, {"role": "user", "content": told})
    return None if step.expected == "words" and not calls else _retry(request, "call")


def _retry(request: dict[str, Any], expected: Expected, *added: Message) -> dict[str, Any]:
    step: Step = request["_step"]
    made = grammar(step.tools, expected, step.values)
    return {
        **request,
        "messages": [*request["messages"], *added],
        "grammar": made,
        "_step": replace(step, retried=True),
    }


# ---------------------------------------------------------------------------------------------- answers in JSON


class SmallJson(SmallShaping):
    """Shapes one request whose final answer must have the caller's JSON form. Calls come first, as usual."""

    may_skip_model = False

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = form
        self._asks_for_answer = False

    def prepare(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> dict[str, Any] | LLMResponse:
        request = super().prepare(messages, tools)
        only_words = isinstance(request, dict) and request["_step"].expected == "words"
        return self._answer_request(request) if isinstance(request, dict) and only_words else request

    def _answer_request(self, request: dict[str, Any]) -> dict[str, Any]:
        self._asks_for_answer = True
        *before, last = request["messages"]
        # llama.cpp accepts a grammar or a form, not both.
        rest = {name: value for name, value in request.items() if name != "grammar"}
        asked = {**last, "content": f"{last['content']}\n\nAnswer in JSON."}
        return {**rest, "messages": [*before, asked], "response_format": self._form}

    def visible(self, text: str) -> str:
        return text if self._asks_for_answer else ""

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        if self._asks_for_answer:
            text, reason = _text_of_answer(answer)
            return LLMResponse(text, finish_reason=reason, usage=read_usage(answer.get("usage")))
        step = super().read(answer, request)
        return step if isinstance(step, dict) or step.tool_calls else self._answer_request(request)
