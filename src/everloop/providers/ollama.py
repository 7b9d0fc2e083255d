"""An Ollama on this machine: whether one answers, and which of its models to ask."""

from __future__ import annotations

import asyncio
import http.client
from typing import Any

import msgspec

from ..tools.threads import in_thread
from .endpoints import ENDPOINTS
from .origin import origin_of

LARGEST = 1 << 20  # bytes of a list of models
NO_CHAT = ("embed", "bert", "rerank", "bge-", "minilm")


async def find_ollama(timeout: float = 0.5, base_url: str = ENDPOINTS["ollama"].base_url) -> str | None:
    """The model that was changed last of the Ollama at a base URL, of those that chat and run here; None if there is
    none, or if nobody answers in time."""
    try:
        async with asyncio.timeout(timeout):
            return await in_thread(_latest_model, base_url, timeout)
    except (OSError, http.client.HTTPException, ValueError, msgspec.MsgspecError):
        return None


def _latest_model(base_url: str, timeout: float) -> str | None:
    origin = origin_of(base_url)
    connection = http.client.HTTPConnection(origin.host, origin.port, timeout=timeout)
    try:
        connection.request("GET", "/api/tags")
        response = connection.getresponse()
        if response.status != 200:
            return None
        return latest(msgspec.json.decode(response.read(LARGEST)))
    finally:
        connection.close()


def latest(listed: Any) -> str | None:
    """The newest model of Ollama's list that can chat and does not send what it is told to somebody else."""
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
