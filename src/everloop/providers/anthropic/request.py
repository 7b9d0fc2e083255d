"""Convert a conversation and options in OpenAI's format to a request of Anthropic's Messages API.

Each message is encoded once, and its bytes stay the same from round to round; only the cache markers move to the end.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ...messages import Conversation, Message
from ..base import ProviderError, option_keywords
from ..openai import encode, parse_arguments, text_of

MARKER = b',"cache_control":{"type":"ephemeral"}}'
PICTURES = ("image/jpeg", "image/png", "image/gif", "image/webp")
UNIONS = ("anyOf", "oneOf", "allOf")
OPENING = encode({"type": "text", "text": "(The conversation begins here.)"})
EMPTY = encode({"type": "text", "text": "(empty message)"})
NO_OUTPUT = "(no output)"
# The API accepts calls in the history only in a request with tools.
NO_TOOLS = (
    b'[{"name":"unavailable","description":"No tool can be called now.",'
    b'"input_schema":{"type":"object","properties":{}}}]'
)
NO_CHOICE = b',"tool_choice":{"type":"none"}'

# Request options that have the same name in both APIs, and all supported ones.
SAME = ("temperature", "top_p", "max_tokens")
HONOURED = frozenset({*SAME, "stop", "tool_choice", "parallel_tool_calls", "response_format", "user"})
CHOICES = {"auto": "auto", "required": "any", "none": "none"}

_is_name = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch
_not_in_a_name = re.compile(r"[^A-Za-z0-9_-]")
_data_url = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*?;base64,([A-Za-z0-9+/=\s]+)").fullmatch


class Encoded:
    """The encoded system prompt and messages of one conversation so far."""

    def __init__(self) -> None:
        self.system: list[bytes] = []
        self.has_calls = False
        self._taken: list[Message] = []
        self._frozen: list[bytes] = []  # JSON of messages that no longer change
        self._loose: list[tuple[str, list[bytes]]] = []  # from the user's second-last message on; these get markers
        self._results = False  # the last message holds tool results

    @property
    def may_think(self) -> bool:
        """Return whether the model may think before it continues.

        After a tool call, the API requires the signed thoughts that preceded it, and those are not kept.
        """
        return bool(self._loose) and self._loose[-1][0] == "user" and not self._results

    def follow(self, messages: Sequence[Message]) -> bool:
        """Encode new messages; return False if the earlier ones are not those encoded before."""
        count = len(self._taken)
        if messages[:count] != self._taken:  # mostly the same objects, so the comparison is cheap
            return False
        for message in messages[count:]:
            self._add(message)
            self._taken.append(message)
        return True

    def system_json(self) -> bytes:
        return b"[" + b",".join([*self.system[:-1], marked(self.system[-1])]) + b"]"

    def parts(self) -> list[bytes]:
        """Return the messages as a JSON array, in few parts, most of which have not changed since the last request."""
        parts = [b"[", *self._frozen]
        for role, blocks in self._loose or [("user", [OPENING])]:
            if len(parts) > 1:
                parts.append(b",")
            parts.append(_message(role, [*blocks[:-1], marked(blocks[-1])] if role == "user" else blocks))
        return [*parts, b"]"]

    def _add(self, message: Message) -> None:
        role, content = message.get("role"), message.get("content")
        if role in ("system", "developer"):
            if text := text_of(content).strip():
                if not (self._loose or self._frozen):
                    self.system.append(text_block(text))
                else:  # kept in place: in the system prompt it would invalidate the cache
                    self._put("user", [text_block(f"<system>\n{text}\n</system>")])
        elif role == "assistant":
            self._put("assistant", self._assistant_blocks(message))
        elif role == "tool":
            self._put("user", [result_block(message)], results=True)
        else:
            self._put("user", user_blocks(content) or [EMPTY])

    def _assistant_blocks(self, message: Message) -> list[bytes]:
        text = text_of(message.get("content")).rstrip()  # the API rejects trailing white space
        blocks = [text_block(text)] if text else []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments = parse_arguments(function.get("arguments") or "{}")
            made = {"type": "tool_use", "id": safe_id(call.get("id")), "name": safe_name(function.get("name"))}
            blocks.append(encode(made | {"input": arguments if isinstance(arguments, dict) else {}}))
            self.has_calls = True
        return blocks

    def _put(self, role: str, blocks: list[bytes], results: bool = False) -> None:
        """Add a message, or extend the last one if it has the same role, since roles must alternate."""
        if not blocks:
            return
        if self._loose and self._loose[-1][0] == role:
            self._loose[-1][1].extend(blocks)
            self._results |= results
            return
        if role == "assistant" and not (self._loose or self._frozen):
            self._loose.append(("user", [OPENING]))
        self._loose.append((role, blocks))
        self._results = results
        if role == "user" and sum(1 for side, _ in self._loose if side == "user") > 2:
            self._freeze()

    def _freeze(self) -> None:
        """Freeze the first loose messages, up to the next one of the user."""
        count = next(at for at, (role, _) in enumerate(self._loose[1:], start=1) if role == "user")
        new = b",".join(_message(role, blocks) for role, blocks in self._loose[:count])
        self._frozen.append(b"," + new if self._frozen else new)
        del self._loose[:count]
        # Each part is more than twice as long as the next, so there are few parts and bytes are seldom copied.
        while len(self._frozen) > 1 and len(self._frozen[-2]) < 2 * len(self._frozen[-1]):
            last = self._frozen.pop()
            self._frozen[-1] += last


class Histories:
    """The encodings of conversations, each kept for as long as its conversation exists."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Conversation], Encoded]] = {}

    def encoded(self, messages: Sequence[Message]) -> Encoded:
        if not isinstance(messages, Conversation):
            return _encode_all(messages)
        key = id(messages)
        known = self._kept.get(key)
        if known is not None and known[1].follow(messages):
            return known[1]
        made, kept = _encode_all(messages), self._kept
        kept[key] = (weakref.ref(messages, lambda _: kept.pop(key, None)), made)
        return made


