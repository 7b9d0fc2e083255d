"""A chat request, read: what of it goes to the model, or the one thing that is wrong with it.

Everything a client can send is honoured or refused by its name; nothing is passed over in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Never

import msgspec

from ..messages import Message, encode_json
from ..text import clean, one_line
from .errors import ApiError, bad_request
from .history import History
from .shapes import FIXED, AnyMessage, ChatBody, DeveloperMessage, SchemaFormat, SystemMessage, TextFormat, ToolChoice

__all__ = ["DEFAULTS", "UNHEARD", "ChatRequest", "read_chat"]

# What the model behind may or may not honour, and the value of the API's that asks for nothing.
DEFAULTS: Mapping[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "max_tokens": None,
    "stop": [],
    "seed": None,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "reasoning_effort": None,
    "verbosity": "medium",
    "user": "",
}
# Said for the sake of a service's book-keeping: they change no answer, so nobody misses them.
UNHEARD = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
DEEPEST = 100  # levels of a schema

_decode = msgspec.json.Decoder(ChatBody).decode
_surrogate = re.compile(rb"\\u[dD][89a-fA-F]").search
_at = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`", re.S)
_unknown = re.compile(r"Object contains unknown field `(.*)`", re.S)
_missing = re.compile(r"Object missing required field `(\w+)`")
_value = re.compile(r"Invalid (?:enum )?value (.*)", re.S)
_WORDS = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "array": "list"}


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """What a client asks for. `messages` begin after the leading system messages, whose texts are `system`."""

    messages: list[Message]
    system: str = ""
    model: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # by the names that providers know
    stream: bool = False
    include_usage: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    answer_only: bool = False  # no tool may be called; a model that cannot be told so must be offered none

    @property
    def last_user(self) -> Message | None:
        """The user's last message, which a kept session goes on with."""
        return next((message for message in reversed(self.messages) if message["role"] == "user"), None)


def read_chat(body: bytes, *, honours: frozenset[str], messages_limit: int) -> ChatRequest:
    """The request in a body; an ApiError that names the parameter if it cannot be done as asked.

    `honours` are the options that the model behind takes. A body of many megabytes takes a while: read it in a thread.
    """
    chat = _parse(body)
    _refuse_fixed(chat)
    if len(chat.messages) > messages_limit:
        raise bad_request(
            f"messages: there are {len(chat.messages)}, and at most {messages_limit} are taken", "messages"
        )
    leading, messages = _split(chat.messages)
    options = chat.stream_options
    if options is not None and not chat.stream:
        raise bad_request("stream_options: only allowed together with stream", "stream_options")
    return ChatRequest(
        messages=History(len(leading)).read(messages),
        system="\n\n".join(text for message in leading if (text := _text_of(message).strip())),
        model=chat.model or None,
        tools=_tools(chat),
        options=_options(chat, honours),
        stream=bool(chat.stream),
        include_usage=bool(options and options.include_usage),
        metadata=chat.metadata or {},
        answer_only=chat.tool_choice == "none",
    )


# ---------------------------------------------------------------------------------------------- parameters


def _refuse_fixed(chat: ChatBody) -> None:
    for name, values in FIXED.items():
        value = getattr(chat, name)
        if value is not None and not any(_same(value, accepted) for accepted in values):
            _refuse_value(name, values)
    options = chat.stream_options
    if options is not None and options.include_obfuscation not in (None, False):
        _refuse_value("stream_options.include_obfuscation", (False,))


def _same(value: Any, accepted: Any) -> bool:
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def _refuse_value(name: str, values: tuple[Any, ...]) -> Never:
    allowed = " or ".join(encode_json(value).decode() for value in values if value is not None)
    what = f"only {allowed} is supported" if allowed else "not supported"
    raise bad_request(
        f"{name}: {what}; leave it out", name, "unsupported_value" if allowed else "unsupported_parameter"
    )


def _options(chat: ChatBody, honours: frozenset[str]) -> dict[str, Any]:
    """What goes to the model. What it does not take is refused, unless it asks for nothing."""
    if chat.max_completion_tokens is not None:
        if chat.max_tokens not in (None, chat.max_completion_tokens):
            problem = "max_tokens: differs from max_completion_tokens, which is its new name; send one of them"
            raise bad_request(problem, "max_tokens", "invalid_value")
        chat.max_tokens = chat.max_completion_tokens
    options: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        value = getattr(chat, name)
        if value is None or value == [] or value == {}:
            continue
        if isinstance(value, msgspec.Struct):
            value = msgspec.to_builtins(value)
        if name in honours:
            options[name] = value
        elif value != default and name not in UNHEARD and not (name == "tool_choice" and value == "none"):
            sent = "max_completion_tokens" if name == "max_tokens" and chat.max_completion_tokens else name
            raise bad_request(
                f"{sent}: the model behind this server does not take it; leave it out", sent, "unsupported_parameter"
            )
    if isinstance(chat.response_format, TextFormat):
        options.pop("response_format", None)
    if isinstance(chat.response_format, SchemaFormat):
        _check_depth(chat.response_format.json_schema.schema, "response_format.json_schema.schema")
    return options


