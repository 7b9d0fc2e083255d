"""Matrix, against a real server."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from everloop.channels.base import Later, Part, Received, StateRow, make_channel
from everloop.channels.links import LinkStore
from everloop.channels.matrix_devices import MAX_DEVICES, Devices, encryption_facts, grouped
from everloop.errors import ConfigError
from everloop.store.sqlite import SQLiteStore
from everloop.store.sqlite.backup import backup, restore
from everloop.testing import ScriptedProvider, call
from everloop.testing.channels import config_of, conform, running, storm, take_over

from ..support.commands import everloop
from ..support.web_servers import answer, serving
from .flood import check_flood
from .hooks import HookNetwork
from .says import Recalls, Says, found, until
from .synapse import EncryptedNetwork, MatrixNetwork, People, Synapse, people, synapse
from .transcription import SOUND, Endpoint

pytestmark = pytest.mark.timeout(300, func_only=True)  # the first test may have to install the server


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
    """Return what the bot has written in a room, once there are so many messages."""

    async def look() -> list[dict[str, Any]]:
        contents = await asyncio.to_thread(network.contents, room)
        return contents if len(contents) >= number else []

    return await found(look)


async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(server: Synapse, tmp_path: Path) -> None:
    report = await conform(lambda: MatrixNetwork(server).running(), tmp_path, step=12)
    assert report.problems == []
    assert report.kills >= 1


async def test_only_admitted_people_can_invite_it_and_its_token_is_shown_nowhere(
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


async def test_a_thread_is_a_session_and_gaps_of_a_sync_are_read_from_the_history(
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


async def test_a_person_who_joins_a_room_sees_nothing_of_its_shared_session(
    matrix: MatrixNetwork, tmp_path: Path
) -> None:
    """Not even one who has Anna's name."""
    anna, eve, room = matrix.anna, matrix.eve, matrix.rooms["1"]
    matrix.settings["allow"] = [anna["user_id"], eve["user_id"]]

    def let_in() -> None:
        matrix.invite(anna, eve, room)
        matrix.join(eve, room)
        path = f"/_matrix/client/v3/profile/{quote(eve['user_id'])}/displayname"
        matrix.server.call("PUT", path, {"displayname": anna["user_id"]}, eve["access_token"])

    async with (
        HookNetwork().running() as hook,
        running([matrix.settings, hook.settings], tmp_path, Recalls()) as store,
    ):
        await hook.say("anna", "/link")
        await until(lambda: hook.heard("anna"))
        await matrix.say("1", f"/link {hook.heard('anna')[0].split()[4][:8]}")
        await told(matrix, room, 1)
        await hook.say("anna", "a secret")
        await until(lambda: len(hook.heard("anna")) == 3)
        await asyncio.to_thread(let_in)
        await asyncio.to_thread(matrix.write, eve, room, "/unlink")
        await asyncio.to_thread(matrix.write, eve, room, f"{matrix.bot['user_id']}: what was said?")
        first = await told(matrix, room, 2)
        for who in (eve, anna):
            await asyncio.to_thread(matrix.write, who, room, f"{matrix.bot['user_id']}: and of {who['user_id']}?")
        contents = await told(matrix, room, 4)
        assert "what was said?" in first[-1]["body"]
        assert "a secret" not in str(contents)
        (shared,) = [one for one in (await LinkStore(store, "me").read()).shared if one.is_shared]
        assert [one.account for one in shared.members] == ["hook:anna", f"matrix:{anna['user_id']}"]


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
    assert encrypted.server.has(encrypted.bot["device_id"])  # the check does look where the server keeps things


async def test_in_encrypted_rooms_nothing_is_lost_or_doubled_whichever_write_is_the_last(
    server: Synapse, clients: People, tmp_path: Path
) -> None:
    report = await conform(lambda: EncryptedNetwork(server, clients).running(), tmp_path, step=31, files=True)
    assert report.problems == []
    assert report.kills >= 1


async def test_many_messages_in_encrypted_rooms_and_kills_lose_and_double_nothing(
    server: Synapse, clients: People, tmp_path: Path
) -> None:
    report = await storm(
        lambda: EncryptedNetwork(server, clients).running(), tmp_path, chats=("1", "2"), each=8, kills=3
    )
    assert report.problems == []
    assert report.kills == 3


