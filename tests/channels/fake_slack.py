"""Slack on the loopback interface, as far as an app can tell: the Web API, Socket Mode and events over HTTP.

An event is delivered again, in another envelope, until it is acknowledged; a ticket opens one connection; requests are
signed as Slack signs them; tokens, channels, lengths and blocks are checked as the real one checks them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, urlencode

import aiohttp
from aiohttp import web

from everloop.testing.channels import shown_file

from .hooks import free_port

BOT_TOKEN = "xoxb-1-secret-of-the-bot-never-shown"
APP_TOKEN = "xapp-1-secret-of-the-app-never-shown"
SIGNING = "8f742231b10e-signing-never-shown"
ME = "U0EVER"


class FakeSlack:
    """The workspace, and the people in it.

    With `rough`, every event comes twice, unacknowledged ones come again on the next connection in another order, and
    connections are dropped, also after a message was posted and before the response.
    """

    def __init__(self, *, rough: bool = False, http: bool = False, seed: int = 0) -> None:
        self.settings: dict[str, Any] = {}
        self.posted: list[dict[str, Any]] = []  # arguments of the chat.postMessage calls that succeeded
        self.updated: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.calls: list[str] = []
        self.fail: list[tuple[int, dict[str, Any], dict[str, str]]] = []  # of chat.postMessage before it works
        self.archived: set[str] = set()
        self.statuses: list[int] = []  # of the responses to events over HTTP
        self.socket: web.WebSocketResponse | None = None
        self.hellos = 0
        self.files: dict[str, bytes] = {}
        self.downloads: list[str] = []
        self._rough, self._http = rough, http
        self._chance = random.Random(seed)
        self._shown: dict[str, dict[str, str]] = defaultdict(dict)  # channel → ts → text
        self._clock = 0
        self._tickets: set[str] = set()
        self._pending: dict[str, tuple[str, dict[str, Any]]] = {}  # unacknowledged, by envelope
        self._envelopes = 0
        self.uploads: list[tuple[str, str, str, bytes]] = []  # chat, kind, name and content of files from the app
        self.upload_url = ""  # a different address for uploads
        self._slots: dict[str, tuple[str, int]] = {}  # name and length
        self._uploaded: dict[str, bytes] = {}
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeSlack]:
        app = web.Application(client_max_size=60_000_000)
        app.router.add_post("/upload/{id}", self._upload)
        app.router.add_post("/api/{method}", self._handle)
        app.router.add_get("/link", self._link)
        app.router.add_get("/files/{name}", self._file)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._port = runner.addresses[0][1]
        self.settings = {
            "name": "slack",
            "allow": ["U7"],
            "bot_token": BOT_TOKEN,
            "base_url": f"http://127.0.0.1:{self._port}/api",
        }
        if self._http:
            self.settings |= {"signing_secret": SIGNING, "port": free_port()}
        else:
            self.settings |= {"app_token": APP_TOKEN}
        async with aiohttp.ClientSession() as self._session:
            try:
                yield self
            finally:
                await runner.cleanup()

    # ------------------------------------------------------------------------------------------ people

    async def say(self, chat: str, text: str, *, user: str = "U7", **more: Any) -> None:
        """A person writes; the app gets a message event, and also an app_mention if the text has its name."""
        channel = _channel(chat)
        message = {
            "type": "message",
            "channel": channel,
            "channel_type": {"D": "im", "C": "channel", "G": "mpim"}[channel[0]],
            "user": user,
            "text": text if re.search(r"<[@#!h]", text) else html.escape(text, quote=False),
            "ts": self._ts(),
            "event_ts": "1",
            **more,
        }
        await self._deliver("events_api", {"type": "event_callback", "team_id": "T1", "event": message})
        if f"<@{ME}>" in text and channel[0] != "D":
            mention = {name: value for name, value in message.items() if name != "channel_type"}
            mention["type"] = "app_mention"
            await self._deliver("events_api", {"type": "event_callback", "team_id": "T1", "event": mention})

    async def press(self, label: str, *, user: str = "U7", message: dict[str, Any] | None = None) -> None:
        """A person presses a button of the latest message that has buttons."""
        message = message or next(one for one in reversed(self.posted) if "blocks" in one)
        actions = next(block for block in message["blocks"] if block["type"] == "actions")
        button = next(one for one in actions["elements"] if one["text"]["text"] == label)
        place = {name: message[name] for name in ("ts", "text", "blocks", "thread_ts") if name in message}
        payload = {
            "type": "block_actions",
            "user": {"id": user, "username": "someone"},
            "channel": {"id": message["channel"], "name": "x"},
            "message": place,
            "actions": [{"type": "button", "action_id": button["action_id"], "value": button["value"],
                         "action_ts": self._ts()}],
        }  # fmt: skip
        await self._deliver("interactive", payload)

    async def attach(
        self, chat: str, name: str, data: bytes, *, sender: int = 7, size: int | None = None, url: str = ""
    ) -> None:
        """A person sends a file without text."""
        self.files[name] = data
        url = url or f"http://127.0.0.1:{self._port}/files/{name}"
        file = {"name": name, "size": len(data) if size is None else size, "url_private_download": url}
        await self.say(chat, "", user=f"U{sender}", subtype="file_share", files=[file])

    async def _file(self, request: web.Request) -> web.Response:
        self.downloads.append(request.match_info["name"])
        if request.headers.get("Authorization") != f"Bearer {BOT_TOKEN}":
            return web.Response(status=403)
        return web.Response(body=self.files[request.match_info["name"]])

    def heard(self, chat: str) -> list[str]:
        return [text for _, text in sorted(self._shown[_channel(chat)].items())]

    async def disturb(self) -> None:
        """Drop all connections, as when the process dies."""

    async def drop(self, code: int | None = None) -> None:
        """Close the connection; without a code, announce that first, as Slack does."""
        assert self.socket is not None
        if code is None:
            await self.socket.send_json({"type": "disconnect", "reason": "refresh_requested"})
        else:
            socket, self.socket = self.socket, None  # if both sides close it, aiohttp makes one of them wait forever
            await socket.close(code=code)

    # ------------------------------------------------------------------------------------------ delivery

    async def _deliver(self, type: str, payload: dict[str, Any]) -> None:
        if self._http:
            for _ in range(2 if self._rough else 1):
                while (status := await self.post(payload)) not in (200, 400):
                    await asyncio.sleep(0.02)
            self.statuses.append(status)
            return
        for _ in range(2 if self._rough else 1):
            self._envelopes += 1
            envelope = f"e{self._envelopes}"
            self._pending[envelope] = (type, payload)
            await self._push(envelope)

    async def post(self, payload: dict[str, Any], *, secret: str = SIGNING, at: float | None = None) -> int:
        """Try a request once: the status, or 0 without a response."""
        body, kind = json.dumps(payload).encode(), "application/json"
        if payload["type"] == "block_actions":
            body, kind = urlencode({"payload": body.decode()}).encode(), "application/x-www-form-urlencoded"
        now = str(int(at if at is not None else time.time()))
        signed = hmac.new(secret.encode(), f"v0:{now}:{body.decode()}".encode(), hashlib.sha256).hexdigest()
        headers = {"X-Slack-Request-Timestamp": now, "X-Slack-Signature": f"v0={signed}", "Content-Type": kind}
        assert self._session is not None
        url = f"http://127.0.0.1:{self.settings['port']}/slack"
        try:
            async with self._session.post(url, data=body, headers=headers) as reply:
                self.body = await reply.read()
                return reply.status
        except aiohttp.ClientError:
            return 0

    async def _push(self, envelope: str) -> None:
        if self.socket is None or self.socket.closed or envelope not in self._pending:
            return
        type, payload = self._pending[envelope]
        with suppress(ConnectionError):
            await self.socket.send_json(
                {"envelope_id": envelope, "type": type, "payload": payload, "accepts_response_payload": False}
            )

    async def _link(self, request: web.Request) -> web.StreamResponse:
        ticket = request.query["ticket"]
        if ticket not in self._tickets:
            return web.Response(status=403)
        self._tickets.discard(ticket)
        socket = web.WebSocketResponse(timeout=0.1)
        await socket.prepare(request)
        self.socket = socket
        self.hellos += 1
        await socket.send_json({"type": "hello", "num_connections": 1, "debug_info": {}})
        waiting = list(self._pending)
        if self._rough:
            self._chance.shuffle(waiting)
        for envelope in waiting:
            await self._push(envelope)
        async for frame in socket:
            self._pending.pop(json.loads(frame.data)["envelope_id"], None)
            if self._rough and self._chance.random() < 0.05:
                await self.drop(self._chance.choice([None, 1001]))
        return socket

    # ------------------------------------------------------------------------------------------ the API

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        method = request.match_info["method"]
        self.calls.append(method)
        given = request.headers.get("Authorization", "")
        if given != f"Bearer {APP_TOKEN if method == 'apps.connections.open' else BOT_TOKEN}":
            return _answer({"ok": False, "error": "invalid_auth"})
        body = (await request.read()).decode()
        is_form = request.headers["Content-Type"].startswith("application/x-www-form-urlencoded")
        asked = {name: value[0] for name, value in parse_qs(body).items()} if is_form else json.loads(body)
        match method:
            case "auth.test":
                return _answer({"ok": True, "user_id": ME, "user": "ever", "team": "Garden", "bot_id": "B1"})
            case "apps.connections.open":
                ticket = f"t{len(self.calls)}"
                self._tickets.add(ticket)
                return _answer({"ok": True, "url": f"ws://127.0.0.1:{self._port}/link?ticket={ticket}"})
            case "users.info":
                if not is_form:  # as the real one, which reads no JSON here
                    return _answer({"ok": False, "error": "user_not_found"})
                return _answer({"ok": True, "user": {"id": asked["user"], "real_name": f"Person {asked['user']}"}})
            case "files.getUploadURLExternal":
                if not is_form:
                    return _answer({"ok": False, "error": "invalid_arguments"})
                id = f"F{len(self._slots) + 1}"
                self._slots[id] = (asked["filename"], int(asked["length"]))
                url = f"http://127.0.0.1:{self._port}/upload/{id}"
                return _answer({"ok": True, "upload_url": self.upload_url or url, "file_id": id})
            case "files.completeUploadExternal":
                reply = self._share(asked)
                if self._rough and self._chance.random() < 0.3 and request.transport:
                    request.transport.abort()  # shared, but the app gets no response
                return reply
            case "chat.postMessage":
                reply = self._post_message(asked)
                if reply.status == 200 and self._rough and self._chance.random() < 0.1 and request.transport:
                    request.transport.abort()  # posted, but the app gets no response
                return reply
            case "chat.update" if not _calls_nobody(asked):
                return _answer({"ok": False, "error": "the_text_could_call_people"})
            case "chat.update":
                if asked["ts"] not in self._shown[asked["channel"]]:
                    return _answer({"ok": False, "error": "message_not_found"})
                self.updated.append(asked)
                self._shown[asked["channel"]][asked["ts"]] = html.unescape(asked["text"])
                return _answer({"ok": True, "ts": asked["ts"], "channel": asked["channel"]})
            case "chat.delete":
                self.deleted.append(asked["ts"])
                if self._shown[asked["channel"]].pop(asked["ts"], None) is None:
                    return _answer({"ok": False, "error": "message_not_found"})
                return _answer({"ok": True, "ts": asked["ts"]})
        return _answer({"ok": False, "error": "unknown_method"})

    async def _upload(self, request: web.Request) -> web.Response:
        data, id = await request.read(), request.match_info["id"]
        if len(data) != self._slots[id][1] or "Authorization" in request.headers:
            return web.Response(status=400)
        self._uploaded[id] = data
        return web.Response(text=f"OK - {len(data)}")

    def _share(self, asked: dict[str, Any]) -> web.Response:
        if self.fail:
            status, body, headers = self.fail.pop(0)
            return web.json_response(body, status=status, headers=headers)
        (file,) = asked["files"]
        channel, name = asked["channel_id"], self._slots[file["id"]][0]
        self.uploads.append((channel, "file", name, self._uploaded.pop(file["id"])))
        self._shown[channel][self._ts()] = shown_file(name, asked.get("initial_comment", ""))
        return _answer({"ok": True, "files": [{"id": file["id"], "title": file["title"]}]})

    def _post_message(self, asked: dict[str, Any]) -> web.Response:
        if self.fail:
            status, body, headers = self.fail.pop(0)
            return web.json_response(body, status=status, headers=headers)
        channel = asked["channel"]
        if not _calls_nobody(asked):
            return _answer({"ok": False, "error": "the_text_could_call_people"})
        if not re.fullmatch(r"[CDG]\w+", channel):
            return _answer({"ok": False, "error": "channel_not_found"})
        if channel in self.archived:
            return _answer({"ok": False, "error": "is_archived"})
        if not asked.get("text", "").strip():
            return _answer({"ok": False, "error": "no_text"})
        for block in asked.get("blocks", []):
            if block["type"] == "section" and not 0 < len(block["text"]["text"]) <= 3000:
                return _answer({"ok": False, "error": "invalid_blocks"})
        ts = self._ts()
        self.posted.append({**asked, "ts": ts})
        self._shown[channel][ts] = html.unescape(asked["text"]).strip()
        return _answer({"ok": True, "ts": ts, "channel": channel, "message": {"text": asked["text"]}})

    def _ts(self) -> str:
        self._clock += 1
        return f"1700000000.{self._clock:06d}"


def _calls_nobody(asked: dict[str, Any]) -> bool:
    """Whether Slack leaves names in a text alone instead of making them mentions.

    When a message is changed, it makes mentions unless told not to.
    """
    return (asked.get("parse"), asked.get("link_names")) == ("none", False)


def _channel(chat: str) -> str:
    return chat if chat[0] in "CDG" else f"D{chat}"


def _answer(body: dict[str, Any]) -> web.Response:
    return web.json_response(body)
