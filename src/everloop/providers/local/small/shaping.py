"""Makes small models useful: a short prompt with worked examples, few tools, and answers held to a grammar.

A model of one billion parameters or so loses its way in long prompts and many tools, but copies examples well. So it is
asked in another way than larger ones, and what it answers is read back into the shapes that everybody else knows.
The prompt begins with what never changes, then has the conversation, then the examples nearest to the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from ...base import LLMResponse, ToolCallRequest
from ...openai import read_usage
from .asked import about_the_person
from .claims import claims_work, failed, fingerprint
from .formats import SmallJson
from .grammar import Wanted, grammar
from .next import fits, wanted_next
from .prompt import OLD_LIMIT, RESULT_LIMIT, example_messages, joined, memory_in, notes, prefix, told
from .results import quote, short_result
from .tools import KNOWN, SHOWN, acts, choose, introduce, nearest, shows
from .turn import Message, Turn, last_request, parted, text_of, turn_of
from .values import as_named, values_for

LARGE = 3_000_000_000  # bytes of a model's file from which on it can help itself: about four billion parameters
ANSWER_TOKENS = 600


def shaping_for(setting: str, size: int) -> SmallShaping | None:
    """The shaping for a model whose file has `size` bytes, by the setting: `auto`, `on` or `off`."""
    small = setting == "on" or (setting != "off" and size < LARGE)
    return SmallShaping() if small else None


class SmallShaping:
    """Shapes requests for a small model. It keeps nothing: the same conversation, the same bytes."""

    def knows(self, tools: Sequence[Message]) -> bool:
        """Whether there are examples of any of these tools."""
        return any(tool.get("function", {}).get("name") in KNOWN for tool in tools)

    def for_json(self) -> SmallJson:
        return SmallJson(self)

    def prepare(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> dict[str, Any]:
        """The request for llama.cpp: messages, a grammar, and how many messages at the beginning never change."""
        offered = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), dict)]
        system, conversation = parted(messages)
        last = last_request(conversation)
        turn = turn_of(conversation[last:])
        chosen = choose(offered, turn.request, [name for name, _, _ in turn.calls])
        # The same in all rounds of the turn, so that they are read once.
        introduced, shown_for = introduce(chosen), names_of(chosen)
        if any(failed(result) for _, _, result in turn.calls):
            chosen = offered  # what it needs may be among the others
        known = about_the_person(turn.request, [memory_in(system), *(text_of(one) for one in conversation[:last])])
        wanted = "words" if known and not turn.calls else wanted_next(turn, names_of(chosen))
        values = values_for(turn, conversation)
        chosen = [tool for tool in chosen if fits(str(tool.get("name")), turn, wanted, shown_for, values)]
        names = names_of(chosen)
        stable = prefix(names_of(offered))
        begin = _begin(turn, names)
        near = nearest(turn.request, shown_for, SHOWN) if names and not known else []
        shown = [
            *stable,
            *notes(system),
            *told(conversation[:last], OLD_LIMIT),
            *(message for example in reversed(near) for message in example_messages(example)),
            *([{"role": "user", "content": introduced}] if introduced else []),
            *told(conversation[last:], RESULT_LIMIT),
        ]
        return {
            "messages": joined(shown),
            "stable": len(stable),
            "grammar": grammar(chosen, wanted, values, begin),
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "cache_prompt": True,
            "_wanted": wanted,
            "_turn": turn,
            "_tools": chosen,
            "_values": values,
            "_begin": begin,
        }

    def visible(self, text: str) -> str:
        """Words are for the person, a call is not."""
        return "" if text.lstrip()[:1] in ("{", "") else text.lstrip()

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        """llama.cpp's answer in our shapes, or the request to make instead, where that cannot be right.

        Asked again once only: a model that insists is believed, for the person sees the calls.
        """
        choice = (answer.get("choices") or [{}])[0]
        text = str((choice.get("message") or {}).get("content") or "").strip()
        call = _call(text)
        if "_again" not in request and (again := _instead(text, call, request)):
            return again
        usage = read_usage(answer.get("usage"))
        if call is not None:
            return LLMResponse(None, [call], finish_reason="tool_calls", usage=usage)
        return LLMResponse(text, finish_reason=str(choice.get("finish_reason") or "stop"), usage=usage)


def _begin(turn: Turn, names: frozenset[str]) -> str:
    """What words must begin with: the last result, where that is what was asked for."""
    if not turn.calls:
        return ""
    name, arguments, result = turn.calls[-1]
    if name not in ("list_dir", "read_file") or not shows(turn.request, names, name):
        return ""
    return quote(name, arguments, result)


def _instead(text: str, call: ToolCallRequest | None, request: dict[str, Any]) -> dict[str, Any] | None:
    """The request to make instead of one whose answer repeats a call, or claims work that no call has done."""
    turn: Turn = request["_turn"]
    if call is not None and (command := as_named(call.name, call.arguments, turn)):
        tools = [tool for tool in request["_tools"] if tool.get("name") == call.name]
        return _again({**request, "_tools": tools, "_values": {call.name: {"command": [command]}}}, "call")
    if call is not None:
        made = {fingerprint(name, arguments) for name, arguments, _ in turn.calls}
        return _again(request, "words") if fingerprint(call.name, call.arguments) in made else None
    done = any(acts(name) and not failed(result) for name, _, result in turn.calls)
    if done or not request["_tools"] or not claims_work(text):
        return None
    if turn.calls and failed(turn.calls[-1][2]):
        report = f"That was not done. The result was:\n{short_result('', turn.calls[-1][2], OLD_LIMIT)}\nSay so."
        return _again(request, "words", {"role": "assistant", "content": text}, {"role": "user", "content": report})
    return None if request["_wanted"] == "words" and not turn.calls else _again(request, "call")


def _again(request: dict[str, Any], wanted: Wanted, *said: Message) -> dict[str, Any]:
    made = grammar(request["_tools"], wanted, request["_values"], request["_begin"])
    return {**request, "messages": [*request["messages"], *said], "grammar": made, "_again": True}


def names_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(str(tool.get("name")) for tool in tools)


def _call(text: str) -> ToolCallRequest | None:
    """The call that an answer is, if it is one."""
    if not text.startswith("{"):
        return None
    id = f"call_{uuid4().hex[:12]}"
    try:
        pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
        name, arguments = str(pairs[0][1]), {key: _plain(value) for key, value in pairs[1:]}
    except (ValueError, TypeError, IndexError, AttributeError):
        return ToolCallRequest(id, "unknown", {}, error="the call was cut off: make it shorter")
    return ToolCallRequest(id, name, arguments)


def _plain(value: Any) -> Any:
    """Pairs back to objects, at any depth."""
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):
            return {key: _plain(item) for key, item in value}
        return [_plain(item) for item in value]
    return value
