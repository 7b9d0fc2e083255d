"""People with encrypting clients (matrix-nio), in a process and an environment of their own.

A request is a line of JSON on standard input: a number, the name of a method of `Person`, the person and the arguments.
A response is a line with that number, and a result or an error. Nothing of Everloop is imported here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
from typing import Any

from nio import (  # type: ignore[import-not-found]
    AsyncClient,
    AsyncClientConfig,
    MegolmEvent,
    RoomEncryptedMedia,
    RoomMessage,
    RoomSendResponse,
    UploadResponse,
)
from nio.crypto.attachments import decrypt_attachment  # type: ignore[import-not-found]
from nio.events.to_device import RoomKeyRequest  # type: ignore[import-not-found]

UNREADABLE = "UNREADABLE"


class Person:
    """One account's client, which syncs in the background."""

    def __init__(self, server: str, user: str, device: str, token: str) -> None:
        config = AsyncClientConfig(encryption_enabled=True, store_sync_tokens=False, request_timeout=60)
        self.client = AsyncClient(server, user, device, store_path=tempfile.mkdtemp(prefix="nio"), config=config)
        self.client.restore_login(user, device, token)
        self.client.add_event_callback(self._on_message, (RoomMessage, RoomEncryptedMedia))
        self.client.add_event_callback(self._on_unreadable, MegolmEvent)
        self.events: dict[str, Any] = {}
        self.requests: list[Any] = []
        self.news = asyncio.Condition()

    async def start(self) -> str:
        await self.client.sync(timeout=0, full_state=True)
        await self._do_keys()
        self.task = asyncio.create_task(self._sync())
        return str(self.client.olm.account.identity_keys["ed25519"])

    async def _sync(self) -> None:
        while True:
            synced = await self.client.sync(timeout=20_000)
            self.requests += [one for one in synced.to_device_events if isinstance(one, RoomKeyRequest)]
            await self._do_keys()
            async with self.news:
                self.news.notify_all()

    async def _do_keys(self) -> None:
        if self.client.should_upload_keys:
            await self.client.keys_upload()
        if self.client.should_query_keys:
            await self.client.keys_query()
        await self.client.send_to_device_messages()

    async def _on_message(self, room: Any, event: Any) -> None:
        self.events[event.event_id] = event

    async def _on_unreadable(self, room: Any, event: Any) -> None:
        self.events[event.event_id] = None

    async def say(self, room: str, content: dict[str, Any], reader: str) -> str:
        """Send an encrypted message once the room is known to be encrypted and a device of its reader is known."""

        def is_known() -> bool:
            found = self.client.rooms.get(room)
            has_device = any(self.client.olm.device_store.active_user_devices(reader))
            return found is not None and found.encrypted and has_device

        async with self.news:
            await asyncio.wait_for(self.news.wait_for(is_known), 40)
        sent = await self.client.room_send(room, "m.room.message", content, ignore_unverified_devices=True)
        assert isinstance(sent, RoomSendResponse), sent
        return str(sent.event_id)

    async def read(self, ids: list[str]) -> list[Any]:
        """Return the contents of events by id, as soon as this client has seen them."""
        async with self.news:
            await asyncio.wait_for(self.news.wait_for(lambda: all(id in self.events for id in ids)), 40)
        return [UNREADABLE if (one := self.events[id]) is None else one.source["content"] for id in ids]

    async def rotate(self, room: str) -> None:
        """Use a new key from the next message on."""
        self.client.invalidate_outbound_session(room)

    async def withhold(self, room: str, user: str) -> None:
        """Begin a session in a room as if its key had been sent to a person, although it has not."""
        olm = self.client.olm
        olm.rotate_outbound_group_session(room)
        session = olm.outbound_group_sessions[room]
        session.users_shared_with |= {(user, device.id) for device in olm.device_store.active_user_devices(user)}
        session.mark_as_shared()

    async def forward(self, user: str) -> str:
        """Wait until a person asks for a key, and forward that key."""
        async with self.news:
            await asyncio.wait_for(self.news.wait_for(lambda: any(one.sender == user for one in self.requests)), 40)
        asked = next(one for one in self.requests if one.sender == user)
        olm = self.client.olm
        device = olm.device_store[asked.sender][asked.requesting_device_id]
        if olm.session_store.get(device.curve25519) is None:
            await self.client.keys_claim({user: [device.id]})
        key = olm.inbound_group_store.get(asked.room_id, olm.account.identity_keys["curve25519"], asked.session_id)
        session = olm.session_store.get(device.curve25519)
        message = olm._encrypt_forwarding_key(asked.room_id, key, session, device)
        for _ in range(2):  # as a server may do
            await self.client.to_device(message)
        return str(asked.session_id)

    async def lose_keys(self, user: str) -> None:
        """Lose the keys of rooms, and tell a person's devices, as clients do."""
        olm = self.client.olm
        olm.inbound_group_store._entries.clear()
        for device in olm.device_store.active_user_devices(user):
            olm._queue_dummy_message(olm.session_store.get(device.curve25519), device)
        await self.client.send_to_device_messages()

    async def upload(self, text: str) -> dict[str, Any]:
        """Upload an encrypted file. Return the `file` of an event about it."""
        import io

        data = base64.b64decode(text)
        done, keys = await self.client.upload(
            lambda *_: io.BytesIO(data), "application/octet-stream", "notes.txt", encrypt=True, filesize=len(data)
        )
        assert isinstance(done, UploadResponse), done
        return {**keys, "url": done.content_uri}

    async def download(self, file: dict[str, Any]) -> str:
        """Return the decrypted content of a file."""
        body = (await self.client.download(file["url"])).body
        plain = decrypt_attachment(body, file["key"]["k"], file["hashes"]["sha256"], file["iv"])
        return base64.b64encode(plain).decode()

    async def stop(self) -> None:
        self.task.cancel()
        await self.client.close()


async def main() -> None:
    people: dict[str, Person] = {}
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks = set()

    async def answer(number: int, method: str, who: str, args: list[Any]) -> None:
        try:
            if method == "start":
                people[who] = Person(*args)
                args = []
            reply = [number, await getattr(people[who], method)(*args), None]
        except Exception as error:
            reply = [number, None, f"{type(error).__name__}: {error}"]
        os.write(1, json.dumps(reply).encode() + b"\n")

    while line := await reader.readline():
        task = asyncio.create_task(answer(*json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main())
