"""Makes small models useful: a short prompt with worked examples, few tools, and answers held to a grammar.

A model of one billion parameters or so loses its way in long prompts and many tools, but copies examples well. So it is
asked in another way than larger ones, and its answers are converted back into the usual format.
The prompt begins with what never changes; the examples nearest to the request and the conversation follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from uuid import uuid4

from ....tools.narrow import NARROW, command_of, failed, quote, short_result
from ...base import LLMResponse, ToolCallRequest
from ...openai import read_usage
from .answers import claims_work, imitates, invented, leak, report, sentence
from .conversation import Message, Seen, Turn, described, last_request, meant, parted, seen_in, text_of, turn_of
from .decide import RECENT as RECENT_TURNS
from .decide import (
    Decision,
    arithmetic,
    decide,
    first_call,
    fits,
    last_words,
    only,
    saved_part,
    shows_all,
    wanted_next,
    writes_code,
)
from .examples import KNOWN, SHOWN, acts, choose, introduce, mentions, nearest, needs_tool, shows
from .grammar import Values, Wanted, grammar
from .prompt import OLD_LIMIT, RESULT_LIMIT, client_prefix, example_messages, joined, notes, prefix, talk, told
from .values import values_for
from .words import paths_in, tongue

LARGE = 3_000_000_000  # bytes of a model's file from which on it can help itself: about four billion parameters
ANSWER_TOKENS = 600
PROMPT_TOKENS = 1_500  # of the examples and notes before a conversation


def shaping_for(setting: str, size: int) -> SmallShaping | None:
    """The shaping for a model whose file has `size` bytes, by the setting: `auto`, `on` or `off`."""
    small = setting == "on" or (setting != "off" and size < LARGE)
    return SmallShaping() if small else None


@dataclass(frozen=True)
class Asked:
    """A request with all that it is judged by. `certain` is whether an answer that needs no model may be given."""

    system: str
    conversation: Sequence[Message]
    last: int  # where the turn that is being worked on begins
    turn: Turn
    offered: Sequence[Mapping[str, Any]]
    certain: bool

    @cached_property
    def before(self) -> Seen:
        """What was seen of the workspace before this turn."""
        return seen_in(self.conversation[: self.last])

    @cached_property
    def there(self) -> Seen:
        return seen_in(self.conversation)


class SmallShaping:
    """Shapes requests for a small model. It keeps nothing: the same conversation, the same bytes."""

    prompt_tokens = PROMPT_TOKENS

    def for_json(self, form: Mapping[str, Any]) -> SmallJson:
        return SmallJson(form)

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, certain: bool = True
    ) -> dict[str, Any] | LLMResponse:
        """The request for llama.cpp: messages, a grammar, and how many messages at the beginning never change. With
        `certain`, the answer itself where it needs no model: a result, or a sum. A look that must come first always."""
        offered = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), dict)]
        if "exec" in names_of(offered):
            offered += NARROW.values()
        system, conversation = parted(messages)
        last = last_request(conversation)
        turn = turn_of(conversation[last:])
        asked = Asked(system, conversation, last, turn, offered, certain)
        if not offered:
            result = arithmetic(turn.request) if certain else ""
            return LLMResponse(result) if result else self._request(asked)
        if not KNOWN & names_of(offered):
            return self._with_client_tools(asked)
        decision = _decision(asked)
        if decision.route == "work" or turn.calls:
            return self._work(asked, decision)
        talk = _talk(asked)
        if isinstance(talk, dict):
            talk["_work"] = partial(self._work, asked, Decision("work", meant(turn.request, asked.before)))
        return talk

    def _work(self, asked: Asked, decision: Decision) -> dict[str, Any] | LLMResponse:
        """The step of a turn that may need tools, on the file that the decision names."""
        turn, names = _resolved(asked.turn, decision, asked.there), names_of(asked.offered)
        answer = last_words(asked.conversation[: asked.last], turn.request)
        if first := first_call(turn, names, asked.before, asked.there, answer):
            return _made(*first)
        if asked.certain and not turn.calls and "write_file" in names and (file := writes_code(turn.request)):
            return _code(asked, file)
        return self._request(replace(asked, turn=turn))

    def _request(self, asked: Asked) -> dict[str, Any] | LLMResponse:
        """The request for the model with tools, worked examples and a grammar."""
        system, conversation, last, turn = asked.system, asked.conversation, asked.last, asked.turn
        offered, before, there, certain = asked.offered, asked.before, asked.there, asked.certain
        chosen: Sequence[Mapping[str, Any]] = choose(offered, turn.request, [name for name, _, _ in turn.calls])
        # The same in all rounds of the turn, so that they are read once.
        introduced, shown_for = introduce(chosen), names_of(chosen)
        if any(failed(result) for _, _, result in turn.calls):
            chosen = offered  # what it needs may be among the others
        wanted = wanted_next(turn, names_of(chosen))
        whole = shows_all(turn.request)
        if turn.calls and turn.calls[-1][0] == "read_file" and (turn.file or whole) and not only(turn, there):
            wanted = "words"
            if certain and whole and (text := quote(*turn.calls[-1])):
                return LLMResponse(text)
        if certain and wanted != "call" and not only(turn, there) and (done := report(turn)):
            return LLMResponse(done)
        values = values_for(turn, conversation, there)
        clear = only(turn, there) & shown_for
        if clear and not any(failed(result) for _, _, result in turn.calls):
            wanted, chosen = "call", [tool for tool in chosen if tool.get("name") in clear]
        else:
            chosen = [tool for tool in chosen if fits(str(tool.get("name")), turn, wanted, shown_for, values)]
        if not turn.file and not paths_in(turn.request):  # nothing is deleted or moved by a guess at what is meant
            chosen = [tool for tool in chosen if tool.get("name") not in NARROW]
        names = names_of(chosen)
        stable = prefix(names_of(offered))
        begin = _begin(turn, names)
        near = nearest(turn.request, shown_for, SHOWN) if names else []
        current = told(conversation[last:], RESULT_LIMIT)
        if turn.file and current:
            current[0] = {"role": "user", "content": turn.request}
        own = [
            *notes(system, before),
            *told(conversation[:last], OLD_LIMIT),
            *([{"role": "user", "content": introduced}] if introduced else []),
            *current,
        ]
        # Examples stand before the conversation: behind it, "the list" and "it" would mean theirs.
        shown = [*stable, *(message for example in reversed(near) for message in example_messages(example)), *own]
        return self._held(asked, shown, len(stable), chosen, wanted, values, begin, [*stable[:1], *own])

    def _held(
        self,
        asked: Asked,
        shown: Sequence[Message],
        stable: int,
        tools: Sequence[Mapping[str, Any]],
        wanted: Wanted,
        values: Values,
        begin: str,
        bare: Sequence[Message],
    ) -> dict[str, Any]:
        """The request whose answer is held to a grammar. `bare` are its messages without examples."""
        said = [text_of(one) for one in asked.conversation if one.get("role") != "assistant"]
        return {
            "messages": joined(shown),
            "stable": stable,
            "grammar": grammar(tools, wanted, values, begin),
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "cache_prompt": True,
            "_wanted": wanted,
            "_turn": asked.turn,
            "_tools": tools,
            "_values": values,
            "_begin": begin,
            "_bare": joined(bare),
            "_known": [asked.system, *said, *asked.there.files],
        }

    def _with_client_tools(self, asked: Asked) -> dict[str, Any]:
        """The request where all tools are a client's own: no example shows them, so each of them is described."""
        stable = client_prefix(asked.system, asked.offered)
        own = told(asked.conversation, RESULT_LIMIT)
        return self._held(asked, [*stable, *own], len(stable), asked.offered, "either", {}, "", [stable[0], *own])

    def visible(self, text: str) -> str:
        """Words are for the person, a call is not."""
        return "" if text.lstrip()[:1] in ("{", "") else text.lstrip()

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        """llama.cpp's answer in our shapes, or the request to make instead, where that cannot be right.

        Asked again once only: a model that insists is believed, for the person sees the calls.
        """
        usage = read_usage(answer.get("usage"))
        text, reason = _text_of_answer(answer)
        if "_code" in request and reason == "stop":
            saved = ToolCallRequest(_new_id(), "write_file", {"path": request["_code"], "content": saved_part(text)})
            return LLMResponse(text, [saved], finish_reason="tool_calls", usage=usage)
        if "_talk" in request:
            if "_work" in request and imitates(text):  # talk can have done nothing
                done: LLMResponse | dict[str, Any] = request["_work"]()
                return done
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
            return LLMResponse(sentence("unsure", tongue(request["_turn"].request)), usage=usage)
        if call is not None:
            return LLMResponse(None, [_widened(call)], finish_reason="tool_calls", usage=usage)
        return LLMResponse(text, finish_reason=reason, usage=usage)


