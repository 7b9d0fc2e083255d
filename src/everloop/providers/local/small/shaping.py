"""Makes small models useful: a short prompt with worked examples, few tools, and answers held to a grammar.

A model of one billion parameters or so loses its way in long prompts and many tools, but copies examples well. So it is
asked in another way than larger ones, and its answers are converted back into the usual format.
The prompt begins with what never changes; the examples nearest to the request and the conversation follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ....tools.narrow import LOOKING, NARROW, command_of, failed, quote, short_result
from ...base import LLMResponse, ToolCallRequest
from ...openai import read_usage
from .answers import claims_work, imitates, invented, leak, report, sentence
from .conversation import Message, Turn, meant, text_of, turn_of
from .decide import code_in, decide, first_call, next_step, resolved, writes_code
from .examples import KNOWN, SHOWN, Tool, choose, introduce, names_of, nearest, shows
from .grammar import Values, Wanted, grammar, values_for
from .prompt import OLD_LIMIT, RESULT_LIMIT, client_prefix, example_messages, joined, notes, prefix, talk, told
from .words import tongue

LARGE = 3_000_000_000  # bytes of a model's file from which on it can help itself: about four billion parameters
PROMPT_TOKENS = 1_500  # of the examples and notes before a conversation
_NAMED = re.compile(r'\{\s*"\w+"\s*:\s*("(?:[^"\\]|\\.)*")\s*,?')
_ASKED: Mapping[str, Any] = {"temperature": 0, "max_tokens": 600, "cache_prompt": True}


def shaping_for(setting: str, size: int) -> SmallShaping | None:
    """The shaping for a model whose file has `size` bytes, by the setting: `auto`, `on` or `off`."""
    small = setting == "on" or (setting != "off" and size < LARGE)
    return SmallShaping() if small else None


class SmallShaping:
    """Shapes requests for a small model. It keeps nothing: the same conversation, the same bytes."""

    prompt_tokens = PROMPT_TOKENS
    certain = True  # whether an answer that needs no model may be given

    def for_json(self, form: Mapping[str, Any]) -> SmallJson:
        return SmallJson(form)

    def prepare(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> dict[str, Any] | LLMResponse:
        """The request for llama.cpp: messages, a grammar, and how many messages at the beginning never change. Or the
        answer itself where it is certain without the model: a look that must come first, or what a call has done."""
        offered = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), dict)]
        if "exec" in names_of(offered):
            offered += NARROW.values()
        turn = turn_of(messages)
        if offered and not KNOWN & names_of(offered):  # a client's own: no example shows them
            stable = client_prefix(turn.system, offered)
            own = told(turn.conversation, RESULT_LIMIT)
            return _held(turn, [*stable, *own], len(stable), offered, "either", {}, [stable[0], *own])
        decided = decide(turn, offered) if offered else turn
        if decided is None and not turn.calls:
            return {**_plainly(turn), "_talk": offered}
        return self._work(decided or turn, offered)

    def _work(self, turn: Turn, offered: Sequence[Tool]) -> dict[str, Any] | LLMResponse:
        """A step of a turn that may need tools: a call that is certain, or a request with examples and a grammar."""
        turn, names = resolved(turn), names_of(offered)
        if names and (first := first_call(turn, names)):
            return LLMResponse(None, [_call_of(*first)], finish_reason="tool_calls")
        if self.certain and not turn.calls and "write_file" in names and (file := writes_code(turn.request)):
            return {**_plainly(turn, f"\n\nAnswer with the code of {file} alone, in one fenced block."), "_code": file}
        chosen = choose(offered, turn.request, turn.names)
        # The same in all rounds of the turn, so that they are read once.
        introduced, shown_for = introduce(chosen), names_of(chosen)
        values = values_for(turn)
        wanted, possible = next_step(turn, chosen, offered, values)
        if self.certain and wanted != "call" and (done := report(turn)):
            return LLMResponse(done)
        if turn.calls and shows(turn.request, names_of(possible), turn.names[-1]):
            values["words"] = {"begin": quote(*turn.calls[-1])}
        near = nearest(turn.request, shown_for, SHOWN) if possible else []
        stable = prefix(names)
        own = [
            *notes(turn.system, turn.before),
            *told(turn.conversation[: turn.start], OLD_LIMIT),
            *([{"role": "user", "content": introduced}] if introduced else []),
            *told(turn.conversation[turn.start :], RESULT_LIMIT, turn.request if turn.file else ""),
        ]
        # Examples stand before the conversation: behind it, "the list" and "it" would mean theirs.
        shown = [*stable, *(message for example in reversed(near) for message in example_messages(example)), *own]
        return _held(turn, shown, len(stable), possible, wanted, values, [*stable[:1], *own])

    def visible(self, text: str) -> str:
        """Words are for the person, a call is not."""
        return "" if text.lstrip()[:1] in ("{", "") else text.lstrip()

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        """llama.cpp's answer in our shapes, or the request to make instead, where that cannot be right.

        Asked again once only: a model that insists is believed, for the person sees the calls.
        """
        usage, turn = read_usage(answer.get("usage")), request["_turn"]
        text, reason = _text_of_answer(answer)
        if "_code" in request and reason == "stop":
            saved = _call_of("write_file", {"path": request["_code"], "content": code_in(text) or f"{text}\n"})
            return LLMResponse(text, [saved], finish_reason="tool_calls", usage=usage)
        if "_talk" in request:
            if request["_talk"] and imitates(text):  # talk can have done nothing
                return self._work(replace(turn, file=meant(turn.said, turn.before)), request["_talk"])
            return LLMResponse(text, finish_reason=reason, usage=usage)
        call = _call(text)
        written = [text] if call is None else [json.dumps(call.arguments, ensure_ascii=False)]
        if "_again" not in request and (again := _instead(text, call, request)):
            return again
        made_up = call is not None and invented(call.name, call.arguments, request)
        if "_bared" not in request and (made_up or leak(written, request["_known"])):
            # Nothing of an example may reach the person or a file. Asked without examples, it can be from none.
            return {**request, "messages": request["_bare"], "_bared": True, "_again": True}
        if made_up:
            return LLMResponse(sentence("unsure", tongue(turn.said)), usage=usage)
        if call is not None:
            call = _call_of(call.name, call.arguments, call.error)
            return LLMResponse(None, [call], finish_reason="tool_calls", usage=usage)
        return LLMResponse(text, finish_reason=reason, usage=usage)


def _plainly(turn: Turn, wish: str = "") -> dict[str, Any]:
    """The request for the plain model: its own template, no grammar, no tools and no examples."""
    *before, last = joined(talk(turn.system, turn.conversation, turn.there))
    shown = [*before, {**last, "content": last["content"] + wish}]
    return {**_ASKED, "messages": shown, "stable": 0, "_wanted": "words", "_turn": turn, "_talk": ()}


def _held(
    turn: Turn,
    shown: Sequence[Message],
    stable: int,
    tools: Sequence[Tool],
    wanted: Wanted,
    values: Values,
    bare: Sequence[Message],
) -> dict[str, Any]:
    """The request whose answer is held to a grammar. `bare` are its messages without examples."""
    said = [text_of(one) for one in turn.conversation if one.get("role") != "assistant"]
    return {
        **_ASKED,
        "messages": joined(shown),
        "stable": stable,
        "grammar": grammar(tools, wanted, values),
        "_wanted": wanted,
        "_turn": turn,
        "_tools": tools,
        "_values": values,
        "_bare": joined(bare),
        "_known": [turn.system, *said, *turn.there.files],
    }


def _text_of_answer(answer: Mapping[str, Any]) -> tuple[str, str]:
    """The text of llama.cpp's answer, and why it ended."""
    choice = (answer.get("choices") or [{}])[0]
    text = str((choice.get("message") or {}).get("content") or "").strip()
    return text, str(choice.get("finish_reason") or "stop")


