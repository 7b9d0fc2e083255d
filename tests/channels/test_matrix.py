"""Matrix, against a real server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from everloop.testing.channels import conform, running

from .says import Says, found
from .synapse import EncryptedNetwork, MatrixNetwork, People, Synapse, people, synapse

pytestmark = pytest.mark.timeout(300, func_only=True)  # the first one may have to install the server


@pytest.fixture(scope="module")
def server() -> Iterator[Synapse]:
    with synapse() as made:
        yield made


@pytest.fixture
async def matrix(server: Synapse) -> AsyncIterator[MatrixNetwork]:
    async with MatrixNetwork(server).running() as made:
        yield made


@pytest.fixture(scope="module")
def clients() -> Iterator[People]:
    with people() as made:
        yield made


@pytest.fixture
async def encrypted(server: Synapse, clients: People) -> AsyncIterator[EncryptedNetwork]:
    async with EncryptedNetwork(server, clients).running() as made:
        yield made


async def told(network: MatrixNetwork, room: str, number: int) -> list[dict[str, Any]]:
    """What the bot has written in a room, as soon as there is so much of it."""

    async def look() -> list[dict[str, Any]]:
        contents = await asyncio.to_thread(network.contents, room)
        return contents if len(contents) >= number else []

    return await found(look)


async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(server: Synapse, tmp_path: Path) -> None:
    report = await conform(lambda: MatrixNetwork(server).running(), tmp_path, step=12)
    assert report.problems == []
    assert report.kills >= 1


async def test_only_people_who_are_let_in_can_invite_it_and_its_token_is_shown_nowhere(
    matrix: MatrixNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says = Says("**all** of them\n\n```\na < b\n```")
    theirs = await asyncio.to_thread(matrix.make_room, matrix.eve, [matrix.bot])
    ours = await asyncio.to_thread(matrix.make_room, matrix.anna, [matrix.bot, matrix.eve])
    async with running(matrix.settings, tmp_path, says):
        await found(lambda: asyncio.to_thread(matrix.is_in, ours))
        await asyncio.to_thread(matrix.join, matrix.eve, ours)
        name = matrix.bot["user_id"]
        await asyncio.to_thread(matrix.write, matrix.eve, theirs, "hello")
        await asyncio.to_thread(matrix.write, matrix.eve, ours, f"{name}: what grows?")
        await asyncio.to_thread(matrix.write, matrix.anna, ours, "nobody is meant")
        mention = {"m.mentions": {"user_ids": [name]}}
        await asyncio.to_thread(matrix.write, matrix.anna, ours, "what is ripe?", **mention)
        (answer,) = await told(matrix, ours, 1)
    assert len(says.asked) == 1
    assert says.asked[0].endswith(": what is ripe?")
    assert answer["formatted_body"] == "<b>all</b> of them<br><br><pre>a &lt; b</pre>"
    assert not await asyncio.to_thread(matrix.is_in, theirs)
    caplog.set_level(logging.DEBUG)
    matrix.settings["token"] = wrong = "syt_wrong_token"
    (tmp_path / "wrong").mkdir()
    async with running(matrix.settings, tmp_path / "wrong") as store:
        state = await found(lambda: store.channel_state("matrix"))
    assert "M_UNKNOWN_TOKEN" in state["status"]
    assert "channel matrix" in caplog.text
    assert wrong not in caplog.text + str(state)


async def test_a_thread_is_a_session_and_what_a_sync_leaves_out_is_read_from_the_history(
    matrix: MatrixNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everloop.channels import matrix as module

    monkeypatch.setitem(module.FILTER["room"]["timeline"], "limit", 2)  # type: ignore[index]
    matrix.settings |= {"start": "new"}
    says, room = Says("ok"), matrix.rooms["1"]
    await matrix.say("1", "long ago")
    async with running(matrix.settings, tmp_path, says) as store:
        await found(lambda: _cursor(store))
    for number in range(6):
        await matrix.say("1", f"message {number}")
    root = await asyncio.to_thread(matrix.write, matrix.anna, room, "the root")
    relation = {"m.relates_to": {"rel_type": "m.thread", "event_id": root}}
    await asyncio.to_thread(matrix.write, matrix.anna, room, "in a thread", **relation)
    async with running(matrix.settings, tmp_path, says) as store:
        contents = await told(matrix, room, 8)
        keys = {info.key for info in await store.sessions("me")}
    assert sorted(says.asked) == [*sorted(["in a thread"]), *(f"message {n}" for n in range(6)), "the root"]
    assert len(keys) == 2
    assert [one["m.relates_to"]["event_id"] for one in contents if "m.relates_to" in one] == [root]


async def _cursor(store: Any) -> bool:
    return "cursor" in await store.channel_state("matrix")


# ------------------------------------------------------------------------------------------------- encrypted rooms


async def test_an_encrypted_message_is_answered_encrypted_and_the_server_reads_neither(
    encrypted: EncryptedNetwork, tmp_path: Path
) -> None:
    says, room = Says("the **tomatoes** at noon"), encrypted.rooms["1"]
    async with running(encrypted.settings, tmp_path, says):
        await encrypted.say("1", "what shall the gardener water?")
        (answer,) = await told(encrypted, room, 1)
    assert says.asked == ["what shall the gardener water?"]
    assert answer["formatted_body"] == "the <b>tomatoes</b> at noon"
    assert [one["type"] for one in encrypted.sent(room)] == ["m.room.encrypted"]
    assert not encrypted.server.has("tomatoes")
    assert not encrypted.server.has("gardener")
    assert encrypted.server.has(encrypted.bot["device_id"])  # it does look where the server keeps things
