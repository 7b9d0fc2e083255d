"""A small model that must answer in a form of the caller's own: the same short prompt, and that form for the words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base import LLMResponse
from ...openai import read_usage
from .turn import Message

if TYPE_CHECKING:
    from .shaping import SmallShaping


class SmallJson:
    """Shapes one request whose answer is JSON. Calls come first, as ever; the answer is held to the form alone."""

    def __init__(self, shaping: SmallShaping) -> None:
        self._shaping = shaping
        self._answers = False

    def prepare(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> dict[str, Any] | LLMResponse:
        request = self._shaping.prepare(messages, tools, certain=False)
        if isinstance(request, LLMResponse):
            return request
        self._answers = request["_wanted"] != "call"
        if self._answers:
            request.pop("grammar", None)  # there can be only one, and llama.cpp makes it of the form
            last = request["messages"][-1]
            request["messages"][-1] = {**last, "content": f"{last['content']}\n\nAnswer in JSON."}
        return request

    def knows(self, tools: Sequence[Message]) -> bool:
        return self._shaping.knows(tools)

    def for_json(self) -> SmallJson:
        return self

    def visible(self, text: str) -> str:
        return text if self._answers else self._shaping.visible(text)

    def read(self, answer: Mapping[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        if not self._answers:
            return self._shaping.read(answer, request)
        choice = (answer.get("choices") or [{}])[0]
        text = str((choice.get("message") or {}).get("content") or "").strip()
        reason = str(choice.get("finish_reason") or "stop")
        return LLMResponse(text, finish_reason=reason, usage=read_usage(answer.get("usage")))
