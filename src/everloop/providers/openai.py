"""Any endpoint that speaks OpenAI's chat completions, by base URL."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ..messages import Conversation
from .base import OPTIONS, Delta, LLMProvider, LLMResponse, Messages, Options, Tools, option_keywords
from .endpoints import Quirks, quirks_of
from .http import Endpoint, Timeouts, endpoint_of, feed_whole, stream_answer
from .sse import Answer, encode

__all__ = ["OpenAIProvider", "Timeouts"]

SPARE_BYTES = 1 << 20  # what an answer may hold beside its text
END_CHAT = b"}"
END_STREAM = b',"stream":true}'
END_COUNTED = b',"stream":true,"stream_options":{"include_usage":true}}'
NEED_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})


class OpenAIProvider(LLMProvider):
    """A model behind an OpenAI-compatible endpoint.

    `extra` are further fields of every request (temperature, …); an answer is kept up to `answer_limit` characters.
    `quirks` are how the server departs from OpenAI's API, by default what is known of the one at this base URL.
    """

    options = OPTIONS

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str = "",
        *,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        headers: Mapping[str, str] | None = None,
        answer_limit: int = 2_000_000,
        extra: Mapping[str, Any] | None = None,
        quirks: Quirks | None = None,
    ) -> None:
        self.default_model = model
        sent = {"User-Agent": "everloop", **(headers or {})}
        if api_key:
            sent["Authorization"] = f"Bearer {api_key}"
        self._endpoint = Endpoint(endpoint_of(base_url, "/chat/completions"), sent, timeouts, api_key)
        self._answer_limit = answer_limit
        self._body_limit = 6 * answer_limit + SPARE_BYTES  # \uXXXX: six bytes for one character
        self._quirks = quirks_of(base_url) if quirks is None else quirks
        self.options = OPTIONS - self._quirks.refused
        self._extra = dict(extra or {})
        self._end_stream = END_COUNTED if self._quirks.stream_options else END_STREAM
        self._tools: dict[int, tuple[Sequence[Any], int, bytes]] = {}

    async def chat(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> LLMResponse:
        answer = Answer(self._answer_limit, self._endpoint.where)
        body = self._body(messages, tools, model, options, END_CHAT)
        data = await self._endpoint.fetch(body, self._body_limit)
        feed_whole(answer, data, self._endpoint.where)
        return answer.response()

    def stream(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        answer = Answer(self._answer_limit, self._endpoint.where)
        body = self._body(messages, tools, model, options, self._end_stream)
        return stream_answer(self._endpoint, body, answer, self._body_limit)

    async def close(self) -> None:
        await self._endpoint.close()

    def _body(
        self,
        messages: Messages,
        tools: Tools,
        model: str | None,
        options: Options,
        end: bytes,
    ) -> list[bytes]:
        """The request, in parts that are encoded already: a round never touches the history again."""
        parts = [b'{"model":', encode(model or self.default_model), b',"messages":', *_history(messages)]
        if tools:
            parts += b',"tools":', self._encoded_tools(tools)
        if fields := self._extra | self._fields(options, tools):
            parts += b",", encode(fields)[1:-1]
        parts.append(end)
        return parts

    def _fields(self, options: Mapping[str, Any] | None, tools: Sequence[Any] | None) -> dict[str, Any]:
        """The options under the names that this server has for them."""
        chosen: dict[str, Any] = option_keywords(self, options).get("options", {})
        if not tools and chosen.get("tool_choice") in (None, "auto", "none"):  # servers refuse these without tools
            chosen = {name: value for name, value in chosen.items() if name not in NEED_TOOLS}
        return {self._quirks.names.get(name, name): value for name, value in chosen.items()}

    def _encoded_tools(self, tools: Sequence[dict[str, Any]]) -> bytes:
        """The tools' JSON, cached for the same list object: a registry makes a new list when its tools change."""
        known = self._tools.get(id(tools))
        if known is not None and known[0] is tools and known[1] == len(tools):
            return known[2]
        if len(self._tools) >= 32:
            self._tools.clear()
        encoded = encode(tools)
        self._tools[id(tools)] = (tools, len(tools), encoded)
        return encoded


def _history(messages: Sequence[dict[str, Any]]) -> list[bytes]:
    if isinstance(messages, Conversation):
        try:
            return messages.json_parts()
        except (UnicodeEncodeError, TypeError, OverflowError):
            pass  # something in it only encodes with replacements
    return [encode(messages)]
