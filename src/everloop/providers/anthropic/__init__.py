"""Anthropic's Messages API, and whatever else speaks it."""

from ..http import Timeouts
from .provider import AnthropicProvider

__all__ = ["AnthropicProvider", "Timeouts"]
