"""Prices of well-known models, in US dollars per million tokens. `[[price]]` in the settings takes precedence.

They are the list prices of short prompts, from the vendors' public price lists by way of litellm's; a contract, region,
batch or long prompt may be priced differently. Update `AS_OF` together with the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from . import Price

AS_OF = "2026-11"
# name, input, output, cached input
_TABLE = """
# Anthropic
claude-haiku-4-5 1 5 0.1
claude-haiku-5-5 0.1 0.5 0.01
claude-opus-4-5 5 25 0.5
claude-opus-4-6 5 25 0.5
claude-opus-4-7 5 25 0.5
claude-opus-4-8 5 25 0.5
claude-opus-5 5 25 0.5
claude-opus-5-5 4 20 0.2
claude-sonnet-4-5 3 15 0.3
claude-sonnet-4-6 3 15 0.3
claude-sonnet-5 2 10 0.2
claude-sonnet-5-5 2 10 0.1
# DeepSeek
deepseek-chat 0.28 0.42 0.028
deepseek-reasoner 0.28 0.42 0.028
deepseek-v4-flash 0.3 1.2 0.006
deepseek-v4-pro 1.32 3.96 0.044
# Google
gemini-2.5-flash 0.3 2.5 0.03
gemini-2.5-flash-lite 0.1 0.4 0.01
gemini-2.5-pro 1.25 10 0.125
gemini-3-flash-preview 0.5 3 0.05
gemini-3.1-flash-lite 0.25 1.5 0.025
gemini-3.1-flash-lite-preview 0.25 1.5 0.025
gemini-3.1-pro-preview 2 12 0.2
gemini-3.5-flash 1.5 9 0.15
gemini-3.5-flash-lite 0.3 2.5 0.03
gemini-3.6-flash 0.75 3.75 0.075
gemini-3.7-flash 0.75 3.75 0.075
gemini-3.8-flash 0.75 3.75 0.075
gemini-4-argon 2 10 0.1
# Mistral
mistral-large-3 0.5 1.5 0.05
mistral-large-4 0.68 2.09 0.068
mistral-medium 1.5 7.5 0.15
mistral-small 0.1 0.3 0.01
# OpenAI
gpt-4.1 2 8 0.5
gpt-4.1-mini 0.4 1.6 0.1
gpt-4.1-nano 0.1 0.4 0.025
gpt-4o 2.5 10 1.25
gpt-4o-mini 0.15 0.6 0.075
gpt-5 1.25 10 0.125
gpt-5-mini 0.25 2 0.025
gpt-5-nano 0.05 0.4 0.005
gpt-5.1 1.25 10 0.125
gpt-5.2 1.75 14 0.175
gpt-5.4 2.5 15 0.25
gpt-5.4-mini 0.75 4.5 0.075
gpt-5.4-nano 0.2 1.25 0.02
gpt-5.5 5 30 0.5
gpt-5.6 4 20 0.4
gpt-5.6-luna 0.2 1.2 0.02
gpt-5.6-sol 4 20 0.4
gpt-5.6-terra 2 12 0.2
gpt-6-astra 10 50 1
gpt-6-luna 0.1 0.5 0.01
gpt-6-sol 2 10 0.2
gpt-6.1-sol 2 10 0.1
o3 2 8 0.5
o3-mini 1.1 4.4 0.55
o4-mini 1.1 4.4 0.275
# xAI
grok-4.3 1.25 2.5 0.2
grok-4.5 2 6 0.3
grok-4.6 2 6 0.5
grok-4.7 2 6 0.5
grok-code-fast-1 1 2 0.2
"""
_DATED = re.compile(r"-(?:latest|20\d\d-?\d\d-?\d\d)$")


@lru_cache(maxsize=1)
def shipped() -> dict[str, Price]:
    """Return the prices shipped with this version, by model name."""
    rows = [line.split() for line in _TABLE.splitlines() if line and not line.startswith("#")]
    return {
        name: Price(model=name, input=float(read), output=float(written), cached=float(cached))
        for name, read, written, cached in rows
    }


def price_of(model: str, own: Sequence[Price] = ()) -> Price | None:
    """Return the price of a model: the first match among the configured ones, else the shipped one.

    A vendor prefix and a date suffix of the name are ignored.
    """
    for price in own:
        if fnmatchcase(model, price.model):
            return price
    return shipped().get(_DATED.sub("", model.rpartition("/")[2].lower()))


def cost_of(price: Price, usage: Mapping[str, int]) -> float:
    """Return the cost of these tokens."""
    cached = min(usage.get("cached_tokens", 0), usage.get("prompt_tokens", 0))
    read = usage.get("prompt_tokens", 0) - cached
    cheap = price.cached if price.cached >= 0 else price.input
    return (read * price.input + cached * cheap + usage.get("completion_tokens", 0) * price.output) / 1_000_000
