"""Test doubles: a scripted model, and real HTTP servers that speak the model APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .conversation import check_conversation
from .scripted import ChatOnlyProvider, Request, ScriptedProvider, call

if TYPE_CHECKING:
    from .anthropic_server import FakeAnthropic
    from .openai_server import FakeOpenAI

__all__ = [
    "ChatOnlyProvider",
    "FakeAnthropic",
    "FakeOpenAI",
    "Request",
    "ScriptedProvider",
    "call",
    "check_conversation",
]


def __getattr__(name: str) -> Any:
    if name == "FakeOpenAI":  # only the servers need more than the standard library
        from .openai_server import FakeOpenAI

        return FakeOpenAI
    if name == "FakeAnthropic":
        from .anthropic_server import FakeAnthropic

        return FakeAnthropic
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
