"""Decides whom a channel answers: people on the allow list or paired by a code, and members of open groups.

Strangers get nothing. With `pairing = true`, a stranger who writes in a direct chat gets a code, once; the owner
confirms it with `/pair CODE` or `everloop channels pair CODE`.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import Literal

import msgspec

from ..bus import InboundMessage, OutboundMessage
from ..config import ChannelConfig
from ..errors import EverloopError
from ..store.base import Store
from ..store.peers import SENDING
from ..text import one_line
from .base import Can, Received, fold_case

LETTERS = "ABCDEFGHJKMNPQRSTUVWXYZ23456789"  # without letters that look alike
CODE_LENGTH = 8
CODE_SECONDS = 3600.0
MAX_PENDING = 3  # valid codes of a channel; further strangers get nothing
FETCH_SECONDS, FETCH_WINDOW = 120.0, 600.0  # time limit for fetching one sender's files, per window
MAX_SENDERS = 10_000  # in each limit; beyond that the oldest are evicted
PAIRED = "You are paired with this agent now. Write whatever you like; /help shows the commands."
EVERYONE = "*"  # in the allow list: everyone, in direct chats
_CODE, _PEER = "code:", "peer:"

Standing = Literal["owner", "peer", "member", "stranger"]


def new_code() -> str:
    return "".join(secrets.choice(LETTERS) for _ in range(CODE_LENGTH))


def is_code(typed: str, code: str) -> bool:
    """Return whether a person typed this code, in any case. The comparison takes constant time."""
    return secrets.compare_digest(typed.strip().upper().replace("-", "").encode("utf-8", "replace"), code.encode())


class Pending(msgspec.Struct, frozen=True):
    """A stranger with a pairing code that is not confirmed yet."""

    code: str
    sender: str
    chat: str
    name: str
    at: float
    message: str = ""  # the id of the message that the code was sent in reply to

    @property
    def is_valid(self) -> bool:
        return 0 <= time.time() - self.at < CODE_SECONDS


class PairedPeer(msgspec.Struct, frozen=True):
    """A person whose pairing code was confirmed."""

    sender: str
    name: str
    at: float
    admin: bool = False  # may confirm the codes of others
    code: str = ""
    message: str = ""  # the id of the message that confirmed it, if one did


class Pairings:
    """The codes and paired people of a channel, in the store."""

    def __init__(self, store: Store, channel: str) -> None:
        self._store = store
        self._channel = channel

    async def peers(self) -> dict[str, PairedPeer]:
        state = await self._store.channel_state(self._channel)
        found = [msgspec.json.decode(value, type=PairedPeer) for key, value in state.items() if key.startswith(_PEER)]
        return {peer.sender: peer for peer in found}

    async def pending(self) -> list[Pending]:
        """Return the valid codes, oldest first, and remove those that have expired."""
        state = await self._store.channel_state(self._channel)
        found = [msgspec.json.decode(value, type=Pending) for key, value in state.items() if key.startswith(_CODE)]
        for one in found:
            if not one.is_valid:
                await self._store.set_channel_state(self._channel, _CODE + one.code, None)
        return sorted((one for one in found if one.is_valid), key=lambda one: one.at)

    async def new_code(self, message: Received, chat_id: str) -> str | None:
        """Return a new code for a stranger; None if they already have one, or if too many strangers do.

        A message that is redelivered after a crash gets the same code.
        """
        pending = await self.pending()
        for one in pending:
            if one.sender == message.sender:
                return one.code if message.id and one.message == message.id else None
        if len(pending) >= MAX_PENDING:
            return None
        code = new_code()
        made = Pending(code, message.sender, chat_id, one_line(message.name, 60), time.time(), message.id or "")
        await self._store.set_channel_state(self._channel, _CODE + code, msgspec.json.encode(made).decode())
        return code

    async def confirm(self, code: str, owner: str, admin: bool = False, message: str = "") -> PairedPeer | None:
        """Pair the person who was given this code, and tell them; None if no valid code matches.

        `message` is the id of the message with the code: if it is redelivered after a crash, the result is the same.
        """
        for one in await self.pending():
            if is_code(code, one.code):
                await tell(self._store, self._channel, owner, one.chat, PAIRED, f"pair:{one.code}")
                peer = PairedPeer(one.sender, one.name, time.time(), admin, one.code, message)
                return peer if await self._replace(one, peer) else None
        peers = (await self.peers()).values() if message else ()
        return next((one for one in peers if one.message == message and is_code(code, one.code)), None)

    async def _replace(self, pending: Pending, peer: PairedPeer) -> bool:
        """Replace a code with the person who had it, unless another process already has."""
        key = _CODE + pending.code
        made = (self._channel, _PEER + peer.sender, msgspec.json.encode(peer).decode())
        found = (await self._store.channel_state(self._channel)).get(key)
        if found is None:
            return False
        return await self._store.write_channel_state([made, (self._channel, key, None)], (self._channel, key, found))

    async def remove(self, sender: str) -> bool:
        known = sender in await self.peers()
        await self._store.set_channel_state(self._channel, _PEER + sender, None)
        return known


async def tell(store: Store, channel: str, owner: str, chat_id: str, text: str, id: str) -> None:
    """Send a text to a chat outside of any turn, once per id."""
    # In a separate session, so that what strangers and commands cause stays out of the conversation.
    about = InboundMessage(
        channel, "channel", chat_id, "", id=f"{channel}:{id}", owner=owner, session=f"{channel}:access"
    )
    await store.answer(about, [OutboundMessage(channel, chat_id, text)])
    await store.wake(SENDING)


async def confirm_anywhere(
    store: Store, channels: dict[str, ChannelConfig], code: str, admin: bool, message: str = ""
) -> str:
    """Confirm a code of any of these channels and return the text for the owner.

    Raise an `EverloopError` if no code matches. `message` is the id of the message with the code, if any.
    """
    for name, config in channels.items():
        if (peer := await Pairings(store, name).confirm(code, config.owner, admin, message)) is not None:
            return f"Paired {peer.name or peer.sender} ({name}:{peer.sender})."
    raise EverloopError(f"no valid code is {one_line(code, 20)}: a code is valid for an hour; ask for a new one")


def same_id(id: str, can: Can) -> str:
    """Return the canonical form of a person's or group's id, if the network ignores case."""
    return id if can.case else fold_case(id)


class Access:
    """Decides what a person may do in a channel."""

    def __init__(self, config: ChannelConfig, can: Can, pairings: Pairings) -> None:
        self._config = config
        self._can = can
        self._allowed = frozenset(same_id(one, can) for one in config.allow) - {EVERYONE}
        self._groups = frozenset(same_id(one, can) for one in config.groups)
        self._pairings = pairings

    async def known_as(self, sender: str) -> Literal["owner", "peer"] | None:
        """Return the role of a person who is named in the settings or paired; None for everyone else."""
        if same_id(sender, self._can) in self._allowed:
            return "owner"
        peer = (await self._pairings.peers()).get(sender)
        return None if peer is None else "owner" if peer.admin else "peer"

    async def standing(self, message: Received) -> Standing:
        """Return the sender's role. People on the allow list count as owners, because the settings name them."""
        if (known := await self.known_as(message.sender)) is not None:
            return known
        if EVERYONE in self._config.allow and not message.group:
            return "peer"
        is_open = same_id(message.chat, self._can) in self._groups
        return "member" if message.group and is_open else "stranger"