def _text_of_answer(answer: Mapping[str, Any]) -> tuple[str, str]:
    """The text of llama.cpp's answer, and why it ended."""
    choice = (answer.get("choices") or [{}])[0]
    text = str((choice.get("message") or {}).get("content") or "").strip()
    return text, str(choice.get("finish_reason") or "stop")


def _decision(asked: Asked) -> Decision:
    conversation, request = asked.conversation[: asked.last], asked.turn.request
    starts = [at for at, message in enumerate(conversation) if message.get("role") == "user"]
    lately = seen_in(conversation[starts[-RECENT_TURNS] if len(starts) >= RECENT_TURNS else 0 :])
    needs = "call" if mentions(asked.offered, request) else needs_tool(request, names_of(asked.offered))
    return decide(request, asked.before, bool(lately.touched), needs)


def _talk(asked: Asked) -> dict[str, Any] | LLMResponse:
    """The request for the plain model: its own template, no grammar, no tools and no examples."""
    if asked.certain and (result := arithmetic(asked.turn.request)):
        return LLMResponse(result)
    return _plainly(joined(talk(asked.system, asked.conversation, asked.there)))


def _plainly(messages: list[Message]) -> dict[str, Any]:
    return {
        "messages": messages,
        "stable": 0,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "cache_prompt": True,
        "_wanted": "words",
        "_talk": True,
    }


