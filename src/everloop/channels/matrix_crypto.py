"""End-to-end encryption for Matrix: Olm between devices, Megolm in rooms, on vodozemac, and files.

All keys are in the store, so that any worker that holds the account's lease can use the device. Three rules keep them
safe when a process is killed:

- Everything that an Olm message changes (its session, the account's one-time keys, the room key in it) is one write,
  before the message is acknowledged. A handled message that is delivered again is recognised by its digest.
- An Olm session is written before anything that it has encrypted is sent: no state of it encrypts twice.
- Sessions that encrypt in rooms are never written. After a restart there are new ones.

Each write requires the `epoch` that this object set when it read the keys. A frozen worker whose account was taken over
can therefore write nothing, and so send nothing that needs a key.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import msgspec
import vodozemac
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ..text import one_line
from .base import Inbox, Later, Never, StateRow
from .matrix_devices import (
    DEVICES,
    KEYS,
    OWN,
    ROOMS,
    WAITING,
    Device,
    DeviceLists,
    Devices,
    Name,
    ToDevice,
    confirmed_in,
    is_name,
)

log = logging.getLogger(__name__)
OLM = "m.olm.v1.curve25519-aes-sha2"
MEGOLM = "m.megolm.v1.aes-sha2"
ONE_TIME_KEYS = 50  # that the server should hold
# The store also has the conversations in plain text, so a password stored beside them would protect nothing.
PICKLE_KEY = bytes(32)
MAX_SESSIONS = 8  # Olm sessions with one device
MAX_HANDLED = 500  # digests of Olm messages
MAX_WAITING = 500  # messages that cannot be read yet
MAX_MESSAGES = 100  # encrypted with one session, unless the room requires fewer
MAX_AGE = 7 * 24 * 3600.0  # of a room's session
REPAIR_SECONDS = 3600.0  # between two new Olm sessions with a device whose messages cannot be read
NO_READER_SECONDS = 30.0  # before retrying an answer that no device may read
SERVER_MILLISECONDS = 10_000  # for the server to wait for other servers
EPOCH, ACCOUNT, HANDLED, OLM_SESSIONS = "epoch", "account", "handled", "olm:"
SESSION, INDEX = "session", "index:"
T = TypeVar("T")
BAD = (ValueError, msgspec.MsgspecError)  # raised by vodozemac and the decoder for invalid data


class Call(Protocol):
    """A request to the server: method, path, body and the type of the reply."""

    async def __call__(self, method: str, path: str, asked: dict[str, Any] | None, result: type[T]) -> T: ...


class Unreadable(Exception):
    """A message cannot be decrypted: not yet, or, if `final`, never."""

    def __init__(self, reason: str, *, final: bool = False, wants_key: bool = False) -> None:
        super().__init__(reason)
        self.final = final
        self.wants_key = wants_key  # the key may be requested from a device of the sender


# ------------------------------------------------------------------------------------------------ what is kept


class SavedAccount(msgspec.Struct):
    pickle: str
    user: str
    device: str
    shared: bool = False  # the server has its keys


class SavedOlm(msgspec.Struct):
    pickle: str
    at: float
    encrypts: bool = True  # not after `everloop restore`: the restored keys are older than those used since


class SavedGroup(msgspec.Struct):
    """A session that decrypts in a room, and the device that made it."""

    pickle: str
    sender: str
    curve25519: str
    ed25519: str


class WaitingEvent(msgspec.Struct):
    """An event of a room that cannot be decrypted yet."""

    room: str
    sender: str
    event_id: str
    content: dict[str, Any]
    reason: str
    at: float

    @property
    def session(self) -> str:
        return str(self.content.get("session_id", ""))


class OlmSession:
    """A session with a device."""

    def __init__(self, session: vodozemac.Session, at: float, encrypts: bool = True) -> None:
        self.session = session
        self.at = at  # when it was created or last used to decrypt: both devices use the newest one
        self.encrypts = encrypts


class RoomSession:
    """A session that encrypts in a room. It exists in one process only, so no state of it is used twice."""

    def __init__(self) -> None:
        self.session = vodozemac.GroupSession()
        self.since = time.time()
        self.shared: set[Name] = set()


# ------------------------------------------------------------------------------------------------ what servers say


class OlmBody(msgspec.Struct):
    type: int
    body: str


class OlmContent(msgspec.Struct):
    algorithm: str
    sender_key: str
    ciphertext: dict[str, OlmBody]


class OlmPayload(msgspec.Struct):
    type: str
    sender: str
    recipient: str
    recipient_keys: dict[str, str]
    keys: dict[str, str]
    content: dict[str, Any] = {}


class RoomKey(msgspec.Struct):
    algorithm: str
    room_id: str
    session_id: str
    session_key: str
    sender_key: str = ""  # of a forwarded key


class MegolmContent(msgspec.Struct):
    algorithm: str
    session_id: str
    ciphertext: str


class MegolmPayload(msgspec.Struct):
    type: str
    room_id: str
    content: dict[str, Any]


class KeyCounts(msgspec.Struct):
    one_time_key_counts: dict[str, int] = {}


class FoundKeys(msgspec.Struct):
    device_keys: dict[str, dict[str, dict[str, Any]]] = {}
    failures: dict[str, Any] = {}


class ClaimedKeys(msgspec.Struct):
    one_time_keys: dict[str, dict[str, dict[str, Any]]] = {}


class Members(msgspec.Struct):
    joined: dict[str, Any] = {}


class Done(msgspec.Struct):
    """A reply without content."""


class Crypto:
    """Holds the keys of this device, and encrypts and decrypts with them."""

    def __init__(
        self, channel: str, me: Name, strict: bool, call: Call, inbox: Inbox, rooms: dict[str, RoomSession]
    ) -> None:
        """`rooms` has the sessions that encrypt; the caller keeps them when the keys are read again."""
        self._channel = channel
        self._me = me
        self._strict = strict
        self._call = call
        self._inbox = inbox
        self._rooms = rooms
        self._lock = asyncio.Lock()  # held for each change of the keys, including its write
        self._epoch = secrets.token_hex(8)
        self._members: dict[str, list[str]] = {}
        self._fresh: set[str] = set()  # people whose devices are up to date
        self._repaired: dict[str, float] = {}
        self._new_keys: set[str] = set()  # sessions whose keys have arrived
        self._asked: set[str] = set()  # sessions whose keys were requested
        self._olm: dict[str, list[OlmSession]] = {}  # by the Curve25519 key of the other device
        self._handled: list[str] = []  # digests of the last Olm messages
        self.waiting: dict[str, WaitingEvent] = {}

    # ------------------------------------------------------------------------------------------ begin

    async def open(self) -> None:
        """Read or create the keys, and upload the public ones."""
        async with self._lock:
            before = (await self._inbox.state(KEYS)).get(EPOCH)
            if not await self._inbox.write_state([(KEYS, EPOCH, self._epoch)], (KEYS, EPOCH, before)):
                raise OSError("another worker reads the keys of this account")
            state = await self._inbox.state(KEYS)
            gone = self._load(state)
            devices = await self._inbox.state(DEVICES)
            self._devices, self._confirmed = Devices(devices), confirmed_in(devices)
            self._tried_with = self._confirmed
            kept = (await self._inbox.state(WAITING)).values()
            for one in sorted((msgspec.json.decode(value, type=WaitingEvent) for value in kept), key=lambda e: e.at):
                self.waiting[one.event_id] = one
                self._new_keys.add(one.session)  # it may have arrived just before the process ended
            await self._check_own_device()
            if not self._saved.shared:
                fingerprint = f"{self._me.id} {self._account.ed25519_key.to_base64()}"
                await self._write([*gone, self._account_row(), (KEYS, OWN, fingerprint)])
                await self._upload_keys(0, has_fallback=False)

    def _load(self, state: Mapping[str, str]) -> list[StateRow]:
        """Load the keys of this device, or create them. Return the rows of an earlier device, to be removed."""
        saved = msgspec.json.decode(state[ACCOUNT], type=SavedAccount) if ACCOUNT in state else None
        sessions = {key: value for key, value in state.items() if key.startswith(OLM_SESSIONS)}
        if saved is not None and (saved.user, saved.device) == self._me:
            self._saved, self._account = saved, vodozemac.Account.from_pickle(saved.pickle, PICKLE_KEY)
            for key, value in sessions.items():
                decoded = msgspec.json.decode(value, type=list[SavedOlm])
                self._olm[key.removeprefix(OLM_SESSIONS)] = [_restored(one) for one in decoded]
            self._handled = msgspec.json.decode(state.get(HANDLED, "[]"), type=list[str])
            gone: list[StateRow] = []
        else:
            if saved is not None:
                log.warning("channel %s: the token belongs to a new device, which gets new keys", self._channel)
            self._saved, self._account = SavedAccount("", *self._me), vodozemac.Account()
            gone = [(KEYS, key, None) for key in sessions]
        self._own_key = self._account.curve25519_key.to_base64()
        return gone

    async def _check_own_device(self) -> None:
        """Refuse a token whose device already has keys from another program."""
        asked = {"device_keys": {self._me.user: [self._me.id]}}
        found = await self._call("POST", "/keys/query", asked, FoundKeys)
        keys = found.device_keys.get(self._me.user, {}).get(self._me.id, {}).get("keys")
        own = self._account.ed25519_key.to_base64()
        if isinstance(keys, dict) and keys.get(f"ed25519:{self._me.id}", own) != own:
            raise Never(
                f"the device {self._me.id} of the token has keys of another program: log in once more for the agent, "
                "and give it that token (docs/channels.md)"
            )

    async def _upload_keys(self, count: int, has_fallback: bool) -> None:
        """Upload one-time keys. They are on disk before the server has them."""
        if not self._account.one_time_keys:  # otherwise an upload was interrupted, and is repeated
            self._account.generate_one_time_keys(max(ONE_TIME_KEYS - count, 1))
            if not has_fallback:
                self._account.generate_fallback_key()  # type: ignore[attr-defined]
            await self._write([self._account_row()])
        fallback = self._account.fallback_key  # type: ignore[attr-defined]
        asked: dict[str, Any] = {
            "one_time_keys": {
                f"signed_curve25519:{id}": self._signed({"key": key.to_base64()})
                for id, key in self._account.one_time_keys.items()
            },
            "fallback_keys": {
                f"signed_curve25519:{id}": self._signed({"key": key.to_base64(), "fallback": True})
                for id, key in fallback.items()
            },
        }
        if not self._saved.shared:
            user, id = self._me
            keys = {f"curve25519:{id}": self._own_key, f"ed25519:{id}": self._account.ed25519_key.to_base64()}
            device = {"user_id": user, "device_id": id, "algorithms": [OLM, MEGOLM], "keys": keys}
            asked["device_keys"] = self._signed(device)
        await self._call("POST", "/keys/upload", asked, KeyCounts)
        self._account.mark_keys_as_published()
        self._saved.shared = True
        await self._write([self._account_row()])

    def _signed(self, content: dict[str, Any]) -> dict[str, Any]:
        signature = self._account.sign(_canonical(content)).to_base64()
        return {**content, "signatures": {self._me.user: {f"ed25519:{self._me.id}": signature}}}

    # ------------------------------------------------------------------------------------------ writing

    async def _write(self, rows: Sequence[StateRow]) -> None:
        if not await self._inbox.write_state(rows, (KEYS, EPOCH, self._epoch)):
            raise OSError("another worker has the keys of this account now")

    def _account_row(self) -> StateRow:
        self._saved.pickle = self._account.pickle(PICKLE_KEY)
        return KEYS, ACCOUNT, _json(self._saved)

    def _olm_row(self, curve25519: str) -> StateRow:
        kept = sorted(self._olm[curve25519], key=lambda one: one.at)[-MAX_SESSIONS:]
        self._olm[curve25519] = kept
        saved = [SavedOlm(one.session.pickle(PICKLE_KEY), one.at, one.encrypts) for one in kept]
        return KEYS, OLM_SESSIONS + curve25519, _json(saved)

    # ------------------------------------------------------------------------------------------ from other devices

    async def take(
        self, events: Iterable[ToDevice], lists: DeviceLists, one_time_keys: int, has_fallback: bool
    ) -> None:
        """Process events from other devices, and changes of keys. When this returns, all of it is on disk."""
        async with self._lock:
            self._fresh -= {*lists.changed, *lists.left}
            self._new_keys |= {one.session for one in self.waiting.values() if one.sender in lists.changed}
            unread: set[tuple[str, str]] = set()
            for event in events:
                if event.type == "m.room.encrypted":
                    await self._take_olm(event, unread)
            for sender, curve25519 in unread:
                await self._repair(sender, curve25519)
            if one_time_keys < ONE_TIME_KEYS // 2 or not has_fallback:
                await self._upload_keys(one_time_keys, has_fallback)

    async def _take_olm(self, event: ToDevice, unread: set[tuple[str, str]]) -> None:
        try:
            content = msgspec.convert(event.content, OlmContent)
            own = content.ciphertext[self._own_key]
            sender_key = vodozemac.Curve25519PublicKey.from_base64(content.sender_key).to_base64()
            message = vodozemac.AnyOlmMessage.from_parts(own.type, _from_base64(own.body))
        except (KeyError, *BAD):  # not for this device, or invalid
            return
        digest = hashlib.sha256(f"{sender_key} {own.body}".encode()).hexdigest()[:24]
        if content.algorithm != OLM or digest in self._handled or not is_name(event.sender):
            return
        rows = list[StateRow]()
        plain = self._decrypt_olm(sender_key, message, rows)
        if plain is None:
            unread.add((event.sender, sender_key))
        else:
            rows += await self._take_payload(event.sender, sender_key, plain)
        self._handled = [*self._handled[1 - MAX_HANDLED :], digest]
        await self._write([*rows, (KEYS, HANDLED, _json(self._handled))])

    def _decrypt_olm(self, sender_key: str, message: vodozemac.AnyOlmMessage, rows: list[StateRow]) -> bytes | None:
        """Return the content of an Olm message, and the rows that decrypting it changes."""
        first = message.to_pre_key() if message.to_parts()[0] == 0 else None
        known = self._olm.get(sender_key, [])
        for one in known:
            if first is not None and not one.session.session_matches(first):
                continue
            try:
                plain = one.session.decrypt(message)
            except ValueError:
                continue
            one.at = time.time()
            rows.append(self._olm_row(sender_key))
            return plain
        if first is None or any(one.session.session_matches(first) for one in known):
            return None
        key = vodozemac.Curve25519PublicKey.from_base64(sender_key)
        try:
            session, plain = self._account.create_inbound_session(key, first)
        except ValueError:
            return None
        self._olm.setdefault(sender_key, []).append(OlmSession(session, time.time()))
        rows += [self._olm_row(sender_key), self._account_row()]
        return plain

    async def _take_payload(self, sender: str, sender_key: str, plain: bytes) -> list[StateRow]:
        """Return the rows of a room key. A key for another device, or with another sender inside, is ignored."""
        try:
            payload = msgspec.json.decode(plain, type=OlmPayload)
            own = payload.recipient_keys.get("ed25519") == self._account.ed25519_key.to_base64()
            if payload.sender != sender or payload.recipient != self._me.user or not own:
                return []
            if payload.type == "m.dummy":  # the device could not decrypt something: send it the room keys again
                self._share_again(sender, sender_key)
            forwarded = payload.type == "m.forwarded_room_key"
            if payload.type != "m.room_key" and not forwarded:
                return []
            key = msgspec.convert(payload.content, RoomKey)
            if key.algorithm != MEGOLM:
                return []
            if forwarded:  # only accepted from the device that created the session, and only on request
                asked = (one for one in self.waiting.values() if one.session == key.session_id)
                if key.sender_key != sender_key or not any(
                    (one.room, one.sender) == (key.room_id, sender) for one in asked
                ):
                    return []
                exported = vodozemac.ExportedSessionKey(key.session_key)
                session = vodozemac.InboundGroupSession.import_session(exported)
            else:
                session = vodozemac.InboundGroupSession(vodozemac.SessionKey(key.session_key))
        except BAD:
            return []
        if session.session_id != key.session_id:
            return []
        space = _group_space(key.room_id, sender, key.session_id)
        if (text := (await self._inbox.state(space)).get(SESSION)) is not None:
            known = msgspec.json.decode(text, type=SavedGroup)
            first = vodozemac.InboundGroupSession.from_pickle(known.pickle, PICKLE_KEY).first_known_index
            if known.curve25519 != sender_key or first <= session.first_known_index:
                return []
        self._new_keys.add(key.session_id)
        fingerprint = payload.keys.get("ed25519", "")
        saved = SavedGroup(session.pickle(PICKLE_KEY), sender, sender_key, fingerprint)
        return [(space, SESSION, _json(saved))]

    def _share_again(self, sender: str, curve25519: str) -> None:
        if (found := self._devices.by_key(sender, curve25519)) is not None:
            for session in self._rooms.values():
                session.shared.discard(found[0])

    async def _repair(self, sender: str, curve25519: str) -> None:
        """Start a new Olm session with a device whose messages cannot be decrypted, so that later ones can."""
        if time.time() < self._repaired.get(curve25519, 0) + REPAIR_SECONDS:
            return
        self._repaired[curve25519] = time.time()
        await self._refresh([sender])
        if (found := self._devices.by_key(sender, curve25519)) is None or not self._is_trusted(*found):
            return
        log.warning(
            "channel %s: an encrypted message from %s cannot be decrypted; a new session with its device is started",
            self._channel,
            one_line(sender, 80),
        )
        await self._begin_sessions(dict([found]))
        await self._send_to(dict([found]), "m.dummy", {})

    # ------------------------------------------------------------------------------------------ devices

    async def _refresh(self, users: Iterable[str]) -> None:
        """Query the devices of people whose devices may have changed."""
        wanted = [user for user in users if user not in self._fresh and is_name(user)]
        if not wanted:
            return
        asked = {"device_keys": {user: [] for user in wanted}, "timeout": SERVER_MILLISECONDS}
        found = await self._call("POST", "/keys/query", asked, FoundKeys)
        rows = list[StateRow]()
        for user in wanted:
            if user.partition(":")[2] in found.failures:
                continue
            devices = found.device_keys.get(user, {})
            read = {id: keys for id, one in devices.items() if (keys := _keys_of(user, id, one)) is not None}
            changes, changed = self._devices.see(user, read)
            rows += changes
            for id in changed:
                log.warning(
                    "channel %s: the keys of the device %s of %s have changed, so it is not trusted",
                    self._channel,
                    one_line(id, 60),
                    one_line(user, 80),
                )
            self._fresh.add(user)
        if rows:
            await self._write(rows)

    def _is_trusted(self, name: Name, device: Device) -> bool:
        return not self._strict or self._confirmed.get(name) == device.ed25519

    async def _read_confirmed(self) -> None:
        if self._strict:
            self._confirmed = confirmed_in(await self._inbox.state(DEVICES))

    # ------------------------------------------------------------------------------------------ reading

    async def decrypt(self, room: str, sender: str, event_id: str, content: dict[str, Any]) -> MegolmPayload | None:
        """Decrypt an event of a room. One that cannot be decrypted yet is stored, and its key is requested."""
        async with self._lock:
            try:
                return await self._decrypt(room, sender, event_id, content)
            except Unreadable as error:
                if error.final:
                    log.warning(
                        "channel %s: a message from %s in %s is ignored: %s",
                        self._channel,
                        one_line(sender, 80),
                        one_line(room, 80),
                        error,
                    )
                else:
                    await self._keep_waiting(room, sender, event_id, content, error)
                return None

    async def _decrypt(self, room: str, sender: str, event_id: str, content: dict[str, Any]) -> MegolmPayload:
        try:
            asked = msgspec.convert(content, MegolmContent)
            message = vodozemac.MegolmMessage.from_base64(asked.ciphertext)
        except BAD:
            raise Unreadable("it is not encrypted by Megolm", final=True) from None
        space = _group_space(room, sender, asked.session_id)
        state = await self._inbox.state(space)
        if SESSION not in state:
            raise Unreadable("its key is missing", wants_key=True)
        group = msgspec.json.decode(state[SESSION], type=SavedGroup)
        await self._check_device(group)
        session = vodozemac.InboundGroupSession.from_pickle(group.pickle, PICKLE_KEY)
        if message.message_index() < session.first_known_index:
            raise Unreadable("its key begins later", wants_key=True)
        try:
            plain = session.decrypt(message)
            payload = msgspec.json.decode(plain.plaintext, type=MegolmPayload)
        except BAD:
            raise Unreadable("it is damaged", final=True) from None
        if payload.room_id != room:
            raise Unreadable("it was written in another room", final=True)
        seen = state.get(place := f"{INDEX}{plain.message_index}")
        if seen not in (None, event_id):
            raise Unreadable("the server repeats a message under another id", final=True)
        if seen is None:
            await self._write([(space, place, event_id)])
        return payload

    async def _check_device(self, group: SavedGroup) -> None:
        """Return whether the session was created by a trusted device of the sender."""
        if (found := self._devices.by_key(group.sender, group.curve25519)) is None:
            await self._refresh([group.sender])
            found = self._devices.by_key(group.sender, group.curve25519)
        if found is None or found[1].ed25519 != group.ed25519:
            raise Unreadable("no device of its sender has this key")
        await self._read_confirmed()
        if not self._is_trusted(*found):
            raise Unreadable(f"the device {found[0].id} is not confirmed")

    async def _keep_waiting(
        self, room: str, sender: str, event_id: str, content: dict[str, Any], why: Unreadable
    ) -> None:
        one = WaitingEvent(room, sender, event_id, content, f"{sender}: {why}", time.time())
        known = self.waiting.get(event_id)
        if known is None or known.reason != one.reason:
            others = ((other.session, other.reason) for other in self.waiting.values())
            is_told = (one.session, one.reason) in others
            await self._keep(one)
            if not is_told:
                log.warning(
                    "channel %s: a message from %s in %s cannot be read: %s",
                    self._channel,
                    one_line(sender, 80),
                    one_line(room, 80),
                    why,
                )
        if why.wants_key and one.session not in self._asked:
            self._asked.add(one.session)
            await self._request_key(one)

    async def _keep(self, one: WaitingEvent) -> None:
        rows: list[StateRow] = [(WAITING, one.event_id, _json(one))]
        if one.event_id not in self.waiting and len(self.waiting) >= MAX_WAITING:
            oldest = next(iter(self.waiting))
            log.warning(
                "channel %s: more than %d messages wait for keys; the oldest is dropped", self._channel, MAX_WAITING
            )
            del self.waiting[oldest]
            rows.append((WAITING, oldest, None))
        await self._write(rows)
        self.waiting[one.event_id] = one

    async def _request_key(self, one: WaitingEvent) -> None:
        wanted = {"algorithm": MEGOLM, "room_id": one.room, "session_id": one.session}
        if isinstance(key := one.content.get("sender_key"), str):
            wanted["sender_key"] = key
        request = {"action": "request", "request_id": secrets.token_hex(16), "requesting_device_id": self._me.id}
        messages = {one.sender: {"*": {**request, "body": wanted}}}
        await self._put_to_device("m.room_key_request", messages)

    async def readable_again(self) -> list[WaitingEvent]:
        """Return the events that may be decrypted now, because a key has arrived or a device was confirmed."""
        async with self._lock:
            if not self.waiting:
                return []
            await self._read_confirmed()
            news, self._new_keys = self._new_keys, set()
            again, self._tried_with = self._confirmed != self._tried_with, self._confirmed
            return [one for one in self.waiting.values() if again or one.session in news]

    async def forget(self, event_id: str) -> None:
        """Remove an event that no longer waits."""
        async with self._lock:
            if event_id in self.waiting:
                await self._write([(WAITING, event_id, None)])
                del self.waiting[event_id]

    # ------------------------------------------------------------------------------------------ writing in rooms

    async def keep_room(self, room: str, settings: Mapping[str, Any]) -> None:
        """Record that a room is encrypted, so that the server cannot deny it later."""
        async with self._lock:
            await self._write([(ROOMS, room, _json(settings))])

    def members_changed(self, room: str) -> None:
        self._members.pop(room, None)

    async def encrypt(self, room: str, content: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Encrypt a message for the devices of a room that may read it. `settings` are the room's."""
        if settings.get("algorithm") != MEGOLM:
            raise Never(f"{one_line(room, 80)} is encrypted with something other than {MEGOLM}")
        async with self._lock:
            session = await self._shared_session(room, *rotation_of(settings))
            payload = {"type": "m.room.message", "content": content, "room_id": room}
            message = session.session.encrypt(_canonical(payload))
            made: dict[str, Any] = {
                "algorithm": MEGOLM,
                "ciphertext": message.to_base64(),
                "session_id": session.session.session_id,
                "device_id": self._me.id,
                "sender_key": self._own_key,
            }
            if "m.relates_to" in content:  # the server needs to know the thread
                made["m.relates_to"] = content["m.relates_to"]
            return made

    async def _shared_session(self, room: str, most_messages: int, longest_age: float) -> RoomSession:
        """Return the session of a room, which exactly the devices that may read it have."""
        readers = await self._readers(room)
        if not readers:
            who = "confirmed device" if self._strict else "device"
            raise Later(NO_READER_SECONDS, f"no {who} in {one_line(room, 80)} can read an encrypted answer")
        session = self._rooms.get(room)
        if (
            session is None
            or session.session.message_index >= most_messages
            or time.time() >= session.since + longest_age
            or session.shared - readers.keys()  # people who have left must not read more
        ):
            session = self._rooms[room] = RoomSession()
        missing = {name: device for name, device in readers.items() if name not in session.shared}
        if missing:
            key = {
                "algorithm": MEGOLM,
                "room_id": room,
                "session_id": session.session.session_id,
                "session_key": session.session.session_key.to_base64(),
            }
            session.shared |= await self._send_to(missing, "m.room_key", key)
        if not session.shared:
            raise Later(NO_READER_SECONDS, f"no device in {one_line(room, 80)} has keys to start a session with")
        return session

    async def _readers(self, room: str) -> dict[Name, Device]:
        if room not in self._members:
            target = f"/rooms/{quote(room, safe='')}/joined_members"
            self._members[room] = list((await self._call("GET", target, None, Members)).joined)
        await self._refresh(self._members[room])
        await self._read_confirmed()
        found = dict[Name, Device]()
        for user in self._members[room]:
            for name, device in self._devices.of(user).items():
                if name != self._me and self._is_trusted(name, device):
                    found[name] = device
        return found

    async def _send_to(self, devices: Mapping[Name, Device], type: str, content: dict[str, Any]) -> set[Name]:
        """Send content to devices through Olm. Return the devices that it could be encrypted for."""
        await self._begin_sessions({name: one for name, one in devices.items() if self._session(one) is None})
        messages: dict[str, dict[str, Any]] = {}
        rows, reached = list[StateRow](), set[Name]()
        for name, device in devices.items():
            if (session := self._session(device)) is None:
                log.info("channel %s: no session with the device %s", self._channel, one_line(name.id, 60))
                continue
            payload = {
                "type": type,
                "content": content,
                "sender": self._me.user,
                "sender_device": self._me.id,
                "keys": {"ed25519": self._account.ed25519_key.to_base64()},
                "recipient": name.user,
                "recipient_keys": {"ed25519": device.ed25519},
            }
            kind, body = session.session.encrypt(_canonical(payload)).to_parts()
            ciphertext = {device.curve25519: {"type": kind, "body": _to_base64(body)}}
            wrapped = {"algorithm": OLM, "sender_key": self._own_key, "ciphertext": ciphertext}
            messages.setdefault(name.user, {})[name.id] = wrapped
            rows.append(self._olm_row(device.curve25519))
            reached.add(name)
        if reached:
            await self._write(rows)  # before it is sent: no state of a session encrypts twice
            await self._put_to_device("m.room.encrypted", messages)
        return reached

    def _session(self, device: Device) -> OlmSession | None:
        usable = [one for one in self._olm.get(device.curve25519, []) if one.encrypts]
        return max(usable, key=lambda one: one.at, default=None)

    async def _begin_sessions(self, devices: Mapping[Name, Device]) -> None:
        """Start Olm sessions with one-time keys that the devices have signed."""
        if not devices:
            return
        wanted: dict[str, dict[str, str]] = {}
        for name in devices:
            wanted.setdefault(name.user, {})[name.id] = "signed_curve25519"
        asked = {"one_time_keys": wanted, "timeout": SERVER_MILLISECONDS}
        found = await self._call("POST", "/keys/claim", asked, ClaimedKeys)
        for name, device in devices.items():
            for key in found.one_time_keys.get(name.user, {}).get(name.id, {}).values():
                if isinstance(key, dict) and _is_signed(key, name, device.ed25519):
                    public = [vodozemac.Curve25519PublicKey.from_base64(one) for one in (device.curve25519, key["key"])]
                    session = self._account.create_outbound_session(public[0], public[1])
                    self._olm.setdefault(device.curve25519, []).append(OlmSession(session, time.time()))
                    break

    async def _put_to_device(self, type: str, messages: dict[str, dict[str, Any]]) -> None:
        await self._call("PUT", f"/sendToDevice/{type}/{secrets.token_hex(16)}", {"messages": messages}, Done)


