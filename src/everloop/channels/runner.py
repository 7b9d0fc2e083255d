"""Runs channels: moves messages from the networks into the inbox, and from the outbox to the networks.

One worker polls an account, under a lease. An incoming message is on disk before the channel acknowledges it. An
outgoing message is sent in parts; each part is recorded once the network has accepted it, so that a crash repeats at
most one part in each chat.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

import msgspec

from ..bus import InboundMessage, Kind, OutboundMessage, Question
from ..commands import answer_of, kind_of
from ..config import LINK, ChannelConfig
from ..config.redaction import stripped
from ..errors import EverloopError, StoreError
from ..log import UserSaid
from ..providers.transcription import is_recording
from ..runtime.owners import Owners
from ..runtime.streaming import SessionSubscriber
from ..store.base import Delivery, Outgoing, SentPart, Store
from ..store.peers import ANY, SENDING, WORK, Notice, new_worker, retire
from ..text import clean, one_line
from ..text_cursor import Position
from ..threads import in_thread
from ..tools.message import OutgoingFiles
from .access import Access, FetchLimit, Pairings, RateLimit, Standing, confirm_anywhere, same_id, tell
from .base import (
    Attachment,
    Button,
    Can,
    Channel,
    Later,
    Never,
    NoFile,
    Options,
    OutgoingFile,
    Part,
    Received,
    StateRow,
    space_of,
)
from .files import MAX_FILES, MEGABYTE, Save, fetched, name_of, opened, refusal
from .links import LEFT, ChatLinks, LinkCommand, channel_of, command_in
from .preview import Follow, Previews
from .text import MARK, literal, render, split

if TYPE_CHECKING:
    from ..observability.metrics import Meters

log = logging.getLogger(__name__)
FIRST_DELAY, MAX_DELAY = 1.0, 60.0  # seconds between two attempts
STEADY_SECONDS = 60.0  # after a connection of this length, the delay starts over
AT_ONCE = 8  # parts sent concurrently, in different chats
TAKEN_AT_ONCE = 50
MAX_WAITING = 1000  # messages queued in memory, over all chats
MAX_TEXT = 100_000  # characters of a message; the rest is cut off
MAX_ID = 300
REMEMBERED = 1000  # ids of the latest incoming messages
STATUS = "status"
CURSOR = "cursor"
INSTANCE = "instance"
QUESTION = "question:"
MAX_QUESTIONS = 100  # with buttons; beyond that the oldest are removed
TOKEN_LENGTH = 20
# The buttons of a question, by the suffix of their values: the label, and the equivalent command.
CHOICES = {"y": ("Approve", "/approve"), "a": ("Always", "/approve always"), "n": ("Deny", "/deny")}


def lease_of(channel: str) -> str:
    return f"channel:{channel}"


def chat_id_of(chat: str, thread: str, threads: bool) -> str:
    """Return the id of a chat, or of a thread in it: if the network has threads, each has its own session."""
    if not threads:
        return chat
    chat, thread = (one.replace("%", "%25").replace("/", "%2F") for one in (chat, thread))
    return f"{chat}/{thread}" if thread else chat


def chat_of(chat_id: str, threads: bool) -> tuple[str, str]:
    """Split a chat id into the chat and the thread."""
    if not threads:
        return chat_id, ""
    chat, _, thread = chat_id.partition("/")
    return unquote(chat), unquote(thread)


class Status(msgspec.Struct, frozen=True):
    """The state of a channel's connection, as last reported by its worker."""

    at: float
    error: str = ""  # why it does not work; "" while it does


def follower(owners: Owners) -> Follow:
    """Return a function that follows sessions from the current end of their logs, wherever their turns run."""

    async def follow(owner: str, key: str) -> SessionSubscriber:
        agent, info = await owners.agent(owner), await owners.store.session(owner, key)
        return agent.conversations.follow(owner, key, Position(0 if info is None else info.entries, 0))

    return follow


@dataclass(frozen=True, slots=True)
class Host:
    """What all accounts of a process work with."""

    store: Store
    worker: str
    configs: Mapping[str, ChannelConfig]  # of all channels, by name
    follow: Follow | None
    meters: Meters | None
    links: Mapping[str, Sequence[str]]
    save: Save | None
    outgoing: OutgoingFiles | None
    transcribes: bool