def _code(asked: Asked, file: str) -> dict[str, Any]:
    """The request for the code of a file: the plain model writes it with its line breaks, and it is saved as it is."""
    shown = joined(talk(asked.system, asked.conversation, asked.there))
    wish = f"{shown[-1]['content']}\n\nAnswer with the code of {file} alone, in one fenced block."
    shown[-1] = {"role": "user", "content": wish}
    return {**_plainly(shown), "_code": file}


def _resolved(turn: Turn, decision: Decision, there: Seen) -> Turn:
    """The turn with the file that is meant behind its request. After a look at the folder, what that has shown."""
    file = decision.file
    if not paths_in(turn.request) and any(name == "list_dir" for name, _, _ in turn.calls):
        file = described(turn.request, there) or file
    if not file:
        return turn
    request = f"{turn.request} ({file})"
    return Turn(request, turn.calls, file, decision.corrects, decision.goes_on)


def _made(name: str, arguments: dict[str, Any]) -> LLMResponse:
    call = _widened(ToolCallRequest(_new_id(), name, arguments))
    return LLMResponse(None, [call], finish_reason="tool_calls")


def _new_id() -> str:
    return f"call_{uuid4().hex[:12]}"


def _widened(call: ToolCallRequest) -> ToolCallRequest:
    """A call of a narrow tool as the command that it stands for."""
    if call.name not in NARROW:
        return call
    return replace(call, name="exec", arguments={"command": command_of(call.name, call.arguments)})


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
    if call is not None:
        made = [(name, arguments) for name, arguments, _ in turn.calls]
        return _again(request, "words") if (call.name, call.arguments) in made else None
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
    id = _new_id()
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


# ---------------------------------------------------------------------------------------------- answers in JSON


class SmallJson(SmallShaping):
    """Shapes one request whose answer has a form of the caller's. Calls come first; the answer is held to the form."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._form = form
        self._answers = False

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, certain: bool = False
    ) -> dict[str, Any] | LLMResponse:
        request = super().prepare(messages, tools, certain)
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
