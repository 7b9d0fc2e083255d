"""Push notices for people who are not looking at the web page: a question is open, or a turn has ended.

They are put into the outbox in the transaction that ends or parks the turn, so that none is lost or duplicated, and are
sent by the web push channel, which knows who is looking.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ..bus import WEB, OutboundMessage
from ..config import ChannelConfig
from ..log import TurnEnded
from ..store.base import Claim
from ..text import one_line

PUSH = "push"
MAX_TEXT = 200  # characters of the text
OWN_DOING = frozenset({"cancelled", "replaced", "handed", "abandoned"})  # end reasons that a person or a client caused


class Notices(msgspec.Struct, frozen=True):
    """Creates the notices of turns whose answers are read on the web page."""

    channel: str

    def of_end(self, claim: Claim, ended: TurnEnded) -> list[OutboundMessage]:
        cron = claim.message.cron
        silent = cron is not None and cron.is_silent(ended.text)
        if silent or ended.reason in OWN_DOING:
            return []
        return self._made(claim, "failed" if ended.reason == "error" else "ended", ended.text)

    def of_question(self, claim: Claim, question: str) -> list[OutboundMessage]:
        return self._made(claim, "question", question)

    def _made(self, claim: Claim, kind: str, text: str) -> list[OutboundMessage]:
        if claim.message.origin[0] != WEB:
            return []
        extra = {"kind": kind, "session": claim.key, "at": f"{time.time():.0f}"}
        return [OutboundMessage(self.channel, claim.owner, one_line(text, MAX_TEXT) or kind, metadata={"extra": extra})]


def notices_for(channels: Sequence[ChannelConfig]) -> Notices | None:
    """Return the notices for the web push channel, if one is configured."""
    return next((Notices(one.name) for one in channels if (one.network or one.name) == PUSH), None)
