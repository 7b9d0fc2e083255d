"""Chat networks for the page: channel status, pairing of people who wrote to a channel, and undelivered messages."""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..config import ChannelConfig
from ..runtime.owners import Owners
from ..store.peers import SENDING
from ..store.tokens import ADMIN
from ..text import clean
from .errors import forbidden, not_found
from .guard import OWNER, TOKEN
from .page_routes import json_response, operation, read_body, refusals

DEAD = 100  # undelivered messages shown per channel
SHOWN = 500  # characters per message
RESENT = 1000  # messages per request


class PendingItem(msgspec.Struct):
    """A person who was given a pairing code."""

    code: str
    sender: str
    name: str
    at: float


class DeadItem(msgspec.Struct):
    """A message that could not be delivered."""

    id: int
    at: float
    chat: str
    reason: str
    text: str


class ChannelItem(msgspec.Struct):
    name: str
    network: str
    owner: str
    running: bool
    error: str  # why it does not work; "" while it does
    at: float | None  # time of that status; None before it first ran
    pending: list[PendingItem]
    paired: list[str]
    dead: list[DeadItem]  # the latest


class ChannelList(msgspec.Struct):
    channels: list[ChannelItem]
    operator: bool  # the visitor may also let people pair others


class PairBody(msgspec.Struct, forbid_unknown_fields=True):
    code: str
    admin: bool = False  # the person may pair others


class Paired(msgspec.Struct):
    said: str


class ResendBody(msgspec.Struct, forbid_unknown_fields=True):
    ids: list[int]


class Resent(msgspec.Struct):
    ids: list[int]


class ChannelsApi:
    """Owners see the channels whose chats are their sessions; an operator sees all."""

    def __init__(self, owners: Owners) -> None:
        self._config = owners.config
        self._store = owners.store

    @operation("GET", "/api/channels", "channels", "The chat networks of the settings.", ChannelList)
    async def channels(self, request: web.Request) -> web.Response:
        held = await self._store.holders()
        found = [await self._item(one, held) for one in self._of(request).values()]
        return json_response(ChannelList(found, _is_operator(request)))

    @operation("POST", "/api/channels/pair", "pair", "Confirm a pairing code.", Paired, PairBody)
    async def pair(self, request: web.Request) -> web.Response:
        from ..channels.access import confirm_anywhere

        body = await read_body(request, PairBody)
        if body.admin and not _is_operator(request):
            raise forbidden("only an operator may let people pair others", "missing_right")
        with refusals():
            return json_response(Paired(await confirm_anywhere(self._store, self._of(request), body.code, body.admin)))

    @operation("POST", "/api/channels/{name}/resend", "resend", "Send undelivered messages again.", Resent, ResendBody)
    async def resend(self, request: web.Request) -> web.Response:
        body, name = await read_body(request, ResendBody), request.match_info["name"]
        if name not in self._of(request):
            raise not_found("there is no such channel", code="channel_not_found")
        dead = {one.id for one in await self._store.dead_letters(name, RESENT)}
        revived = await self._store.revive([id for id in body.ids[:RESENT] if id in dead])
        await self._store.wake(SENDING)
        return json_response(Resent(revived))

    def _of(self, request: web.Request) -> dict[str, ChannelConfig]:
        """Return the channels that a visitor may see."""
        every = _is_operator(request)
        return {one.name: one for one in self._config.channels if every or one.owner == request[OWNER]}

    async def _item(self, config: ChannelConfig, held: dict[str, str]) -> ChannelItem:
        from ..channels.access import Pairings
        from ..channels.runner import STATUS, Status, lease_of

        name = config.name
        pairings, state = Pairings(self._store, name), await self._store.channel_state(name)
        status = msgspec.json.decode(state[STATUS], type=Status) if STATUS in state else None
        dead = await self._store.dead_letters(name, DEAD)
        return ChannelItem(
            name,
            config.network or name,
            config.owner,
            lease_of(name) in held,
            status.error if status is not None else "",
            status.at if status is not None else None,
            [PendingItem(one.code, one.sender, one.name, one.at) for one in await pairings.pending()],
            sorted(await pairings.peers()),
            [DeadItem(one.id, one.at, one.chat_id, clean(one.reason), clean(one.content)[:SHOWN]) for one in dead],
        )


def _is_operator(request: web.Request) -> bool:
    """Return whether the visitor is the person of this machine, or has a token with the right admin."""
    token = request[TOKEN]
    return token is None or ADMIN in token.rights
