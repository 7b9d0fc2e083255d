"""The `local` provider: convert messages to the engine's requests, and its answers back."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...config import Config
from ...errors import EverloopError
from ...text_cursor import TextCursor
from ...threads import in_thread
from ..base import OPTIONS, Delta, LLMProvider, LLMResponse, ProviderError, option_keywords
from ..openai import Answer, encode
from .catalogue import CATALOGUE, DEFAULT
from .engine import WINDOW, Engine, Settings
from .small.shaping import shaping_for
from .weights import Weights, own_file

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None
ANSWER_TOKENS = 1_024  # a rambling small model writes until it is stopped
TEMPERATURE = 0.2
MAX_ANSWER = 2_000_000  # characters
HONOURED = OPTIONS - {
    "logprobs",
    "metadata",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "top_logprobs",
    "verbosity",
}
_NOT_SENT = frozenset({"user", "prompt_cache_key"})
_OF_TOOLS = frozenset({"tool_choice", "parallel_tool_calls"})


class Shaping(Protocol):
    """Converts a conversation to the form in which a model works best, and its answer back."""

    prompt_tokens: int  # sent instead of the system prompt and the tools; 0 if those are sent

    def prepare(self, messages: Messages, tools: Tools) -> dict[str, Any] | LLMResponse:
        """Return the request for llama.cpp: `messages` or a `prompt`, and its other fields (`grammar`, `json_schema`,
        …); or the answer, if it is certain without the model.

        `stable` in the request is the number of messages, or characters of the prompt, that stay the same from turn to
        turn. Names that begin with _ are kept for `read` and are not sent.
        """
        ...

    def for_json(self, form: Mapping[str, Any]) -> Shaping:
        """Return the shaping for one request whose answer must have the caller's JSON form (`response_format`)."""
        ...

    def visible(self, text: str) -> str:
        """Return the part of an unfinished answer that may be shown. It only grows."""
        ...

    def read(self, answer: dict[str, Any], request: dict[str, Any]) -> LLMResponse | dict[str, Any]:
        """Convert an answer (`choices`, `usage`, `timings`), or return another request to make instead."""
        ...


class Plain:
    """The model's own chat template, with all tools."""

    prompt_tokens = 0

    def prepare(self, messages: Messages, tools: Tools) -> dict[str, Any]:
        request: dict[str, Any] = {"messages": [_plain(message) for message in messages]}
        request["stable"] = _leading_system(messages)
        if tools:
            request["tools"] = list(tools)
        return request

    def for_json(self, form: Mapping[str, Any]) -> Plain:
        return self

    def visible(self, text: str) -> str:
        return text

    def read(self, answer: dict[str, Any], request: dict[str, Any]) -> LLMResponse:
        whole = Answer(MAX_ANSWER, "the local model")
        whole.feed(encode(answer))
        return whole.response()


