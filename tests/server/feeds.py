"""A client of the page's API: JSON requests, and feeds as a browser reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .serving import Client, Serving


@dataclass
class Event:
    name: str
    data: dict[str, Any]
    id: str = ""


@dataclass
class Page:
    """What a page shows, as a function of the events of its feed alone."""

    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    live: str = ""  # the text of the running round
    state: dict[str, Any] = field(default_factory=dict)
    last_id: str = ""
    events: list[Event] = field(default_factory=list)

    def take(self, event: Event) -> None:
        self.events.append(event)
        self.last_id = event.id or self.last_id
        match event.name:
            case "start":
                self.entries = {seq: one for seq, one in self.entries.items() if seq <= event.data["after"]}
                self.live = self.live if event.data["chars"] else ""
            case "entry":
                assert event.data["seq"] not in self.entries, f"{event.data} came twice"
                self.entries[event.data["seq"]] = event.data
                self.live = ""
            case "text":
                self.live += event.data["text"]
            case "restart":
                self.live = ""
            case "state":
                self.state = event.data

    @property
    def kinds(self) -> list[str]:
        return [one["kind"] for _, one in sorted(self.entries.items())]

    @property
    def text(self) -> str:
        """The text of all answers."""
        said = [one["content"] or "" for _, one in sorted(self.entries.items()) if one["kind"] == "answer"]
        return "".join(said) + self.live

    @property
    def question(self) -> int:
        (seq,) = [seq for seq, one in self.entries.items() if one["kind"] == "asked"][-1:]
        return seq


class Feed:
    """An open feed of a session."""

    def __init__(self, response: aiohttp.ClientResponse, page: Page) -> None:
        self.response = response
        self.page = page
        self.comments: list[str] = []

    async def read(self, until: Callable[[Page], bool] | None = None) -> Page:
        """Read until the page satisfies a condition, or to the feed's end."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(40):
            while until is None or not until(self.page):
                line = (await self.response.content.readline()).decode()
                if not line:
                    assert until is None, f"the feed ended: {self.page}"
                    break
                if line == "\n":
                    if "data" in fields:
                        self.page.take(Event(fields["event"], json.loads(fields["data"]), fields.get("id", "")))
                    fields = {}
                elif line.startswith(":"):
                    self.comments.append(line[1:].strip())
                else:
                    name, _, value = line.removesuffix("\n").partition(": ")
                    fields[name] = value
        return self.page

    def close(self) -> None:
        self.response.close()


class PageClient(Client):
    """Uses the page's API."""

    async def feed(
        self, key: str, page: Page | None = None, headers: Mapping[str, str] | None = None, **query: Any
    ) -> Feed:
        """Open a feed; with the page of an earlier one, resume from its position."""
        sent = {**self.headers, **(headers or {})}
        if page is not None and page.last_id:
            sent["Last-Event-ID"] = page.last_id
        response = await self.http.get(f"{self.url}/api/sessions/{key}/feed", params=query, headers=sent)
        assert response.status == 200, await response.text()
        return Feed(response, page or Page())

    async def api(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        sent = {**self.headers, **(headers or {})}
        async with self.http.request(method, f"{self.url}/api/{path}", json=body, headers=sent) as response:
            return response.status, await response.json()

    async def say(self, key: str, text: str, **more: Any) -> Any:
        status, body = await self.api("POST", f"sessions/{key}/messages", {"text": text, **more})
        assert status == 202, body
        return body

    async def answer(self, key: str, question: int, allow: bool, **more: Any) -> tuple[int, Any]:
        return await self.api("POST", f"sessions/{key}/answer", {"question": question, "allow": allow, **more})


async def page_client(server: Serving, name: str) -> PageClient:
    client = PageClient(server.url, server.http)
    client.headers = (await server.client(name)).headers
    return client


def is_over(page: Page) -> bool:
    return bool(page.kinds) and page.kinds[-1] == "end" and page.state.get("turn") is None


async def said(client: PageClient, key: str, text: str) -> Page:
    """Send a message to a session, and wait until its turn has ended."""
    feed = await client.feed(key)
    await client.say(key, text)
    page = await feed.read(lambda page: is_over(page) and any(one.get("text") == text for one in page.entries.values()))
    feed.close()
    return page