class ChannelRunner:
    """Runs all channels of the settings until it is cancelled."""

    def __init__(
        self,
        store: Store,
        channels: Sequence[tuple[ChannelConfig, Channel, Options]],
        follow: Follow | None = None,
        meters: Meters | None = None,
        links: Mapping[str, Sequence[str]] | None = None,
        save: Save | None = None,
        outgoing: OutgoingFiles | None = None,
        transcribes: bool = False,
    ) -> None:
        """With `follow`, chats are shown what happens in their sessions.

        `links` maps people to their accounts, whose direct chats share one session; `save` keeps the files that people
        send, and `outgoing` has those that the agent sends. `transcribes` says that turns get the words of voice
        messages.
        """
        self.worker = new_worker()
        configs = {config.name: config for config, _, _ in channels}
        host = Host(store, self.worker, configs, follow, meters, links or {}, save, outgoing, transcribes)
        self._accounts = [Account(host, *one) for one in channels]
        self._peer = store.peer(self.worker, self._on_notice)

    async def run(self) -> None:
        try:
            await self._peer.join()
            async with asyncio.TaskGroup() as tasks:
                for account in self._accounts:
                    tasks.create_task(account.run(), name=f"channel {account.name}")
        finally:
            await self._peer.leave()
            retire(self.worker)

    def _on_notice(self, notice: Notice) -> None:
        for account in self._accounts:
            if notice.what in (SENDING, ANY):
                account.more_outgoing()
            if notice.what == ANY:
                account.lease_changed()


class Account:
    """One account at a network: its lease, what comes in and what goes out."""

    def __init__(self, host: Host, config: ChannelConfig, channel: Channel, options: Options) -> None:
        self.name = config.name
        self._store = host.store
        self._worker = host.worker
        self._channel = channel
        self._reporter = Reporter(host.store, config.name, options, host.meters)
        self._previews = Previews(host.store, config, channel, host.follow)
        self._inbox = ChannelInbox(host, config, channel, self._reporter, self._previews)
        self._sender = Sender(host, config, channel, self._reporter, self._previews, self._inbox.may_read)
        self._changed = asyncio.Event()  # the lease may have another holder

    def more_outgoing(self) -> None:
        self._sender.more.set()

    def lease_changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Work whenever the lease is held, until cancelled."""
        delay = FIRST_DELAY
        while True:
            self._changed.clear()  # before the query, so that a change during it is not missed
            try:
                if await self._store.hold(lease_of(self.name), self._worker):
                    await self._work()
                    continue
                delay = FIRST_DELAY
            except StoreError as error:  # a full or locked disk must not end the server
                log.error("channel %s: %s", self.name, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_DELAY)
                continue
            except Exception as error:  # a bug: the other channels and the server continue
                log.error("channel %s failed", self.name, exc_info=self._reporter.strip(error))
                await asyncio.sleep(MAX_DELAY)
                continue
            await self._changed.wait()

    async def _work(self) -> None:
        """Receive and send until the lease is lost."""
        work = [asyncio.create_task(self._receive()), asyncio.create_task(self._sender.run())]
        sweeping = asyncio.create_task(self._previews.sweep())
        try:
            await self._store.wake(ANY)  # a frozen worker that held the lease learns that it has lost it
            while await self._store.hold(lease_of(self.name), self._worker):
                changed = asyncio.create_task(self._changed.wait())
                done, _ = await asyncio.wait({*work, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for task in done - {changed}:
                    task.result()  # never ends normally: raises a bug or a store error
                self._changed.clear()
        finally:
            for task in (*work, sweeping):
                task.cancel()
            await asyncio.gather(*work, sweeping, return_exceptions=True)
            await self._previews.close()
            if (close := getattr(self._channel, "close", None)) is not None:
                with contextlib.suppress(Exception):
                    await close()
            with contextlib.suppress(StoreError):
                await self._store.release_outgoing(self._worker, self.name)
                await self._store.unhold(lease_of(self.name), self._worker)
                await self._store.wake(ANY)

    async def _receive(self) -> None:
        """Receive until cancelled. After a failure, report the reason and restart with a delay."""
        delay = FIRST_DELAY
        while True:
            began, accepted = time.monotonic(), self._inbox.accepted
            wait = 0.0
            try:
                await self._channel.receive(self._inbox)
                reason = "the connection ended"
            except Later as error:
                wait, reason = error.seconds, str(error)
            except Exception as error:
                reason = describe(error)
            if time.monotonic() - began > STEADY_SECONDS or self._inbox.accepted > accepted:
                delay = FIRST_DELAY
            await self._reporter.failed(reason)
            await asyncio.sleep(max(wait, delay * random.uniform(0.5, 1.0)))
            delay = min(2 * delay, MAX_DELAY)


def describe(error: BaseException) -> str:
    if isinstance(error, EverloopError | Never | Later) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Reporter:
    """Reports a channel's state to the log and the store, without secrets and only when it changes."""

    def __init__(self, store: Store, name: str, options: Options, meters: Meters | None) -> None:
        self._store = store
        self._name = name
        self._options = options
        self._meters = meters
        self._last: str | None = None

    async def works(self) -> None:
        if self._last is None or self._last:
            if self._last:
                log.warning("channel %s works again", self._name)
            await self._keep("")

    async def failed(self, reason: str) -> None:
        reason = self.clean(reason)
        if reason != self._last:
            log.warning("channel %s: %s; retrying", self._name, reason)
            await self._keep(reason)

    def count(self, outcome: Literal["taken", "sent", "dead"]) -> None:
        if self._meters is not None:
            self._meters.channels.add(self._name, outcome)

    def clean(self, text: str) -> str:
        """Return a reason on one line, without secrets."""
        return one_line(self._options.redacted(text), 300)

    def strip(self, error: Exception) -> Exception:
        """Return an error whose traceback may be logged."""
        return stripped(error, self._options.redacted)

    async def _keep(self, error: str) -> None:
        self._last = error
        status = msgspec.json.encode(Status(time.time(), error)).decode()
        with contextlib.suppress(StoreError):
            await self._store.set_channel_state(self._name, STATUS, status)


