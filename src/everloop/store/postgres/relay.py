"""Carries events of turns between processes by NOTIFY: each has a channel of its own, and one is for all of them.

What is said to one process within a few hundredths of a second goes out together. Nothing is kept: what gets lost is in
the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..peers import ENDED
from ..write import Write
from .post import Post
from .pulse import CHANNEL, Pulse

if TYPE_CHECKING:
    from .connecting import Connection
    from .lanes import Lanes

log = logging.getLogger(__name__)
BATCH_SECONDS = 0.04
RENEW_SECONDS = 10.0  # between two words that a session is still followed
FORGET_SECONDS = 30.0  # after which one who has not said so counts as gone
TOPICS = 200  # of one word to all
# Nothing is kept of it, so nothing waits for the disk.
SAY = """SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, piece)
    FROM unnest(%s::text[]) AS piece"""


class Word(msgspec.Struct, omit_defaults=True):
    """What is said to all processes."""

    what: str  # watch, ask (watch, and be told what a newcomer must know), unwatch, tell
    address: str
    topics: list[str] = []
    data: str = ""


class Relay:
    """One for each store of a process."""

    def __init__(self, lanes: Lanes, pulse: Pulse) -> None:
        self.address = pulse.address
        self.batches = 0  # that were sent, each one NOTIFY or a few in a transaction
        self.on_word: Callable[[], None] | None = None  # told before something is said to all
        self._lanes = lanes
        self._pulse = pulse
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posts: dict[str, Post] = {}  # by address
        self._flushes: list[Callable[[], None]] = []
        self._tick: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0
        self._renewal: asyncio.TimerHandle | None = None
        self._served: dict[str, list[Served]] = {}  # by topic, as the following
        self._followed: dict[str, list[Followed]] = {}
        self._followers: dict[str, dict[str, float]] = {}  # address and until when
        self._parts: dict[str, list[str]] = {}  # by sender: pieces of what is not complete yet
        pulse.relayed = self._from_pulse

    def bind(self) -> None:
        """Hear in the loop that runs."""
        self._loop = asyncio.get_running_loop()

    def publish(
        self, owner: str, key: str, on_subscriber: Callable[[str], None], on_message: Callable[[bytes], None]
    ) -> Served:
        """Work on a session: `asked` hears the address of one who begins to follow it, `told` what is told to all."""
        self.bind()
        made = Served(self, topic_of(owner, key), on_subscriber, on_message)
        self._served.setdefault(made.topic, []).append(made)
        return made

    def subscribe(self, owner: str, key: str, on_event: Callable[[bytes], None]) -> Followed:
        """Hear what is said of a session by whoever works on it elsewhere."""
        self.bind()
        self._pulse.beat()
        made = Followed(self, topic_of(owner, key), on_event)
        self._followed.setdefault(made.topic, []).append(made)
        made.request_state()
        self._renew_later()
        return made

    def send(self, owner: str, key: str, data: bytes) -> None:
        """Tell whoever works on a session, wherever that is."""
        self.tell_all(Word("tell", self.address, [topic_of(owner, key)], data.decode()))

    def close(self) -> None:
        """Say nothing more."""
        for handle in (self._tick, self._renewal):
            if handle is not None:
                handle.cancel()
        self._tick = self._renewal = None
        self._flushes.clear()
        for post in self._posts.values():
            post.drop()
        self._posts.clear()

    # ------------------------------------------------------------------------------------------ saying

    def followers(self, topic: str) -> Sequence[str]:
        """The addresses of those elsewhere who follow a session."""
        there = self._followers.get(topic)
        if not there:
            return ()
        now = time.monotonic()
        for address in [address for address, until in there.items() if until < now]:
            del there[address]
        if not there:
            del self._followers[topic]
        return list(there)

    def say(self, address: str, topic: str, data: bytes) -> None:
        """Say one line to a process, with whatever else is said to it in this moment."""
        post = self._posts.get(address)
        if post is None:
            post = self._posts[address] = Post(partial(self._send, f"{CHANNEL}_{address}"), self.address)
        post.put(b"%b %b\n" % (topic.encode(), data))
        self._tick_later()

    def soon(self, flush: Callable[[], None]) -> None:
        """Call `flush` once, before the next batches go out."""
        self._flushes.append(flush)
        self._tick_later()

    def tell_all(self, word: Word) -> None:
        self._send(CHANNEL, [msgspec.json.encode(word).decode()])

    def wake(self) -> None:
        """Let all look at the store."""
        self._send(CHANNEL, [ENDED])

    def _tick_later(self) -> None:
        """What comes after a silence goes out at once, what follows in batches."""
        if self._tick is None:
            loop = asyncio.get_running_loop()
            self._tick = loop.call_at(max(self._ticked_at + BATCH_SECONDS, loop.time()), self._ticks)

    def _ticks(self) -> None:
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            try:
                flush()
            except Exception:  # of one turn: the others are told of all the same
                log.exception("what is for watching was lost")
        self._tick, self._ticked_at = None, asyncio.get_running_loop().time()
        for address, post in list(self._posts.items()):
            if not post.send():
                del self._posts[address]

    def _send(self, channel: str, pieces: list[str], then: Callable[[], None] | None = None) -> None:
        self.batches += 1

        def work(db: Connection) -> None:
            db.execute(SAY, (channel, pieces))

        def done(sent: asyncio.Future[None]) -> None:
            if not sent.cancelled() and (error := sent.exception()) is not None:
                log.debug("what is for watching was lost: %s", error)
            if then is not None:
                then()

        if channel == CHANNEL and self.on_word is not None:
            self.on_word()
        self.in_turn(work, channel).add_done_callback(done)

    def in_turn(self, work: Callable[[Connection], None], channel: str = CHANNEL) -> Write[None]:
        """Say something after all that was said before on the same channel: who follows a turn, before it is woken."""
        return self._lanes.submit("reads", work, ("relay", channel))

    # ------------------------------------------------------------------------------------------ following

    def _renew_later(self) -> None:
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_later(RENEW_SECONDS, self._renews)

    def _renews(self) -> None:
        self._renewal = None
        if self._followed:
            self._watch("watch")
            self._renew_later()

    def _watch(self, what: str) -> None:
        """Say of all that is followed from here that it is."""
        topics = list(self._followed)
        for start in range(0, len(topics), TOPICS):
            self.tell_all(Word(what, self.address, topics[start : start + TOPICS]))

    def closed(self, handle: Served | Followed) -> None:
        """A session is served or followed no more."""
        by_topic: dict[str, list[Served]] | dict[str, list[Followed]]
        by_topic = self._served if isinstance(handle, Served) else self._followed
        left = [one for one in by_topic.pop(handle.topic, ()) if one is not handle]
        if left:
            by_topic[handle.topic] = left  # type: ignore[assignment]
        elif isinstance(handle, Followed):
            self.tell_all(Word("unwatch", self.address, [handle.topic]))

    # ------------------------------------------------------------------------------------------ hearing

    def _from_pulse(self, notices: list[tuple[str, str]] | None) -> None:
        """What has come, in the pulse's thread; None when it listens again after a while without a connection."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hear, notices)

    def _hear(self, notices: list[tuple[str, str]] | None) -> None:
        if notices is None:
            self._parts.clear()
            if self._followed:  # what was said meanwhile is lost
                self._watch("ask")
            return
        for channel, payload in notices:
            try:
                if channel == CHANNEL:
                    self._take_word(msgspec.json.decode(payload, type=Word))
                else:
                    self._take_piece(payload)
            except (msgspec.MsgspecError, ValueError) as error:  # of another version
                log.warning("something was said that is not understood: %s", error)

    def _take_word(self, word: Word) -> None:
        if word.what == "tell":
            for one in [one for topic in word.topics for one in self._served.get(topic, ())]:
                one.told(word.data.encode())
        if word.address == self.address:
            return
        until = time.monotonic() + FORGET_SECONDS
        for topic in word.topics:
            if word.what in ("watch", "ask"):
                there = self._followers.setdefault(topic, {})
                new = word.address not in there
                there[word.address] = until
                for one in self._served.get(topic, ()) if new or word.what == "ask" else ():
                    one.asked(word.address)
            elif word.what == "unwatch" and topic in self._followers:
                there = self._followers[topic]
                there.pop(word.address, None)
                if not there:
                    del self._followers[topic]
        if word.what == "watch":
            for topic in list(self._followers):
                self.followers(topic)  # whoever died without a word is forgotten

    def _take_piece(self, payload: str) -> None:
        head, _, text = payload.partition("\n")
        sender, number, count = head.split(" ")
        parts = self._parts.setdefault(sender, [])
        if number == "0":
            parts.clear()
        elif len(parts) != int(number):  # one before it was lost
            return
        parts.append(text)
        if len(parts) < int(count):
            return
        del self._parts[sender]
        for line in "".join(parts).split("\n")[:-1]:
            topic, _, data = line.partition(" ")
            for one in self._followed.get(topic, ()):
                one.heard(data.encode())


