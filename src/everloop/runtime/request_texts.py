"""What of the requests to a model is not in the log: the system prompt and the tools, each kept once by its hash.

An answer in the log names both by their hashes, so that the timeline can show the request exactly as it was sent, also
after a file of the prompt or the tools have changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import Sent
from ..errors import StoreError
from ..messages import encode_json
from ..store.base import Claim, Store

log = logging.getLogger(__name__)
KNOWN = 1_000  # hashes that are remembered as kept
NOTE_SECONDS = 1.0  # for how long waits for the disk are collected, to be written at once


def encoded(value: Any) -> tuple[str, str]:
    """A value as JSON, and the hash of that."""
    data = encode_json(value)
    return data.decode(), hashlib.sha256(data).hexdigest()[:32]


class RequestTexts:
    """Keeps the texts of an agent's requests in the store. A text that is known to be there costs no write."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        self._tools: tuple[object, int, str, str] = (
            None,
            0,
            "",
            "",
        )  # the last list, its length, its JSON and the hash

    def of_turn(self, claim: Claim, prompt: str, sent: Sent, *, is_own: bool) -> TurnTexts:
        """What keeps the texts of one turn. A prompt that is the turn's `is_own` is deleted with its session."""
        return TurnTexts(self, claim, *encoded(prompt), sent, is_own)

    def tools(self, tools: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> tuple[str, str]:
        """The JSON of the tools and of the further fields of a request, and its hash. A registry makes a new list when
        its tools change."""
        if self._tools[0] is not tools or self._tools[1] != len(tools):
            self._tools = (tools, len(tools), *encoded({"tools": tools, "extra": extra}))
        return self._tools[2:]

    def missing(self, claim: Claim, texts: Mapping[str, tuple[str, bool]]) -> dict[str, dict[str, str]]:
        """Those of the texts that are not known to be kept, by the key that they are kept under."""
        found: dict[str, dict[str, str]] = {}
        for hash, (text, is_own) in texts.items():
            if (claim.owner, claim.session if is_own else 0, hash) not in self._known:
                found.setdefault(claim.key if is_own else "", {})[hash] = text
        return found

    async def keep(self, claim: Claim, missing: Mapping[str, Mapping[str, str]]) -> bool:
        """Keep texts; False if the store could not."""
        try:
            for key, texts in missing.items():
                await self._store.keep_request_texts(claim.owner, key, texts)
                for hash in texts:
                    self._known[claim.owner, claim.session if key else 0, hash] = None
        except (StoreError, ValueError) as error:  # the turn goes on; its timeline says that the request is rebuilt
            log.warning("what was sent to the model is not kept: %s", error)
            return False
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return True


@dataclass(slots=True)
class TurnTexts:
    """Keeps the texts of one turn's requests, while the model works on them."""

    _texts: RequestTexts
    _claim: Claim
    _prompt: str
    _hash: str
    _sent: Sent
    _is_own: bool

    def begin(self, tools: Sequence[Mapping[str, Any]] | None, extra: Mapping[str, Any]) -> asyncio.Task[bool] | None:
        """Note what the next request is made of. Where some of it is not kept yet, that begins at once."""
        tools_text, tools_hash = self._texts.tools(tools or (), extra)
        self._sent.prompt, self._sent.tools = self._hash, tools_hash
        texts = {self._hash: (self._prompt, self._is_own), tools_hash: (tools_text, False)}
        missing = self._texts.missing(self._claim, texts)
        return asyncio.ensure_future(self._texts.keep(self._claim, missing)) if missing else None

    async def end(self, keeping: asyncio.Task[bool] | None) -> None:
        """Wait until the texts are kept: the answer in the log must not name any that are not."""
        if keeping is not None and not await keeping:
            self._sent.prompt = self._sent.tools = ""


class FlushTimes:
    """Writes down how long turns waited for the disk in their last write, which cannot say so itself: many at once, a
    moment later, and unflushed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seconds: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, row: int, seconds: float) -> None:
        """Note the wait of the turn that this inbox row opened."""
        self._seconds[row] = self._seconds.get(row, 0.0) + round(seconds, 4)
        if self._task is None:
            self._task = asyncio.ensure_future(self._write_later())

    async def _write_later(self) -> None:
        try:
            await asyncio.sleep(NOTE_SECONDS)
        finally:
            self._task = None
        await self.write()

    async def write(self) -> None:
        """Write what was noted. It is only for people to read: what cannot be written is lost."""
        seconds, self._seconds = self._seconds, {}
        if seconds:
            try:
                await self._store.note_flushes(seconds)
            except StoreError as error:
                log.warning("how long turns waited for the disk is not written down: %s", error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.write()
