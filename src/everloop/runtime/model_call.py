"""An answer as it is heard: thoughts parted from it, and calls of tools read out of its text where it has any.

What reads them is loaded when a character turns up that a call or a tag could begin with. Most answers have none.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import events
from ..messages import Conversation
from ..providers.base import LLMResponse
from ..threads import in_thread

if TYPE_CHECKING:
    from ..providers.text_calls import Reader, Reading, TextPart

_SUSPICIOUS = re.compile(r"[<{\[`]")
_DIALECTS = "everloop.providers.text_calls"

LARGE = 50_000  # characters of an answer, or of what is held back of one, that are read beside the event loop
LONG = 1_000_000  # characters of a conversation that is looked through for quotations there too

Tools = Sequence[dict[str, Any]] | None


async def heard(
    response: LLMResponse, conversation: Conversation, tools: Tools, brought: Sequence[str] = ()
) -> LLMResponse:
    """A whole answer. Calls in its text count only if `tools` were offered and the provider gave none itself.

    `brought`: further texts from outside, which an API client sent.
    """
    content: object = getattr(response, "content", None)  # of whatever a provider has returned
    if not isinstance(content, str) or _SUSPICIOUS.search(content) is None or not _is_answer(response):
        return response
    await _load()
    from ..providers.text_calls import read

    reading = partial(read, content, None if response.tool_calls else tools, outside(conversation, brought))
    slow = len(content) > LARGE or _is_long(conversation)
    return _with(response, await in_thread(reading) if slow else reading())


class Hearing:
    """An answer that comes in pieces, shown as far as it is certain what they are."""

    def __init__(
        self, conversation: Conversation, tools: Tools, emit: events.Emit, brought: Sequence[str] = ()
    ) -> None:
        self._conversation = conversation
        self._brought = brought
        self._tools = tools
        self._emit = emit
        self._long = _is_long(conversation)
        self._texts: list[str] = []
        self._reader: Reader | None = None

    def take(self, text: str) -> bool:
        """The next piece of the text; False if it waits for `read`."""
        self._texts.append(text)
        if self._reader is None:
            if _SUSPICIOUS.search(text) is not None:
                return False
            self._emit(events.Text(text))
        elif self._is_slow(self._reader, text):
            return False
        else:
            self._show(self._reader.feed(text))
        return True

    async def read(self) -> None:
        """Read the piece that was taken: something in it may be more than text."""
        reader = self._reader
        if reader is None:
            await _load()
            from ..providers.text_calls import Reader

            reader = self._reader = Reader(self._tools, outside(self._conversation, self._brought))
            reader.feed("".join(self._texts[:-1]))  # all of it was shown: there was nothing in it
        text = self._texts[-1]
        self._show(await in_thread(reader.feed, text) if self._is_slow(reader, text) else reader.feed(text))

    def _is_slow(self, reader: Reader, text: str = "") -> bool:
        """Whether others would be kept waiting."""
        return self._long or reader.held + len(text) > LARGE

    def restart(self) -> None:
        """What came so far is lost."""
        self._texts.clear()
        self._reader = None

    async def end(self, whole: LLMResponse | None) -> LLMResponse:
        """The answer, once all has come."""
        text = "".join(self._texts)
        response = whole if whole is not None else LLMResponse(text)
        if self._reader is None:
            return await heard(response, self._conversation, self._tools, self._brought)
        reading = await in_thread(self._reader.finish) if self._is_slow(self._reader) else self._reader.finish()
        self._show(reading.pieces)
        if not _is_answer(response) or response.tool_calls or response.content != text:
            return await heard(response, self._conversation, self._tools, self._brought)
        return _with(response, reading)

    def _show(self, pieces: Sequence[TextPart]) -> None:
        for piece in pieces:
            self._emit(events.Reasoning(piece.text) if piece.reasoning else events.Text(piece.text))


def _with(response: LLMResponse, reading: Reading) -> LLMResponse:
    """The answer as it was read."""
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


def outside(conversation: Conversation, brought: Sequence[str] = ()) -> Callable[[str], bool]:
    """Whether a text stands, but for its spaces, in something that came from outside: a page, a mail, another agent.

    A model that quotes such a text does not call what is called in it.
    """
    texts: list[str] | None = None

    def quoted(source: str) -> bool:
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

    return quoted


def _squeezed(text: str) -> str:
    return "".join(text.split())


async def _load() -> None:
    """Load what reads calls, beside the event loop."""
    if _DIALECTS not in sys.modules:
        await in_thread(importlib.import_module, _DIALECTS)
