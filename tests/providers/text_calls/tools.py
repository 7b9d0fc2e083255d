"""The tools that the tests of dialects offer, and a reading that can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everloop.providers.text_calls import Reader, Reading


def definition(name: str, required: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    schema["required"] = required.split()
    function = {"name": name, "description": f"The tool {name}.", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    definition("read_file", "path", path="string", limit="integer"),
    definition("list_dir", "", path="string"),
    definition("write_file", "path content", path="string", content="string"),
    definition("exec", "command", command="string", timeout="number", background="boolean"),
    definition("web_search", "query", query="string", count="integer"),
    definition("tag", "names", names="array", options="object"),
    {
        "type": "function",
        "function": {"name": "anything", "parameters": {"type": "object", "additionalProperties": True}},
    },
]


def plain(reading: Reading) -> tuple[str, list[tuple[str, Any, bool]], str]:
    """(content, calls as (name, arguments, whether it has an error), reasoning)."""
    calls = [(call.name, call.arguments, call.error is not None) for call in reading.calls]
    return reading.content, calls, reasoning_of(reading)


def reasoning_of(reading: Reading) -> str:
    return reading.reasoning


def fed(pieces: Iterable[str], tools: Any = TOOLS) -> tuple[Reading, str, str]:
    """Return the reading of a text in pieces, the text that was shown, and the reasoning that was shown."""
    reader = Reader(tools)
    shown = [part for piece in pieces for part in reader.feed(piece)]
    reading = reader.finish()
    shown += reading.pieces
    return (
        reading,
        "".join(piece.text for piece in shown if not piece.reasoning),
        "".join(piece.text for piece in shown if piece.reasoning),
    )