def _encode_all(messages: Sequence[Message]) -> Encoded:
    encoded = Encoded()
    encoded.follow(messages)
    return encoded


def encode_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[bytes, dict[str, str]]:
    """Return the definitions of the tools, and the original of each name that had to be changed."""
    blocks, names = [], {}
    for tool in tools:
        function = tool.get("function") or tool
        name = safe_name(function.get("name"))
        if name != function.get("name"):
            names[name] = str(function.get("name"))
        made = {"name": name}
        if description := function.get("description"):
            made["description"] = description
        schema = {key: value for key, value in (function.get("parameters") or {}).items() if key not in UNIONS}
        blocks.append(encode(made | {"input_schema": {"type": "object", "properties": {}} | schema}))
    return b"[" + b",".join([*blocks[:-1], marked(blocks[-1])]) + b"]", names


def user_blocks(content: Any) -> list[bytes]:
    """Return the blocks of a user message without empty texts, which the API rejects."""
    if isinstance(content, str):
        return [text_block(content)] if content.strip() else []
    return [block for part in content or () if (block := _part_block(part))] if isinstance(content, list) else []


def result_block(message: Message) -> bytes:
    content = message.get("content")
    made = {"type": "tool_result", "tool_use_id": safe_id(message.get("tool_call_id"))}
    if isinstance(content, list):
        if blocks := user_blocks(content):
            return encode(made)[:-1] + b',"content":[' + b",".join(blocks) + b"]}"
        content = ""
    return encode(made | {"content": content if isinstance(content, str) and content.strip() else NO_OUTPUT})


def _part_block(part: Any) -> bytes | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        text = text_of(part.get("text"))
        return text_block(text) if text.strip() else None
    if kind != "image_url":
        return text_block(f"[left out: this model takes no {kind or 'part without a type'}]")
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        return text_block("[left out: a picture without an address]")
    if url.startswith(("http://", "https://")):
        return encode({"type": "image", "source": {"type": "url", "url": url}})
    found = _data_url(url)
    mime = found[1].lower().replace("image/jpg", "image/jpeg") if found else ""
    if found is None or mime not in PICTURES:
        return text_block(f"[left out: a picture that is not one of {', '.join(PICTURES)}]")
    data = "".join(found[2].split())
    if len(data) % 4 or "=" in data[:-2]:  # the API would reject the whole conversation
        return text_block("[left out: a picture that is broken]")
    return encode({"type": "image", "source": {"type": "base64", "media_type": mime, "data": data}})


def text_block(text: str) -> bytes:
    return encode({"type": "text", "text": text})


def marked(block: bytes) -> bytes:
    """Return the block with a cache marker; the API caches everything up to it."""
    return block[:-1] + MARKER


def safe_name(name: Any) -> str:
    """Return a name that the API accepts: the same for the same name, different for different ones."""
    text = name if isinstance(name, str) else str(name)
    if _is_name(text):
        return text
    digest = hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return f"{_not_in_a_name.sub('_', text)[:55]}_{digest}"


safe_id = safe_name  # call ids have the same alphabet


def _message(role: str, blocks: Sequence[bytes]) -> bytes:
    return b'{"role":"%b","content":[%b]}' % (role.encode(), b",".join(blocks))


# --------------------------------------------------------------------------------- request options


def fields_of(provider: object, options: Mapping[str, Any] | None, has_tools: bool) -> dict[str, Any]:
    """Return the request fields for these options; an option that the API cannot express is an error."""
    chosen: dict[str, Any] = option_keywords(provider, options).get("options", {})
    fields = {name: chosen[name] for name in SAME if name in chosen}
    if stop := chosen.get("stop"):
        fields["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if "user" in chosen:
        fields["metadata"] = {"user_id": chosen["user"]}
    if answer := _format(chosen.get("response_format")):
        fields["output_config"] = {"format": answer}
    if choice := _choice(chosen.get("tool_choice"), chosen.get("parallel_tool_calls"), has_tools):
        fields["tool_choice"] = choice
    return fields


def forces_a_call(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") in ("any", "tool")


def _format(wanted: Any) -> dict[str, Any] | None:
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind in (None, "text"):
        return None
    described = wanted.get("json_schema") if isinstance(wanted, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ProviderError(
            f"Anthropic's API takes no response_format {kind!r}: give one of type json_schema with a schema", status=400
        )
    return {"type": "json_schema", "schema": schema}


def _choice(wanted: Any, parallel: Any, has_tools: bool) -> dict[str, Any] | None:
    """Return the tool choice, which the API accepts only in a request with tools."""
    made: dict[str, Any] | None = None
    if isinstance(wanted, str) and wanted in CHOICES:
        made = {"type": CHOICES[wanted]}
    elif wanted is not None:
        function = wanted.get("function") if isinstance(wanted, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ProviderError(
                "Anthropic's API takes a tool_choice of auto, none, required or one function", status=400
            )
        made = {"type": "tool", "name": safe_name(function["name"])}
    if not has_tools:
        if forces_a_call(made):
            raise ProviderError("tool_choice asks for a call, and the request has no tools", status=400)
        return None
    if parallel is False and (made is None or made["type"] != "none"):
        made = (made or {"type": "auto"}) | {"disable_parallel_tool_use": True}
    return made
