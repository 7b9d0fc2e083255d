"""A single model call: the request and the record of its texts, the answer (streamed or whole), and tool calls that the
model wrote into its text.

Calls and reasoning in the text are parsed by `providers.text_calls`. It is imported when a character arrives that could
start one; most answers have none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from .. import events
from ..context.prompt import Composer
from ..context.window import Measure, is_overflow
from ..engine import Sent
from ..errors import StoreError
from ..messages import Conversation, encode_json
from ..providers.base import (
    Delta,
    LLMProvider,
    LLMResponse,
    ProviderError,
    StreamingProvider,
    count_of,
    counts,
    extra_of,
    option_keywords,
)
from ..store.base import Claim, Store
from ..threads import in_thread
from .budgets import Budgets
from .images import Free, ImageFilter, plain_images
from .turn_spec import TurnSpec, brought_by

if TYPE_CHECKING:
    from ..providers.text_calls import Reader, Reading, TextPart

log = logging.getLogger(__name__)

# A marker may start with one of these, or with a word at the start of a line: "functools[", "function call", "Action:".
_SUSPICIOUS = re.compile(r"[<{\[`◁]|>(?=>|\Z)|\](?=<|\Z)|^[ \t]*(?:f(?:\Z|u(?:\Z|n(?:\Z|c)))|A(?:\Z|c(?:\Z|t)))", re.M)
_TEXT_CALLS = "everloop.providers.text_calls"
_is_loaded = False  # whether that has been imported

LARGE = 50_000  # characters of an answer, or of its held-back part, above which it is parsed in a thread
LONG = 1_000_000  # characters of a conversation above which it is searched for quotations in a thread

FAILED = "the server's model call failed"

Tools = Sequence[dict[str, Any]] | None


class ModelCall:
    """Calls a model, streaming if there is a subscriber and the provider supports it.

    `options` are passed to providers that support them. With `text_calls`, tool calls that the model wrote into its
    text count, if it made no others and they are not quoted from external content; `brought` are external texts that a
    client sent.
    """

    def __init__(
        self,
        provider: LLMProvider,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        text_calls: bool = True,
        brought: Sequence[str] = (),
    ) -> None:
        self._provider = provider
        self._model = model
        self._options = options
        self._text_calls = text_calls
        self._brought = brought

    async def ask(self, conversation: Conversation, tools: Tools, emit: events.Emit | None) -> LLMResponse:
        """Return the model's whole answer, streaming it to `emit`."""
        options = option_keywords(self._provider, self._options)
        answer = AnswerReader(conversation, tools if self._text_calls else None, emit, self._brought)
        if emit is None or not isinstance(self._provider, StreamingProvider):
            return await answer.whole(await self._chat(conversation, tools, options))
        whole: LLMResponse | None = None
        is_streamed = False
        async for item in self._provider.stream(conversation, tools=tools, model=self._model, **options):
            is_streamed = True
            if not isinstance(item, Delta):
                whole = item
                continue
            if item.restart:
                answer.restart()
                emit(events.Restarted(item.restart))
            if item.reasoning:
                emit(events.Reasoning(item.reasoning))
            if text := item.text:
                if answer.reader is None and _SUSPICIOUS.search(text) is None:
                    answer.texts.append(text)
                    emit(events.Text(text))
                else:
                    await answer.read(text)
        if not is_streamed:  # any object may be a provider, such as a mock, whose `stream` yields nothing
            return await answer.whole(await self._chat(conversation, tools, options))
        return await answer.end(whole)

    async def _chat(self, conversation: Conversation, tools: Tools, options: Mapping[str, Any]) -> LLMResponse:
        asked = self._provider.chat(conversation, tools=tools, model=self._model, **options)
        if not isawaitable(asked):
            raise TypeError(f"{type(self._provider).__name__}.chat() is not an async function: write `async def chat`")
        return await asked


