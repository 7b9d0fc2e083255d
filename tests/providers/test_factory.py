"""From settings to a provider that asks the right server, with the right key and no other's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from everloop.errors import ConfigError
from everloop.providers.base import ProviderError, honours
from everloop.providers.endpoints import ENDPOINTS
from everloop.providers.factory import make_provider
from everloop.testing import FakeAnthropic, FakeOpenAI
from tests.providers.openai.streams import ASK

CANARY = "canary-key-4711"
KEYS = {known.key: CANARY for known in ENDPOINTS.values() if known.key}


def settings(**values: Any) -> Any:
    return SimpleNamespace(**values)


def secret_of(config: Any, environment: dict[str, str]) -> Any:
    """Return the key that the provider of these settings would send."""
    return make_provider(config, environment)._providers[0][0]._endpoint._secret  # type: ignore[attr-defined]


async def test_settings_make_a_provider_with_retries_and_fallbacks():
    async with FakeOpenAI() as server:
        server.fail(503, headers={"retry-after-ms": "1"})
        server.fail(404)
        server.reply("from the spare")
        config = settings(
            provider="openai", base_url=server.base_url, api_key="k", model="main", fallbacks=["spare"],
            connect_timeout=5, first_token_timeout=5, token_timeout=5, request_timeout=5, retries=1,
        )  # fmt: skip
        provider = make_provider(config)
        answer = await provider.chat(ASK)
        assert (answer.content, answer.model) == ("from the spare", "spare")
        assert [request.model for request in server.requests] == ["main", "main", "spare"]
        assert provider.get_default_model() == "main"
        await provider.close()


async def test_the_timeouts_of_the_settings_are_kept():
    async with FakeOpenAI() as server:
        server.hang(5)
        provider = make_provider(settings(base_url=server.base_url, model="m", first_token_timeout=0.1, retries=0))
        with pytest.raises(ProviderError, match=r"no first token within 0.1 s"):
            [item async for item in provider.stream(ASK)]  # type: ignore[attr-defined]
        await provider.close()


def test_an_unknown_provider_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"opneai.*EVERLOOP_PROVIDER.*openai, ollama"):
        make_provider(settings(provider="opneai", model="m"))


def test_a_missing_model_key_or_address_names_the_setting():
    with pytest.raises(ConfigError, match="EVERLOOP_MODEL"):
        make_provider(settings(provider="ollama", model=""))
    with pytest.raises(ConfigError, match=r"EVERLOOP_API_KEY.*OPENAI_API_KEY.*EVERLOOP_BASE_URL"):
        make_provider(settings(provider=None, model="m"), {})
    with pytest.raises(ConfigError, match="EVERLOOP_BASE_URL"):
        make_provider(settings(provider="azure", model="m", api_key="k"))


@pytest.mark.parametrize("name", [name for name, known in ENDPOINTS.items() if known.base_url])
def test_every_known_endpoint_can_be_made(name):
    assert make_provider(settings(provider=name, model="m", api_key="k")).get_default_model() == "m"


def test_an_environments_key_goes_to_its_own_endpoint():
    assert secret_of(settings(provider="groq", model="m"), {"GROQ_API_KEY": CANARY}) == CANARY
    assert secret_of(settings(provider="anthropic", model="m"), {"ANTHROPIC_API_KEY": CANARY}) == CANARY
    at_groq = settings(provider="openai", base_url="https://api.groq.com/openai/v1", model="m")
    assert secret_of(at_groq, {"GROQ_API_KEY": CANARY, "OPENAI_API_KEY": "another"}) == CANARY
    azure = settings(provider="azure", base_url="https://mine.openai.azure.com/openai/v1", model="m")
    assert secret_of(azure, {"AZURE_OPENAI_API_KEY": CANARY}) == CANARY


def test_the_key_of_the_settings_takes_precedence_over_that_of_the_environment():
    assert secret_of(settings(provider="groq", model="m", api_key="mine"), KEYS) == "mine"


@pytest.mark.parametrize(
    "base_url",
    [
        "http://api.openai.com/v1",  # not safe in transit
        "https://api.openai.com:8443/v1",
        "https://api.openai.com.example.org/v1",
        "https://example.org/api.openai.com/v1",
        "https://api.openai.com@example.org/v1",
        "https://mineopenai.azure.com/openai/v1",
        "http://mine.openai.azure.com/openai/v1",
        "http://127.0.0.1:11434/v1",
        "https://10.0.0.1/v1",
    ],
)
@pytest.mark.parametrize("name", ["openai", "anthropic", "azure", "groq"])
def test_no_key_of_the_environment_goes_to_another_server(name, base_url):
    assert not secret_of(settings(provider=name, base_url=base_url, model="m"), KEYS)


async def test_a_server_named_by_its_address_gets_no_key_at_all(monkeypatch):
    for name in KEYS:
        monkeypatch.setenv(name, CANARY)
    async with FakeOpenAI() as server:
        for name in ("openai", "groq", "ollama"):
            provider = make_provider(settings(provider=name, base_url=server.base_url, model="tools-0x0"))
            await provider.chat(ASK)
            await provider.close()
        assert CANARY not in str([request.headers for request in server.requests])


async def test_the_settings_temperature_and_length_go_into_every_request():
    async with FakeOpenAI() as openai, FakeAnthropic() as anthropic:
        for name, server in (("openai", openai), ("groq", openai), ("anthropic", anthropic)):
            server.reply("ok")
            config = settings(provider=name, base_url=server.base_url, api_key="k", model="m")
            config.temperature, config.answer_tokens = 0.0, 99
            provider = make_provider(config)
            await provider.chat(ASK)
            await provider.close()
        plain, groq, claude = (dict(seen.body or {}) for seen in (*openai.requests, *anthropic.requests))
        assert plain["temperature"] == groq["temperature"] == claude["temperature"] == 0.0
        assert plain["max_tokens"] == claude["max_tokens"] == groq["max_completion_tokens"] == 99
        assert "max_tokens" not in groq


async def test_without_these_settings_requests_leave_them_out():
    async with FakeOpenAI() as server:
        server.reply("ok")
        config = settings(base_url=server.base_url, model="m", temperature=-1.0, answer_tokens=0)
        provider = make_provider(config)
        await provider.chat(ASK)
        await provider.close()
        assert server.requests[0].body == {"model": "m", "messages": ASK}


async def test_an_option_of_one_request_wins_over_the_settings():
    async with FakeOpenAI() as server:
        server.reply("ok")
        config = settings(provider="groq", base_url=server.base_url, model="m", temperature=0.5, answer_tokens=9)
        provider: Any = make_provider(config)
        await provider.chat(ASK, options={"max_tokens": 5, "temperature": 0})
        await provider.close()
        body = server.requests[0].body or {}
        assert (body["max_completion_tokens"], body["temperature"]) == (5, 0)
        assert "max_tokens" not in body


def test_an_endpoint_of_a_kind_keeps_its_quirks_at_another_address():
    there = settings(provider="ollama", base_url="http://10.0.0.7:11434/v1", model="m")
    assert "tool_choice" not in honours(make_provider(there))
    plain = settings(provider="openai", base_url="http://10.0.0.7:9/v1", model="m")
    assert "tool_choice" in honours(make_provider(plain))


def test_litellm_without_its_package_says_what_to_install():
    with pytest.raises(ConfigError, match=r"everloop\[litellm\]"):
        make_provider(settings(provider="litellm", model="groq/m"))
