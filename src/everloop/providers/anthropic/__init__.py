"""Anthropic's Messages API, and servers that are compatible with it."""

from ..http import Timeouts
from .provider import AnthropicProvider

__all__ = ["AnthropicProvider", "Timeouts"]
