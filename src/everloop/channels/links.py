"""Which chats share a session: the direct chats of one person, named by the settings or linked by a code.

`/link` in a direct chat gives its sender a code. `/link CODE`, sent in a direct chat by another admitted
account, lets the direct chats of that account join the session of the first; `/unlink` ends it. A code admits
nobody. The codes and links of an owner are one value in the store, changed by compare-and-set: a code is used once,
whichever worker handles the message, and a command that is repeated after a crash has the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import msgspec

from ..config import LINK, ChannelConfig
from ..cron.jobs import job_of, timer_of
from ..cron.zones import BadSchedule
from ..store.base import Store, Timer
from ..text import one_line
from ..threads import in_thread
from .access import CODE_SECONDS, Access, Pairings, is_code, new_code, same_id
from .base import Can, Received, fold_case
from .text import literal

T = TypeVar("T")
MAX_WRONG = 10  # per account and hour; after that even a valid code is refused
MAX_SESSIONS = 20  # shared sessions that an account may ever start
TAKES_PART = "takes part:"  # prefix of the chats that take part in a session of others, each with its person
APART = f"{LINK}:apart:"  # prefix of the session of people who may not see the session of their chat
LinkCommand = Literal["link", "unlink"]

DIRECT_ONLY = "Chats are linked in direct chats only, outside of threads."
NOT_KNOWN = "Only people whom the settings name, or who were paired, can link their chats."
BY_SETTINGS = "The settings link this chat already, under [channels.link]."
OTHER_CHAT = "Send this code from your other chat: it lets that chat share this one's session."
ALREADY = "These chats share a session already."
UNLINK_FIRST = "This chat shares a session with another chat already. Send /unlink first, then the code again."
BUSY = "I am still working on something in this chat. Send the code again when that has ended, or after /stop."
HOW_TO_LINK = "Write /link alone to get a code, or /link and the code of your other chat, with nothing after it."
HOW_TO_UNLINK = "Write /unlink alone, with nothing after it."
NO_CODE = "That is no valid code. A code is valid for an hour and can be used once: /link in your other chat gives one."
TOO_MANY = "Those were too many wrong codes. No code is taken from you for an hour."
TOO_MANY_SESSIONS = "That account has shared so many sessions that it can share no other one."
LEFT = "An answer from the session that this chat has left is not sent here. Ask again to get an answer in this chat."
ALONE = "This chat shares its session with no other chat."
ONLY_SETTINGS = "Only the chats that the settings link, under [channels.link], share this session."


# ------------------------------------------------------------------------------------------------------- the data


class LinkCode(msgspec.Struct, frozen=True):
    """A code that lets another account join the session of the one that asked for it."""

    code: str
    account: str  # CHANNEL:SENDER, as in the settings
    chat_id: str
    name: str
    session: str
    at: float
    message: str  # the id of the message that asked for it

    def is_valid(self, now: float) -> bool:
        return 0 <= now - self.at < CODE_SECONDS


class Member(msgspec.Struct, frozen=True):
    """An account whose direct chats share a session."""

    account: str
    name: str
    at: float
    code: LinkCode | None = None  # the code that it joined with; None for the account whose session it was
    message: str = ""  # the id of the message with the code


class SharedSession(msgspec.Struct, frozen=True):
    """A session of several accounts, the first of which owned it before. With only that one left, it is not shared.

    It is kept even then: what others have said in it must not reach a group, or another person, in that chat.
    """

    session: str
    members: tuple[Member, ...]

    @property
    def home(self) -> str:
        return self.members[0].account

    @property
    def is_shared(self) -> bool:
        return len(self.members) > 1

    def find(self, account: str) -> Member | None:
        return next((one for one in self.members if one.account == account), None)


class Guesses(msgspec.Struct, frozen=True):
    """The wrong codes of an account within an hour."""

    account: str
    since: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Requester:
    """The sender of a command that links chats, and their chat."""

    account: str
    name: str
    chat_id: str
    own: str  # the session of that chat without links
    message: str  # the id of the command
    by_settings: str = ""  # the session that the settings give this person


class Left(NamedTuple):
    """An account that has left a shared session."""

    account: str
    session: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The code that an account has joined a session with, and the account that can end the sharing for all."""

    code: LinkCode
    home: str


