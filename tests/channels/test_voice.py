"""Voice messages: transcribed by one endpoint for all networks, and kept where there is none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.config import Config
from everloop.errors import ConfigError
from everloop.providers.transcription import is_recording, make_transcriber
from everloop.testing.channels import running

from .fake_discord import FakeDiscord
from .fake_slack import FakeSlack
from .fake_telegram import FakeTelegram
from .mail import MailNetwork
from .says import Says, until
from .transcription import KEY, SOUND, Endpoint

KINDS: dict[str, Any] = {
    "telegram": FakeTelegram,
    "slack": FakeSlack,
    "discord": FakeDiscord,
}
CHATS = {"slack": "D7"}


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with Endpoint().running() as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
async def test_a_voice_message_is_answered_by_its_transcript(kind: str, endpoint: Endpoint, tmp_path: Path) -> None:
    says, chat = Says("They are."), CHATS.get(kind, "7")
    endpoint.fail = [503]
    async with KINDS[kind]().running() as network, running(network.settings, tmp_path, says, **endpoint.settings):
        await network.attach(chat, "voice.ogg", SOUND)
        await until(lambda: network.heard(chat))
    (kept,) = await asyncio.to_thread(lambda: list((tmp_path / "uploads").iterdir()))
    assert says.asked == [f"[transcript of a voice message]\nAre the beans ripe?\n[attachment: {kept}]"]
    assert endpoint.heard == 2 * [("whisper-1", kept.name, "audio/ogg", SOUND)]
    assert endpoint.keys == 2 * [f"Bearer {KEY}"]
    assert network.heard(chat) == ["They are."]


async def test_a_recording_in_a_mail_is_transcribed_too(endpoint: Endpoint, tmp_path: Path) -> None:
    says = Says("They are.")
    async with MailNetwork().running() as mail, running(mail.settings, tmp_path, says, **endpoint.settings):
        await mail.attach("anna@example.org", [("memo.m4a", SOUND)], "Listen:")
        await until(lambda: mail.mails)
    assert says.asked[0].startswith("Listen:\n\n[transcript of a voice message]\nAre the beans ripe?\n[attachment: ")


async def test_without_an_endpoint_the_sender_is_told_and_the_recording_kept(tmp_path: Path) -> None:
    says = Says("hello")
    async with FakeTelegram().running() as telegram, running(telegram.settings, tmp_path, says):
        await telegram.attach("7", "voice.ogg", SOUND)
        await until(lambda: telegram.heard("7"))
        await telegram.say("7", "then in writing")
        await until(lambda: len(telegram.heard("7")) == 2)
    (kept,) = await asyncio.to_thread(lambda: list((tmp_path / "uploads").iterdir()))
    assert await asyncio.to_thread(kept.read_bytes) == SOUND
    told = "I cannot listen to voice messages: no transcription is set up here. The recording is kept as uploads/"
    assert telegram.heard("7") == [f"{told}{kept.name}.", "hello"]
    assert says.asked == ["then in writing"]  # the voice message cost no model call


@pytest.mark.parametrize(
    ("status", "words", "told"),
    [
        (400, "", "could not be transcribed (127.0.0.1:PORT: HTTP 400: busy).]"),
        (0, "", "contained no recognisable words.]"),
    ],
)
async def test_a_recording_that_cannot_be_transcribed_is_reported(
    endpoint: Endpoint, tmp_path: Path, status: int, words: str, told: str
) -> None:
    says = Says("I see.")
    endpoint.fail, endpoint.words = [status] if status else [], words
    async with FakeTelegram().running() as telegram, running(telegram.settings, tmp_path, says, **endpoint.settings):
        await telegram.attach("7", "voice.ogg", SOUND)
        await until(lambda: says.asked)
    port = endpoint.url.split(":")[2].partition("/")[0]
    assert says.asked[0].startswith(f"[A voice message {told.replace('PORT', port)}")


async def test_a_long_recording_delays_no_other_chat(endpoint: Endpoint, tmp_path: Path) -> None:
    says = Says("hello")
    endpoint.open.clear()
    async with FakeTelegram().running() as telegram, running(telegram.settings, tmp_path, says, **endpoint.settings):
        await telegram.attach("7", "voice.ogg", SOUND)
        await until(lambda: endpoint.heard)
        await telegram.say("17", "a message in another chat")
        await until(lambda: telegram.heard("17"))
        assert telegram.heard("7") == []
        endpoint.open.set()
        await until(lambda: telegram.heard("7"))


async def test_a_link_in_place_of_a_recording_is_not_followed(endpoint: Endpoint, tmp_path: Path) -> None:
    """A command of the agent may have created it while the message waited."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "canary").write_bytes(b"the canary of a secret")

    class Swaps(Says):
        async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> Any:
            await until(lambda: telegram.calls.count("getFile") == 1 and _uploads(work))
            for path in _uploads(work):
                if not path.is_symlink():
                    await asyncio.to_thread(_swap, path, tmp_path / "canary")
            return await super().chat(messages, tools, model)

    says = Swaps("ok")
    async with FakeTelegram().running() as telegram, running(telegram.settings, work, says, **endpoint.settings):
        await telegram.say("7", "first")
        await telegram.attach("7", "voice.ogg", SOUND)
        await until(lambda: len(says.asked) == 2)
    assert says.asked[1].startswith("[A voice message could not be transcribed (the recording cannot be")
    assert endpoint.heard == []


def _uploads(work: Path) -> list[Path]:
    folder = work / "uploads"
    return [one for one in folder.iterdir() if not one.name.startswith(".")] if folder.exists() else []


def _swap(path: Path, secret: Path) -> None:
    os.unlink(path)
    path.symlink_to(secret)


def test_the_providers_key_goes_only_to_its_own_address() -> None:
    def headers(**settings: Any) -> str:
        made = make_transcriber(Config(**settings), {"OPENAI_API_KEY": "of-openai", "GROQ_API_KEY": "of-groq"})
        assert made is not None
        return f"{made._endpoint._origin} {made._endpoint._headers.get('Authorization')}"

    whisper: dict[str, Any] = {"transcription_model": "whisper-1"}
    assert headers(**whisper) == "https://api.openai.com Bearer of-openai"
    assert headers(**whisper, provider="groq") == "https://api.groq.com Bearer of-groq"
    assert headers(**whisper, base_url="http://127.0.0.1:1/v1", api_key="own") == "http://127.0.0.1:1 Bearer own"
    own = {**whisper, "api_key": "of-the-model", "transcription_url": "http://127.0.0.1:2/v1"}
    assert headers(**own) == "http://127.0.0.1:2 None"
    assert headers(**own, transcription_key="for-it") == "http://127.0.0.1:2 Bearer for-it"
    assert make_transcriber(Config()) is None
    with pytest.raises(ConfigError, match="provider anthropic has no transcriptions"):
        make_transcriber(Config(**whisper, provider="anthropic"))


def test_a_recording_is_recognised_by_its_name() -> None:
    assert all(map(is_recording, ["voice.ogg", "a/Memo.M4A", "song.mp3", "x.opus", "audio_message.webm"]))
    assert not any(map(is_recording, ["film.webm", "a.mp4", "notes.txt", ""]))
