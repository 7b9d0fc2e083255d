"""Any endpoint that speaks OpenAI's chat completions, by base URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ..messages import Conversation
from .base import Delta, LLMProvider, LLMResponse, ProviderError
from .http import Endpoint, TimedReader, Timeouts, endpoint_of
from .sse import Answer, Lines, encode, one_line

__all__ = ["OpenAIProvider", "Timeouts"]

SPARE_BYTES = 1 << 20  # what an answer may hold beside its text
LAST_WORDS = 5.0  # seconds a server has for its usage and its [DONE] once the answer has ended
END_CHAT = b"}"
END_STREAM = b',"stream":true,"stream_options":{"include_usage":true}}'


class OpenAIProvider(LLMProvider):
    """A model behind an OpenAI-compatible endpoint.

    `extra` are further fields of every request (temperature, …); an answer is kept up to `answer_limit` characters.
    """

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
    ) -> None:
        self.default_model = model
        sent = {"User-Agent": "everloop", **(headers or {})}
        if api_key:
            sent["Authorization"] = f"Bearer {api_key}"
        self._endpoint = Endpoint(endpoint_of(base_url, "/chat/completions"), sent, timeouts, api_key)
        self._answer_limit = answer_limit
        self._body_limit = 6 * answer_limit + SPARE_BYTES  # \uXXXX: six bytes for one character
        self._extra = b"," + encode(dict(extra))[1:-1] if extra else b""
        self._tools: dict[int, tuple[Sequence[Any], int, bytes]] = {}

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
    ) -> LLMResponse:
        answer = Answer(self._answer_limit, self._endpoint.where)
        data = await self._endpoint.fetch(self._body(messages, tools, model, END_CHAT), self._body_limit)
        self._feed_whole(answer, data)
        return answer.response()

    async def stream(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        model: str | None = None,
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        endpoint = self._endpoint
        answer = Answer(self._answer_limit, endpoint.where)
        started = asyncio.get_running_loop().time()
        response = await endpoint.open(self._body(messages, tools, model, END_STREAM))
        if response.content_type.endswith(("json", "html")):  # a server that does not stream, or no model server
            if delta := self._feed_whole(answer, await endpoint.read_whole(response, self._body_limit)):
                yield delta
            yield answer.response()
            return
        lines, reader = Lines(self._body_limit), TimedReader(endpoint, response, started)
        ended = False
        try:
            while not (ended or answer.full()):
                data = await self._read(reader, answer)
                for line in lines.feed(data) if data else (lines.rest(),):
                    if line[:5] != b"data:":
                        continue
                    reader.heard = True
                    payload = line[5:].strip()
                    if payload == b"[DONE]":
                        ended = True
                        break
                    if delta := answer.feed(payload):
                        yield delta
                    if answer.full():
                        break
                if not data:
                    break
        finally:
            reader.stop()
            if ended:
                response.leave()
            else:
                response.close()
        if not (ended or answer.finish_reason):
            raise ProviderError(f"the stream from {endpoint.where} ended in the middle of the answer", retryable=True)
        yield answer.response()

    async def close(self) -> None:
        await self._endpoint.close()

    async def _read(self, reader: TimedReader, answer: Answer) -> bytes:
        """The next bytes; once the answer has ended, whatever is wrong with the connection is its end."""
        if not answer.finish_reason:
            return await reader.read()
        try:
            return await reader.read(LAST_WORDS)
        except ProviderError:
            return b""

    def _feed_whole(self, answer: Answer, data: bytes) -> Delta | None:
        if data.lstrip()[:1] != b"{":
            raise ProviderError(
                f"{self._endpoint.where} answered with something that is not JSON (is the base URL right? it mostly "
                f"ends in /v1): {one_line(data[:300].decode('utf-8', 'replace'))}"
            )
        return answer.feed(data)

    def _body(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str | None, end: bytes
    ) -> list[bytes]:
        """The request, in parts that are encoded already: a round never touches the history again."""
        parts = [b'{"model":', encode(model or self.default_model), b',"messages":', *_history(messages)]
        if tools:
            parts += b',"tools":', self._encoded_tools(tools)
        parts += self._extra, end
        return parts

    def _encoded_tools(self, tools: Sequence[dict[str, Any]]) -> bytes:
        """The tools' JSON, kept while the same list comes in: a registry makes a new list when its tools change."""
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
