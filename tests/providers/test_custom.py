"""A custom provider: `chat` is enough, and the inherited constructor takes the usual three arguments."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from everloop import AgentLoop, LLMProvider, LLMResponse, MessageBus
from everloop.providers.base import ProviderError, count_of, counts
from everloop.providers.litellm import LiteLLMProvider


class MyProvider(LLMProvider):
    async def chat(self, messages, tools=None, model=None):
        return LLMResponse(f"{self.api_key} {self.base_url} {model or self.get_default_model()}")


async def test_a_provider_with_only_chat_takes_a_key_an_address_and_a_model(tmp_path):
    provider = MyProvider(api_key="my-key", base_url="http://127.0.0.1:1", model="beans-1")
    assert (provider.api_key, provider.base_url, provider.model) == ("my-key", "http://127.0.0.1:1", "beans-1")
    async with AgentLoop(MessageBus(), provider, tmp_path, store=tmp_path / "store.db") as agent:
        assert await agent.process_direct("x") == "my-key http://127.0.0.1:1 beans-1"


def test_each_argument_may_be_left_out():
    assert (MyProvider().api_key, MyProvider().base_url, MyProvider().model) == (None, None, None)
    assert MyProvider("my-key").api_key == "my-key"
    assert MyProvider().get_default_model() == ""


def test_a_default_model_of_the_class_stays_if_none_is_given():
    class Fixed(MyProvider):
        default_model = "peas-2"

    assert Fixed(api_key="k").get_default_model() == "peas-2"
    assert Fixed(model="beans-1").get_default_model() == "beans-1"


async def test_a_subclass_that_never_calls_super_keeps_working(tmp_path):
    class Own(LLMProvider):
        def __init__(self, words: str) -> None:
            self.words = words

        async def chat(self, messages, tools=None, model=None):
            return LLMResponse(f"{self.words} {self.api_key} {self.base_url} {self.model}")

    async with AgentLoop(MessageBus(), Own("said"), tmp_path, store=tmp_path / "store.db") as agent:
        assert await agent.process_direct("x") == "said None None None"


async def test_litellm_needs_no_model_before_a_call_and_then_says_so(tmp_path, monkeypatch):
    (tmp_path / "litellm").mkdir()
    (tmp_path / "litellm" / "__init__.py").write_text("")  # found, never imported
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    provider = LiteLLMProvider(api_key="my-key")
    assert provider.api_key == "my-key"
    asked = [{"role": "user", "content": "x"}]
    with pytest.raises(ProviderError, match="no model is set"):
        await provider.chat(asked)
    with pytest.raises(ProviderError, match="no model is set"):
        await anext(provider.stream(asked))


@pytest.mark.parametrize(
    "usage", [None, "many", {}, {"prompt_tokens": -1}, {"prompt_tokens": 2.5}, {"prompt_tokens": True}]
)
def test_an_invalid_token_count_is_ignored(usage: Any) -> None:
    response = LLMResponse("hi", usage=usage)
    assert counts(response) == {}
    assert count_of(response, "prompt_tokens") == 0


def test_a_single_token_count_equals_the_one_among_all() -> None:
    response = LLMResponse("hi", usage={"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 1 << 60})
    assert counts(response) == {"prompt_tokens": 7, "completion_tokens": 0}
    assert [count_of(response, name) for name in response.usage] == [7, 0, 0]