def test_encryption_is_imported_only_when_set_and_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = {"name": "matrix", "server": "https://example.org", "token": "x"}
    program = (
        "import sys; from everloop.testing.channels import config_of, make_channel;"
        f"make_channel(config_of({plain})); print('vodozemac' in sys.modules, 'cryptography' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    monkeypatch.setitem(sys.modules, "vodozemac", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'everloop[matrix]'")):
        make_channel(config_of({**plain, "encryption": True}))


async def test_a_restart_and_a_restored_copy_keep_the_device_and_reuse_no_key_state(
    encrypted: EncryptedNetwork, tmp_path: Path
) -> None:
    says, room, store = Says("ok"), encrypted.rooms["1"], tmp_path / "store.db"

    async def exchange(text: str, number: int) -> None:
        """Anna writes, perhaps while nothing runs, and can read the answer."""
        await encrypted.say("1", text)
        async with running(encrypted.settings, tmp_path, says):
            assert (await told(encrypted, room, number))[-1]["body"].endswith("ok")

    async with running(encrypted.settings, tmp_path, says):
        await encrypted.say("1", "first")
        await told(encrypted, room, 1)
    keys = await asyncio.to_thread(encrypted.keys_of, encrypted.bot)
    await exchange("while it was away", 2)
    await asyncio.to_thread(encrypted.people.ask, "rotate", encrypted.anna["device_id"], room)
    await exchange("with a new key", 3)
    await asyncio.to_thread(backup, store, tmp_path / "copy.db")
    await exchange("after the copy", 4)
    await asyncio.to_thread(restore, tmp_path / "copy.db", store)
    await exchange("from the copy on", 5)
    assert says.asked[:3] == ["first", "while it was away", "with a new key"]
    assert set(says.asked[3:]) == {"after the copy", "from the copy on"}
    assert await asyncio.to_thread(encrypted.keys_of, encrypted.bot) == keys
    sent = [one["content"] for one in await asyncio.to_thread(encrypted.sent, room)]
    assert len({one["session_id"] for one in sent}) == len(sent)  # each process had its own sessions


