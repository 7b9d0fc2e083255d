"""Keeps a run within the model's window: the results of its older rounds go first, the newest stay whole."""

from __future__ import annotations

from ..context.tokens import Meter, weigh
from ..context.window import Measure
from ..engine import Turn
from ..messages import Conversation, Message
from ..providers.base import LLMResponse, ProviderError, counts
from ..tools.registry import ToolRegistry

TARGET = 0.5  # of the room is left once something is left out, so that the prefix seldom changes
LONG = 600  # units of a result that is worth leaving out
LEFT_OUT = "[left out, to save room: make the call again if you need what it gave]"


class GoalWindow:
    """What one run may send to its model. The log keeps all that is left out."""

    def __init__(self, model: str, tools: ToolRegistry, window: int = 0) -> None:
        """`window` is in tokens; 0 goes by the model's name."""
        self._measure = Measure(model, window, Meter(), tools)

    async def fit(self, turn: Turn, refused: ProviderError | None = None) -> bool:
        """Leave results out where the request is too long, or was refused as such; whether any were."""
        measure, conversation = self._measure, turn.conversation
        if refused is not None:
            if not measure.overflows(refused, conversation):
                return False
            return self._shorten(conversation, int(min(TARGET * measure.room, 0.7 * measure.tokens(conversation))))
        if measure.tokens(conversation) <= measure.limit:
            return False
        return self._shorten(conversation, int(TARGET * measure.room))

    def observe(self, conversation: Conversation, response: LLMResponse) -> None:
        """Learn from what the provider counted for this request."""
        if counted := counts(response).get("prompt_tokens"):
            self._measure.observe(response.model, self._measure.weight(conversation), counted)

    def _shorten(self, conversation: Conversation, target: int) -> bool:
        """Leave out long results, the oldest first, until the target is reached; those of the last round last."""
        messages, units = list(conversation), self._measure.weight(conversation)
        goal = self._measure.in_units(target)
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
            shown.outside = conversation.outside
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