class Served:
    """A session that is at work here, and those elsewhere who follow it."""

    def __init__(self, relay: Relay, topic: str, asked: Callable[[str], None], told: Callable[[bytes], None]) -> None:
        self._relay = relay
        self.topic = topic
        self.asked = asked
        self.told = told
        self.before_batch = relay.soon

    @property
    def has_subscribers(self) -> bool:
        """Whether there is anybody."""
        return bool(self._relay.followers(self.topic))

    def send(self, data: bytes, address: str | None = None) -> None:
        """Say one line of JSON to all of them, or to one. It may get lost."""
        for one in self._relay.followers(self.topic) if address is None else (address,):
            self._relay.say(one, self.topic, data)

    def close(self) -> None:
        """Nothing more happens here. Those who follow look at what it came to."""
        if self.has_subscribers:
            self._relay.wake()
        self._relay.closed(self)


class Followed:
    """A session that is followed from here."""

    def __init__(self, relay: Relay, topic: str, heard: Callable[[bytes], None]) -> None:
        self._relay = relay
        self.topic = topic
        self.heard = heard

    def request_state(self) -> None:
        """Ask whoever works on it for all that a newcomer must know."""
        self._relay.tell_all(Word("ask", self._relay.address, [self.topic]))

    def close(self) -> None:
        self._relay.closed(self)


def topic_of(owner: str, key: str) -> str:
    """A session's name among those who are told of it: short, and the same for nobody else's."""
    return hashlib.blake2b(msgspec.json.encode((owner, key)), digest_size=12).hexdigest()
