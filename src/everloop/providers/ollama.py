"""Find an Ollama server on this machine, and the model to use."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from .endpoints import ENDPOINTS
from .http import Origin, origin_of

SECONDS = 5.0  # for a busy machine; if no Ollama runs, the connection is refused at once
MAX_BYTES = 1 << 20  # bytes of a list of models
NO_CHAT = ("embed", "bert", "rerank", "bge-", "minilm")


async def find_ollama(timeout: float = SECONDS, base_url: str = ENDPOINTS["ollama"].base_url) -> str | None:
    """Return the newest local chat model of the Ollama at a base URL; None if there is none, or no answer in time."""
    try:
        async with asyncio.timeout(timeout):
            return latest(msgspec.json.decode(await _listed(origin_of(base_url))))
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


async def _listed(origin: Origin) -> bytes:
    """Return its list of models. Uses HTTP/1.0, so that the body ends with the connection."""
    reader, writer = await asyncio.open_connection(origin.host, origin.port)
    try:
        writer.write(f"GET /api/tags HTTP/1.0\r\nHost: {origin.authority}\r\n\r\n".encode())
        parts, size = [], 0
        while size < MAX_BYTES and (data := await reader.read(1 << 16)):
            parts.append(data)
            size += len(data)
    finally:
        writer.transport.abort()
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.") or head[8:13].strip() != b"200":
        raise ValueError("it is not Ollama")
    return body


def latest(listed: Any) -> str | None:
    """Return the newest model in Ollama's list that can chat and runs on this machine."""
    models = listed.get("models") if isinstance(listed, dict) else None
    fit = [model for model in models or () if isinstance(model, dict) and _fits(model)]
    return max(fit, key=lambda model: str(model.get("modified_at") or ""))["name"] if fit else None


def _fits(model: dict[str, Any]) -> bool:
    name, details = model.get("name"), model.get("details")
    if not isinstance(name, str) or not name or model.get("remote_host") or model.get("remote_model"):
        return False
    if isinstance(can := model.get("capabilities"), list):
        return "completion" in can
    family = str(details.get("family")) if isinstance(details, dict) else ""
    return not any(word in f"{name} {family}".lower() for word in NO_CHAT)