class LocalProvider(LLMProvider):
    """A model on this machine, run by an engine that all sessions share.

    `shaping` helps models that are too small for their own template; `extra` has further fields for every request.
    """

    options = HONOURED

    def __init__(
        self,
        engine: Engine,
        shaping: Shaping | None = None,
        *,
        model: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.default_model = model
        self.engine = engine
        self._shaping: Shaping = shaping or Plain()
        self.own_prompt = self._shaping.prompt_tokens
        self._extra = {"temperature": TEMPERATURE, "max_tokens": ANSWER_TOKENS, **(extra or {})}

    async def chat(
        self,
        messages: Messages,
        tools: Tools = None,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LLMResponse:
        async for piece in self.stream(messages, tools, model, options):
            if isinstance(piece, LLMResponse):
                return piece
        raise ProviderError("the local model gave no answer", retryable=True)

    async def stream(
        self,
        messages: Messages,
        tools: Tools = None,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        if model and self.default_model and model != self.default_model:
            raise ProviderError(
                f'the local model is {self.default_model}, not "{model}": one is loaded at a time; set EVERLOOP_MODEL',
                status=404,
            )
        chosen = option_keywords(self, options).get("options", {})
        session = str(chosen.get("prompt_cache_key") or chosen.get("user") or _conversation(messages))
        shaping = self._shaping_for(chosen)
        # In a thread: the whole conversation is analysed, which takes a while if it is long.
        step: dict[str, Any] | LLMResponse = await in_thread(self._request, shaping, messages, tools, chosen)
        if isinstance(step, LLMResponse) and step.content:
            yield Delta(step.content)
        shown = TextCursor()
        while isinstance(step, dict):
            deltas = _Deltas(shaping, shown)
            asked = asyncio.create_task(self._ask(step, session, deltas))
            asked.add_done_callback(deltas.end)
            try:
                async for delta in deltas:
                    yield delta
                answer = await asked
            finally:
                asked.cancel()
            shown.begin()
            step = shaping.read(answer, step)
        yield step

    @property
    def doing(self) -> str:
        return "loading the model …" if self.engine.loading else ""

    async def close(self) -> None:
        await self.engine.close()

    def _shaping_for(self, chosen: Mapping[str, Any]) -> Shaping:
        """Return the shaping for these options: a forced tool call needs the model's own template."""
        if chosen.get("tool_choice", "auto") not in ("auto", "none"):
            return Plain()
        form = chosen.get("response_format")
        if isinstance(form, Mapping) and form.get("type", "text") != "text":
            return self._shaping.for_json(form)
        return self._shaping

    def _request(
        self, shaping: Shaping, messages: Messages, tools: Tools, chosen: Mapping[str, Any]
    ) -> dict[str, Any] | LLMResponse:
        """Return the shaped request. It overrides the user's settings, and the request's own options override it."""
        shaped = shaping.prepare(messages, None if chosen.get("tool_choice") == "none" else tools)
        if isinstance(shaped, LLMResponse):
            return shaped
        # llama.cpp rejects the options of tools in a request without tools.
        left_out = _NOT_SENT if shaped.get("tools") else _NOT_SENT | _OF_TOOLS
        if "grammar" in shaped:  # llama.cpp rejects two forms for one answer
            left_out |= {"response_format"}
        options = {name: value for name, value in chosen.items() if name not in left_out}
        return {**self._extra, **shaped, **options}

    async def _ask(self, request: dict[str, Any], session: str, deltas: _Deltas) -> dict[str, Any]:
        sent = {name: value for name, value in request.items() if not name.startswith("_")}
        return await self.engine.complete(sent, deltas.take, session=session)


class _Deltas:
    """An iterator over what is shown of one attempt of the model. `shown` is what earlier attempts have shown."""

    def __init__(self, shaping: Shaping, shown: TextCursor) -> None:
        self._text = ""
        self._visible = 0  # characters of the text that may be shown
        self._shaping = shaping
        self._shown = shown
        self._pieces: asyncio.Queue[Delta | None] = asyncio.Queue()

    def take(self, delta: dict[str, Any]) -> None:
        self._text += delta.get("content", "")
        visible = self._shaping.visible(self._text)
        new, self._visible = visible[self._visible :], len(visible)
        text, reasoning = self._shown.feed(new), delta.get("reasoning_content", "")
        if text is None:
            self._restart()
        if text or reasoning:
            self._pieces.put_nowait(Delta(text or "", reasoning))

    def end(self, _: object) -> None:
        if self._visible and self._shown.is_behind:  # this attempt is shorter than what was shown
            self._restart()
        self._pieces.put_nowait(None)

    def _restart(self) -> None:
        self._pieces.put_nowait(Delta(restart="the model was asked again"))
        self._pieces.put_nowait(Delta(self._shown.restart()))

    def __aiter__(self) -> _Deltas:
        return self

    async def __anext__(self) -> Delta:
        if (delta := await self._pieces.get()) is None:
            raise StopAsyncIteration
        return delta


def local_provider(
    config: Config, shaping: Shaping | None = None, *, engine: Callable[[Settings], Engine] = Engine
) -> LocalProvider:
    """Return a provider for the configured local model. Nothing is loaded before the first request."""
    name = config.model or DEFAULT
    extra: dict[str, Any] = {}
    if config.temperature >= 0:
        extra["temperature"] = config.temperature
    if config.answer_tokens:
        extra["max_tokens"] = config.answer_tokens
    settings = Settings(
        lambda: found_weights(config, name),
        window=config.window or WINDOW,
        slots=config.slots,
        threads=config.threads,
        states=Weights.of(config).folder / "cache",
    )
    shaping = shaping or shaping_for(config.small, _size(name))
    return LocalProvider(engine(settings), shaping, model=name, extra=extra)


def _size(name: str) -> int:
    """Return the size of the model's file in bytes, which may not be pulled yet; 0 if it is unknown."""
    if (card := CATALOGUE.get(name)) is not None:
        return card.size
    try:
        return own_file(name).stat().st_size
    except (OSError, EverloopError):
        return 0


def found_weights(config: Config, name: str) -> Path:
    """Return the model's file. If it is missing, the error names the command that pulls it."""
    weights = Weights.of(config)
    if (path := weights.find(name)) is None:
        raise ProviderError(f"{weights.missing(name)}: `everloop model pull {name}` downloads it")
    return path


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as text: these models take nothing else."""
    content = message.get("content")
    if not isinstance(content, list):
        return message if content is not None else {**message, "content": ""}
    parts = [
        str(part.get("text", "")) if part.get("type") == "text" else "[something that this model cannot see]"
        for part in content
        if isinstance(part, dict)
    ]
    return {**message, "content": "\n\n".join(parts)}


def _leading_system(messages: Messages) -> int:
    return next((n for n, message in enumerate(messages) if message.get("role") != "system"), len(messages))


def _conversation(messages: Messages) -> str:
    """Identify a conversation by its beginning, so that conversations take turns."""
    first = messages[: _leading_system(messages) + 1]
    return hashlib.sha256(repr(first).encode("utf-8", "replace")).hexdigest()
