"""The provider for Anthropic's Messages API and compatible servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from ..base import Delta, LLMProvider, LLMResponse, Messages, Options, Tools
from ..http import Endpoint, Timeouts, endpoint_of, feed_whole
from ..openai import encode
from .answer import MessageAnswer
from .request import HONOURED, NO_CHOICE, NO_TOOLS, Histories, encode_tools, fields_of, forces_a_call

VERSION = "2023-06-01"
SPARE_BYTES = 1 << 20  # of an answer, in addition to its text
MIN_THINKING = 1024
ANSWER_TOKENS = 32_000  # the maximum that all models since Claude 3.7 have in common
OLD_MODELS = {"claude-3-7": ANSWER_TOKENS, "claude-3-5": 8192, "claude-3": 4096}
RESERVED_FIELDS = frozenset({"model", "messages", "system", "tools", "stream"})


class AnthropicProvider(LLMProvider):
    """A model behind Anthropic's Messages API.

    `max_tokens` limits the length of an answer, by default to the model's maximum; `thinking` is how many of these
    tokens the model may spend on thinking, by default none. `extra` has further fields for every request. A request
    whose options exclude thinking (a temperature, a forced call, a short answer) is answered without it.
    """

    options = HONOURED

    def __init__(
        self,
        api_key: str | None,
        model: str,
        *,
        base_url: str = "https://api.anthropic.com",
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        headers: Mapping[str, str] | None = None,
        answer_limit: int = 2_000_000,
        max_tokens: int | None = None,
        thinking: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.default_model = model
        sent = {"User-Agent": "everloop", "anthropic-version": VERSION, **(headers or {})}
        if api_key:
            sent["x-api-key"] = api_key
        path = "/messages" if base_url.partition("?")[0].rstrip("/").endswith("/v1") else "/v1/messages"
        self._endpoint = Endpoint(endpoint_of(base_url, path), sent, timeouts, api_key)
        self._secret = api_key
        self._answer_limit = answer_limit
        self._body_limit = 6 * answer_limit + SPARE_BYTES  # \uXXXX: six bytes for one character
        self.extra = dict(extra or {})
        self._max_tokens = max_tokens
        self._thinking = thinking
        self._check_settings()
        self._histories = Histories()
        self._tools: dict[int, tuple[Sequence[Any], int, tuple[bytes, dict[str, str]]]] = {}

    async def chat(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> LLMResponse:
        body, answer = self._request(messages, tools, model, options, stream=False)
        feed_whole(answer, await self._endpoint.fetch(body, self._body_limit), self._endpoint.where)
        return answer.response()

    def stream(
        self, messages: Messages, tools: Tools = None, model: str | None = None, options: Options = None
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        body, answer = self._request(messages, tools, model, options, stream=True)
        return self._endpoint.stream(body, answer, self._body_limit)

    def request_body(
        self, messages: Messages, tools: Tools, model: str, options: Options, extra: Mapping[str, Any]
    ) -> bytes:
        return b"".join(self._request(messages, tools, model, options, stream=False, extra=extra)[0])

    async def close(self) -> None:
        await self._endpoint.close()

    def _check_settings(self) -> None:
        if taken := RESERVED_FIELDS & self.extra.keys():
            raise ConfigError(f"extra may not have {', '.join(sorted(taken))}: the provider sets it itself")
        if self._max_tokens is not None and self._max_tokens < 1:
            raise ConfigError(f"max_tokens is {self._max_tokens}: an answer has at least 1")
        if self._thinking is None:
            return
        if "thinking" in self.extra:
            raise ConfigError("thinking is also set in extra: set only one of them")
        if self._thinking < MIN_THINKING:
            raise ConfigError(f"thinking is {self._thinking} tokens: the API takes {MIN_THINKING} or more, or None")
        if self._max_tokens is not None and self._thinking >= self._max_tokens:
            raise ConfigError(f"thinking ({self._thinking} tokens) must be less than max_tokens ({self._max_tokens})")

    def _request(
        self,
        messages: Messages,
        tools: Tools,
        model: str | None,
        options: Options,
        *,
        stream: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> tuple[list[bytes], MessageAnswer]:
        """Return a request, in parts that are mostly encoded already, and the answer to fill.

        The parts are in the order in which the API caches them; what changes from round to round comes last.
        """
        model = model or self.default_model
        history = self._histories.encoded(messages)
        names: dict[str, str] = {}
        extra = self.extra if extra is None else extra
        fields = {"max_tokens": self._answer_tokens(model), **extra} | fields_of(self, options, bool(tools))
        parts = [encode({"model": model} | fields)[:-1]]
        if tools:
            definitions, names = self._encoded_tools(tools)
            parts += b',"tools":', definitions
        elif history.has_calls:
            parts += b',"tools":', NO_TOOLS, b"" if "tool_choice" in extra else NO_CHOICE
        if history.system:
            parts += b',"system":', history.system_json()
        parts += b',"messages":', *history.parts()
        if self._thinking is not None and history.may_think and self._allows_thinking(fields):
            parts.append(b',"thinking":{"type":"enabled","budget_tokens":%d}' % self._thinking)
        parts.append(b',"stream":true}' if stream else b"}")
        return parts, MessageAnswer(self._answer_limit, self._endpoint.where, names, self._secret)

    def _allows_thinking(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the API accepts these fields together with thinking."""
        short = self._thinking is not None and fields["max_tokens"] <= self._thinking
        return not (short or {"temperature", "top_p"} & fields.keys() or forces_a_call(fields.get("tool_choice")))

    def _answer_tokens(self, model: str) -> int:
        if self._max_tokens is not None:
            return self._max_tokens
        model = model.replace(".", "-")
        most = next((most for name, most in OLD_MODELS.items() if name in model), ANSWER_TOKENS)
        return most if self._thinking is None or self._thinking < most else self._thinking + most

    def _encoded_tools(self, tools: Sequence[dict[str, Any]]) -> tuple[bytes, dict[str, str]]:
        """Return the tools as JSON, cached by list object: a registry makes a new list when its tools change."""
        known = self._tools.get(id(tools))
        if known is not None and known[0] is tools and known[1] == len(tools):
            return known[2]
        if len(self._tools) >= 32:
            self._tools.clear()
        encoded = encode_tools(tools)
        self._tools[id(tools)] = (tools, len(tools), encoded)
        return encoded
