"""The devices of Matrix users: their keys, and which of them are trusted.

The keys of a device are stored when it is first seen. Other keys under the same name are never used, so a server cannot
impersonate a device. With `trust = "confirmed"`, the owner must also confirm each device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import EverloopError
from ..text import one_line
from .base import StateRow, space_of

if TYPE_CHECKING:
    from ..config import ChannelConfig
    from ..store.base import Store

DEVICES, KEYS, ROOMS, WAITING = "devices", "keys", "rooms", "waiting"  # spaces of the channel's state
FIRST_USE, STRICT = "first-use", "confirmed"  # how devices are trusted
SEEN, CONFIRMED = "device:", "confirmed:"
OWN = "own"  # the id and fingerprint of this device, to be shown
MAX_NAME = 255
MAX_DEVICES = 100  # per person; those that are gone are removed first


class ToDevice(msgspec.Struct):
    """An event that another device has sent to this one."""

    type: str = ""
    sender: str = ""
    content: dict[str, Any] = {}


class DeviceLists(msgspec.Struct):
    """The people whose devices have changed."""

    changed: list[str] = []
    left: list[str] = []


class Name(NamedTuple):
    """The name of a device: its user, and its id."""

    user: str
    id: str


class Device(msgspec.Struct, frozen=True):
    ed25519: str  # signs; this is the fingerprint
    curve25519: str  # encrypts
    since: float
    gone: bool = False  # the person has logged it out


class Devices:
    """The devices that were seen, as stored."""

    def __init__(self, state: Mapping[str, str]) -> None:
        self._known: dict[str, dict[str, Device]] = {}
        for key, value in state.items():
            if key.startswith(SEEN):
                name = _name(key.removeprefix(SEEN))
                self._known.setdefault(name.user, {})[name.id] = msgspec.json.decode(value, type=Device)

    def of(self, user: str) -> dict[Name, Device]:
        """Return the current devices of a person."""
        known = self._known.get(user, {})
        return {Name(user, id): device for id, device in known.items() if not device.gone}

    def by_key(self, user: str, curve25519: str) -> tuple[Name, Device] | None:
        """Return the device of a person with this key, even if it is gone."""
        found = (item for item in self._known.get(user, {}).items() if item[1].curve25519 == curve25519)
        return next(((Name(user, id), device) for id, device in found), None)

    def see(self, user: str, found: Mapping[str, tuple[str, str]]) -> tuple[list[StateRow], list[str]]:
        """Update a person's devices. `found` has the Ed25519 and Curve25519 key of each, by id.

        Return the rows to write, and the ids of devices whose keys differ from those that were seen first.
        """
        known, rows, changed = self._known.setdefault(user, {}), list[StateRow](), list[str]()
        now = dict(known)
        for id, keys in found.items():
            device = known.get(id)
            if device is None:
                now[id] = Device(*keys, since=time.time())
            else:
                is_other = (device.ed25519, device.curve25519) != keys
                now[id] = msgspec.structs.replace(device, gone=is_other)
                changed += [id] if is_other else []
        for id in known.keys() - found.keys():
            now[id] = msgspec.structs.replace(known[id], gone=True)
        for id in _least_wanted(now)[: max(len(now) - MAX_DEVICES, 0)]:
            del now[id]
            rows.append((DEVICES, f"{SEEN}{user} {id}", None))
        for id, device in now.items():
            if known.get(id) != device:
                rows.append((DEVICES, f"{SEEN}{user} {id}", msgspec.json.encode(device).decode()))
        self._known[user] = now
        return rows, changed


def _least_wanted(devices: Mapping[str, Device]) -> list[str]:
    """Return the ids in the order in which devices are removed: those that are gone, then the newest."""
    gone = sorted((device.since, id) for id, device in devices.items() if device.gone)
    there = sorted(((device.since, id) for id, device in devices.items() if not device.gone), reverse=True)
    return [id for _, id in (*gone, *there)]


def confirmed_in(state: Mapping[str, str]) -> dict[Name, str]:
    """Return the fingerprints that the owner has confirmed."""
    return {_name(key.removeprefix(CONFIRMED)): value for key, value in state.items() if key.startswith(CONFIRMED)}


def is_name(user: object, id: str = "x") -> bool:
    """Return whether these are valid ids of a user and of a device: the server's data is not trusted."""
    texts = (user, id)
    if not all(isinstance(one, str) and one.isprintable() and 0 < len(one) <= MAX_NAME for one in texts):
        return False
    return isinstance(user, str) and user.startswith("@") and " " not in user


def _name(text: str) -> Name:
    user, _, id = text.partition(" ")
    return Name(user, id)


def grouped(fingerprint: str) -> str:
    """Return a fingerprint in groups of four, as clients show it."""
    return " ".join(fingerprint[start : start + 4] for start in range(0, len(fingerprint), 4))


# ------------------------------------------------------------------------------------------------ for the owner


async def confirm(store: Store, channel: str, user: str, id: str, remove: bool = False) -> str:
    """Confirm a device, or revoke its confirmation. Return what was done."""
    space, name = space_of(channel, DEVICES), f"{user} {id}"
    state = await store.channel_state(space)
    if (seen := state.get(SEEN + name)) is None:
        ids = [one.id for one in map(_name, _keys(state, SEEN)) if one.user == user]
        there = f"it has {', '.join(ids)}" if ids else "no device of that person was seen"
        raise EverloopError(f"there is no device {one_line(id, 60)} of {one_line(user, 60)}: {one_line(there, 300)}")
    fingerprint = msgspec.json.decode(seen, type=Device).ed25519
    await store.set_channel_state(space, CONFIRMED + name, None if remove else fingerprint)
    done = "is no longer trusted" if remove else f"is trusted, with the fingerprint {grouped(fingerprint)}"
    return f"The device {id} of {user} {done}."


async def encryption_facts(store: Store, config: ChannelConfig) -> dict[str, Any] | None:
    """Return the state of a channel's encryption; None if it has no keys."""
    channel = config.name
    if (own := (await store.channel_state(space_of(channel, KEYS))).get(OWN)) is None:
        return None
    id, fingerprint = own.split(" ")
    state, waiting = await store.channel_state(space_of(channel, DEVICES)), []
    confirmed = confirmed_in(state)
    for key in sorted(_keys(state, SEEN)):
        device = msgspec.json.decode(state[SEEN + key], type=Device)
        if config.options.get("trust") == STRICT and not device.gone and confirmed.get(_name(key)) != device.ed25519:
            waiting.append({"user": _name(key).user, "device": _name(key).id, "fingerprint": device.ed25519})
    unread = await store.channel_state(space_of(channel, WAITING))
    reasons = [msgspec.json.decode(value)["reason"] for value in unread.values()]
    return {"device": id, "fingerprint": fingerprint, "unconfirmed": waiting, "unread": reasons}


def _keys(state: Iterable[str], start: str) -> list[str]:
    return [key.removeprefix(start) for key in state if key.startswith(start)]
