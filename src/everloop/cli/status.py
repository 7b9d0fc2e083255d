"""What the chat shows about its session: the status line, and the commands /cost and /context."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import Config
from ..config.sources import shown
from ..log import UserSaid, text_of
from ..runtime.agent import AgentLoop
from ..text import counted, one_line, printable
from .common import OWNER
from .output import tokens_in_words
from .session_list import MAX_ENTRIES, Totals, adopt_titles, age, first_words, money


class SessionStatus:
    """The numbers of one session. They are unknown until `refresh` reads them."""

    def __init__(self, agent: AgentLoop, config: Config, key: str) -> None:
        self.title = ""
        self.cut_off = ""  # the request of a turn that did not end
        self.continues = ""  # what the chat continues with, in a sentence
        self.totals = Totals()
        self.used, self.window = 0, 0
        self._agent = agent
        self._config = config
        self._key = key

    async def read(self) -> None:
        """Read the session's log."""
        await adopt_titles(self._agent.store, self._config)
        info = await self._agent.store.session(OWNER, self._key)
        if info is None or not info.entries:
            return
        entries = await self._agent.store.read_log(info.id, max(0, info.entries - MAX_ENTRIES))
        self.totals = Totals.of(entries, self._config.model, info)
        self.title = info.title or first_words(entries)
        if info.open_turn is not None:
            said = [one.entry for one in entries if one.turn == info.open_turn and isinstance(one.entry, UserSaid)]
            self.cut_off = one_line(text_of(said[0].content), 80) if said else ""
        if info.entries > info.history_from and self.title:
            turns = counted(self.totals.turns, "turn")
            self.continues = f"Continues “{self.title}” ({turns}, {age(info.updated_at)}); /new starts afresh."

    async def refresh(self) -> None:
        """Read the session's log, and measure its conversation."""
        await self.read()
        self.used, self.window = await self._agent.context_use(self._key)

    def cost_of(self, tokens: Mapping[str, int]) -> str:
        """Return what these tokens of the current model cost; "" if that is unknown."""
        totals = Totals()
        totals.add(self._config.model, dict(tokens))
        return money(totals.cost(self._config))

    def line(self, width: int) -> str:
        """Return the status line: as much of it as fits, the most important first."""
        place = self._config.workspace
        read, cached = self.totals.count("prompt_tokens"), self.totals.count("cached_tokens")
        share = f", {round(100 * cached / read)}% cached" if cached else ""
        context = f"{min(100, round(100 * self.used / self.window))}% context" if self.used and self.window else ""
        parts = [  # in their order on the line, each with its importance
            (0, printable(shown(place) if width >= 80 else place.name)),
            (3, one_line(self.title, max(12, width // 4))),
            (1, printable(self._config.model)),
            (2, context),
            (5, f"{_short(read)} in{share}, {_short(self.totals.count('completion_tokens'))} out" if read else ""),
            (4, money(self.totals.cost(self._config))),
            (6, self._config.busy),
        ]
        room = width - 1
        kept: set[int] = set()
        for importance, part in sorted(parts):
            if part and len(part) + 3 <= room + (3 if not kept else 0):
                room -= len(part) + (3 if kept else 0)
                kept.add(importance)
        return " · ".join(part for importance, part in parts if importance in kept)

    def cost_text(self) -> str:
        """Return the answer to /cost."""
        if not self.totals.tokens:
            return "No model was called in this session yet."
        from ..config.prices import AS_OF

        lines = []
        for model, tokens in self.totals.tokens.items():
            one = Totals(tokens={model: tokens})
            words = tokens_in_words(tokens["prompt_tokens"], tokens["cached_tokens"], tokens["completion_tokens"])
            lines.append(f"{model}: {words}{f' · {cost}' if (cost := money(one.cost(self._config))) else ''}")
        if self._config.provider == "local":
            return "\n".join([*lines, "A model on this machine costs nothing."])
        total = money(self.totals.cost(self._config))
        about = f"total {total}, by list prices of {AS_OF}; a [[price]] in the settings overrides them"
        return "\n".join([*lines, about if total else "The price is unknown: add a [[price]] to the settings."])

    def context_text(self) -> str:
        """Return the answer to /context."""
        share = f"{100 * self.used / self.window:.0f}%" if self.window else "an unknown share"
        at = self._config.compact_at
        return (
            f"The conversation has about {self.used:,} of {self.window:,} tokens ({share}). "
            f"Above {at:.0%}, older turns are summarised; /compact does it now, /new starts afresh."
        )


def _short(count: int) -> str:
    """Return a short form: 1.2k, 3.4M."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
