"""The tools that every agent has, made from the settings."""

from __future__ import annotations

from typing import Any

from ..config import Config
from .base import Tool
from .files import file_tools
from .message import MessageTool


def builtin_tools(config: Config, *, brave_api_key: str | None = None, exec_config: Any = None) -> list[Tool]:
    """Files, commands, the web and messages."""
    return [*file_tools(), MessageTool(config.message_to)]