class TurnModelCall(ModelCall):
    """The engine's model port: within the budgets of a claimed turn, and measured for the model's context window."""

    def __init__(
        self,
        provider: LLMProvider,
        model: str | None,
        claim: Claim,
        spec: TurnSpec,
        *,
        budgets: Budgets,
        measure: Measure,
        text_calls: bool,
        free: Callable[[Conversation], Free | None],
        texts: TurnTexts | None,
        compose: Composer | None,
    ) -> None:
        """Create the port of one turn.

        `free` returns which image addresses an answer may contain, `texts` keeps the parts of a request that are not in
        the log, and `compose` builds the requests if a subclass of the context builder does so.
        """
        super().__init__(provider, model, spec.options, text_calls=text_calls, brought=brought_by(claim))
        self._claim = claim
        self._spec = spec
        self._budgets = budgets
        self._measure = measure
        self._free = free
        self._texts = texts
        self._compose = compose

    async def __call__(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse:
        limited = self._budgets.limits(self._claim)
        tokens = self._measure.tokens(conversation) if limited else 0
        if limited:
            await self._budgets.check(self._claim, self._measure.model, tokens)
        free = self._free(conversation)
        images = ImageFilter(emit, free) if emit is not None and free is not None else None
        try:
            request = conversation if self._compose is None else await in_thread(self._compose, conversation)
            tools = self._spec.tools.get_definitions() or None
            if self._texts is not None and (missing := self._texts.use(tools, extra_of(self._provider))):
                await self._texts.keep(missing)
            response = await self.ask(request, tools, images or emit)
        except Exception as error:
            if (told := error_for(self._claim.owner, error)) is not error:
                raise told from None
            raise
        if images is not None:
            images.end()
        if free is not None and isinstance(content := getattr(response, "content", None), str):
            response = dataclasses.replace(response, content=plain_images(content, free))
        if limited:
            estimate = tokens + len(response.content or "") // 4
            self._budgets.spend(self._claim, response.model or self._measure.model, counts(response), estimate)
        if counted := count_of(response, "prompt_tokens"):
            self._measure.learn(response.model, conversation, counted)
        if isinstance(response, LLMResponse):  # a custom provider may return anything
            response.model = response.model or self._model or self._measure.model
            if self._claim.owner != "me":
                response.failures = [replace(one, error=FAILED) for one in response.failures]
        return response


def error_for(owner: str, error: Exception) -> Exception:
    """Return the error of a failed model call in a form that may be shown to an owner, in the chat or in the log.

    Only the machine's owner sees where the model runs and what it says about our key; errors of other owners go to the
    server's own log.
    """
    if owner == "me" or is_overflow(str(error)):  # its text decides what is shortened next
        return error
    log.error("the model call for owner %s failed: %s", owner, error)
    status = getattr(error, "status", None)
    told = ProviderError(f"{FAILED} (status {status})" if status else FAILED, status=status)
    if isinstance(error, ProviderError):
        told.retryable, told.retry_after, told.several = error.retryable, error.retry_after, error.several
    return told


class Reminder:
    """Stands in for the model: answers with the text of a scheduled reminder."""

    def __init__(self, text: str, free: Callable[[Conversation], Free | None]) -> None:
        self._text = text
        self._free = free  # which image addresses the text may contain

    async def __call__(self, conversation: Conversation, emit: events.Emit | None) -> LLMResponse:
        text = f"Reminder: {self._text}"
        if (free := self._free(conversation)) is not None:
            text = plain_images(text, free)
        if emit is not None:
            emit(events.Text(text))
        return LLMResponse(text)


async def read_text_calls(
    response: LLMResponse, conversation: Conversation, tools: Tools, brought: Sequence[str] = ()
) -> LLMResponse:
    """Extract reasoning and calls from the text of a whole answer.

    Calls in the text count only if `tools` were offered and the provider returned none itself.
    """
    content: object = getattr(response, "content", None)  # a provider may have returned anything
    if not isinstance(content, str) or _SUSPICIOUS.search(content) is None or not _is_answer(response):
        return response
    await _load()
    from ..providers.text_calls import read

    reading = partial(read, content, None if response.tool_calls else tools, quoted_from(conversation, brought))
    slow = len(content) > LARGE or _is_long(conversation)
    return _with(response, await in_thread(reading) if slow else reading())


class AnswerReader:
    """Parses an answer as it streams, and emits the parts that are certain to be text or reasoning.

    Text without a character that could start a call needs no `reader`: it is only kept in `texts`.
    """

    def __init__(
        self, conversation: Conversation, tools: Tools, emit: events.Emit | None, brought: Sequence[str] = ()
    ) -> None:
        self.texts: list[str] = []  # everything received so far
        self.reader: Reader | None = None
        self._conversation = conversation
        self._brought = brought
        self._tools = tools
        self._emit = emit or _ignore
        self._long = _is_long(conversation)

    async def whole(self, response: LLMResponse) -> LLMResponse:
        """Parse an answer that arrived whole."""
        response = await read_text_calls(response, self._conversation, self._tools, self._brought)
        if self._emit is not _ignore:
            if response.reasoning:
                self._emit(events.Reasoning(response.reasoning))
            if response.content:
                self._emit(events.Text(response.content))
        return response

    async def read(self, text: str) -> None:
        """Parse the next piece, which may contain more than text, and emit what is certain so far."""
        if self.reader is None:
            await _load()
            from ..providers.text_calls import Reader

            self.reader = Reader(self._tools, quoted_from(self._conversation, self._brought))
            self.reader.feed("".join(self.texts))  # all of this was already emitted as plain text
        self.texts.append(text)
        feed = self.reader.feed
        self._show(await in_thread(feed, text) if self._is_slow(self.reader, text) else feed(text))

    def restart(self) -> None:
        """Discard what has arrived so far: the answer starts over."""
        self.texts.clear()
        self.reader = None

    async def end(self, whole: LLMResponse | None) -> LLMResponse:
        """Return the complete answer, once all of it has arrived."""
        text = "".join(self.texts)
        response = whole if whole is not None else LLMResponse(text)
        if self.reader is None:
            return await read_text_calls(response, self._conversation, self._tools, self._brought)
        reading = await in_thread(self.reader.finish) if self._is_slow(self.reader) else self.reader.finish()
        self._show(reading.pieces)
        if not _is_answer(response) or response.tool_calls or response.content != text:
            return await read_text_calls(response, self._conversation, self._tools, self._brought)
        return _with(response, reading)

    def _is_slow(self, reader: Reader, text: str = "") -> bool:
        """Return whether parsing would block the event loop for too long."""
        return self._long or reader.held + len(text) > LARGE

    def _show(self, pieces: Sequence[TextPart]) -> None:
        for piece in pieces:
            self._emit(events.Reasoning(piece.text) if piece.reasoning else events.Text(piece.text))


def _ignore(event: events.Event) -> None:
    """Ignore the events of an answer that has no subscriber."""


def _with(response: LLMResponse, reading: Reading) -> LLMResponse:
    """Return the response with its parsed content."""
    if not reading.calls and not reading.reasoning and reading.content == response.content:
        return response
    return dataclasses.replace(
        response,
        content=reading.content or None,
        tool_calls=response.tool_calls or reading.calls,
        finish_reason="tool_calls" if reading.calls else response.finish_reason,
        reasoning="\n\n".join(filter(None, (response.reasoning, reading.reasoning))) or None,
    )


def _is_long(conversation: Conversation) -> bool:
    return getattr(conversation, "characters", 0) > LONG


def _is_answer(response: object) -> bool:
    return isinstance(response, LLMResponse)


def quoted_from(conversation: Conversation, brought: Sequence[str] = ()) -> Callable[[str], bool]:
    """Return a predicate that tells whether a text is quoted from external content, ignoring whitespace.

    External content is a page, a mail or another agent's message, say. A model that quotes such a text is not making
    the calls in it.
    """
    texts: list[str] | None = None

    def is_quoted(source: str) -> bool:
        nonlocal texts
        if texts is None:
            from ..tools.registry import is_marked

            own_words = getattr(conversation, "own_words", {})
            texts = [
                _squeezed(content)
                for place, message in enumerate(conversation)
                if isinstance(content := message.get("content"), str)
                and (is_marked(content) or (message.get("role") == "user" and own_words.get(place) == ""))
            ]
            texts += map(_squeezed, brought)
        return any(_squeezed(source) in text for text in texts) if texts else False

    return is_quoted


def _squeezed(text: str) -> str:
    return "".join(text.split())


async def _load() -> None:
    """Import the parser of text calls in a thread.

    While another turn's thread imports it, it is in `sys.modules` already, but importing it would block.
    """
    global _is_loaded
    if not _is_loaded:
        await in_thread(importlib.import_module, _TEXT_CALLS)
        _is_loaded = True


# ---------------------------------------------------------------------------------------------- texts of requests

# An answer in the log refers to its system prompt and its tools by hash. They are stored once per hash, so the timeline
# can show the exact request that was sent, even after the sources of the prompt or the tools have changed.

KNOWN_HASHES = 1_000  # hashes remembered as stored


class RequestTexts:
    """Stores the texts of an agent's requests. A text that is known to be stored costs no write."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        self._prompt: tuple[str, str, str] = ("", "", "")  # the last prompt, its JSON and the hash
        # the last list of tools, its length, its JSON and the hash
        self._tools: tuple[object, int, str, str] = (None, 0, "", "")

    def of_turn(self, claim: Claim, prompt: str, sent: Sent, *, is_own: bool) -> TurnTexts:
        """Return the texts of one turn. With `is_own`, the prompt is this session's alone and is deleted with it."""
        if self._prompt[0] != prompt:
            self._prompt = (prompt, *_encoded(prompt))
        return TurnTexts(self, claim, *self._prompt[1:], sent, is_own)

    def tools(self, tools: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> tuple[str, str]:
        """Return the tools and the extra fields of a request as JSON, and the hash of that.

        The last result is reused: a registry makes a new list when its tools change.
        """
        if self._tools[0] is not tools or self._tools[1] != len(tools):
            self._tools = (tools, len(tools), *_encoded({"tools": tools, "extra": extra}))
        return self._tools[2:]

    def missing(self, claim: Claim, texts: Mapping[str, tuple[str, bool]]) -> dict[str, dict[str, str]]:
        """Return the texts that are not known to be stored, by session key; "" for those that sessions share."""
        found: dict[str, dict[str, str]] = {}
        for hash, (text, is_own) in texts.items():
            if (claim.owner, claim.session if is_own else 0, hash) not in self._known:
                found.setdefault(claim.key if is_own else "", {})[hash] = text
        return found

    async def keep(self, claim: Claim, missing: Mapping[str, Mapping[str, str]]) -> bool:
        """Store texts. Return False if that failed."""
        try:
            for key, texts in missing.items():
                await self._store.keep_request_texts(claim.owner, key, texts)
                for hash in texts:
                    self._known[claim.owner, claim.session if key else 0, hash] = None
        # The turn continues; its timeline says that the request is reconstructed.
        except (StoreError, ValueError) as error:
            log.warning("the request to the model could not be stored for the timeline: %s", error)
            return False
        while len(self._known) > KNOWN_HASHES:
            self._known.popitem(last=False)
        return True


class TurnTexts(msgspec.Struct):
    """Keeps the texts of one turn's requests, each before the first request that has it."""

    _texts: RequestTexts
    _claim: Claim
    _prompt: str
    _hash: str
    _sent: Sent
    _is_own: bool

    def use(self, tools: Sequence[Mapping[str, Any]] | None, extra: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Record the hashes of the next request's texts, and return those texts that must be kept first."""
        tools_text, tools_hash = self._texts.tools(tools or (), extra)
        previous = self._sent.prompt, self._sent.tools
        if previous == (self._hash, tools_hash):  # they were kept before the previous request
            return {}
        self._sent.prompt, self._sent.tools = self._hash, tools_hash
        texts = {self._hash: (self._prompt, self._is_own), tools_hash: (tools_text, False)}
        return self._texts.missing(self._claim, texts)

    async def keep(self, missing: Mapping[str, Mapping[str, str]]) -> None:
        """Keep texts. If that fails, the answer names none: the log must not refer to a text that is not kept."""
        if not await self._texts.keep(self._claim, missing):
            self._sent.prompt = self._sent.tools = ""


def _encoded(value: Any) -> tuple[str, str]:
    """Return a value as JSON, and the hash of that."""
    data = encode_json(value)
    return data.decode(), hashlib.sha256(data).hexdigest()[:32]
