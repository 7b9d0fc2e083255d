"""Files that the agent sends: as pictures or files, within a size and the policy, and each part once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from everloop import LLMProvider, LLMResponse
from everloop.channels.base import Can
from everloop.channels.runner import steps_of
from everloop.channels.text import MARK
from everloop.config import Rule
from everloop.providers.base import ToolCallRequest
from everloop.testing import ScriptedProvider, call
from everloop.testing.channels import conform, running, shown_file
from everloop.tools.message import OutgoingFiles

from .fake_discord import FakeDiscord
from .fake_slack import FakeSlack
from .fake_telegram import FakeTelegram
from .hooks import HookNetwork
from .ircd import IrcNetwork
from .mail import MailNetwork
from .says import found, until

KINDS: dict[str, Any] = {
    "telegram": FakeTelegram,
    "slack": FakeSlack,
    "discord": FakeDiscord,
    "webhook": HookNetwork,
    "email": MailNetwork,
}
CHATS = {"slack": "D7", "webhook": "garden", "email": "anna@example.org"}
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)  # no network here decodes it
CANARY = b"the canary of a secret"


def sends(*media: str, content: str = "Here it is.") -> ScriptedProvider:
    return ScriptedProvider([call("message", content=content, media=list(media)), "Done."])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_picture_and_a_file_are_sent_after_their_text(kind: str, tmp_path: Path) -> None:
    chat, picture = CHATS.get(kind, "7"), PNG
    (tmp_path / "chart.png").write_bytes(picture)
    (tmp_path / "list of beans.txt").write_text("beans\r\npeas\n")
    model, kept = sends("chart.png", "list of beans.txt"), tmp_path / "home" / "outgoing"
    async with KINDS[kind]().running() as network, running(network.settings, tmp_path, model):
        await network.say(chat, "the chart, please")
        await until(lambda: len(network.heard(chat)) == (2 if kind == "email" else 4))
        await until(lambda: not os.listdir(kept))  # sent files are not kept
    assert network.heard(chat)[0] == "Here it is."
    assert network.heard(chat)[-1] == "Done."
    picture_kind, file_kind = ("photo", "document") if kind == "telegram" else ("file", "file")
    assert network.uploads == [
        (chat, picture_kind, "chart.png", picture),
        (chat, file_kind, "list of beans.txt", b"beans\r\npeas\n"),
    ]


async def test_another_owners_agent_sends_files_from_its_own_workspace(tmp_path: Path) -> None:
    workspace = tmp_path / "home" / "owners" / "anna" / "workspace"
    await asyncio.to_thread(workspace.mkdir, parents=True)
    (workspace / "a.txt").write_text("of anna")
    (tmp_path / "a.txt").write_text("of the owner of the server")
    async with FakeTelegram().running() as telegram:
        telegram.settings["owner"] = "anna"
        async with running(telegram.settings, tmp_path, sends("a.txt")):
            await telegram.say("7", "go")
            await until(lambda: "Done." in telegram.heard("7"))
    assert telegram.uploads == [("7", "document", "a.txt", b"of anna")]


async def test_a_picture_that_telegram_cannot_show_is_sent_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    async with FakeTelegram().running() as telegram, running(telegram.settings, tmp_path, sends("broken.png")):
        await telegram.say("7", "go")
        await until(lambda: "Done." in telegram.heard("7"))
    assert [one[1:3] for one in telegram.uploads] == [("document", "broken.png")]


async def test_a_network_without_files_says_so_in_the_text(tmp_path: Path) -> None:
    (tmp_path / "chart.png").write_bytes(PNG)
    async with IrcNetwork().running() as irc, running(irc.settings, tmp_path, sends("chart.png")):
        await irc.say("anna", "the chart, please")
        await until(lambda: len(irc.heard("anna")) == 3)
    assert irc.heard("anna") == ["Here it is.", "[chart.png cannot be sent here.]", "Done."]


async def test_a_file_over_the_limit_is_reported(tmp_path: Path) -> None:
    (tmp_path / "huge.bin").write_bytes(bytes(1_000_001))
    async with FakeDiscord().running() as discord:
        discord.settings["media_mb"] = 1
        async with running(discord.settings, tmp_path, sends("huge.bin")):
            await discord.say("7", "go")
            await until(lambda: "Done." in discord.heard("7"))
    assert discord.heard("7") == ["Here it is.", "[huge.bin is larger than 1 MB, and was not sent.]", "Done."]
    assert discord.uploads == []


async def test_a_file_that_the_network_refuses_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    async with HookNetwork().running() as hook:
        hook.status = [(200, {}), (413, {})]
        async with running(hook.settings, tmp_path, sends("a.txt")):
            await hook.say("garden", "go")
            await until(lambda: "Done." in hook.heard("garden"))
    assert hook.heard("garden")[0] == "[a.txt cannot be sent here (it is too large for the receiver).]"


async def test_only_readable_files_are_sent(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "outside.txt").write_bytes(CANARY)
    (work / "link.txt").symlink_to(tmp_path / "outside.txt")
    (work / "folder").symlink_to(tmp_path)
    (work / ".env").write_bytes(CANARY)
    (work / "alias").symlink_to(".env")
    (work / "fine.txt").write_text("fine")
    wanted = ["link.txt", "../outside.txt", str(tmp_path / "outside.txt"), "folder/outside.txt", ".env", "alias"]
    steps = [call("message", content="psst", media=[path]) for path in wanted]
    model = ScriptedProvider([*steps, call("message", content="look", media=["fine.txt"]), "Done."])
    rules = (Rule(do="deny", tool="read_file", path=".env"),)
    async with FakeTelegram().running() as telegram:
        more = {"policy": rules, "max_iterations": 20}
        async with running(telegram.settings, work, model, **more) as store:
            await telegram.say("7", "go")
            asked = 0
            while "Done." not in telegram.heard("7"):
                if len(telegram.heard("7")) > asked:  # asked about files outside; the answer is no
                    asked = len(telegram.heard("7"))
                    await telegram.say("7", "no")
                await asyncio.sleep(0.05)
            assert await store.dead_letters("telegram") == []
    assert [one[2:] for one in telegram.uploads] == [("fine.txt", b"fine")]


class Swapper(LLMProvider):
    """Sends a file, and then puts a link to a secret in its place."""

    default_model = "swapper"

    def __init__(self, file: Path, secret: Path) -> None:
        self._file, self._secret = file, secret

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        if messages[-1]["role"] == "user":
            return LLMResponse(None, [ToolCallRequest("c1", "message", {"content": "now", "media": [self._file.name]})])
        await asyncio.to_thread(self._swap)
        return LLMResponse("Done.")

    def _swap(self) -> None:
        self._file.unlink()
        self._file.symlink_to(self._secret)


async def test_the_approved_content_is_what_is_sent(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "secret").write_bytes(CANARY)
    (work / "a.txt").write_text("harmless")
    async with FakeTelegram().running() as telegram:
        telegram.fail = [(429, "Too Many Requests", {"retry_after": 1})]
        async with running(telegram.settings, work, Swapper(work / "a.txt", tmp_path / "secret")):
            await telegram.say("7", "go")
            await until(lambda: "Done." in telegram.heard("7"))
        assert (work / "a.txt").is_symlink()
    assert [one[2:] for one in telegram.uploads] == [("a.txt", b"harmless")]


def test_a_copy_is_read_only_from_its_own_folder(tmp_path: Path) -> None:
    files = OutgoingFiles(tmp_path)
    kept = files.keep("me/t/c/0", "../..\\x/a\nb.txt", b"first")
    assert files.keep("me/t/c/0", "../..\\x/a\nb.txt", b"second") == kept
    assert files.read(kept, 100) == b"first"
    (tmp_path / "secret").write_bytes(CANARY)
    link = Path(kept).parent / "link"
    link.symlink_to(tmp_path / "secret")
    for path in (str(link), str(tmp_path / "secret"), f"{Path(kept).parent}/../secret", "/etc/passwd", ""):
        with pytest.raises(OSError, match=r".*"):
            files.read(path, 100)
    files.forget([str(tmp_path / "secret"), kept])
    assert (tmp_path / "secret").exists()
    assert not Path(kept).exists()


async def test_a_slack_file_is_uploaded_to_slack_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    async with FakeSlack().running() as slack, HookNetwork().running() as canary:
        slack.upload_url = canary.settings["url"]
        async with running(slack.settings, tmp_path, sends("a.txt")) as store:
            await slack.say("D7", "go")
            (dead,) = await found(lambda: store.dead_letters("slack"))
    assert dead.reason == "the file is not at the network itself"
    assert canary.got == []


async def test_a_file_that_may_have_been_sent_is_repeated_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    async with FakeTelegram().running() as telegram:
        telegram.lose = ["sendDocument"]
        async with running(telegram.settings, tmp_path, sends("a.txt")):
            await telegram.say("7", "go")
            await until(lambda: any("Done." in one for one in telegram.heard("7")))
    assert shown_file("a.txt") in telegram.heard("7")
    assert shown_file("a.txt", MARK) in telegram.heard("7")


@pytest.mark.parametrize("can", [Can(text=40, media=1), Can(text=40, media=1, attaches=True), Can(text=40)])
@pytest.mark.parametrize("text", ["", "short", "a long paragraph of words\n\nand another one of them\n\n", "x" * 99])
def test_a_delivery_continues_after_the_last_marked_part(text: str, can: Can) -> None:
    whole = list(steps_of(text, 3, can, 0))
    assert [number for step in whole for number in step.files] == [0, 1, 2]
    for number, step in enumerate(whole, 1):
        assert list(steps_of(text, 3, can, step.end)) == whole[number:]


@pytest.mark.parametrize("kind", ["telegram", "webhook"])
async def test_no_kill_loses_a_file_or_repeats_it_unmarked(kind: str, tmp_path: Path) -> None:
    report = await conform(lambda: KINDS[kind](rough=True).running(), tmp_path, step=7, files=True)
    assert report.problems == []
    assert report.kills >= 3
