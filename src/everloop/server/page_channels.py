"""Chat networks for the page: how each channel is, and the pairing of people who wrote to it."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..errors import EverloopError, StoreError
from ..runtime.owners import Owners
from ..store.tokens import ADMIN
from .errors import bad_request
from .page_routes import json_response, operation, read_body


class PendingItem(msgspec.Struct):
    """A person who was given a code."""

    code: str
    sender: str
    name: str
    at: float


class ChannelItem(msgspec.Struct):
    name: str
    network: str
    running: bool
    error: str  # why it does not work; "" while it does
    pending: list[PendingItem]
    paired: list[str]
    dead: int  # messages that could not be delivered


class ChannelList(msgspec.Struct):
    channels: list[ChannelItem]


class PairBody(msgspec.Struct, forbid_unknown_fields=True):
    code: str
    admin: bool = False  # the person may pair others


class Paired(msgspec.Struct):
    said: str


class ChannelsApi:
    """For the operator alone: a code lets a person talk to the agent."""

    def __init__(self, owners: Owners) -> None:
        self._config = owners.config
        self._store = owners.store

    @operation("GET", "/api/channels", "channels", "The chat networks of the settings.", ChannelList, right=ADMIN)
    async def channels(self, request: web.Request) -> web.Response:
        return json_response(ChannelList([await self._item(one.name) for one in self._config.channels]))

    @operation("POST", "/api/channels/pair", "pair", "Confirm a pairing code.", Paired, PairBody, right=ADMIN)
    async def pair(self, request: web.Request) -> web.Response:
        from ..channels.access import confirm_anywhere

        body = await read_body(request, PairBody)
        channels = {one.name: one for one in self._config.channels}
        try:
            return json_response(Paired(await confirm_anywhere(self._store, channels, body.code, body.admin)))
        except StoreError:
            raise
        except EverloopError as error:
            raise bad_request(str(error)) from None

    async def _item(self, name: str) -> ChannelItem:
        from ..channels.access import Pairings
        from ..channels.runner import STATUS, Status, lease_of

        config = next(one for one in self._config.channels if one.name == name)
        pairings, state = Pairings(self._store, name), await self._store.channel_state(name)
        status = msgspec.json.decode(state[STATUS], type=Status) if STATUS in state else None
        return ChannelItem(
            name,
            config.network or name,
            lease_of(name) in await self._store.holders(),
            status.error if status is not None else "",
            [PendingItem(one.code, one.sender, one.name, one.at) for one in await pairings.pending()],
            sorted(await pairings.peers()),
            len(await self._store.dead_letters(name, 1000)),
        )
