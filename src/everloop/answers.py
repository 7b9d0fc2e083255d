"""A model's answer as an entry of the log, whatever a provider hands over."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from .log import Call, ModelAnswered
from .messages import encode_json
from .providers.base import LLMResponse, ToolCallRequest, counts
from .text import clean

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")


def entry_of(response: LLMResponse, turn: str, used: Collection[str], limit: int) -> ModelAnswered:
    """The entry of an answer: one that can be written, read again and sent to a model.

    Its calls can be told apart from each other and from those in `used`; beyond `limit` they are not run.
    """
    if not hasattr(response, "tool_calls"):
        raise TypeError(f"the provider returned a {type(response).__name__} and not an LLMResponse")
    calls: list[Call] = []
    mine: set[str] = set()
    for number, request in enumerate(response.tool_calls or ()):
        id = clean(str(request.id or ""))
        while not id or id in used or id in mine:
            id, number = f"{turn}_{len(used) + number}", number + 1
        mine.add(id)
        arguments, error = _arguments(request)
        if len(calls) >= limit:
            error = f"at most {limit} calls in one answer are run; make the others in the next round"
        calls.append(Call(id, _tool_name(request.name), arguments, error))
    return ModelAnswered(
        content=clean(response.content) if response.content else None,
        calls=tuple(calls),
        reasoning=clean(response.reasoning) if response.reasoning else None,
        finish_reason=_word(response.finish_reason) or "stop",
        usage=counts(response),
        model=_word(response.model),
    )


def _word(value: Any) -> str:
    """A word of the provider's, which may be a number or a name of its library's."""
    return clean(str.__str__(value) if isinstance(value, str) else str(value)) if value else ""


def _arguments(request: ToolCallRequest) -> tuple[dict[str, Any], str | None]:
    """A call's arguments as they can be kept, and what is wrong with them."""
    arguments: Any = request.arguments
    try:
        if isinstance(arguments, dict):
            encode_json(arguments)
            return arguments, request.error
        problem = f"they must be an object, not {type(arguments).__name__}"
    except Exception as error:
        problem = clean(str(error))
    return {}, request.error or problem


def _tool_name(name: str) -> str:
    """A name that model APIs take back, also when the model has made it up."""
    return name if NAME.fullmatch(name) else NOT_IN_A_NAME.sub("_", name)[:64] or "unknown"