def _call_of(name: str, arguments: dict[str, Any], error: str | None = None) -> ToolCallRequest:
    """A call; one of a narrow tool as the command that it stands for."""
    if name in NARROW:
        name, arguments = "exec", {"command": command_of(name, arguments)}
    return ToolCallRequest(f"call_{uuid4().hex[:12]}", name, arguments, error)


def _instead(text: str, call: ToolCallRequest | None, request: dict[str, Any]) -> dict[str, Any] | None:
    """The request to make instead of one whose answer repeats a call, or claims work that no call has done."""
    turn: Turn = request["_turn"]
    if call is not None:
        made = [(name, arguments) for name, arguments, _ in turn.calls]
        return _again(request, "words") if (call.name, call.arguments) in made else None
    done = any(name not in LOOKING and not failed(result) for name, _, result in turn.calls)
    if done or not request["_tools"] or not claims_work(text):
        return None
    if turn.calls and failed(turn.calls[-1][2]):
        report = f"That was not done. The result was:\n{short_result('', turn.calls[-1][2], OLD_LIMIT)}\nSay so."
        return _again(request, "words", {"role": "assistant", "content": text}, {"role": "user", "content": report})
    return None if request["_wanted"] == "words" and not turn.calls else _again(request, "call")


def _again(request: dict[str, Any], wanted: Wanted, *said: Message) -> dict[str, Any]:
    made = grammar(request["_tools"], wanted, request["_values"])
    return {**request, "messages": [*request["messages"], *said], "grammar": made, "_again": True}


def _call(text: str) -> ToolCallRequest | None:
    """The call that an answer is, if it is one. One of its arguments may be called tool, too."""
    if not text.startswith("{"):
        return None
    try:
        named = _NAMED.match(text)
        name, arguments = (json.loads(named[1]), json.loads(f"{{{text[named.end() :]}")) if named else ("", None)
    except ValueError:
        arguments = None
    if arguments is None:
        return ToolCallRequest("", "unknown", {}, error="the call was cut off: make it shorter")
    return ToolCallRequest("", name, arguments)


# ---------------------------------------------------------------------------------------------- answers in JSON


class SmallJson(SmallShaping):
    """Shapes one request whose answer has a form of the caller's. Calls come first; the answer is held to the form."""

    certain = False

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = form
        self._answers = False

    def prepare(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> dict[str, Any] | LLMResponse:
        request = super().prepare(messages, tools)
        return self._answer(request) if isinstance(request, dict) and request["_wanted"] == "words" else request

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self._answers = True
        *before, last = request["messages"]
        kept = {name: value for name, value in request.items() if name != "grammar"}  # llama.cpp takes one of them
        asked = {**last, "content": f"{last['content']}\n\nAnswer in JSON."}
        return {**kept, "messages": [*before, asked], "response_format": self._form}

    def visible(self, text: str) -> str:
        return text if self._answers else ""

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        if self._answers:
            text, reason = _text_of_answer(answer)
            return LLMResponse(text, finish_reason=reason, usage=read_usage(answer.get("usage")))
        step = super().read(answer, request)
        return step if isinstance(step, dict) or step.tool_calls else self._answer(request)