class Links(msgspec.Struct, frozen=True):
    """All codes and links of an owner."""

    codes: tuple[LinkCode, ...] = ()
    shared: tuple[SharedSession, ...] = ()
    guesses: tuple[Guesses, ...] = ()

    def of(self, account: str) -> SharedSession | None:
        """Return the session that the account shares with others."""
        return next((one for one in self.shared if one.is_shared and one.find(account) is not None), None)

    def session_of(self, account: str, own: str, *, direct: bool) -> str:
        """Return the session of an account's message in a chat; `own` is that of the chat, without links.

        A session that direct chats share, or have shared, is closed to anyone else who writes in its chat: to a group
        that the chat has become, and to another person who now has its name.
        """
        if direct and (shared := self.of(account)) is not None:
            return shared.session
        closed = {one.session for one in self.shared if not (direct and one.home == account)}
        session = own
        while session in closed:
            session = APART + session
        return session

    def current(self, requester: Requester) -> str:
        """Return the session that a person's direct messages belong to."""
        return requester.by_settings or self.session_of(requester.account, requester.own, direct=True)


def offer(links: Links, asks: Requester, code: str, now: float) -> tuple[Links, LinkCode]:
    """Give an account a code, which replaces its previous one; a command that is repeated gets the same code."""
    valid = [one for one in links.codes if one.is_valid(now)]
    for one in valid:
        if (one.account, one.message) == (asks.account, asks.message):
            return links, one
    made = LinkCode(code, asks.account, asks.chat_id, asks.name, links.current(asks), now, asks.message)
    others = (one for one in valid if one.account != asks.account)
    return msgspec.structs.replace(links, codes=(*others, made)), made


def join(links: Links, typed: str, joins: Requester, now: float, *, busy: bool) -> tuple[Links, Joined | str]:
    """Let an account join a session with a code. Return what it joined, or why not; "" if it was told why before."""
    shared = links.of(joins.account)
    member = shared.find(joins.account) if shared is not None else None
    if shared is not None and member is not None and member.code is not None and member.message == joins.message:
        return links, Joined(member.code, shared.home)  # a redelivery of the message that joined
    links, code = guess(links, typed, joins.account, now)
    if not isinstance(code, LinkCode):
        return links, code
    if code.account == joins.account:
        return links, OTHER_CHAT
    if shared is not None or code.session == links.current(joins):
        return links, ALREADY if code.session == links.current(joins) else UNLINK_FIRST
    if busy:
        return links, BUSY
    known = next((one for one in links.shared if one.session == code.session), None)
    if known is None and sum(one.home == code.account for one in links.shared) >= MAX_SESSIONS:
        return links, TOO_MANY_SESSIONS
    before = known.members if known is not None else (Member(code.account, code.name, code.at),)
    made = SharedSession(code.session, (*before, Member(joins.account, joins.name, now, code, joins.message)))
    codes = tuple(one for one in links.codes if one is not code and one.account != joins.account)
    shown = (*(one for one in links.shared if one is not known), made)
    return Links(codes, shown, links.guesses), Joined(code, made.home)


def guess(links: Links, typed: str, account: str, now: float) -> tuple[Links, LinkCode | str]:
    """Look up a typed code, and count wrong ones. Return the code, or why not; "" if the sender was told why before."""
    recent = [one for one in links.guesses if 0 <= now - one.since < CODE_SECONDS]
    before = next((one for one in recent if one.account == account), Guesses(account, now, 0))
    if before.wrong >= MAX_WRONG:
        return links, ""
    fitting = [one for one in links.codes if is_code(typed, one.code) and one.is_valid(now)]
    if fitting:
        return links, fitting[0]
    counted = Guesses(account, before.since, before.wrong + 1)
    others = (one for one in recent if one.account != account)
    why = TOO_MANY if counted.wrong == MAX_WRONG else NO_CODE
    return msgspec.structs.replace(links, guesses=(*others, counted)), why


def revoke(links: Links, typed: Sequence[str]) -> tuple[Links, None]:
    """Void the codes that were written where others could read them."""
    kept = tuple(one for one in links.codes if not any(is_code(word, one.code) for word in typed))
    return msgspec.structs.replace(links, codes=kept), None


def leave(links: Links, account: str, session: str = "") -> tuple[Links, frozenset[Left]]:
    """Take an account out of the session that it shares; if it is the account's own, or this one, everyone leaves.

    Return who left which session.
    """
    left, shared = set[Left](), list[SharedSession]()
    for one in links.shared:
        ends = account == one.home or one.session == session
        kept = one.members[:1] if ends else tuple(member for member in one.members if member.account != account)
        left |= {Left(member.account, one.session) for member in one.members if member not in kept}
        shared.append(SharedSession(one.session, kept))
    void = {account, *(one.account for one in left)}
    codes = tuple(one for one in links.codes if one.account not in void)
    return Links(codes, tuple(shared), links.guesses), frozenset(left)


