"""An answer as it is heard: thoughts parted from it, and calls of tools read out of its text where it has any.

What reads them is loaded when a character turns up that a call or a tag could begin with. Most answers have none.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import events
from ..messages import Conversation
from ..providers.base import LLMResponse

if TYPE_CHECKING:
    from ..providers.dialects import Piece, Reader, Reading

_SUSPICIOUS = re.compile(r"[<{\[`]")
_DIALECTS = "everloop.providers.dialects"

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
    from ..providers.dialects import read

    return _with(response, read(content, None if response.tool_calls else tools, outside(conversation, brought)))


class Hearing:
    """An answer that comes in pieces, shown as far as it is certain what they are."""

    def __init__(
        self, conversation: Conversation, tools: Tools, emit: events.Emit, brought: Sequence[str] = ()
    ) -> None:
        self._conversation = conversation
        self._brought = brought
        self._tools = tools
        self._emit = emit
        self._texts: list[str] = []
        self._reader: Reader | None = None

    def take(self, text: str) -> bool:
        """The next piece of the text; False if it waits for `begin`."""
        self._texts.append(text)
        if self._reader is not None:
            self._show(self._reader.feed(text))
        elif _SUSPICIOUS.search(text) is None:
            self._emit(events.Text(text))
        else:
            return False
        return True

    async def begin(self) -> None:
        """Read the text from here on: something in it may be more than text."""
        await _load()
        from ..providers.dialects import Reader

        self._reader = Reader(self._tools, outside(self._conversation, self._brought))
        self._reader.feed("".join(self._texts[:-1]))  # all of it was shown: there was nothing in it
        self._show(self._reader.feed(self._texts[-1]))

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
        reading = self._reader.finish()
        self._show(reading.pieces)
        if not _is_answer(response) or response.tool_calls or response.content != text:
            return await heard(response, self._conversation, self._tools, self._brought)
        return _with(response, reading)

    def _show(self, pieces: Sequence[Piece]) -> None:
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
        from ..tools.threads import in_thread

        await in_thread(importlib.import_module, _DIALECTS)
