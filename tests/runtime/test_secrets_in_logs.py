"""No secret is logged, whatever fails with it: neither in a traceback nor in the activity log."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, LLMProvider, LLMResponse, MessageBus
from everloop.channels.access import tell
from everloop.channels.runner import Sender
from everloop.config import Config
from everloop.config.redaction import HIDDEN, Secrets
from everloop.log import encode_entry
from everloop.providers.base import ProviderError
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider
from everloop.testing.channels import running
from tests.channels.hooks import HookNetwork
from tests.channels.says import found
from tests.support.commands import until

KEY = "canary-of-a-key-7193"
OTHER = "canary-in-the-environment-5521"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Everything that is logged, with tracebacks, as a server writes it to standard error."""
    monkeypatch.setenv("BEANS_API_TOKEN", OTHER)
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.setLevel(level)
    root.removeHandler(handler)


def check(text: str, *words: str) -> None:
    assert KEY not in text
    assert OTHER not in text
    for one in words:
        assert one in text, text[-2_000:]


async def activity(store: Any) -> str:
    """Return all that the store has of the owner's sessions."""
    entries = [one.entry for info in await store.sessions("me") for one in await store.read_log(info.id)]
    return "\n".join(encode_entry(entry) for entry in entries)


class Told(Exception):
    """An error that keeps its text outside of `args`, as those of some libraries do."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def __str__(self) -> str:
        return f"cannot reach {self.url}"


def chained() -> Exception:
    error = RuntimeError("the model's library broke")
    error.__cause__ = ValueError(f"header x-key: {KEY}")
    error.add_note(f"with {OTHER}")
    return error


ERRORS: dict[str, Callable[[], Exception]] = {
    "plain": lambda: RuntimeError(f"401 for {KEY} and {OTHER}"),
    "provider": lambda: ProviderError(f"the server says: invalid key {KEY} ({OTHER})", status=401),
    "own text": lambda: Told(f"https://models.example/?key={KEY}&token={OTHER}"),
    "cause": chained,
    "group": lambda: ExceptionGroup("two things", [ValueError(KEY), OSError(2, "no file", f"/keys/{OTHER}")]),
    "lookup": lambda: KeyError(KEY),
    "shape": lambda: RuntimeError("Authorization: Bearer abcdefghijklmnop, sk-abcdefghijklmnop1234"),
}


class Fails(LLMProvider):
    """A provider of a program's own, whose library puts the key into its errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__(KEY, model="fails")
        self.error = error

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        raise self.error


@pytest.mark.parametrize("kind", ERRORS)
async def test_a_provider_that_fails_with_its_key_tells_nobody(kind: str, logged: io.StringIO, tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    async with AgentLoop(MessageBus(), Fails(ERRORS[kind]()), tmp_path, store=store, config=Config()) as agent:
        check(await agent.process_direct("hello"))
        check(await agent.process_direct("/compact"))
        kept = await activity(store)
    check(kept, '"error"')
    check(logged.getvalue(), *([] if kind == "provider" else ["Traceback (most recent call last)", "failed"]))
    if kind == "shape":
        assert "abcdefghijklmnop" not in logged.getvalue() + kept
    elif kind in ("plain", "provider", "own text"):
        assert HIDDEN in kept


async def test_a_turn_that_cannot_begin_logs_a_traceback_without_secrets(
    logged: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours, outside of the model call."""

    def broken(*_: Any) -> Any:
        raise RuntimeError(f"no request with {KEY}") from ValueError(OTHER)

    store = SQLiteStore(tmp_path / "store.db")
    config = Config(api_key=KEY)
    async with AgentLoop(MessageBus(), ScriptedProvider(["hi"]), tmp_path, store=store, config=config) as agent:
        monkeypatch.setattr("everloop.runtime.turn_runner.run_turn", broken)
        check(await agent.process_direct("hello"), HIDDEN)
        check(await activity(store), HIDDEN)
    check(logged.getvalue(), "failed", "Traceback", "RuntimeError: no request with [secret]", "ValueError: [secret]")


async def test_a_title_that_fails_with_the_key_logs_it_nowhere(logged: io.StringIO, tmp_path: Path) -> None:
    provider = ScriptedProvider(["Fine.", RuntimeError(f"no title for {KEY}")])
    store = SQLiteStore(tmp_path / "store.db")
    config = Config(api_key=KEY)
    async with AgentLoop(MessageBus(), provider, tmp_path, store=store, config=config) as agent:
        await agent.process_direct("hello")
        assert await agent.name_session() == ""
    check(logged.getvalue(), "got no title")


@pytest.mark.parametrize("place", ["receive", "send", "bug"])
async def test_a_channel_that_fails_with_its_secret_logs_it_nowhere(
    place: str, logged: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError(f"login as agent:{KEY} refused") from ValueError(f"password={KEY}")

    if place == "bug":
        monkeypatch.setattr(Sender, "_take", broken)  # it ends the channel's work, with a traceback
    else:
        monkeypatch.setattr(f"everloop.channels.webhook.Webhook.{place}", broken)
    async with HookNetwork().running() as network:
        network.settings["secret"] = KEY
        async with running(network.settings, tmp_path, ScriptedProvider(["hi"], repeat_last=True)) as store:
            if place == "send":
                await tell(store, "hook", "me", "anna", "hello", "1")
            await until(lambda: "login as" in logged.getvalue())
            if place != "bug":
                await found(lambda: _tells_why(store))
            state = str(await store.channel_state("hook"))
            kept = await activity(store)
    check(logged.getvalue(), *(["Traceback", "channel hook failed"] if place == "bug" else ["channel hook: "]))
    check(state, *([] if place == "bug" else ["login as"]))
    check(kept)


async def _tells_why(store: Any) -> bool:
    return "login as" in str(await store.channel_state("hook"))


def test_an_error_without_secrets_is_the_same_one() -> None:
    error = RuntimeError("nothing to hide")
    assert Secrets(Config(), KEY).strip(error) is error
    assert str(error) == "nothing to hide"
