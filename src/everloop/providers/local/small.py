"""Makes small models useful: a short prompt with worked examples, few tools, and answers held to a grammar.

A model of one billion parameters or so loses its way in long prompts and many tools, but copies examples well. So it is
asked in another way than larger ones, and what it answers is read back into the shapes that everybody else knows.
The prompt begins with what never changes, then has the conversation, then the examples nearest to the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ..base import LLMResponse, ToolCallRequest
from ..sse import read_usage
from .small_claims import claims_work, failed, fingerprint
from .small_example import Example
from .small_examples import FIXED
from .small_grammar import Wanted, call_text, grammar
from .small_results import cut, quote, short_result
from .small_tools import SHOWN, acts, choose, introduce, nearest, needs_tool, next_step, shows
from .small_words import CHANGES, means, names_a_file, paths_in, tokens

Message = dict[str, Any]

LARGE = 3_000_000_000  # bytes of a model's file from which on it can help itself: about four billion parameters
RESULT_LIMIT = 1_600  # characters of a result that is being looked at
OLD_LIMIT = 300  # and of one of an earlier turn
NOTES_LIMIT = 1_200  # characters of what the system prompt says beside the tools
ANSWER_TOKENS = 600
TRIES = 3  # calls of a turn that may fail
RECENT = 8  # messages whose files are known
MOST_PATHS = 40
_SYSTEM = (
    "You are a helpful assistant that works in a folder on the user's computer. "
    "To do something or to look something up, answer with one call of a tool as JSON. "
    "Say only what a result says. When the request is done, or needs no tool, answer in one short sentence, "
    "in the user's language."
)
# Told beside what was said, a small model takes it for what was asked; there is `date`.
_CLOCK = re.compile(r"\n*\[It is now [^\]]*\]\s*$")
_BREAK = "\n\n---\n\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn that is being worked on: what was asked, and the calls so far with their results."""

    request: str
    calls: tuple[tuple[str, dict[str, Any], str], ...] = ()


def shaping_for(setting: str, size: int) -> SmallShaping | None:
    """The shaping for a model whose file has `size` bytes, by the setting: `auto`, `on` or `off`."""
    small = setting == "on" or (setting != "off" and size < LARGE)
    return SmallShaping() if small else None


