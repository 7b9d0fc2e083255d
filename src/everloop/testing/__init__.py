"""Doubles for tests: a model that follows a script, and a real HTTP server that speaks OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .conversation import check_conversation
from .scripted import ChatOnlyProvider, Request, ScriptedProvider, call

if TYPE_CHECKING:
    from .openai_server import FakeOpenAI

__all__ = ["ChatOnlyProvider", "FakeOpenAI", "Request", "ScriptedProvider", "call", "check_conversation"]


def __getattr__(name: str) -> Any:
    if name == "FakeOpenAI":  # the only one that needs more than the standard library
        from .openai_server import FakeOpenAI

        return FakeOpenAI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