# ------------------------------------------------------------------------------------------------------- incoming


class ChannelInbox:
    """Accepts what a channel receives: decides who is answered, and writes messages to the store's inbox."""

    def __init__(
        self, host: Host, config: ChannelConfig, channel: Channel, reporter: Reporter, previews: Previews
    ) -> None:
        self._store = store = host.store
        self._config = config
        self._can = channel.can
        self._configs = {name: one for name, one in host.configs.items() if one.owner == config.owner}
        self._save = host.save
        self._transcribes = host.transcribes
        self._reporter = reporter
        self._previews = previews
        self._questions = Questions(store, config.name)
        self._pairings = Pairings(store, config.name)
        self._access = Access(config, channel.can, self._pairings)
        self._links = ChatLinks(store, config, channel.can, self._access, host.links)
        self._rates = RateLimit(config.per_minute)
        self._fetching = FetchLimit(MAX_FILES * MEGABYTE * config.media_mb)
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._order = asyncio.Lock()
        self.accepted = 0  # number of incoming messages

    async def ready(self) -> None:
        """Report that the channel is connected."""
        await self._reporter.works()

    async def knows(self, sender: str) -> bool:
        """Return whether a person may be answered in a direct chat, if only with a pairing code."""
        asks = Received(chat=sender, sender=sender, text="")
        return self._config.pairing or await self._access.standing(asks) != "stranger"

    async def cursor(self) -> str:
        return (await self._store.channel_state(self._config.name)).get(CURSOR, "")

    async def may_read(self, chat: str, session: str) -> bool:
        """Return whether what was said in a session may be sent to a chat."""
        return await self._links.may_read(chat, session, self._own_session)

    async def keep_cursor(self, value: str) -> None:
        await self._store.set_channel_state(self._config.name, CURSOR, value)

    async def state(self, space: str) -> dict[str, str]:
        return await self._store.channel_state(space_of(self._config.name, space))

    async def write_state(self, rows: Sequence[StateRow], expected: StateRow) -> bool:
        first, *others = [(space_of(self._config.name, space), key, value) for space, key, value in (expected, *rows)]
        return await self._store.write_channel_state(others, first)

    async def accept(self, message: Received) -> bool:
        async with self._order:
            self.accepted += 1
            await self._reporter.works()
            if not _is_usable(message) or (message.id is not None and message.id in self._recent):
                return False
            if message.button:
                return await self._take_button(message)
            taken = await self._accept(message)
            if message.id is not None:
                self._recent[message.id] = None
                while len(self._recent) > REMEMBERED:
                    self._recent.popitem(last=False)
            return taken

    async def _accept(self, message: Received) -> bool:
        if message.group and self._config.mention and not message.mentioned:
            await self._links.revoke_shown(message)
            return False
        standing = await self._access.standing(message)
        if standing == "stranger":
            await self._offer_code(message)
            return False
        first = (*message.text.split(maxsplit=1), "")[0]
        if first.lower().partition("@")[0] == "/pair" and standing != "member":
            await self._pair(message, standing)
            return True
        if standing != "member" and (command := command_in(message.text)) is not None:
            await self._link(message, command)
            return True
        incoming = await self._incoming(message)
        kind = await self._kind_of(incoming, standing, message.group)
        if kind != "urgent" and await self._is_over_limit(message):
            return False
        if message.files:
            kind = "message"
            await self._take_files(message, incoming)
            if await self._access.standing(message) == "stranger":
                return False  # the sender was unpaired while the files were fetched
            incoming.session = await self._session_of(message)  # the chats may have been unlinked in the meantime
            if not self._transcribes and not incoming.content and all(map(is_recording, incoming.media)):
                await self._say(message, _cannot_listen(incoming.media), "voice")
                return True
        if message.group and kind == "message":
            incoming.content = f"{one_line(message.name or message.sender, 60)}: {incoming.content}"
        if kind != "message":
            await self._put(incoming, kind)
            return True
        session = incoming.session_key

        async def may_see() -> bool:
            is_admitted = await self._access.standing(message) != "stranger"
            return is_admitted and await self._session_of(message) == session

        async with self._previews.preparing(incoming, message.chat, bool(message.thread), may_see):
            await self._put(incoming, kind)
        return True

    async def _kind_of(self, incoming: InboundMessage, standing: Standing, group: bool) -> Kind:
        """Return what a message is. Members of an open group may talk, but neither approve nor stop anything."""
        if standing == "member":
            return "message"
        if standing == "peer" and group and not await self._may_answer(incoming):
            return "message"
        return kind_of(incoming)

    async def _may_answer(self, incoming: InboundMessage) -> bool:
        """Return whether a message may answer the session's open question: only the person who caused it may."""
        if answer_of(incoming.content) is None:
            return True
        info = await self._store.session(incoming.owner, incoming.session_key)
        if info is None or not info.parked or info.open_turn is None:
            return True
        turns = await self._store.turns(incoming.owner, session=info.id, prefix=info.open_turn, limit=1)
        logged = await self._store.read_turn(info.id, turns[0].first_seq) if turns else []
        return any(isinstance(one.entry, UserSaid) and one.entry.sender == incoming.sender_id for one in logged[:1])

    async def _take_button(self, message: Received) -> bool:
        """Answer the question of a button, if it is still open and this person may answer it.

        Only the person whose message the turn works on may, and an owner; anyone else is ignored. The button's value is
        not trusted: the question is looked up in the store.
        """
        token, _, choice = message.button.partition(".")
        asked = await self._questions.find(token)
        if asked is None or choice not in CHOICES or chat_of(asked.chat_id, self._can.threads)[0] != message.chat:
            return False
        standing = await self._access.standing(message)
        if standing != "owner" and not (standing == "peer" and message.sender == asked.sender):
            return False
        if not await self.may_read(message.chat, asked.session):
            return False  # the chat has left the session since
        id, owner = f"{self._config.name}:{QUESTION}{token}", self._config.owner
        if await self._store.find(owner, id) is not None:
            return True  # a redelivery
        info = await self._store.session(owner, asked.session)
        if info is None or not info.parked or info.entries != asked.position:
            return False
        answer = InboundMessage(
            self._config.name,
            message.sender,
            asked.chat_id,
            CHOICES[choice][1],
            id=id,
            owner=owner,
            session=asked.session,
        )
        await self._put(answer, "urgent")
        return True

    async def _take_files(self, message: Received, incoming: InboundMessage) -> None:
        """Save the files of a message to the workspace, and note in its text which ones were left out."""
        limit, notes = MEGABYTE * self._config.media_mb, list[str]()
        for number, file in enumerate(message.files):
            if number == 2 * MAX_FILES:
                notes.append(f"[{len(message.files) - number} more files were attached, and not taken.]")
                break
            if self._save is None or not limit or number >= MAX_FILES:
                notes.append(f"[{one_line(clean(file.name), 80)} was attached, and not taken.]")
                continue
            data = await self._fetched(self._limited(message), file, limit)
            if isinstance(data, str):
                notes.append(data)
                continue
            name = name_of(self._config.name, message.id or secrets.token_hex(8), number, file.name)
            try:
                incoming.media.append(await self._save(self._config.owner, name, data))
            except (OSError, LookupError) as error:  # a full disk, or a link in the workspace
                log.error("channel %s: a file could not be saved: %s", self._config.name, error)
                notes.append(f"[{one_line(clean(file.name), 80)} could not be kept.]")
        incoming.content = "\n\n".join(one for one in (incoming.content, *notes) if one)

    async def _fetched(self, sender: str, file: Attachment, limit: int) -> bytes | str:
        """Return the content of a file, or a note about why it is missing. The sender's limits apply."""
        began, data = time.monotonic(), b""
        seconds, size = self._fetching.left(sender, began)
        why = "took too long to fetch" if seconds <= 0 else "came after too many others"
        try:
            if seconds > 0 and size > 0:
                async with asyncio.timeout(seconds):
                    found = await fetched(file, min(limit, size))
                if isinstance(found, bytes):
                    data = found
                if isinstance(found, bytes) or size >= limit:
                    return found
        except TimeoutError:
            why = "took too long to fetch"
        finally:
            self._fetching.count(sender, time.monotonic() - began, len(data), began)
        return f"[{one_line(clean(file.name), 80)} {why}, and was not taken.]"

    async def _put(self, incoming: InboundMessage, kind: Kind) -> None:
        row = await self._store.accept(incoming.addressed(), kind)
        self._reporter.count("taken")
        if not row.done:
            await self._store.wake(WORK, [row.session])

    async def _incoming(self, message: Received) -> InboundMessage:
        name, chat_id = self._config.name, self._chat_id(message)
        session = await self._session_of(message)
        if session != self._own_session(message):
            await self._links.remember(message)
        return InboundMessage(
            name,
            message.sender,
            chat_id,
            clean(message.text[:MAX_TEXT]),
            id=None if message.id is None else f"{name}:{message.id}",
            owner=self._config.owner,
            session=session,
            metadata={"extra": dict(message.extra)} if message.extra else {},
        )

    async def _session_of(self, message: Received) -> str:
        return await self._links.session_of(message, self._own_session(message))

    def _own_session(self, message: Received) -> str:
        """Return the session of a chat that is not linked."""
        is_person = self._can.nicks and not message.group
        return f"{self._config.name}:{same_id(message.sender, self._can) if is_person else self._chat_id(message)}"

    def _chat_id(self, message: Received) -> str:
        return chat_id_of(message.chat, message.thread, self._can.threads)

    async def _say(self, message: Received, text: str, about: str) -> None:
        id = f"{about}:{message.id or secrets.token_hex(8)}"
        await tell(self._store, self._config.name, self._config.owner, self._chat_id(message), text, id)

    async def _offer_code(self, message: Received) -> None:
        """Send a stranger a pairing code if pairing is on; strangers in groups get nothing."""
        if not self._config.pairing or message.group:
            return
        code = await self._pairings.new_code(message, self._chat_id(message))
        if code is not None:
            await self._say(message, f"Your pairing code is {code}. It is valid for an hour.", "code")

    async def _pair(self, message: Received, standing: Standing) -> None:
        code = message.text.partition(" ")[2].strip()
        if standing != "owner":
            said = "Only the owner can pair others."
        elif not code:
            said = "Write /pair and the code that the other person got."
        else:
            try:
                said = literal(await confirm_anywhere(self._store, self._configs, code, False, message.id or ""))
            except EverloopError as error:
                said = literal(str(error))
        await self._say(message, said, "pair")

    async def _link(self, message: Received, command: LinkCommand) -> None:
        """Run a command that links chats. After a crash it is run again, unless its reply is in the outbox."""
        id = message.id or secrets.token_hex(8)
        if await self._store.find(self._config.owner, f"{self._config.name}:{LINK}:{id}") is not None:
            return
        if await self._is_over_limit(message):
            return
        reply = await self._links.answer(command, message, self._chat_id(message), self._own_session(message), id)
        if reply.code is not None:
            name, chat_id = channel_of(reply.code.account), reply.code.chat_id
            await tell(self._store, name, self._config.owner, chat_id, reply.told, f"linked:{reply.code.code}")
        if reply.text:
            await tell(
                self._store, self._config.name, self._config.owner, self._chat_id(message), reply.text, f"{LINK}:{id}"
            )

    async def _is_over_limit(self, message: Received) -> bool:
        """Return whether the sender has exceeded the rate limit. They are told so once a minute."""
        over = self._rates.count(self._limited(message), time.monotonic())
        known = f"{self._config.name}:{message.id}"
        if over and message.id is not None and await self._store.find(self._config.owner, known) is not None:
            return False  # a redelivery
        if over == 1:
            most = self._config.per_minute
            await self._say(
                message, f"That was too fast: I take {most} messages a minute. Send it again later.", "rate"
            )
        return over > 0

    def _limited(self, message: Received) -> str:
        """Return the person that limits apply to: with another nick, they are still the same person."""
        return message.sender.rpartition("!")[2] if self._can.nicks else message.sender


