"""A transcription endpoint for the tests, and a recording."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

SOUND = b"OggS" + bytes(60)
KEY = "the-key-of-the-endpoint"


class Endpoint:
    """A transcription endpoint that returns the same text for every recording."""

    def __init__(self) -> None:
        self.words = "Are the beans ripe?"
        self.fail: list[int] = []  # statuses before it succeeds
        self.heard: list[tuple[str, str, str, bytes]] = []  # model, name, type and content
        self.keys: list[str | None] = []
        self.open = asyncio.Event()
        self.open.set()
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Endpoint]:
        app = web.Application(client_max_size=30_000_000)
        app.router.add_post("/v1/audio/transcriptions", self._transcribe)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            self.open.set()
            await runner.cleanup()

    async def _transcribe(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form["file"]
        assert isinstance(file, web.FileField)
        self.keys.append(request.headers.get("Authorization"))
        self.heard.append((str(form["model"]), file.filename, file.content_type, file.file.read()))
        await self.open.wait()
        if self.fail:
            return web.json_response({"error": {"message": "busy"}}, status=self.fail.pop(0))
        return web.json_response({"text": f" {self.words} "})

    @property
    def settings(self) -> dict[str, str]:
        return {"transcription_model": "whisper-1", "transcription_url": self.url, "transcription_key": KEY}