async def test_a_message_whose_key_is_missing_is_kept_and_its_key_requested(
    encrypted: EncryptedNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says, room, anna = Says("ok"), encrypted.rooms["1"], encrypted.anna["device_id"]
    encrypted.settings["start"] = "new"
    async with running(encrypted.settings, tmp_path, says) as store:
        await found(lambda: _cursor(store))
        await asyncio.to_thread(encrypted.people.ask, "withhold", anna, room, encrypted.bot["user_id"])
        await encrypted.say("1", "read me later")
        await encrypted.say("1", "and me")
        waiting = await found(lambda: _of_length(store, "matrix:waiting", 2))
        facts = await encryption_facts(store, config_of(encrypted.settings))
    assert says.asked == []
    assert "read me" not in str(waiting)
    assert caplog.text.count("cannot be read: its key is missing") == 1
    assert facts is not None
    assert facts["unread"] == [f"{encrypted.anna['user_id']}: its key is missing"] * 2
    async with running(encrypted.settings, tmp_path, says) as store:
        await asyncio.to_thread(encrypted.people.ask, "forward", anna, encrypted.bot["user_id"])
        await told(encrypted, room, 2)
        await found(lambda: _is_empty(store, "matrix:waiting"))
        await encrypted.say("1", "thanks")
        await told(encrypted, room, 3)
    assert says.asked == ["read me later", "and me", "thanks"]
    assert "a new session with its device is started" not in caplog.text  # the key came twice and was handled once


async def test_a_session_that_one_side_has_lost_is_replaced(
    encrypted: EncryptedNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says, room, anna = Says("ok"), encrypted.rooms["1"], encrypted.anna["device_id"]
    async with running(encrypted.settings, tmp_path, says) as store:
        await encrypted.say("1", "first")
        await told(encrypted, room, 1)
        await asyncio.to_thread(encrypted.people.ask, "lose_keys", anna, encrypted.bot["user_id"])
        await encrypted.say("1", "I cannot read that")
        assert (await told(encrypted, room, 2))[1]["body"] == "ok"
        for key in await store.channel_state("matrix:keys"):
            if key.startswith("olm:"):
                await store.set_channel_state("matrix:keys", key, None)
    await asyncio.to_thread(encrypted.people.ask, "rotate", anna, room)
    async with running(encrypted.settings, tmp_path, says):
        await encrypted.say("1", "and now you")
        await asyncio.to_thread(encrypted.people.ask, "forward", anna, encrypted.bot["user_id"])
        await told(encrypted, room, 3)
    assert "a new session with its device is started" in caplog.text
    assert says.asked == ["first", "I cannot read that", "and now you"]


async def test_with_trust_confirmed_a_device_is_ignored_until_the_owner_confirms_it(
    encrypted: EncryptedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERLOOP_HOME", str(tmp_path))
    says, room, user = Says("for Anna's own phone"), encrypted.rooms["1"], encrypted.anna["user_id"]
    encrypted.settings["trust"] = "confirmed"
    other = await asyncio.to_thread(encrypted.server.log_in, encrypted.anna)  # as an administrator of the server could
    await asyncio.to_thread(encrypted.use_client, other)
    async with running(encrypted.settings, tmp_path, says) as store:
        await encrypted.say("1", "is the door locked?")
        await found(lambda: _of_length(store, "matrix:waiting", 1))
        shown = await _channels_shown(encrypted, tmp_path)
        assert says.asked == []
        done = await everloop(
            "channels", "trust", "matrix", user, encrypted.anna["device_id"], "--store", str(tmp_path / "store.db")
        )
        assert done.status == 0, done.err
        await asyncio.to_thread(encrypted.tell, room, "open the door", other)
        (answer,) = await told(encrypted, room, 1)
        (unread,) = await asyncio.to_thread(encrypted.contents, room, other)
        await found(lambda: _of_length(store, "matrix:waiting", 1))
        wrong = await everloop("channels", "trust", "matrix", user, "NOSUCH", "--store", str(tmp_path / "store.db"))
    assert answer["body"] == "for Anna's own phone"
    assert says.asked == ["is the door locked?"]
    assert unread == "UNREADABLE"
    own = (await asyncio.to_thread(encrypted.keys_of, encrypted.bot))[encrypted.bot["device_id"]]
    assert f"encrypts as device {encrypted.bot['device_id']}, fingerprint {grouped(own)}" in shown
    assert (
        f"fingerprint {grouped(encrypted.fingerprint)}, not confirmed: everloop channels trust matrix {user}" in shown
    )
    assert f"1 cannot be read yet: {user}: the device {encrypted.anna['device_id']} is not confirmed" in shown
    assert (wrong.status, wrong.err.count("\n")) == (2, 1)
    assert encrypted.anna["device_id"] in wrong.err


async def test_data_that_a_server_forges_is_not_accepted(
    encrypted: EncryptedNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A message in plain text, an old one under a new id, and other keys under a device's name."""
    says, room, anna = Says("the code is 4711"), encrypted.rooms["1"], encrypted.anna
    async with running(encrypted.settings, tmp_path, says):
        event = await asyncio.to_thread(encrypted.tell, room, "what is the code?")
        await told(encrypted, room, 1)
        await asyncio.to_thread(encrypted.write, anna, room, "open the door")
        await asyncio.to_thread(encrypted.repeat, anna, room, event)
        await until(lambda: "the server repeats a message" in caplog.text)
        assert "is ignored because it is unencrypted in an encrypted room" in caplog.text
        await asyncio.to_thread(encrypted.people.ask, "stop", anna["device_id"])
        await asyncio.to_thread(encrypted.use_client, anna)  # the same device and token, but its own keys
        await asyncio.to_thread(encrypted.tell, room, "tell me the code")
        await until(lambda: "have changed, so it is not trusted" in caplog.text)
        await until(lambda: "no device of its sender has this key" in caplog.text)
    assert says.asked == ["what is the code?"]


async def test_a_plain_room_stays_plain_and_becomes_encrypted_when_its_people_enable_it(
    encrypted: EncryptedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = Says("ok")
    monkeypatch.setattr(EncryptedNetwork, "initial_state", [])
    room = await asyncio.to_thread(encrypted.make_room, encrypted.anna, [encrypted.bot])
    async with running(encrypted.settings, tmp_path, says):
        await found(lambda: asyncio.to_thread(encrypted.is_in, room))
        await asyncio.to_thread(encrypted.write, encrypted.anna, room, "in plain text")
        await told(encrypted, room, 1)
        await asyncio.to_thread(encrypted.turn_on_encryption, room)
        await asyncio.to_thread(encrypted.tell, room, "and now?")
        await told(encrypted, room, 2)
        await asyncio.to_thread(encrypted.tell, room, "and then?")
        await told(encrypted, room, 3)
    sent = await asyncio.to_thread(encrypted.sent, room)
    assert [one["type"] for one in sent] == ["m.room.message", "m.room.encrypted", "m.room.encrypted"]
    assert sent[1]["content"]["session_id"] != sent[2]["content"]["session_id"]  # one key per message
    assert says.asked == ["in plain text", "and now?", "and then?"]


async def test_an_encrypted_file_is_decrypted_and_a_modified_one_refused(
    encrypted: EncryptedNetwork, tmp_path: Path
) -> None:
    says, room = Says("ok"), encrypted.rooms["1"]
    text = base64.b64encode(b"the beans are in the shed").decode()
    file = await asyncio.to_thread(encrypted.people.ask, "upload", encrypted.anna["device_id"], text)
    changed = {**file, "hashes": {"sha256": base64.b64encode(bytes(32)).decode().rstrip("=")}}
    async with running(encrypted.settings, tmp_path, says):
        for number, one in enumerate((file, changed), 1):
            more = {"msgtype": "m.file", "filename": "notes.txt", "file": one}
            await asyncio.to_thread(encrypted.tell, room, "notes.txt", **more)
            await told(encrypted, room, number)
    (saved,) = await asyncio.to_thread(lambda: list((tmp_path / "uploads").iterdir()))
    assert saved.read_bytes() == b"the beans are in the shed"
    assert "notes.txt could not be fetched" in says.asked[1]
    assert not encrypted.server.has("beans")


async def test_a_device_that_was_logged_out_does_not_get_the_key_of_the_next_answer(
    encrypted: EncryptedNetwork, tmp_path: Path
) -> None:
    says, room = Says("ok"), encrypted.rooms["1"]
    other = await asyncio.to_thread(encrypted.server.log_in, encrypted.anna)
    await asyncio.to_thread(encrypted.use_client, other)
    async with running(encrypted.settings, tmp_path, says):
        for number in (1, 2, 3):
            await encrypted.say("1", f"message {number}")
            await told(encrypted, room, number)
            if number == 2:
                assert (await asyncio.to_thread(encrypted.contents, room, other))[1]["body"] == "ok"
                await asyncio.to_thread(encrypted.log_out, other)
    sessions = [one["content"]["session_id"] for one in await asyncio.to_thread(encrypted.sent, room)]
    assert sessions[0] == sessions[1] != sessions[2]


async def test_a_token_whose_device_has_keys_of_another_program_is_refused(
    encrypted: EncryptedNetwork, tmp_path: Path
) -> None:
    keys = await asyncio.to_thread(encrypted.keys_of, encrypted.anna)
    async with running({**encrypted.settings, "token": encrypted.anna["access_token"]}, tmp_path) as store:
        state = await found(lambda: _of_length(store, "matrix", 1))
    assert f"the device {encrypted.anna['device_id']} of the token has keys of another program" in state["status"]
    assert await asyncio.to_thread(encrypted.keys_of, encrypted.anna) == keys


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
async def test_files_go_out_and_the_server_reads_none_in_an_encrypted_room(
    kind: str, server: Synapse, clients: People, tmp_path: Path
) -> None:
    (tmp_path / "beans.png").write_bytes(b"\x89PNG\r\n\x1a\n" + (picture := f"beans of {kind}".encode()))
    (tmp_path / "list of peas.txt").write_text("peas")
    names = ["beans.png", "list of peas.txt"]
    model = ScriptedProvider([call("message", content="Here they are.", media=names), "Done."])
    network = MatrixNetwork(server) if kind == "plain" else EncryptedNetwork(server, clients)
    async with network.running(), running(network.settings, tmp_path, model):
        await network.say("1", "the beans, please")
        contents = await told(network, network.rooms["1"], 4)
        files = [await asyncio.to_thread(network.fetch, one) for one in contents[1:3]]
    assert [(one["msgtype"], one["body"]) for one in contents] == [
        ("m.text", "Here they are."),
        ("m.image", "beans.png"),
        ("m.file", "list of peas.txt"),
        ("m.text", "Done."),
    ]
    assert files == [b"\x89PNG\r\n\x1a\n" + picture, b"peas"]
    assert server.has(picture.decode()) == (kind == "plain")


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
async def test_a_voice_message_is_answered_by_its_transcript(
    kind: str, server: Synapse, clients: People, tmp_path: Path
) -> None:
    """In an encrypted room the recording is encrypted, too: the server never has it, only the endpoint gets it."""
    says, sound = Says("They are."), SOUND + f"the sound of {kind}".encode()
    network = MatrixNetwork(server) if kind == "plain" else EncryptedNetwork(server, clients)
    async with (
        network.running(),
        Endpoint().running() as endpoint,
        running(network.settings, tmp_path, says, **endpoint.settings),
    ):
        await asyncio.to_thread(network.send_file, "Voice message.ogg", "m.audio", sound)
        (answer,) = await told(network, network.rooms["1"], 1)
    (kept,) = await asyncio.to_thread(lambda: list((tmp_path / "uploads").iterdir()))
    assert says.asked == [f"[transcript of a voice message]\nAre the beans ripe?\n[attachment: {kept}]"]
    assert endpoint.heard == [("whisper-1", kept.name, "audio/ogg", sound)]
    assert answer["body"] == "They are."
    assert server.has(f"the sound of {kind}") == (kind == "plain")


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
async def test_one_of_two_workers_polls_and_the_other_takes_over(
    kind: str, server: Synapse, clients: People, tmp_path: Path
) -> None:
    def new() -> Any:
        return MatrixNetwork(server) if kind == "plain" else EncryptedNetwork(server, clients)

    report = await take_over(lambda: new().running(), tmp_path / "kit")
    assert report.problems == []
    assert report.kills == 1


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
async def test_a_flood_from_one_person_delays_no_other_and_is_answered_in_order(
    kind: str, server: Synapse, clients: People, tmp_path: Path
) -> None:
    network = MatrixNetwork(server) if kind == "plain" else EncryptedNetwork(server, clients)
    async with network.running():
        await asyncio.to_thread(network.add_room, "of eve", network.eve)
        if isinstance(network, EncryptedNetwork):
            await asyncio.to_thread(network.use_client, network.eve)
        network.settings["allow"] = [network.anna["user_id"], network.eve["user_id"]]
        await check_flood(network, tmp_path, "1", "of eve")


class OpenInbox:
    """An inbox that accepts nothing, and keeps the channel's state in a store."""

    def __init__(self, store: SQLiteStore) -> None:
        self._store = store
        self.is_ready = asyncio.Event()

    async def accept(self, message: Received) -> bool:
        return False

    async def ready(self) -> None:
        self.is_ready.set()

    async def knows(self, sender: str) -> bool:
        return False

    async def cursor(self) -> str:
        return ""

    async def keep_cursor(self, value: str) -> None:
        """Begins at the end each time."""

    async def state(self, space: str) -> dict[str, str]:
        return await self._store.channel_state(space)

    async def write_state(self, rows: Sequence[StateRow], expected: StateRow) -> bool:
        return await self._store.write_channel_state(rows, expected)


async def test_a_worker_whose_account_another_one_has_taken_over_encrypts_nothing(
    encrypted: EncryptedNetwork, tmp_path: Path
) -> None:
    """Such as one that was frozen while its lease expired: the same key state would encrypt twice."""
    config, room = config_of(encrypted.settings), encrypted.rooms["1"]
    store = SQLiteStore(tmp_path / "store.db")
    workers: list[Any] = []
    tasks = []
    for _ in range(2):
        channel, _ = await asyncio.to_thread(make_channel, config)
        inbox = OpenInbox(store)
        workers.append(channel)
        tasks.append(asyncio.create_task(channel.receive(inbox)))
        async with asyncio.timeout(40):
            await inbox.is_ready.wait()
    frozen, other = workers
    with pytest.raises(Later, match="another worker has the keys"):
        await frozen.send(Part(chat=room, text="hello", plain="hello"), "1")
    assert await asyncio.to_thread(encrypted.sent, room) == []
    await other.send(Part(chat=room, text="hello", plain="hello"), "1")
    assert [one["body"] for one in await told(encrypted, room, 1)] == ["hello"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for channel in workers:
        await channel.close()
    await store.close()


async def _of_length(store: SQLiteStore, space: str, number: int) -> dict[str, str]:
    state = await store.channel_state(space)
    return state if len(state) >= number else {}


async def _is_empty(store: SQLiteStore, space: str) -> bool:
    return not await store.channel_state(space)


async def _channels_shown(network: EncryptedNetwork, folder: Path) -> str:
    """Return what `everloop channels` shows."""
    keys = {key: network.settings[key] for key in ("server", "token", "allow", "encryption", "trust")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    (folder / "config.toml").write_text("\n".join(["[channels.matrix]", *lines]))
    done = await everloop("channels", "list", "--store", str(folder / "store.db"))
    assert done.status == 0, done.err
    return done.out


async def test_the_command_shown_for_a_device_can_be_pasted_whatever_its_server_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERLOOP_HOME", str(tmp_path))
    store = SQLiteStore(tmp_path / "store.db")
    await store.set_channel_state("matrix:keys", "own", "EVER abcdefgh")
    device = '{"ed25519":"abcd","curve25519":"efgh","since":1}'
    await store.set_channel_state("matrix:devices", "device:@anna:$(id) PHONE;reboot", device)
    await store.close()
    (tmp_path / "config.toml").write_text(
        '[channels.matrix]\nserver = "http://127.0.0.1:9"\ntoken = "t"\nencryption = true\ntrust = "confirmed"\n'
    )
    done = await everloop("channels", "list", "--store", str(tmp_path / "store.db"))
    assert "everloop channels trust matrix '@anna:$(id)' 'PHONE;reboot'\n" in done.out


def test_beyond_the_limit_devices_that_are_gone_and_then_the_newest_are_removed() -> None:
    first = {f"D{number}": (f"e{number}", f"c{number}") for number in range(MAX_DEVICES)}
    devices = Devices({})
    rows, _ = devices.see("@anna:example.org", first)
    assert len(rows) == MAX_DEVICES
    del first["D7"]
    rows, changed = devices.see("@anna:example.org", {**first, "D8": ("other", "c8"), "new": ("e", "c")})
    kept = Devices({key: value for _, key, value in rows if value is not None})
    assert changed == ["D8"]
    assert ("devices", "device:@anna:example.org D7", None) in rows
    assert devices.by_key("@anna:example.org", "c7") is None
    assert devices.by_key("@anna:example.org", "c8") is not None  # its earlier messages can still be read
    assert [name.id for name in kept.of("@anna:example.org")] == ["new"]
    assert len(devices.of("@anna:example.org")) == MAX_DEVICES - 1
    devices.see("@anna:example.org", {**first, "new": ("e", "c"), **{f"N{n}": (f"e{n}", f"c{n}") for n in range(50)}})
    assert {name.id for name in devices.of("@anna:example.org")} >= first.keys()


async def test_a_delay_requested_by_the_server_is_kept() -> None:
    limited = answer(b'{"errcode": "M_LIMIT_EXCEEDED", "retry_after_ms": 2500}', "application/json", 429)
    async with serving({"*": limited}) as server:
        settings = {"name": "matrix", "server": f"http://127.0.0.1:{server.port}", "token": "x"}
        channel, _ = await asyncio.to_thread(make_channel, config_of(settings))
        with pytest.raises(Later) as caught:
            await channel.send(Part(chat="!a:b", text="hello", plain="hello"), "1")
        await channel.close()  # type: ignore[attr-defined]
    assert caught.value.seconds == 2.5