def _cannot_listen(recordings: Sequence[str]) -> str:
    kept = ", ".join("/".join(path.split("/")[-2:]) for path in recordings)
    return f"I cannot listen to voice messages: no transcription is set up here. The recording is kept as {kept}."


def _is_usable(message: Received) -> bool:
    ids = (message.chat, message.sender, message.thread, message.id or "-")
    said = message.button or message.text.strip() or message.files
    return bool(said and message.chat and message.sender) and max(map(len, ids)) <= MAX_ID


# ------------------------------------------------------------------------------------------------------- questions


class AskedQuestion(msgspec.Struct, frozen=True):
    """A question that was sent with buttons."""

    session: str
    position: int  # in the session's log
    sender: str  # who may answer, in addition to the owner
    chat_id: str
    at: float


class Questions:
    """Stores a channel's questions with buttons. Each has a token, which is part of its buttons' values."""

    def __init__(self, store: Store, channel: str) -> None:
        self._store = store
        self._channel = channel

    async def find(self, token: str) -> AskedQuestion | None:
        found = (await self._store.channel_state(self._channel)).get(QUESTION + token)
        return None if found is None else msgspec.json.decode(found, type=AskedQuestion)

    async def keep(self, token: str, question: Question, chat_id: str) -> None:
        """Store a question before it is sent; the oldest ones are removed."""
        state = await self._store.channel_state(self._channel)
        known = {key: value for key, value in state.items() if key.startswith(QUESTION)}
        if QUESTION + token in known:
            return
        if len(known) >= MAX_QUESTIONS:
            oldest = min(known, key=lambda key: msgspec.json.decode(known[key], type=AskedQuestion).at)
            await self._store.set_channel_state(self._channel, oldest, None)
        made = AskedQuestion(question.session, question.position, question.sender, chat_id, time.time())
        await self._store.set_channel_state(self._channel, QUESTION + token, msgspec.json.encode(made).decode())


