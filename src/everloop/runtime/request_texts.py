"""The parts of model requests that are not in the log: the system prompt and the tools, each stored once per hash.

An answer in the log refers to both by hash, so the timeline can show the exact request that was sent, even after the
sources of the prompt or the tools have changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..engine import Sent
from ..errors import StoreError
from ..messages import encode_json
from ..store.base import Claim, Store

log = logging.getLogger(__name__)
KNOWN = 1_000  # hashes remembered as stored
NOTE_SECONDS = 1.0  # how long flush times are collected before they are written in one batch


def encoded(value: Any) -> tuple[str, str]:
    """Return a value as JSON, and the hash of that."""
    data = encode_json(value)
    return data.decode(), hashlib.sha256(data).hexdigest()[:32]


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
            self._prompt = (prompt, *encoded(prompt))
        return TurnTexts(self, claim, *self._prompt[1:], sent, is_own)

    def tools(self, tools: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> tuple[str, str]:
        """Return the tools and the extra fields of a request as JSON, and the hash of that.

        The last result is reused: a registry makes a new list when its tools change.
        """
        if self._tools[0] is not tools or self._tools[1] != len(tools):
            self._tools = (tools, len(tools), *encoded({"tools": tools, "extra": extra}))
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
        while len(self._known) > KNOWN:
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


class FlushTimes:
    """Records the flush time of each turn's last write, which cannot contain it: in batches, later, and unflushed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seconds: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, row: int, seconds: float) -> None:
        """Record the flush time of the turn that this inbox row opened."""
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
        """Write the recorded times. They are only informative: if the write fails, they are dropped."""
        seconds, self._seconds = self._seconds, {}
        if seconds:
            try:
                await self._store.note_flushes(seconds)
            except StoreError as error:
                log.warning("flush times could not be written: %s", error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.write()