class RateLimit:
    """Counts the messages of each sender per minute. Only one process polls an account, so memory suffices."""

    def __init__(self, per_minute: int) -> None:
        self._most = per_minute
        self._windows: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def count(self, sender: str, now: float) -> int:
        """Count a message and return by how many the sender exceeds the limit in this window."""
        began, number = self._windows.pop(sender, (now, 0))
        if now - began >= 60:
            began, number = now, 0
        self._windows[sender] = (began, number + 1)
        while len(self._windows) > MAX_SENDERS:
            self._windows.popitem(last=False)
        return max(number + 1 - self._most, 0) if self._most else 0


class FetchLimit:
    """Limits the files of each sender per ten minutes: their total size, and the time it takes to fetch them.

    While a file is fetched, everyone else's messages wait; and all senders share the disk.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._windows: OrderedDict[str, tuple[float, float, int]] = OrderedDict()

    def left(self, sender: str, now: float) -> tuple[float, int]:
        """Return how many seconds and bytes the sender has left in this window."""
        _, seconds, size = self._window(sender, now)
        return FETCH_SECONDS - seconds, self._most_bytes - size

    def count(self, sender: str, seconds: float, size: int, now: float) -> None:
        began, before, already = self._window(sender, now)
        self._windows.pop(sender, None)
        self._windows[sender] = (began, before + seconds, already + size)
        while len(self._windows) > MAX_SENDERS:
            self._windows.popitem(last=False)

    def _window(self, sender: str, now: float) -> tuple[float, float, int]:
        found = self._windows.get(sender)
        return found if found is not None and now - found[0] < FETCH_WINDOW else (now, 0.0, 0)
