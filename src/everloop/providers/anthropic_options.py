"""Request options, which have OpenAI's names, as fields of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .anthropic_request import safe_name
from .base import ProviderError, option_keywords

SAME = ("temperature", "top_p", "max_tokens")
HONOURED = frozenset({*SAME, "stop", "tool_choice", "parallel_tool_calls", "response_format", "user"})
CHOICES = {"auto": "auto", "required": "any", "none": "none"}


def fields_of(provider: object, options: Mapping[str, Any] | None, has_tools: bool) -> dict[str, Any]:
    """The fields of a request that say what its options ask for; what the API has no way to say is an error."""
    chosen: dict[str, Any] = option_keywords(provider, options).get("options", {})
    fields = {name: chosen[name] for name in SAME if name in chosen}
    if stop := chosen.get("stop"):
        fields["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if "user" in chosen:
        fields["metadata"] = {"user_id": chosen["user"]}
    if answer := _format(chosen.get("response_format")):
        fields["output_config"] = {"format": answer}
    if choice := _choice(chosen.get("tool_choice"), chosen.get("parallel_tool_calls"), has_tools):
        fields["tool_choice"] = choice
    return fields


def forces_a_call(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") in ("any", "tool")


def _format(wanted: Any) -> dict[str, Any] | None:
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind in (None, "text"):
        return None
    described = wanted.get("json_schema") if isinstance(wanted, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ProviderError(
            f"Anthropic's API takes no response_format {kind!r}: give one of type json_schema with a schema", status=400
        )
    return {"type": "json_schema", "schema": schema}


def _choice(wanted: Any, parallel: Any, has_tools: bool) -> dict[str, Any] | None:
    """The API takes a choice only from a request that has tools."""
    made: dict[str, Any] | None = None
    if isinstance(wanted, str) and wanted in CHOICES:
        made = {"type": CHOICES[wanted]}
    elif wanted is not None:
        function = wanted.get("function") if isinstance(wanted, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ProviderError(
                "Anthropic's API takes a tool_choice of auto, none, required or one function", status=400
            )
        made = {"type": "tool", "name": safe_name(function["name"])}
    if not has_tools:
        if forces_a_call(made):
            raise ProviderError("tool_choice asks for a call, and the request has no tools", status=400)
        return None
    if parallel is False and (made is None or made["type"] != "none"):
        made = (made or {"type": "auto"}) | {"disable_parallel_tool_use": True}
    return made
