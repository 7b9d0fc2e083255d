"""Build a whole answer from the chunks of llama.cpp's stream."""

from __future__ import annotations

from typing import Any


class AnswerBuilder:
    """Collects chunks; `ended` returns the whole answer or the error, in OpenAI's format."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._finish_reason = "stop"
        self._last: dict[str, Any] = {}
        self._error: Any = None

    def feed(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add a chunk, and return what it adds to the visible answer: `content`, `reasoning_content` or `progress`."""
        if "error" in chunk:
            self._error = chunk["error"]
            return {}
        self._last |= {name: chunk[name] for name in ("usage", "timings", "model") if chunk.get(name)}
        if progress := chunk.get("prompt_progress"):
            return {"progress": progress}
        for choice in chunk.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            piece = {"content": choice["text"]} if "text" in choice else choice.get("delta") or {}
            return self._take(piece)
        return {}

    def ended(self, prefix: dict[str, Any]) -> dict[str, Any]:
        if self._error is not None:
            return {"error": self._error}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text)}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        timings = {**self._last.get("timings", {}), **prefix}
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason}
        usage = self._last.get("usage") or _usage(timings)
        return {"answer": {"choices": [choice], "usage": usage, "timings": timings}}

    def _take(self, piece: dict[str, Any]) -> dict[str, Any]:
        new: dict[str, Any] = {}
        if text := piece.get("content"):
            self._text.append(text)
            new["content"] = text
        if thought := piece.get("reasoning_content"):
            self._thoughts.append(thought)
            new["reasoning_content"] = thought
        for call in piece.get("tool_calls") or ():
            self._take_call(call)
        return new

    def _take_call(self, piece: dict[str, Any]) -> None:
        index = int(piece.get("index") or 0)
        while len(self._calls) <= index:
            self._calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = self._calls[index], piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _usage(timings: dict[str, Any]) -> dict[str, Any]:
    """Return the token counts, for a server whose last chunk has none."""
    read, cached, wrote = (int(timings.get(name) or 0) for name in ("prompt_n", "cache_n", "predicted_n"))
    return {
        "prompt_tokens": read + cached,
        "completion_tokens": wrote,
        "total_tokens": read + cached + wrote,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
