"""Adapts data from MCP servers: names that model APIs accept, definitions that are safe to use, results."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mcp import types

from ...messages import encode_json
from ...text import one_line
from ..base import Output
from ..registry import reports_failure
from .limits import without_hidden

MAX_DESCRIPTION = 8_000
MAX_SCHEMA = 100_000  # bytes of JSON
MAX_NAME = 200  # characters of a tool's original name
MAX_IMAGES = 8
MAX_IMAGE = 5 << 20  # characters of a data URL
_IMAGE = re.compile(r"image/(?:png|jpeg|gif|webp)")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_VALUES = {"const", "default", "enum", "example", "examples"}  # schema keywords with data, not schemas


def prefixes(servers: Sequence[str]) -> dict[str, str]:
    """Return the tool name prefix of each server. It depends on the configuration alone."""
    wanted = {name: f"mcp_{_clean(name)[:24]}" for name in servers}
    shared = Counter(wanted.values())
    return {
        name: prefix if shared[prefix] == 1 or prefix == f"mcp_{name}" else f"{prefix}-{_digest(name)[:4]}"
        for name, prefix in wanted.items()
    }


def tool_names(prefix: str, names: Sequence[str], others: Iterable[str]) -> dict[str, str]:
    """Return our name for each tool of a server, by original name; `others` are the prefixes of the other servers.

    A name that is too long, would be used by two tools, or belongs to another server gets a suffix computed from the
    tool's original name. So it does not depend on which other servers exist.
    """
    longer = tuple(f"{other}_" for other in others if len(other) > len(prefix))
    wanted = {name: f"{prefix}_{_clean(name)}" for name in names}
    shared = Counter(wanted.values())
    for name, full in wanted.items():
        alone = shared[full] == 1 or full == f"{prefix}_{name}"
        if not alone or len(full) > 64 or full.startswith(longer):
            wanted[name] = f"{prefix}_{_digest(name)}_{_clean(name)}"[:64]
    return wanted


def description_of(tool: types.Tool) -> str:
    annotations = tool.annotations
    text = without_hidden(
        (tool.description or tool.title or (annotations and annotations.title) or "")[: MAX_DESCRIPTION * 2]
    )
    return text if len(text) <= MAX_DESCRIPTION else text[:MAX_DESCRIPTION] + " […]"


def parameters_of(tool: types.Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments; raise a ValueError if it cannot be used."""
    try:
        schema = _without_patterns(tool.input_schema)
        length = len(encode_json(schema))
    except RecursionError:
        raise ValueError("its schema is nested too deeply") from None
    if length > MAX_SCHEMA:
        raise ValueError(f"its schema is too long ({length:,} bytes)")
    assert isinstance(schema, dict)
    return schema


def _without_patterns(schema: Any) -> Any:
    """Return a schema whose regular expressions are shown to the model but not executed.

    An external expression can take forever.
    """
    if isinstance(schema, list):
        return [_without_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in _VALUES else _without_patterns(value) for key, value in schema.items()}
    if isinstance(pattern := found.get("pattern"), str):
        del found["pattern"]
        description = found.get("description")
        stated = f"It must match the pattern {pattern[:500]}"
        found["description"] = f"{description} {stated}" if isinstance(description, str) else stated
    return found


def output_of(result: types.CallToolResult) -> Output:
    """Convert the result of a call: text for the model, and images that it can be shown."""
    texts: list[str] = []
    images: list[str] = []
    for part in result.content:
        _add(part, texts, images)
    if not texts and result.structured_content is not None:
        texts.append(encode_json(result.structured_content).decode())
    if not texts:
        texts.append(f"({len(images)} images)" if images else "(no output)")
    failed = result.is_error or reports_failure(result.structured_content)
    return Output("\n".join(texts), untrusted=True, images=tuple(images), failed=failed)


def _add(part: types.ContentBlock, texts: list[str], images: list[str]) -> None:
    if isinstance(part, types.TextContent):
        texts.append(part.text)
    elif isinstance(part, types.ImageContent):
        _add_image(part.mime_type, part.data, texts, images)
    elif isinstance(part, types.AudioContent):
        texts.append(f"[sound, {one_line(part.mime_type, 100)}, {_bytes(part.data)}: it cannot be heard here]")
    elif isinstance(part, types.ResourceLink):
        about = f": {one_line(part.description, 500)}" if part.description else ""
        texts.append(f"[resource {one_line(part.name, 200)} at {one_line(part.uri, 500)}{about}]")
    elif isinstance(part.resource, types.TextResourceContents):
        texts.append(f"[resource {one_line(part.resource.uri, 500)}]\n{part.resource.text}")
    else:
        kind, blob = part.resource.mime_type or "", part.resource.blob
        texts.append(f"[resource {one_line(part.resource.uri, 500)}, {one_line(kind, 100) or 'data'}, {_bytes(blob)}]")
        if kind.startswith("image/"):
            _add_image(kind, blob, texts, images)


def _add_image(kind: str, data: str, texts: list[str], images: list[str]) -> None:
    if len(images) == MAX_IMAGES:
        left_out = f"more than {MAX_IMAGES} images"
    elif _IMAGE.fullmatch(kind) is None or len(data) % 4 or _BASE64.fullmatch(data) is None:
        left_out = f"an image of a kind that cannot be shown, {one_line(kind, 100)}"
    elif len(data) > MAX_IMAGE:
        left_out = f"an image that is too big, {_bytes(data)}"
    else:
        images.append(f"data:{kind};base64,{data}")
        return
    texts.append(f"[left out: {left_out}]")


def _bytes(data: str) -> str:
    return f"{len(data) * 3 // 4:,} bytes"


def _clean(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name) or "_"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
