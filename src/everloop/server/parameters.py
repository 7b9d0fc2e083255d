"""What becomes of each parameter of a chat request, in words: for the OpenAPI document and the page on the API."""

from __future__ import annotations

from typing import Literal

from .requests import DEFAULTS, UNHEARD
from .shapes import FIXED, ChatBody

Effect = Literal["honoured", "passed on", "no effect", "refused"]

WORDS = {
    "messages": "The conversation; it ends with the user, a tool's result, or a reminder after these.",
    "model": "One of `GET /v1/models`; without it, or with another name, the server's own answers.",
    "tools": "Up to 128 functions of the client; their calls are handed back. Without them the agent uses its own.",
    "tool_choice": '"none", "auto", "required", or one of `tools` by name.',
    "parallel_tool_calls": "Whether the model may make several calls in one answer.",
    "stream": "Whether the answer comes as server-sent events.",
    "stream_options": "With `stream` only: `include_usage` adds a chunk with the usage.",
    "temperature": "0 to 2.",
    "top_p": "0 to 1.",
    "max_tokens": "The most tokens of an answer, for each call of the model.",
    "max_completion_tokens": "The new name of `max_tokens`; where both are there, they must be the same.",
    "stop": "A text, or up to 4, at which the answer ends.",
    "seed": "A whole number of 64 bits.",
    "response_format": '"text", "json_object", or "json_schema" with a named schema.',
    "presence_penalty": "-2 to 2.",
    "frequency_penalty": "-2 to 2.",
    "logit_bias": "-100 to 100 by token.",
    "reasoning_effort": '"none", "minimal", "low", "medium", "high" or "xhigh".',
    "verbosity": '"low", "medium" or "high".',
    "user": "Passed on to a model that takes it.",
    "metadata": "Up to 16 pairs of strings (64 and 512 characters), kept in the activity log.",
    "safety_identifier": "A text.",
    "prompt_cache_key": "A text.",
    "prompt_cache_retention": "A text.",
    "n": "Only 1.",
    "logprobs": "Only false.",
    "top_logprobs": "Only 0.",
    "modalities": 'Only ["text"].',
    "audio": "Only null.",
    "prediction": "Only null.",
    "web_search_options": "Only null. The agent searches with its own tools.",
    "store": "Only false. Sessions are kept with the header `X-Session`.",
    "service_tier": 'Only "auto" or "default".',
    "functions": "Only null; `tools` is its new name.",
    "function_call": "Only null; `tool_choice` is its new name.",
}


def effect(name: str) -> Effect:
    """What the server does with a parameter."""
    if name in FIXED:
        return "refused"
    if name in UNHEARD:
        return "no effect"
    return "passed on" if name in DEFAULTS or name == "max_completion_tokens" else "honoured"


def table() -> str:
    """The table of all parameters, as Markdown."""
    rows = [f"| `{name}` | {effect(name)} | {WORDS[name]} |" for name in ChatBody.__struct_fields__]
    return "\n".join(["| parameter | | |", "|---|---|---|", *rows])
