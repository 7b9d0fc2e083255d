"""Telegram's Bot API on the loopback interface, as far as a bot can tell.

Updates are delivered again until a later offset confirms them; a second poller ends the first with 409; texts and their
HTML are checked as the real one checks them; blocked and unknown chats, 429 and broken connections are as there.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import aiohttp
from aiohttp import web

from everloop.testing.channels import shown_file

from .hooks import free_port

TOKEN = "123456:AAE-secret-of-the-bot_never-shown"
BOT = {"id": 4242, "is_bot": True, "first_name": "Ever", "username": "ever_bot"}
TAGS = {"b", "i", "s", "u", "code", "pre", "a", "blockquote"}


class _Reader(HTMLParser):
    """Parses Telegram's HTML: the visible text, or why it cannot be parsed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text, self.open, self.wrong = "", list[str](), ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in TAGS:
            self.wrong = self.wrong or f'Unsupported start tag "{tag}"'
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong = self.wrong or f'Unmatched end tag "{tag}"'

    def handle_data(self, data: str) -> None:
        self.text += data


def utf16(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


class FakeTelegram:
    """The server, and the people who write to the bot.

    With `rough`, every message comes twice in two updates, batches are shuffled, and connections are dropped, also
    after a message was sent and before the response.
    """

    def __init__(self, *, rough: bool = False, http: bool = False, seed: int = 0) -> None:
        self.settings: dict[str, Any] = {}
        self.sent: list[dict[str, Any]] = []  # arguments of the `sendMessage` calls that succeeded
        self.calls: list[str] = []
        self.fail: list[tuple[int, str, dict[str, Any]]] = []  # responses to `sendMessage` before it succeeds
        self.blocked: set[str] = set()
        self.lose: list[str] = []  # methods with files whose next response gets lost
        self.edited: list[dict[str, Any]] = []
        self.deleted: list[int] = []
        self.webhook: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.uploads: list[tuple[str, str, str, bytes]] = []  # chat, kind, name and content of files from the bot
        self.downloads: list[str] = []
        self.drafts: dict[int, str] = {}
        self.answered: list[str] = []  # callback queries
        self.polls = 0  # getUpdates in progress
        self.conflicts = 0
        self._rough, self._is_http = rough, http
        self._chance = random.Random(seed)
        self._updates: list[dict[str, Any]] = []
        self._last_update = 1000
        self._last_message = 0
        self._shown: defaultdict[str, list[str]] = defaultdict(list)
        self._changed = asyncio.Condition()
        self._poller: asyncio.Future[None] | None = None
        self._drop = 0
        self._places: dict[int, str] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeTelegram]:
        app = web.Application(client_max_size=60_000_000)
        app.router.add_get("/file/{bot}/{name}", self._file)
        app.router.add_route("*", "/{bot}/{method}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        self.settings = {
            "name": "telegram",
            "allow": ["7"],
            "token": TOKEN,
            "base_url": f"http://127.0.0.1:{port}",
        }
        if self._is_http:
            self.settings |= {"webhook_url": "https://bot.example.org/telegram", "port": free_port()}
        try:
            yield self
        finally:
            await runner.cleanup()

    # ------------------------------------------------------------------------------------------ people

    async def say(self, chat: str, text: str, *, sender: int = 7, **more: Any) -> None:
        self._last_message += 1
        kind = more.pop("type", "private" if int(chat) > 0 else "supergroup")
        message = {
            "message_id": self._last_message,
            "date": 1,
            "chat": {"id": int(chat), "type": kind},
            "from": {"id": sender, "is_bot": False, "first_name": f"Person {sender}"},
            "text": text,
            **more,
        }
        if text.startswith("/"):
            length = utf16(text.split()[0])
            message.setdefault("entities", [{"type": "bot_command", "offset": 0, "length": length}])
        for found in re.finditer(r"@\w+", text):
            start = utf16(text[: found.start()])
            mention = {"type": "mention", "offset": start, "length": utf16(found[0])}
            message.setdefault("entities", []).append(mention)
        for _ in range(2 if self._rough else 1):
            self._last_update += 1
            update = {"update_id": self._last_update, "message": message}
            if self._is_http:
                while await self.post(update, self.webhook.get("secret_token", "")) != 200:
                    await asyncio.sleep(0.02)
            else:
                self._updates.append(update)
        async with self._changed:
            self._changed.notify_all()

    async def post(self, update: dict[str, Any], proof: str) -> int:
        """Try once to deliver an update to the webhook: the status, or 0 without a response."""
        url = f"http://127.0.0.1:{self.settings['port']}/telegram"  # behind a TLS proxy
        headers = {"X-Telegram-Bot-Api-Secret-Token": proof}
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=update, headers=headers) as reply:
                return reply.status
        except aiohttp.ClientError:
            return 0

    async def press(self, label: str, *, sender: int = 7, asked: dict[str, Any] | None = None) -> None:
        """A person presses a button of the latest message that has buttons."""
        sent = asked or next(one for one in reversed(self.sent) if "reply_markup" in one)
        row = sent["reply_markup"]["inline_keyboard"][0]
        data = next(one["callback_data"] for one in row if one["text"] == label)
        assert len(data.encode()) <= 64
        chat = int(sent["chat_id"])
        query = {
            "id": f"q{self._last_update}",
            "from": {"id": sender, "is_bot": False, "first_name": f"Person {sender}"},
            "message": {"message_id": sent["message_id"], "date": 1, "from": BOT, "text": sent["text"],
                        "chat": {"id": chat, "type": "private" if chat > 0 else "supergroup"}},
            "chat_instance": "1",
            "data": data,
        }  # fmt: skip
        self._last_update += 1
        self._updates.append({"update_id": self._last_update, "callback_query": query})
        async with self._changed:
            self._changed.notify_all()

    def heard(self, chat: str) -> list[str]:
        return self._shown[chat]

    async def disturb(self) -> None:
        self._drop += 1

    # ------------------------------------------------------------------------------------------ the API

    async def _file(self, request: web.Request) -> web.Response:
        self.downloads.append(request.match_info["name"])
        assert request.match_info["bot"] == f"bot{TOKEN}"
        return web.Response(body=self.files[request.match_info["name"]])

    async def attach(self, chat: str, name: str, data: bytes, *, sender: int = 7, size: int | None = None) -> None:
        """A person sends a file without text."""
        self.files[name] = data
        document = {"file_id": name, "file_name": name, "file_size": len(data) if size is None else size}
        await self.say(chat, "", sender=sender, document=document)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        method = request.match_info["method"]
        self.calls.append(method)
        if request.match_info["bot"] != f"bot{TOKEN}":
            return _error(401, "Unauthorized")
        if request.content_type == "multipart/form-data":
            reply = self._send_file(method, await request.post())
            is_lost = method in self.lose or (self._rough and self._chance.random() < 0.3)
            self.lose = []
            if reply.status == 200 and is_lost and request.transport:
                request.transport.abort()  # sent, but the bot gets no response
            return reply
        asked = json.loads(await request.read() or b"{}")
        match method:
            case "getMe":
                return _ok(BOT)
            case "getUpdates" if self.webhook:
                return _error(409, "Conflict: can't use getUpdates method while webhook is active")
            case "getUpdates":
                return await self._get_updates(asked)
            case "deleteWebhook":
                self.webhook = {}
                return _ok(True)
            case "setWebhook":
                if not asked["url"].startswith("https://"):
                    return _error(400, "Bad Request: bad webhook: An HTTPS URL must be provided for webhook")
                self.webhook = asked
                return _ok(True)
            case "getFile":
                return _ok({"file_id": asked["file_id"], "file_path": asked["file_id"]})
            case "answerCallbackQuery":
                self.answered.append(asked["callback_query_id"])
                return _ok(True)
            case "editMessageText":
                self.edited.append(asked)
                self.drafts[asked["message_id"]] = asked["text"]
                return _ok({"message_id": asked["message_id"], "date": 1, "chat": {"id": 1, "type": "private"}})
            case "deleteMessage":
                self.deleted.append(asked["message_id"])
                self._remove(str(asked["chat_id"]), asked["message_id"])
                return _ok(True)
            case "editMessageReplyMarkup":
                self.edited.append(asked)
                return _ok(True)
            case "sendChatAction":
                return _ok(True)
            case "sendMessage":
                reply = self._send(asked)
                if reply.status == 200 and self._rough and self._chance.random() < 0.1 and request.transport:
                    request.transport.abort()  # sent, but the bot gets no response
                return reply
        return _error(404, "Not Found: method not found")

    async def _get_updates(self, asked: dict[str, Any]) -> web.Response:
        if self._poller is not None and not self._poller.done():
            self._poller.set_result(None)
        poller = self._poller = asyncio.get_running_loop().create_future()
        offset = asked.get("offset", 0)
        self._updates = [update for update in self._updates if update["update_id"] >= offset]
        self.polls += 1
        try:
            async with asyncio.timeout(asked.get("timeout", 0)), self._changed:
                while not self._updates and not poller.done():
                    waiting = asyncio.ensure_future(self._changed.wait())
                    try:
                        await asyncio.wait({waiting, poller}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not waiting.done():
                            waiting.cancel()
                            await asyncio.gather(waiting, return_exceptions=True)
        except TimeoutError:
            return _ok([])
        finally:
            self.polls -= 1
        if poller.done():
            self.conflicts += 1
            return _error(409, "Conflict: terminated by other getUpdates request")
        found = self._updates[: 100 if not self._rough else self._chance.randint(1, 7)]
        return _ok(found)

    def _send_file(self, method: str, asked: Any) -> web.Response:
        kind = {"sendPhoto": "photo", "sendDocument": "document"}[method]
        if self.fail:
            code, description, parameters = self.fail.pop(0)
            return _error(code, description, parameters)
        chat, file = str(asked["chat_id"]), asked[kind]
        data = file.file.read()
        if kind == "photo" and len(data) < 60:  # not a picture that can be decoded
            return _error(400, "Bad Request: IMAGE_PROCESS_FAILED")
        self._last_message += 1
        self.uploads.append((chat, kind, file.filename, data))
        self._shown[chat].append(shown_file(file.filename, asked.get("caption", "")))
        return _ok({"message_id": self._last_message, "date": 1, "chat": {"id": int(chat), "type": "private"}})

    def _remove(self, chat: str, message: int) -> None:
        self._shown[chat].remove(self._places[message])

    def _send(self, asked: dict[str, Any]) -> web.Response:
        if self.fail:
            code, description, parameters = self.fail.pop(0)
            return _error(code, description, parameters)
        chat = str(asked["chat_id"])
        if chat in self.blocked:
            return _error(403, "Forbidden: bot was blocked by the user")
        if not re.fullmatch(r"-?\d+", chat):
            return _error(400, "Bad Request: chat not found")
        text = asked["text"]
        if asked.get("parse_mode") == "HTML":
            reader = _Reader()
            reader.feed(text)
            reader.close()
            if reader.wrong or reader.open:
                wrong = reader.wrong or f'Can\'t find end tag corresponding to start tag "{reader.open[-1]}"'
                return _error(400, f"Bad Request: can't parse entities: {wrong}")
            text = reader.text
        if not text.strip():
            return _error(400, "Bad Request: message text is empty")
        if utf16(text) > 4096:
            return _error(400, "Bad Request: message is too long")
        self._last_message += 1
        self.sent.append({**asked, "message_id": self._last_message})
        self._shown[chat].append(text.strip())
        self._places[self._last_message] = text.strip()
        return _ok({"message_id": self._last_message, "date": 1, "chat": {"id": int(chat), "type": "private"}})


def _ok(result: Any) -> web.Response:
    return web.json_response({"ok": True, "result": result})


def _error(code: int, description: str, parameters: dict[str, Any] | None = None) -> web.Response:
    more = {"parameters": parameters} if parameters else {}
    return web.json_response({"ok": False, "error_code": code, "description": description, **more}, status=code)
