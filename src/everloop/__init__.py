"""Everloop: a self-hosted agent runtime that never drops a turn.

The public names below are loaded on first use, so that `import everloop` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module

from ._version import __version__ as __version__

__all__ = [
    "AgentDefinition",
    "AgentExecutor",
    "AgentLoop",
    "Config",
    "ContextBuilder",
    "CronService",
    "InboundMessage",
    "LLMProvider",
    "LLMResponse",
    "MessageBus",
    "OutboundMessage",
    "OutputObject",
    "SessionManager",
    "SubagentManager",
    "Tool",
    "ToolCallRequest",
    "ToolRegistry",
    "__version__",
    "tool",
]

TYPE_CHECKING = False  # typing's own constant would cost its import
if TYPE_CHECKING:
    from everloop.bus import InboundMessage, MessageBus, OutboundMessage
    from everloop.config import Config
    from everloop.context.prompt import ContextBuilder
    from everloop.cron.service import CronService
    from everloop.goals.definitions import AgentDefinition
    from everloop.goals.executor import AgentExecutor, OutputObject
    from everloop.providers.base import LLMProvider, LLMResponse, ToolCallRequest
    from everloop.runtime.agent import AgentLoop
    from everloop.runtime.subagents import SubagentManager
    from everloop.store.sessions import SessionManager
    from everloop.tools.base import Tool, tool
    from everloop.tools.registry import ToolRegistry

_HOMES = {
    "AgentDefinition": "everloop.goals.definitions",
    "AgentExecutor": "everloop.goals.executor",
    "AgentLoop": "everloop.runtime.agent",
    "Config": "everloop.config",
    "ContextBuilder": "everloop.context.prompt",
    "CronService": "everloop.cron.service",
    "InboundMessage": "everloop.bus",
    "LLMProvider": "everloop.providers.base",
    "LLMResponse": "everloop.providers.base",
    "MessageBus": "everloop.bus",
    "OutboundMessage": "everloop.bus",
    "OutputObject": "everloop.goals.executor",
    "SessionManager": "everloop.store.sessions",
    "SubagentManager": "everloop.runtime.subagents",
    "Tool": "everloop.tools.base",
    "ToolCallRequest": "everloop.providers.base",
    "ToolRegistry": "everloop.tools.registry",
    "tool": "everloop.tools.base",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module and keep it."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