def _group_space(room: str, sender: str, session: str) -> str:
    """Return the space of a session in a room. It is per person: a key only decrypts messages of its sender."""
    return f"group:{hashlib.sha256(_canonical([room, sender, session])).hexdigest()[:32]}"


def _restored(saved: SavedOlm) -> OlmSession:
    return OlmSession(vodozemac.Session.from_pickle(saved.pickle, PICKLE_KEY), saved.at, saved.encrypts)


def _keys_of(user: str, id: str, found: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the Ed25519 and Curve25519 keys of a device, if it has signed them itself."""
    keys = found.get("keys")
    if not is_name(user, id) or (found.get("user_id"), found.get("device_id")) != (user, id):
        return None
    algorithms = found.get("algorithms")
    if not isinstance(keys, dict) or not isinstance(algorithms, list) or MEGOLM not in algorithms:
        return None
    ed25519, curve25519 = keys.get(f"ed25519:{id}"), keys.get(f"curve25519:{id}")
    if not isinstance(ed25519, str) or not isinstance(curve25519, str):
        return None
    try:
        vodozemac.Curve25519PublicKey.from_base64(curve25519)
    except ValueError:
        return None
    return (ed25519, curve25519) if _is_signed(found, Name(user, id), ed25519) else None


def _is_signed(content: Mapping[str, Any], name: Name, ed25519: str) -> bool:
    """Return whether a device has signed this."""
    try:
        signature = vodozemac.Ed25519Signature.from_base64(content["signatures"][name.user][f"ed25519:{name.id}"])
        plain = {key: value for key, value in content.items() if key not in ("signatures", "unsigned")}
        vodozemac.Ed25519PublicKey.from_base64(ed25519).verify_signature(_canonical(plain), signature)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _canonical(content: Any) -> bytes:
    """Return Matrix's canonical JSON, which signatures cover."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode().rstrip("=")


def _from_base64(text: str) -> bytes:
    """Decode base64 with or without padding, of either alphabet."""
    return base64.urlsafe_b64decode(text.replace("+", "-").replace("/", "_") + "=" * (-len(text) % 4))


def rotation_of(content: Mapping[str, Any]) -> tuple[int, float]:
    """Return how many messages a session encrypts, and for how many seconds. The room may lower both."""
    messages, period = content.get("rotation_period_msgs"), content.get("rotation_period_ms")
    most = messages if isinstance(messages, int) and messages > 0 else MAX_MESSAGES
    age = period / 1000 if isinstance(period, int | float) and period > 0 else MAX_AGE
    return min(most, MAX_MESSAGES), min(age, MAX_AGE)


# ------------------------------------------------------------------------------------------------ files


class FileKey(msgspec.Struct):
    k: str


class EncryptedFile(msgspec.Struct):
    """The description of a file in a message. The file is encrypted with AES-256 in counter mode."""

    url: str
    key: FileKey
    iv: str
    hashes: dict[str, str]


def encrypted(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Encrypt a file with a new key. Return it, and its description without the address."""
    key, iv = secrets.token_bytes(32), secrets.token_bytes(8) + bytes(8)  # the counter starts at 0
    encryptor = Cipher(algorithms.AES(key), modes.CTR(iv)).encryptor()
    made = encryptor.update(data) + encryptor.finalize()
    web_key = {"kty": "oct", "alg": "A256CTR", "ext": True, "key_ops": ["encrypt", "decrypt"]}
    k = base64.urlsafe_b64encode(key).decode().rstrip("=")
    hashes = {"sha256": _to_base64(hashlib.sha256(made).digest())}
    return made, {"v": "v2", "key": {**web_key, "k": k}, "iv": _to_base64(iv), "hashes": hashes}


def decrypted(data: bytes, file: EncryptedFile) -> bytes:
    """Decrypt a file; raise `Never` if it was tampered with."""
    try:
        key, iv = _from_base64(file.key.k), _from_base64(file.iv)
        wanted = _from_base64(file.hashes["sha256"])
        if len(key) != 32 or not hmac.compare_digest(wanted, hashlib.sha256(data).digest()):
            raise ValueError("the file is another one")
        decryptor = Cipher(algorithms.AES(key), modes.CTR(iv)).decryptor()
        return decryptor.update(data) + decryptor.finalize()
    except (KeyError, ValueError):
        raise Never("the file cannot be decrypted") from None