# ------------------------------------------------------------------------------------------------------- the store


class LinkStore:
    """Reads and changes the codes and links of an owner in the store."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner

    async def read(self) -> Links:
        return _decoded(await self._kept())

    async def change(self, change: Callable[[Links], tuple[Links, T]]) -> T:
        """Change the value. If another process has changed it in the meantime, start over."""
        while True:
            kept = await self._kept()
            links = _decoded(kept)
            changed, result = change(links)
            if changed == links:
                return result
            row = (LINK, self._owner, msgspec.json.encode(changed).decode())
            if await self._store.write_channel_state([row], (LINK, self._owner, kept)):
                return result

    async def leave(self, account: str, session: str = "") -> bool:
        """Take an account out of the session that it shares, together with the jobs that it has scheduled there.

        Return whether it shared one.
        """
        left = leave(await self.read(), account, session)[1]
        await move_jobs(self._store, self._owner, left)  # first, so that a retry after a crash completes it
        return bool(await self.change(lambda links: leave(links, account, session)))

    async def _kept(self) -> str | None:
        return (await self._store.channel_state(LINK)).get(self._owner)


def _decoded(kept: str | None) -> Links:
    return Links() if kept is None else msgspec.json.decode(kept, type=Links)


# ------------------------------------------------------------------------------------------------------- a channel


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a command, and the notice for the chat whose code was used."""

    text: str
    code: LinkCode | None = None
    told: str = ""


class ChatLinks:
    """Finds the session of a channel's messages, and runs the commands that link chats."""

    def __init__(
        self, store: Store, config: ChannelConfig, can: Can, access: Access, settings: Mapping[str, Sequence[str]]
    ) -> None:
        """`settings` maps people to their accounts."""
        self._store = store
        self._name = config.name
        self._owner = config.owner
        self._can = can
        self._access = access
        self._links = LinkStore(store, config.owner)
        self._takes_part: dict[str, str] = {}  # what this process has remembered
        # People by their id in this network.
        self._people = {
            same_id(sender, can): person
            for person, accounts in settings.items()
            for name, _, sender in (account.partition(":") for account in accounts)
            if name == config.name
        }

    async def session_of(self, message: Received, own: str) -> str:
        """Return the session of a message; `own` is that of its chat."""
        direct = self._is_direct(message)
        if direct and (person := self._person_of(message)) is not None:
            return f"{LINK}:{person}"
        links = await self._links.read()
        if not links.shared:
            return own
        # Someone who is only answered because everyone is shares nothing, even if they were in the settings once.
        direct = direct and await self._access.known_as(message.sender) is not None
        return links.session_of(self._account_of(message), own, direct=direct)

    async def remember(self, message: Received) -> None:
        """Remember whose chat takes part in a session that is not its own, so that `may_read` knows it."""
        if self._takes_part.get(message.chat) != message.sender:
            await self._store.set_channel_state(self._name, TAKES_PART + message.chat, message.sender)
            self._takes_part[message.chat] = message.sender

    async def may_read(self, chat: str, session: str, own: Callable[[Received], str]) -> bool:
        """Return whether what was said in a session may be sent to a chat: not if the chat has left that session.

        A message that it sent before may be answered with what others have said there since.
        """
        links = await self._links.read()
        if not (session.startswith(f"{LINK}:") or any(one.session == session for one in links.shared)):
            return True
        sender = (await self._store.channel_state(self._name)).get(TAKES_PART + chat)
        if sender is None:
            return True
        asks = Received(chat=chat, sender=sender, text="")
        return await self.session_of(asks, own(asks)) == session

    async def revoke_shown(self, message: Received) -> None:
        """Void a code that an admitted person has written in a group without mentioning the agent."""
        typed = message.text.split()[1:]
        has_code = command_in(message.text) is not None and typed
        if has_code and await self._access.known_as(message.sender) is not None:
            await self._links.change(lambda links: revoke(links, typed))

    async def answer(self, command: LinkCommand, message: Received, chat_id: str, own: str, id: str) -> Reply:
        """Run a command. `own` is the session of its chat, and `id` is the same whenever it is repeated."""
        typed, now = message.text.split()[1:], time.time()
        account = self._account_of(message)
        if await self._access.known_as(message.sender) is None:
            return Reply(NOT_KNOWN)
        if not self._is_direct(message):
            if typed:
                await self._links.change(lambda links: revoke(links, typed))
            return Reply(DIRECT_ONLY)
        if len(typed) > (1 if command == "link" else 0):
            return Reply(HOW_TO_LINK if command == "link" else HOW_TO_UNLINK)
        by_settings = "" if (person := self._person_of(message)) is None else f"{LINK}:{person}"
        requester = Requester(account, one_line(message.name, 60), chat_id, own, id, by_settings)
        if command == "unlink":
            await self._links.leave(account, by_settings)
            return Reply(ONLY_SETTINGS if by_settings else ALONE)
        if not typed:
            made = await self._links.change(lambda links: offer(links, requester, new_code(), now))
            return Reply(
                f"Your link code is {made.code}. Send me “/link {made.code}” from your other chat within an hour, and "
                "from then on both chats share this session. Keep it to yourself: who uses it can read this session."
            )
        if by_settings:
            return Reply(BY_SETTINGS)
        busy = await self._is_busy((await self._links.read()).current(requester))
        found = await self._links.change(lambda links: join(links, typed[0], requester, now, busy=busy))
        if isinstance(found, str):
            return Reply(found)
        code = found.code
        here, there = _shown(requester.name, account), _shown(code.name, code.account)
        home = _shown("", found.home)
        # Accounts in the settings, and the one whose session it was, can make all others leave.
        ends = found.home == code.account or (
            code.session.startswith(f"{LINK}:") and not code.session.startswith(APART)
        )
        return Reply(
            f"This chat shares the session of {there} now. /unlink ends that.",
            code,
            f"{here} shares this session now. If that is not you, send /unlink{'' if ends else f' from {home}'}.",
        )

    async def _is_busy(self, session: str) -> bool:
        """Return whether a turn of a session is open or about to start.

        It could ask a question in this chat, whose answer would then go to the other session.
        """
        info = await self._store.session(self._owner, session)
        return info is not None and (
            info.open_turn is not None or bool(await self._store.waiting(self._owner, session))
        )

    def _account_of(self, message: Received) -> str:
        return account_of(self._name, message.sender, self._can)

    def _person_of(self, message: Received) -> str | None:
        return self._people.get(same_id(message.sender, self._can))

    def _is_direct(self, message: Received) -> bool:
        return not message.group and (not message.thread or self._can.always_threads)