class SmallShaping:
    """Shapes requests for a small model. It keeps nothing: the same conversation, the same bytes."""

    def prepare(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> dict[str, Any]:
        """The request for llama.cpp: messages, a grammar, and how many messages at the beginning never change."""
        offered = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), dict)]
        system, conversation = _parted(messages)
        last = _last_request(conversation)
        turn = _turn(conversation[last:])
        chosen = choose(offered, turn.request, [name for name, _, _ in turn.calls])
        introduced, shown_for = introduce(chosen), _names(chosen)  # the same in all rounds, so that they are read once
        if any(failed(result) for _, _, result in turn.calls):
            chosen = offered  # what it needs may be among the others
        wanted = _wanted(turn, _names(chosen))
        if wanted == "call" and turn.calls and not failed(turn.calls[-1][2]):  # it has looked, and would look again
            new = _left(turn) and not means(turn.request, "change")  # a file that is written, and not one to edit
            chosen = [
                tool for tool in chosen if acts(name := str(tool.get("name"))) and not (new and name == "edit_file")
            ]
        names = _names(chosen)
        prefix = _prefix(_names(offered))
        paths = _paths(turn, conversation)
        begin = _begin(turn, names)
        near = nearest(turn.request, shown_for, SHOWN) if names else []
        shown = [
            *prefix,
            *_notes(system),
            *_told(conversation[:last], OLD_LIMIT),
            *(message for example in reversed(near) for message in _example(example)),
            *([{"role": "user", "content": introduced}] if introduced else []),
            *_told(conversation[last:], RESULT_LIMIT),
        ]
        return {
            "messages": _joined(shown),
            "stable": len(prefix),
            "grammar": grammar(chosen, wanted, paths, begin),
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "cache_prompt": True,
            "_wanted": wanted,
            "_turn": turn,
            "_tools": chosen,
            "_paths": paths,
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


def _wanted(turn: Turn, names: frozenset[str]) -> Wanted:
    """Whether a call, words or either should come next, by what was so with requests like this one."""
    if not names:
        return "words"
    if not turn.calls:  # a request that names a file is not answered before something was looked at or done
        return "call" if names_a_file(turn.request) else needs_tool(turn.request, names)
    failures = [failed(result) for _, _, result in turn.calls]
    if failures[-1]:
        if sum(failures) == 1 and _mendable(*turn.calls[-1]):
            return "call"
        return "either" if sum(failures) < TRIES else "words"
    return "call" if _left(turn) else next_step(turn.request, names, [name for name, _, _ in turn.calls])


def _mendable(name: str, _: Mapping[str, Any], result: str) -> bool:
    """Whether a call failed by how it was made: a word of the request as a command, a text that is not in the file."""
    return "command not found" in result or (name == "edit_file" and "does not exist" not in result)


def _left(turn: Turn) -> bool:
    """Whether something is still to be changed: a file that was named is in no call, and nothing was changed yet."""
    touched = json.dumps([arguments for _, arguments, _ in turn.calls], ensure_ascii=False)
    return (
        0 < len(turn.calls) < TRIES
        and not any(acts(name) or failed(result) for name, _, result in turn.calls)
        and means(turn.request, *CHANGES)
        and any(path not in touched for path in paths_in(turn.request))
    )


def _begin(turn: Turn, names: frozenset[str]) -> str:
    """What words must begin with: the last result, where that is what was asked for."""
    if not turn.calls:
        return ""
    name, arguments, result = turn.calls[-1]
    if name not in ("list_dir", "read_file") or not shows(turn.request, names, name):
        return ""
    return quote(name, arguments, result)


def _paths(turn: Turn, conversation: Sequence[Message]) -> dict[str, list[str]]:
    """Where a file can be that is looked at or changed: it was named, or a result of the turn has it.

    Small models garble names when they are free to. Once a call has failed they are free.
    """
    if any(failed(result) for _, _, result in turn.calls):
        return {}
    seen = [path for _, _, result in turn.calls for path in paths_in(result)][:MOST_PATHS]
    named = paths_in(turn.request)
    said = [path for message in conversation[-RECENT:] for path in paths_in(_text(message))]
    files = list(dict.fromkeys([*named, *seen] or said[-MOST_PATHS:]))
    folders = list(dict.fromkeys([".", *(path for path in files), *tokens(turn.request)[:MOST_PATHS]]))
    return {"read_file": files, "edit_file": files, "list_dir": folders, "grep": folders}


def _instead(text: str, call: ToolCallRequest | None, request: dict[str, Any]) -> dict[str, Any] | None:
    """The request to make instead of one whose answer repeats a call, or claims work that no call has done."""
    turn: Turn = request["_turn"]
    if call is not None:
        made = {fingerprint(name, arguments) for name, arguments, _ in turn.calls}
        return _again(request, "words") if fingerprint(call.name, call.arguments) in made else None
    done = any(acts(name) and not failed(result) for name, _, result in turn.calls)
    if done or not request["_tools"] or not claims_work(text):
        return None
    if turn.calls and failed(turn.calls[-1][2]):
        told = f"That was not done. The result was:\n{short_result('', turn.calls[-1][2], OLD_LIMIT)}\nSay so."
        return _again(request, "words", {"role": "assistant", "content": text}, {"role": "user", "content": told})
    return None if request["_wanted"] == "words" and not turn.calls else _again(request, "call")


def _again(request: dict[str, Any], wanted: Wanted, *said: Message) -> dict[str, Any]:
    made = grammar(request["_tools"], wanted, request["_paths"], request["_begin"])
    return {**request, "messages": [*request["messages"], *said], "grammar": made, "_again": True}


# ---------------------------------------------------------------------------------------------- the prompt


def _prefix(names: frozenset[str]) -> list[Message]:
    """The system prompt and the examples that fit the tools there are: the same bytes for all conversations."""
    if not names:
        return [{"role": "system", "content": "You are a helpful assistant. Answer in short."}]
    shown: list[Message] = [{"role": "system", "content": _SYSTEM}]
    for example in FIXED:
        if example.tools <= names:
            shown += _example(example)
    return shown


def _example(example: Example) -> list[Message]:
    shown: list[Message] = [{"role": "user", "content": example.request}]
    for step in example.steps:
        shown.append({"role": "assistant", "content": call_text(step.tool, step.arguments)})
        shown.append({"role": "user", "content": _result(short_result(step.tool, step.result, RESULT_LIMIT))})
    return [*shown, {"role": "assistant", "content": example.answer}]


def _result(text: str) -> str:
    return f"Result:\n{text}"


def _notes(system: str) -> list[Message]:
    """What the agent's own prompt says beside its tools and skills, as a short exchange before the conversation.

    It stands behind the examples, so that they need not be read again when the memory or the workspace is another.
    """
    blocks = [block for block in system.split(_BREAK) if not block.startswith("## Skills")]
    if blocks and blocks[0].startswith("# "):
        lines = [line for line in blocks[0].splitlines()[2:] if not line.startswith(("Runtime:", "Time zone:"))]
        blocks[0] = " ".join(lines).replace(". You work with tools and then answer the user.", ".")
    text = cut("\n\n".join(blocks).strip(), NOTES_LIMIT)
    if not text:
        return []
    return [
        {"role": "user", "content": f"{text}\n\nThe examples end here."},
        {"role": "assistant", "content": "I am ready."},
    ]


def _told(conversation: Sequence[Message], limit: int) -> list[Message]:
    """Messages in the shapes that the examples have: calls as their JSON, results as what a person would paste."""
    shown: list[Message] = []
    for message in conversation:
        role, text = message.get("role"), _text(message)
        if role == "tool":
            shown.append({"role": "user", "content": _result(short_result(str(message.get("name")), text, limit))})
        elif role == "assistant":
            if text:
                shown.append({"role": "assistant", "content": cut(text, limit)})
            for name, arguments in _calls(message):
                shown.append({"role": "assistant", "content": call_text(name, arguments)})
        elif text:
            shown.append({"role": "user", "content": _CLOCK.sub("", text)})
    return shown


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Messages of one role after another as one: many models' templates want the roles to take turns."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**message, "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append(dict(message))
    return joined


# ---------------------------------------------------------------------------------------------- reading


def _names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(str(tool.get("name")) for tool in tools)


def _parted(messages: Sequence[Message]) -> tuple[str, list[Message]]:
    """The system prompt, and the rest."""
    system = [_text(message) for message in messages if message.get("role") in ("system", "developer")]
    rest = [message for message in messages if message.get("role") not in ("system", "developer")]
    return "\n\n".join(system), rest


def _last_request(conversation: Sequence[Message]) -> int:
    """Where the turn that is being worked on begins."""
    return max((at for at, message in enumerate(conversation) if message.get("role") == "user"), default=0)


def _turn(messages: Sequence[Message]) -> Turn:
    request = _CLOCK.sub("", _text(messages[0])) if messages and messages[0].get("role") == "user" else ""
    results = {message.get("tool_call_id"): _text(message) for message in messages if message.get("role") == "tool"}
    calls = [
        (*named, results.get(call.get("id"), ""))
        for message in messages
        for call, named in zip(message.get("tool_calls") or (), _calls(message), strict=True)
    ]
    return Turn(request, tuple(calls))


def _calls(message: Message) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (ValueError, TypeError):
            arguments = {}
        found.append((str(function.get("name")), arguments if isinstance(arguments, dict) else {}))
    return found


def _text(message: Message) -> str:
    """The words of a message; a picture is none."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
    return content if isinstance(content, str) else ""


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