# ------------------------------------------------------------------------------------------------------- outgoing


@dataclass(slots=True)
class Queued:
    """A message to send, and its progress."""

    row: Outgoing
    session: str  # that it was said in
    parts: list[SentPart]
    since: float  # when it was taken from the outbox
    begun: bool  # the store has recorded that sending the next part has begun
    uncertain: bool  # the network may already have the next part
    withheld: bool = False  # its chat has left the session


class ChatLeft(Exception):
    """The chat of a message no longer takes part in the session that it was said in."""


class LeaseLost(Exception):
    """Another worker has taken over this message."""


class Sender:
    """Sends the outbox of a channel: chats concurrently, the messages of each chat in order."""

    def __init__(
        self,
        host: Host,
        config: ChannelConfig,
        channel: Channel,
        reporter: Reporter,
        previews: Previews,
        may_read: Callable[[str, str], Awaitable[bool]],
    ) -> None:
        """`may_read` tells whether a chat may get what was said in a session."""
        self.more = asyncio.Event()  # there may be something in the outbox
        self._store = host.store
        self._worker = host.worker
        self._config = config
        self._channel = channel
        self._outgoing = host.outgoing
        self._reporter = reporter
        self._previews = previews
        self._may_read = may_read
        self._questions = Questions(host.store, config.name)
        self._chats: dict[str, deque[Queued]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._instance = ""

    async def run(self) -> None:
        try:
            self._instance = await self._find_instance()
            if self._outgoing is not None:
                await in_thread(self._outgoing.sweep)
            while True:
                self.more.clear()  # before the query, so that a message that arrives during it is not missed
                if sum(map(len, self._chats.values())) < MAX_WAITING and await self._take():
                    continue
                await self.more.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._chats.clear()
            self._tasks.clear()

    async def _find_instance(self) -> str:
        """Return an id of this store, so that two stores never use the same key."""
        if not (found := (await self._store.channel_state("")).get(INSTANCE, "")):
            found = secrets.token_hex(8)
            await self._store.set_channel_state("", INSTANCE, found)
        return found

    async def _take(self) -> bool:
        rows = await self._store.take_outgoing(self._worker, TAKEN_AT_ONCE, None, [self._config.name])
        if not rows:
            return False
        found = await self._store.deliveries([row.id for row in rows])
        queued = [self._queued(row, found[row.id]) for row in rows]
        behind = [one for one in queued if self._enqueue(one)]
        back = [one for one in behind if not one.uncertain]
        for one in back:
            one.begun = False
        if back:
            await self._store.hold_back([one.row.id for one in back], self._worker)
        for chat in self._chats.keys() - self._tasks.keys():
            task = self._tasks[chat] = asyncio.create_task(self._send_chat(chat))
            task.add_done_callback(self._chat_ended)
        return True

    def _queued(self, row: Outgoing, delivery: Delivery) -> Queued:
        return Queued(row, delivery.session, list(delivery.parts), time.time(), True, row.message.repeat)

    def _enqueue(self, one: Queued) -> bool:
        """Append a message to the queue of its chat. Return whether it has to wait for others."""
        queue = self._chats.setdefault(one.row.message.chat_id, deque())
        queue.append(one)
        return len(queue) > 1

    def _chat_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("channel %s: %s", self._config.name, self._reporter.clean(describe(error)))
        self.more.set()

    async def _send_chat(self, chat: str) -> None:
        """Send the messages of a chat until there are none left."""
        queue = self._chats[chat]
        try:
            while queue:
                with contextlib.suppress(LeaseLost):
                    await self._send(queue[0])
                    await self._previews.answered(chat, queue[0].row.message.reply_to)
                queue.popleft()
        finally:
            self._chats.pop(chat, None)
            self._tasks.pop(chat, None)

    async def _send(self, one: Queued) -> None:
        message = one.row.message
        try:
            await self._send_message(one, message)
        except ChatLeft:
            withheld = "" if one.parts else LEFT  # the rest of a message is left out without a word
            one.withheld = True
            await self._send_message(one, replace(message, content=withheld, media=[], question=None))
        if message.media and self._outgoing is not None:
            await in_thread(self._outgoing.forget, message.media)

    async def _send_message(self, one: Queued, message: OutboundMessage) -> None:
        can = self._channel.can
        text = render(message.content, "plain") if can.form == "plain" else message.content
        start = one.parts[-1].end if one.parts else 0
        for step, is_last in _with_last(steps_of(text, len(message.media), can, start)):
            files, notes = await self._open([message.media[number] for number in step.files])
            part = self._part(one, "\n\n".join(filter(None, [step.text, *notes])), files)
            if is_last and can.buttons and message.question is not None:
                part = replace(part, buttons=await self._buttons(one, message.question))
            network_id = await self._send_part(one, part)
            if network_id is None:
                return
            one.parts.append(SentPart(network_id[:MAX_ID], step.end))
            one.uncertain = False
            await self._mark(one, is_last)
        if not text.strip() and not message.media:
            await self._mark(one, True)

    async def _open(self, paths: Sequence[str]) -> tuple[tuple[OutgoingFile, ...], list[str]]:
        """Return the files to send, and notes about those that cannot be sent."""
        files, notes = list[OutgoingFile](), list[str]()
        can = self._channel.can
        left = min(can.media, MEGABYTE * self._config.media_mb)
        for path in paths:
            if self._outgoing is None or not left:
                notes.append(refusal(path.rpartition("/")[2]))
                continue
            found = await opened(self._outgoing, path, left)
            if isinstance(found, str):
                notes.append(found)
            else:
                files.append(found)
                left -= len(found.data)
        return tuple(files), notes

    async def _buttons(self, one: Queued, question: Question) -> tuple[Button, ...]:
        """Return the buttons of a question, and store the question under their token."""
        token = self._key(one, "question")[:TOKEN_LENGTH]
        await self._questions.keep(token, question, one.row.message.chat_id)
        return tuple(Button(label, f"{token}.{choice}") for choice, (label, _) in CHOICES.items())

    def _key(self, one: Queued, what: object) -> str:
        return hashlib.sha256(f"{self._instance}:{one.row.id}:{what}".encode()).hexdigest()[:32]

    def _part(self, one: Queued, text: str, files: tuple[OutgoingFile, ...]) -> Part:
        message, form = one.row.message, self._channel.can.form
        chat, thread = chat_of(message.chat_id, self._channel.can.threads)
        number = len(one.parts) + 1
        own, reply_to = f"{self._config.name}:", None
        if number == 1 and (about := message.reply_to or "").startswith(own):
            # Presses of buttons and scheduled jobs are not messages on the network.
            reply_to = about.removeprefix(own) if not about.startswith(own + QUESTION) else None
        return Part(
            chat=chat,
            thread=thread,
            text=text if form == "plain" else render(text, form),
            plain=text if form == "plain" else render(text, "plain"),
            reply_to=reply_to,
            extra=message.metadata.get("extra", {}),
            number=number,
            files=files,
        )

    def _without_files(self, part: Part, reason: str) -> Part:
        """Return the part with a note in place of each file that the network does not accept."""
        note = "\n\n".join(refusal(file.name, self._reporter.clean(reason)) for file in part.files)
        shown = note if self._channel.can.form == "plain" else render(note, self._channel.can.form)
        text, plain = f"{part.text}\n\n{shown}".strip(), f"{part.plain}\n\n{note}".strip()
        return replace(part, files=(), text=text, plain=plain)

    async def _send_part(self, one: Queued, part: Part) -> str | None:
        """Send a part, with retries. Return the network's id; None if the message was given up."""
        key = self._key(one, part.number)
        delay = FIRST_DELAY
        chat = chat_of(one.row.message.chat_id, self._channel.can.threads)[0]
        while True:
            if not one.withheld and not await self._may_read(chat, one.session):
                raise ChatLeft
            if not one.begun:
                await self._mark(one, False)
            sent = self._marked(part) if one.uncertain else part
            wait = delay * random.uniform(0.5, 1.0)
            try:
                async with self._slots:
                    return await self._channel.send(sent, key)
            except Later as error:
                wait, reason = max(error.seconds, 0.0), str(error)
                if not one.uncertain:
                    await self._store.hold_back([one.row.id], self._worker)
                    one.begun = False
            except NoFile as error:
                part = self._without_files(part, str(error))
                continue
            except Never as error:
                await self._give_up(one, str(error))
                return None
            except Exception as error:
                one.uncertain, reason = True, describe(error)
            await self._reporter.failed(f"cannot send: {reason}")
            if time.time() + wait > one.since + 3600 * self._config.give_up_hours:
                await self._give_up(one, reason)
                return None
            await asyncio.sleep(wait)
            delay = min(2 * delay, MAX_DELAY)

    def _marked(self, part: Part) -> Part:
        if self._channel.can.repeats == "key":
            return replace(part, repeat=True)
        text, plain = f"{MARK} {part.text}".rstrip(), f"{MARK} {part.plain}".rstrip()
        return replace(part, repeat=True, text=text, plain=plain)

    async def _mark(self, one: Queued, sent: bool) -> None:
        if not await self._patiently(one, sent):
            raise LeaseLost
        one.begun = True
        if sent:
            self._reporter.count("sent")
            await self._reporter.works()

    async def _patiently(self, one: Queued, sent: bool) -> bool:
        """Record the parts, with retries: a full disk must not cause a message to be sent again."""
        delay = FIRST_DELAY
        while True:
            try:
                return await self._store.mark_parts(one.row.id, self._worker, one.parts, sent)
            except StoreError as error:
                log.error("channel %s: %s", self._config.name, error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)

    async def _give_up(self, one: Queued, reason: str) -> None:
        reason = self._reporter.clean(reason)
        log.warning(
            "channel %s: message %d was given up (%s): `everloop channels dead` shows it",
            self._config.name,
            one.row.id,
            reason,
        )
        await self._store.bury(one.row.id, self._worker, reason)
        self._reporter.count("dead")


@dataclass(frozen=True, slots=True)
class Step:
    """The content of one part of a message: a piece of its text, and the indexes of its files."""

    text: str
    files: tuple[int, ...]
    end: int  # where the part ends: an offset in the text, plus one for each file after it


def steps_of(text: str, files: int, can: Can, start: int) -> Iterator[Step]:
    """Yield the parts of a message from an offset on: its text, then its files unless these are attached."""
    pieces = [Step(piece.text, (), piece.end) for piece in split(text, can, start)]
    left = range(max(start - len(text), 0), files)
    if can.attaches and left:
        last = pieces.pop() if pieces else Step("", (), len(text))
        yield from pieces
        yield replace(last, files=tuple(left), end=len(text) + files)
        return
    yield from pieces
    for number in left:
        yield Step("", (number,), len(text) + number + 1)


def _with_last(steps: Iterator[Step]) -> Iterator[tuple[Step, bool]]:
    """Yield each step together with whether it is the last one."""
    previous: Step | None = None
    for step in steps:
        if previous is not None:
            yield previous, False
        previous = step
    if previous is not None:
        yield previous, True
