"""How full a model's window is with a conversation."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from ..messages import Conversation
from ..providers.base import ProviderError
from ..tools.registry import ToolRegistry
from .models import is_overflow, model_info, window_in_error
from .tokens import Meter, weigh, weigh_tools

log = logging.getLogger(__name__)

ANSWER_SHARE = 4  # at most this part of the window is kept free for the answer
FITS = 0.95  # of the rest may be filled; the estimate is not exact
MOST_OF_A_CHARACTER = 5  # tokens, whatever the text and the tokenizer
SMALLEST = 2_000  # tokens: an error that names a smaller window means something else
BELIEVED_SECONDS = 3600.0  # that a window counts which an error has named: servers change, and errors quote


class Measure:
    """Weighs conversations for one model."""

    def __init__(self, model: str, window: int, meter: Meter, tools: ToolRegistry) -> None:
        """`window` is the one of the settings; 0 goes by the model's name."""
        self.model = model
        self._set = window
        self._meter = meter
        self._tools = tools
        self._weight_of_tools: tuple[Sequence[Any], int] = ((), 0)
        self._named = (0, 0.0)  # a window that an error has named, and until when it counts
        self._warned = False
        self._answers = 0

    @property
    def window(self) -> int:
        """Tokens that the model takes."""
        known = self._set or model_info(self.model).window
        named, until = self._named
        return min(named, known) if named and time.monotonic() < until else known

    @property
    def room(self) -> int:
        """Tokens that a request may have, with space left for the answer."""
        return self.window - min(model_info(self.model).output, self.window // ANSWER_SHARE)

    @property
    def limit(self) -> float:
        """Tokens of a request that still fits."""
        return FITS * self.room

    def weight(self, conversation: Conversation) -> int:
        """The units of a request. A message is weighed once in its life."""
        count, units = conversation.weighed
        if count < len(conversation):
            units += sum(map(weigh, conversation[count:]))
            conversation.weighed = (len(conversation), units)
        return units + self._weigh_tools()

    def is_small(self, conversation: Conversation, share: float) -> bool:
        """Whether a request surely fills less than this share of the room, without weighing anything."""
        return MOST_OF_A_CHARACTER * (conversation.characters + self._weigh_tools()) < share * self.room

    def learn(self, answered: str | None, conversation: Conversation, counted: int) -> None:
        """Take in what the provider counted for a request: of the first few answers, then of every eighth."""
        self._answers += 1
        if self._answers <= 4 or self._answers % 8 == 0:
            self.observe(answered, self.weight(conversation), counted)

    def tokens(self, conversation: Conversation) -> int:
        return self._meter.tokens(self.model, self.weight(conversation))

    def in_tokens(self, units: int) -> int:
        return self._meter.tokens(self.model, units)

    def in_units(self, tokens: float) -> int:
        return self._meter.units(self.model, int(tokens))

    def fixed(self, conversation: Conversation) -> int:
        """The units that every request of this conversation has."""
        return weigh(conversation[0]) + self._weigh_tools()

    def tokens_at(self, share: float, conversation: Conversation) -> float:
        """The tokens of a request that has filled this share of what is left beside the system prompt and the tools."""
        fixed = self.in_tokens(self.fixed(conversation))
        return fixed + share * max(self.room - fixed, 0)

    def can_fit(self, conversation: Conversation) -> bool:
        """Whether there is room for any conversation at all beside the system prompt and the tools."""
        fixed = int(self.tokens_at(0, conversation))
        if fixed < self.limit:
            return True
        if not self._warned:
            what = (
                f"the system prompt and the tools have about {fixed:,} tokens, and {self.model} takes {self.window:,}"
            )
            log.warning("%s: set window under [provider] if it takes more", what)
        self._warned = True
        return False

    def observe(self, answered: str | None, units: int, counted: int) -> None:
        """Take in what the provider counted for a request of so many units, by the name of the model that answered and
        of the one that was asked."""
        for name in dict.fromkeys((answered or self.model, self.model)):
            self._meter.observe(name, units, counted)
        if self._named[0] and counted > self._named[0]:  # it takes more than an error said
            self._named = (0, 0.0)

    def overflows(self, refused: ProviderError, conversation: Conversation) -> bool:
        """Whether the model API says that this request was too long. A window that it names is believed for a while,
        unless it cannot be right or is another model's."""
        text = str(refused)
        if not is_overflow(text):
            return False
        named = window_in_error(text)
        if named and not refused.several and SMALLEST <= named <= 1.5 * self.tokens(conversation):
            if named < self.window:
                log.warning("%s says that it takes %s tokens: set window under [provider]", self.model, f"{named:,}")
            self._named = (named, time.monotonic() + BELIEVED_SECONDS)
        return True

    def _weigh_tools(self) -> int:
        tools = self._tools.get_definitions()
        if self._weight_of_tools[0] is not tools:
            self._weight_of_tools = (tools, weigh_tools(tools))
        return self._weight_of_tools[1]
