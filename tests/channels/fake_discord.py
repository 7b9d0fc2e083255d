"""Discord on the loopback interface, as far as a bot can tell: the gateway and the REST API.

A session keeps its events, and replays those after the position from which it is resumed. Nonces are enforced. People
write only once the bot has been online: before that, a gateway has no session that could keep events.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

from everloop.testing.channels import shown_file

TOKEN = "MTA.secret-of-the-bot.never-shown"
ME = {"id": "4242", "username": "ever", "bot": True}


class FakeDiscord:
    """The servers, and the people on them. A channel whose id begins with 9 belongs to a server.

    With `rough`, connections are dropped in every way that the gateway knows, events are replayed twice, sessions are
    lost, and messages are posted without the bot getting a response.
    """

    def __init__(self, *, rough: bool = False, seed: int = 0) -> None:
        self.settings: dict[str, Any] = {}
        self.posted: list[dict[str, Any]] = []  # new messages from the bot
        self.edited: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.typing: list[str] = []
        self.callbacks: list[dict[str, Any]] = []
        self.identified = self.resumed = 0
        self.intents = 0
        self.fail: list[tuple[int, dict[str, Any]]] = []  # responses to a post before it succeeds
        self.closed_to: set[str] = set()  # people who accept no direct messages
        self.socket: web.WebSocketResponse | None = None
        self.beats = True  # whether heartbeats are answered
        self.interval = 41_250
        self.unreadable: set[str] = set()
        self.files: dict[str, bytes] = {}
        self.uploads: list[tuple[str, str, str, bytes]] = []  # chat, kind, name and content of files from the bot
        self.downloads: list[str] = []
        self._rough = rough
        self._chance = random.Random(seed)
        self._online = asyncio.Event()
        self._session = ""
        self._events: list[dict[str, Any]] = []  # of the session
        self._messages: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._nonces: dict[str, dict[str, Any]] = {}
        self._number = 1000

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeDiscord]:
        app = web.Application(client_max_size=60_000_000)
        app.router.add_get("/gateway/", self._gateway)
        app.router.add_get("/cdn/{name}", self._file)
        app.router.add_route("*", "/api/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._port = runner.addresses[0][1]
        self.settings = {
            "name": "discord",
            "allow": ["7"],
            "token": TOKEN,
            "base_url": f"http://127.0.0.1:{self._port}/api",
        }
        try:
            yield self
        finally:
            await runner.cleanup()

    # ------------------------------------------------------------------------------------------ people

    async def say(self, chat: str, text: str, *, user: str = "7", **more: Any) -> None:
        await asyncio.wait_for(self._online.wait(), 60)
        message = {
            "id": self._id(),
            "channel_id": chat,
            "author": {"id": user, "username": f"person{user}", "global_name": f"Person {user}"},
            "content": text,
            "type": 0,
            "mentions": [ME] if f"<@{ME['id']}>" in text else [],
            "attachments": [],
            **more,
        }
        self._messages[chat].append(message)
        in_guild = {"guild_id": "1", "member": {"nick": None}} if chat.startswith("9") else {}
        await self._dispatch("MESSAGE_CREATE", {**message, **in_guild})

    async def press(self, label: str, *, user: str = "7", message: dict[str, Any] | None = None) -> None:
        """A person presses a button of the latest message that has buttons."""
        message = message or next(one for one in reversed(self.posted) if one.get("components"))
        buttons = message["components"][0]["components"]
        button = next(one for one in buttons if one["label"] == label)
        chat = message["channel_id"]
        who = {"id": user, "username": f"person{user}"}
        where: dict[str, Any] = {"guild_id": "1", "member": {"user": who}} if chat.startswith("9") else {"user": who}
        data = {"component_type": 2, "custom_id": button["custom_id"]}
        interaction = {"id": self._id(), "token": "i-token", "type": 3, "channel_id": chat, "data": data, **where}
        await self._dispatch("INTERACTION_CREATE", {**interaction, "message": {"id": message["id"]}})

    async def attach(
        self, chat: str, name: str, data: bytes, *, sender: int = 7, size: int | None = None, url: str = ""
    ) -> None:
        """A person sends a file without text."""
        self.files[name] = data
        file = {
            "id": self._id(),
            "filename": name,
            "size": len(data) if size is None else size,
            "url": url or f"http://127.0.0.1:{self._port}/cdn/{name}",
        }
        await self.say(chat, "", user=str(sender), attachments=[file])

    async def _file(self, request: web.Request) -> web.Response:
        self.downloads.append(request.match_info["name"])
        return web.Response(body=self.files[request.match_info["name"]])

    def heard(self, chat: str) -> list[str]:
        return [one["content"].strip() for one in self._messages[chat] if one["author"]["id"] == ME["id"]]

    async def disturb(self) -> None:
        """Drop all connections, as when the process dies."""

    async def drop(self, code: int = 4000) -> None:
        assert self.socket is not None
        socket, self.socket = self.socket, None  # if both sides close it, aiohttp makes one of them wait forever
        await socket.close(code=code)

    def forget_session(self) -> None:
        """Refuse the next attempt to resume."""
        self._session = ""

    # ------------------------------------------------------------------------------------------ the gateway

    async def _dispatch(self, type: str, data: dict[str, Any]) -> None:
        event = {"op": 0, "t": type, "s": len(self._events) + 1, "d": data}
        self._events.append(event)
        if self.socket is None or self.socket.closed:
            return
        with suppress(ConnectionError):
            for _ in range(2 if self._rough else 1):
                await self.socket.send_json(event)
            if self._rough and self._chance.random() < 0.08:
                if self._chance.random() < 0.5:
                    await self.socket.send_json({"op": 7, "d": None})
                else:
                    await self.drop(self._chance.choice([1001, 4000]))

    async def _gateway(self, request: web.Request) -> web.StreamResponse:
        assert (request.query["v"], request.query["encoding"]) == ("10", "json")
        socket = web.WebSocketResponse(timeout=0.1)
        await socket.prepare(request)
        await socket.send_json({"op": 10, "d": {"heartbeat_interval": self.interval}})
        async for frame in socket:
            told = json.loads(frame.data)
            match told["op"]:
                case 1:
                    if self.beats:
                        await socket.send_json({"op": 11})
                    if told["d"]:
                        self._online.set()
                case 2 | 6 if told["d"]["token"] != TOKEN:
                    await socket.close(code=4004)
                case 2:
                    await self._identify(socket, told["d"])
                case 6:
                    await self._resume(socket, told["d"])
                case _:
                    await socket.close(code=4001)
        return socket

    async def _identify(self, socket: web.WebSocketResponse, asked: dict[str, Any]) -> None:
        self.identified += 1
        self.intents = asked["intents"]
        self._session = f"session-{self._id()}"
        self._events = []
        self.socket = socket
        url = f"ws://127.0.0.1:{self._port}/gateway"
        ready = {"v": 10, "user": ME, "session_id": self._session, "resume_gateway_url": url, "guilds": []}
        event = {"op": 0, "t": "READY", "s": 1, "d": ready}
        self._events.append(event)
        await socket.send_json(event)

    async def _resume(self, socket: web.WebSocketResponse, asked: dict[str, Any]) -> None:
        missed = [event for event in self._events if event["s"] > (asked["seq"] or 0)]
        known = {one["channel_id"] for one in self.posted}
        if self._rough and self._chance.random() < 0.3 and {one["d"].get("channel_id") for one in missed} <= known:
            self._session = ""
        if asked["session_id"] != self._session:
            await socket.send_json({"op": 9, "d": False})
            return
        self.resumed += 1
        for event in missed:
            await socket.send_json(event)
        self.socket = socket
        await socket.send_json({"op": 0, "t": "RESUMED", "s": len(self._events), "d": {}})

    # ------------------------------------------------------------------------------------------ REST

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"].split("/")
        if not request.headers.get("User-Agent", "").startswith("DiscordBot ("):
            return web.Response(status=403, text="error code: 1010")
        sent: list[tuple[str, bytes]] = []
        if request.content_type == "multipart/form-data":
            form = await request.post()
            asked = json.loads(str(form["payload_json"]))
            sent = [(one.filename, one.file.read()) for one in form.values() if isinstance(one, web.FileField)]
        else:
            asked = json.loads(await request.read() or b"{}")
        if path[0] == "interactions" and path[-1] == "callback":
            self.callbacks.append(asked)
            return web.Response(status=204)
        if request.headers.get("Authorization") != f"Bot {TOKEN}":
            return web.json_response({"message": "401: Unauthorized", "code": 0}, status=401)
        match request.method, path:
            case "GET", ["users", "@me"]:
                return web.json_response(ME)
            case "GET", ["gateway", "bot"]:
                return web.json_response({"url": f"ws://127.0.0.1:{self._port}/gateway", "shards": 1})
            case "GET", ["channels", chat, "messages"] if chat in self.unreadable:
                return web.Response(status=502)
            case "GET", ["channels", chat, "messages"]:
                after, limit = int(request.query["after"]), int(request.query["limit"])
                later = [one for one in self._messages[chat] if int(one["id"]) > after][:limit]
                return web.json_response(later[::-1])  # newest first
            case "POST", ["channels", chat, "typing"]:
                self.typing.append(chat)
                return web.Response(status=204)
            case "POST", ["channels", chat, "messages"]:
                reply = self._post(chat, asked, sent)
                if reply.status == 200 and self._rough and self._chance.random() < 0.1 and request.transport:
                    request.transport.abort()  # posted, but the bot gets no response
                return reply
            case "PATCH", ["channels", chat, "messages", id]:
                found = next(one for one in self._messages[chat] if one["id"] == id)
                found["content"] = asked["content"]
                self.edited.append(asked)
                return web.json_response(found)
            case "DELETE", ["channels", chat, "messages", id]:
                self.deleted.append(id)
                self._messages[chat] = [one for one in self._messages[chat] if one["id"] != id]
                return web.Response(status=204)
        return web.json_response({"message": "404: Not Found", "code": 0}, status=404)

    def _post(self, chat: str, asked: dict[str, Any], files: list[tuple[str, bytes]]) -> web.Response:
        if self.fail:
            status, body = self.fail.pop(0)
            return web.json_response(body, status=status)
        if chat in self.closed_to:
            failure = {"message": "Cannot send messages to this user", "code": 50007}
            return web.json_response(failure, status=403)
        if not (files or asked["content"]) or len(asked["content"]) > 2000 or len(asked.get("nonce", "")) > 25:
            return web.json_response({"message": "Invalid Form Body", "code": 50035}, status=400)
        nonce = asked.get("nonce") if asked.get("enforce_nonce") else None
        if nonce in self._nonces:
            return web.json_response(self._nonces[nonce])
        message = {**asked, "id": self._id(), "channel_id": chat, "author": ME, "type": 0, "mentions": []}
        if nonce is not None:
            self._nonces[nonce] = message
        self.posted.append(message)
        for name, data in files:
            self.uploads.append((chat, "file", name, data))
            message["content"] = shown_file(name, message["content"])
        self._messages[chat].append(message)
        return web.json_response(message)

    def _id(self) -> str:
        self._number += 1
        return str(self._number)
