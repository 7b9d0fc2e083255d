"""Keeps a run within the model's window: the results of its older rounds go first, the newest stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..context.models import is_overflow, model_info, window_in_error
from ..context.tokens import Meter, weigh, weigh_tools
from ..engine import Turn
from ..messages import Conversation, Message
from ..providers.base import LLMResponse, ProviderError

FITS = 0.95  # of the room may be filled; the estimate is not exact
TARGET = 0.5  # of the room is left once something is left out, so that the prefix seldom changes
ANSWER_SHARE = 4  # at most this part of the window is kept free for the answer
LONG = 600  # units of a result that is worth leaving out
LEFT_OUT = "[left out, to save room: make the call again if you need what it gave]"


class GoalWindow:
    """What one run may send to its model. The log keeps all that is left out."""

    def __init__(self, model: str, tools: Sequence[dict[str, Any]], window: int = 0) -> None:
        """`window` is in tokens; 0 goes by the model's name."""
        self._model = model
        self._tools = weigh_tools(tools)
        self._window = window or model_info(model).window
        self._meter = Meter()

    async def fit(self, turn: Turn, refused: ProviderError | None = None) -> bool:
        """Leave results out where the request is too long, or was refused as such; whether any were."""
        conversation = turn.conversation
        had = self._tokens(conversation)
        if refused is not None:
            if not is_overflow(str(refused)):
                return False
            named = window_in_error(str(refused))
            self._window = max(1_000, min(self._window, named or self._window, int(0.8 * had)))
        elif had <= FITS * self._room:
            return False
        return self._shorten(conversation, int(TARGET * self._room))

    def observe(self, conversation: Conversation, response: LLMResponse) -> None:
        """Learn from what the provider counted for this request."""
        usage = getattr(response, "usage", None)
        if isinstance(usage, dict) and isinstance(counted := usage.get("prompt_tokens"), int):
            self._meter.observe(self._model, self._units(conversation), counted)

    @property
    def _room(self) -> int:
        return self._window - min(model_info(self._model).output, self._window // ANSWER_SHARE)

    def _units(self, conversation: Conversation) -> int:
        count, units = conversation.weighed
        if count < len(conversation):
            units += sum(map(weigh, conversation[count:]))
            conversation.weighed = (len(conversation), units)
        return units + self._tools

    def _tokens(self, conversation: Conversation) -> int:
        return self._meter.tokens(self._model, self._units(conversation))

    def _shorten(self, conversation: Conversation, target: int) -> bool:
        """Leave out long results, the oldest first, until the target is reached; those of the last round last."""
        messages, units = list(conversation), self._units(conversation)
        goal = self._meter.units(self._model, target)
        changed = False
        for place, message in enumerate(conversation):
            shorter = _without_result(message)
            if units <= goal or shorter is None:
                continue
            units -= weigh(message) - weigh(shorter)
            messages[place] = shorter
            changed = True
        if changed:
            shown = Conversation(messages, blind=conversation.blind)
            shown.untrusted = conversation.untrusted  # what was read is known to the model all the same
            conversation.become(shown)
        return changed


def _without_result(message: Message) -> Message | None:
    """A result, or the pictures of a round, in a few words; None for what is short or nobody's result."""
    content = message.get("content")
    if message["role"] == "tool" and weigh(message) > LONG:
        return {**message, "content": LEFT_OUT}
    if message["role"] == "user" and isinstance(content, list) and weigh(message) > LONG:
        return {**message, "content": LEFT_OUT}
    return None