def _tools(chat: ChatBody) -> list[dict[str, Any]]:
    """The client's tools, and whether its choice is among them."""
    tools, names = [], set()
    for at, tool in enumerate(chat.tools or ()):
        function, where = tool.function, f"tools[{at}].function"
        if function.name in names:
            raise bad_request(f"{where}.name: a tool of this name stands before it", f"{where}.name", "invalid_value")
        if function.parameters is not None and function.parameters.get("type", "object") != "object":
            where = f"{where}.parameters"
            raise bad_request(f'{where}: must be a schema of type "object"', where, "invalid_value")
        _check_depth(function.parameters, f"{where}.parameters")
        names.add(function.name)
        tools.append({"type": "function", "function": msgspec.to_builtins(function)})
    choice = chat.tool_choice
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise bad_request("tool_choice: names a tool that is not among tools", "tool_choice", "invalid_value")
    if choice == "required" and not tools:
        raise bad_request("tool_choice: only allowed together with tools", "tool_choice", "invalid_value")
    return tools


def _check_depth(schema: Any, where: str) -> None:
    """Refuse what can just be read, and could not be written again from a deeper place of the program."""
    encoded = encode_json(schema)
    if encoded.count(b"{") + encoded.count(b"[") <= DEEPEST:  # a quick look is enough for most
        return
    level = [schema]
    for _ in range(DEEPEST):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
        if not level:
            return
    raise bad_request(f"{where}: is nested more than {DEEPEST} levels deep", where, "invalid_value")


# ---------------------------------------------------------------------------------------------- messages


def _split(messages: list[AnyMessage]) -> tuple[list[SystemMessage | DeveloperMessage], list[AnyMessage]]:
    """The leading system messages, and the others."""
    leading: list[SystemMessage | DeveloperMessage] = []
    for message in messages:
        if not isinstance(message, SystemMessage | DeveloperMessage):
            break
        leading.append(message)
    return leading, messages[len(leading) :]


def _text_of(message: SystemMessage | DeveloperMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


# ---------------------------------------------------------------------------------------------- parsing


def _parse(body: bytes) -> ChatBody:
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if _surrogate(body):  # half a character, which a client has cut out of a text
            return _parse_odd(body)
        raise _no_json(error) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def _parse_odd(body: bytes) -> ChatBody:
    """The same by the standard library, with lone surrogates replaced."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        return msgspec.convert(_cleaned(value), ChatBody)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise _no_json(error) from None


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): _cleaned(item) for key, item in value.items()}
    return value


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON")


def _no_json(error: Exception) -> ApiError:
    return bad_request(f"the body is not JSON: {one_line(str(error))}", code="invalid_json")


def _refusal(text: str) -> ApiError:
    """msgspec's words on what does not fit, as an error that names the parameter."""
    found = _at.fullmatch(text)
    what, path = (found["what"], found["path"].partition("[...]")[0]) if found else (text, "")
    if unknown := _unknown.fullmatch(what):
        name = _below(path, one_line(unknown[1], 64))
        return bad_request(f"{name}: no such parameter", name, "unknown_parameter")
    if missing := _missing.fullmatch(what):
        name = _below(path, missing[1])
        return bad_request(f"{name}: is missing", name, "missing_required_parameter")
    if value := _value.fullmatch(what):
        return _wrong_value(path, one_line(value[1], 80))
    reason = re.sub(r"`([^`]*)`", lambda words: _in_words(words[1]), what)
    reason = reason[:1].lower() + one_line(reason[1:])
    subject = f"a key of {path}" if found and found["key"] else path or "the body"
    return bad_request(f"{subject}: {reason}", path or None, "invalid_type" if ", got " in reason else "invalid_value")


def _wrong_value(path: str, value: str) -> ApiError:
    if path.startswith("messages") and path.endswith(".role"):
        known = "system, developer, user, assistant or tool" + (
            ", which is its new name" if "function" in value else ""
        )
        return bad_request(f"{path}: {value} is not supported; it must be {known}", path, "invalid_value")
    if path.startswith("messages") and path.endswith("].type"):
        path = path.removesuffix(".type")
        return bad_request(f"{path}: {value} is not a part that can stand here", path, "unsupported_value")
    return bad_request(f"{path}: {value} is not supported", path, "invalid_value")


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(word, word) for word in types.split(" | "))
