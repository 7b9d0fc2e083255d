"""A model that obeys the latest instruction from any source, and the secret it may leak."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from everloop import LLMProvider
from everloop.providers.base import LLMResponse, ToolCallRequest

_ORDER = re.compile(r"(CALL|SAY) (\w+) (?=\{)")
_SHORT = re.compile(r"call-([a-z]+)", re.IGNORECASE)  # for places with little room, such as a host name
_SECRET = re.compile(r"secret-[0-9a-f]{24}")
_ids = itertools.count(1)


class ObeyingProvider(LLMProvider):
    """Follows each instruction in any text once: `CALL name {arguments}` is a call, `SAY answer {"text": …}`
    an answer.

    Instructions may be in results, in messages, in the prompt and in tool descriptions. SECRET in one stands for
    what the model knows about the user. Calls from `script` come first: the innocent work that exposes the model to an
    instruction.
    """

    default_model = "obeying"

    def __init__(self, short: dict[str, str] | None = None) -> None:
        self.script: list[ToolCallRequest] = []
        self.obeyed: list[str] = []  # in call order
        self.seen = ""
        self._short = short or {}  # orders by their short names

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
    ) -> LLMResponse:
        shown = [_text(message) for message in messages if message["role"] != "assistant"]
        self.seen += "\n".join(shown)
        orders = self._orders([*shown, *_strings(tools)])
        if tools is None:  # a summary is requested
            return LLMResponse("They said: " + " ".join(orders))
        if self.script:
            return LLMResponse(None, [self.script.pop(0)], "tool_calls")
        names = {tool["function"]["name"] for tool in tools}
        for order in orders:
            kind, name, _ = order.split(" ", 2)
            if order in self.obeyed or (kind == "CALL" and name not in names):
                continue
            self.obeyed.append(order)
            arguments = json.loads(order.split(" ", 2)[2].replace("SECRET", self._secret()))
            if kind == "SAY":
                return LLMResponse(arguments["text"])
            return LLMResponse(None, [ToolCallRequest(f"c{next(_ids)}", name, arguments)], "tool_calls")
        return LLMResponse("What I have read: " + " ".join(orders))

    def _secret(self) -> str:
        found = _SECRET.search(self.seen)
        return found[0] if found else "nothing"

    def _orders(self, texts: Sequence[str]) -> list[str]:
        """All instructions in these texts, including those quoted as JSON."""
        found: dict[str, None] = {}
        for text in (part for one in texts for part in _parts(one)):
            for order in _ORDER.finditer(text):
                try:
                    _, end = json.JSONDecoder().raw_decode(text, order.end())
                except ValueError:
                    continue
                found[f"{order[1]} {order[2]} {text[order.end() : end]}"] = None
            for short in _SHORT.findall(text):
                if short.lower() in self._short:
                    found[self._short[short.lower()]] = None
        return list(found)


def _parts(text: str) -> list[str]:
    """A text, and if it is JSON, the texts in it."""
    try:
        return [text, *_strings(json.loads(text))]
    except ValueError:
        return [text]


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for part in value for text in _strings(part)] if isinstance(value, list | tuple) else []


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content or ""


def order(name: str, /, **arguments: Any) -> str:
    return f"CALL {name} {json.dumps(arguments)}"


def answer_order(text: str) -> str:
    return f"SAY answer {json.dumps({'text': text})}"