def command_in(text: str) -> LinkCommand | None:
    """Return the command that a text begins with; None if there is none.

    It is a command even with other words after it: one of them may be a code, which no model must read.
    """
    match (*text.split(maxsplit=1), "")[0].lower().partition("@")[0]:
        case "/link":
            return "link"
        case "/unlink":
            return "unlink"
    return None


def account_of(channel: str, sender: str, can: Can) -> str:
    return f"{channel}:{same_id(sender, can)}"


def channel_of(account: str) -> str:
    return account.partition(":")[0]


async def unlink(store: Store, config: ChannelConfig, can: Can, sender: str) -> bool:
    """Take a person's account out of the session that it shares. Return whether it shared one."""
    account = account_of(config.name, sender, can)
    return await LinkStore(store, config.owner).leave(account)


async def unpair(store: Store, config: ChannelConfig, can: Can, sender: str) -> bool:
    """Revoke the pairing of a person, and pause their jobs. Return whether they were paired."""
    removed = await Pairings(store, config.name).remove(sender)
    await unlink(store, config, can, sender)  # last: a message that arrives in the meantime must not link them again
    await pause_jobs(store, config.owner, account_of(config.name, sender, can))
    return removed


async def move_jobs(store: Store, owner: str, left: Collection[Left]) -> None:
    """Move the jobs of people who left a session to the session of their own chat.

    A job answers in that chat, which must not see what is said in the shared session from now on.
    """
    gone = {(fold_case(one.account), one.session) for one in left}
    for timer in await store.timers(owner) if gone else ():
        if (_asked_by(timer), timer.data.get("session")) in gone:
            await store.set_timer(msgspec.structs.replace(timer, data={**timer.data, "session": None}))


def _asked_by(timer: Timer) -> str:
    """Return the account that scheduled a job, in lower case; for jobs of the command line, that of their chat."""
    return fold_case(f"{timer.data.get('channel')}:{timer.data.get('by') or timer.data.get('chat_id')}")


async def pause_jobs(store: Store, owner: str, account: str) -> None:
    """Pause the jobs that a person has scheduled, or that answer in their chat."""
    for timer in await store.timers(owner):
        if _asked_by(timer) == fold_case(account):
            try:
                job = await in_thread(job_of, timer)
            except (ValueError, BadSchedule):  # damaged, so it does not run
                continue
            await store.set_timer(timer_of(replace(job, paused=True)))


def _shown(name: str, account: str) -> str:
    return literal(f"{name} ({account})" if name else account)
