"""Request options besides messages: sent under the server's names, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from everloop.providers.anthropic import AnthropicProvider
from everloop.providers.base import OPTIONS, LLMProvider, LLMResponse, ProviderError, honours, option_keywords
from everloop.providers.endpoints import Quirks
from everloop.providers.openai import OpenAIProvider
from everloop.providers.retry import Resilient
from tests.providers.openai.streams import ASK, ECHO
from tests.support.model_servers import anthropic as anthropic
from tests.support.model_servers import server as server

VALUES: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.9,
    "max_tokens": 77,
    "stop": ["END"],
    "seed": 7,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "logit_bias": {"50256": -100},
    "reasoning_effort": "low",
    "verbosity": "low",
    "user": "somebody",
    "safety_identifier": "someone",
    "prompt_cache_key": "key",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "logprobs": True,
    "top_logprobs": 2,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Plain(LLMProvider):
    """A complete custom provider."""

    async def chat(self, messages: Any, tools: Any = None, model: Any = None) -> LLMResponse:
        return LLMResponse("plain")


async def asked(provider: Any, options: Any, tools: Any = ECHO, *, streamed: bool = True) -> None:
    """Make one request, and release the connection; the request is in the server's hands."""
    try:
        if streamed:
            async for _ in provider.stream(ASK, tools, None, options=options):
                pass
        else:
            await provider.chat(ASK, tools, None, options=options)
    finally:
        await provider.close()


async def sent_to(server: Any, provider: Any, options: Any, tools: Any = ECHO, **how: bool) -> dict[str, Any]:
    server.reply("ok")
    await asked(provider, options, tools, **how)
    return dict(server.requests[-1].body)


async def refused(provider: Any, options: Any, tools: Any = ECHO) -> ProviderError:
    """Return the error that both kinds of call raise."""
    for streamed in (True, False):
        with pytest.raises(ProviderError) as error:
            await asked(provider, options, tools, streamed=streamed)
        assert error.value.status == 400
        assert not error.value.retryable
    return error.value


@pytest.mark.parametrize("streamed", [True, False])
async def test_every_option_reaches_an_openai_server_unchanged(server, streamed):
    assert VALUES.keys() == OPTIONS
    provider = OpenAIProvider(server.base_url, model="m")
    body = await sent_to(server, provider, VALUES, streamed=streamed)
    assert {name: body[name] for name in VALUES} == VALUES


async def test_options_win_over_the_fields_of_every_request_and_apply_to_one_request(server):
    provider = OpenAIProvider(server.base_url, model="m", extra={"temperature": 1, "top_k": 5})
    first = await sent_to(server, provider, {"temperature": 0})
    second = await sent_to(server, provider, {"temperature": None})
    assert [(body["temperature"], body["top_k"]) for body in (first, second)] == [(0, 5), (1, 5)]


async def test_a_server_gets_an_option_under_its_own_name_and_only_those_it_accepts(server):
    quirks = Quirks({"max_tokens": "max_completion_tokens"}, refused=frozenset({"seed"}), stream_options=False)
    provider = OpenAIProvider(server.base_url, model="m", quirks=quirks)
    body = await sent_to(server, provider, {"max_tokens": 5})
    assert body["max_completion_tokens"] == 5
    assert body.keys().isdisjoint({"max_tokens", "stream_options"})
    assert "seed" not in honours(provider)
    assert "seed" in str(await refused(provider, {"max_tokens": 5, "seed": 1}))


async def test_without_tools_the_choice_of_one_is_left_out(server, anthropic):
    options = {"tool_choice": "auto", "parallel_tool_calls": False}
    for asked_server, provider in (
        (server, OpenAIProvider(server.base_url, model="m")),
        (anthropic, AnthropicProvider("k", "m", base_url=anthropic.base_url)),
    ):
        assert (await sent_to(asked_server, provider, options, None)).keys().isdisjoint(options)


async def test_a_forced_call_without_tools_is_not_silently_left_out(server, anthropic):
    body = await sent_to(server, OpenAIProvider(server.base_url, model="m"), {"tool_choice": "required"}, None)
    assert body["tool_choice"] == "required"
    await refused(AnthropicProvider("k", "m", base_url=anthropic.base_url), {"tool_choice": "required"}, None)
    assert anthropic.requests == []


ANTHROPIC: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.0, "top_p": 0.5, "max_tokens": 9}, {"temperature": 0.0, "top_p": 0.5, "max_tokens": 9}),
    ({"stop": "END"}, {"stop_sequences": ["END"]}),
    ({"stop": ["a", "b"]}, {"stop_sequences": ["a", "b"]}),
    ({"user": "somebody"}, {"metadata": {"user_id": "somebody"}}),
    ({"tool_choice": "auto"}, {"tool_choice": {"type": "auto"}}),
    ({"tool_choice": "none"}, {"tool_choice": {"type": "none"}}),
    ({"tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
    (
        {"tool_choice": {"type": "function", "function": {"name": "echo"}}},
        {"tool_choice": {"type": "tool", "name": "echo"}},
    ),
    ({"parallel_tool_calls": False}, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ({"parallel_tool_calls": True}, {}),
    (
        {"parallel_tool_calls": False, "tool_choice": "required"},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    ),
    ({"parallel_tool_calls": False, "tool_choice": "none"}, {"tool_choice": {"type": "none"}}),
    ({"response_format": {"type": "text"}}, {}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
]


@pytest.mark.parametrize(("options", "fields"), ANTHROPIC)
async def test_options_become_the_fields_of_anthropics_api(anthropic, options, fields):
    provider = AnthropicProvider("k", "m", base_url=anthropic.base_url)
    body = await sent_to(anthropic, provider, options)
    usual = await sent_to(anthropic, provider, None)
    assert body == usual | fields


@pytest.mark.parametrize("options", [{name: VALUES[name]} for name in ("seed", "logit_bias", "response_format")])
async def test_options_that_anthropics_api_lacks_are_refused_by_name(anthropic, options):
    error = await refused(AnthropicProvider("k", "m", base_url=anthropic.base_url), options)
    assert all(name in str(error) for name in options)
    assert anthropic.requests == []


async def test_an_unknown_form_of_choice_is_refused(anthropic):
    provider = AnthropicProvider("k", "m", base_url=anthropic.base_url)
    for choice in ("sometimes", {"type": "allowed_tools"}, {"type": "function", "function": {}}, 3):
        assert "tool_choice" in str(await refused(provider, {"tool_choice": choice}))


@pytest.mark.parametrize(
    ("options", "thinks"),
    [
        (None, True),
        ({"stop": "x", "tool_choice": "none"}, True),
        ({"max_tokens": 4001}, True),
        ({"max_tokens": 4000}, False),
        ({"temperature": 0.2}, False),
        ({"top_p": 0.2}, False),
        ({"tool_choice": "required"}, False),
    ],
)
async def test_a_model_does_not_think_where_the_api_would_refuse_it(anthropic, options, thinks):
    provider = AnthropicProvider("k", "m", base_url=anthropic.base_url, thinking=4000)
    assert ("thinking" in await sent_to(anthropic, provider, options)) == thinks


async def test_a_renamed_tool_is_chosen_by_its_new_name(anthropic):
    tools = [{"type": "function", "function": {"name": "a.b", "parameters": {"type": "object"}}}]
    provider = AnthropicProvider("k", "m", base_url=anthropic.base_url)
    choice = {"type": "function", "function": {"name": "a.b"}}
    body = await sent_to(anthropic, provider, {"tool_choice": choice}, tools)
    assert body["tool_choice"]["name"] == body["tools"][0]["name"]


async def test_a_list_of_providers_accepts_what_all_of_them_do_and_passes_it_on(server, anthropic):
    first = OpenAIProvider(server.base_url, model="m")
    second = AnthropicProvider("k", "m", base_url=anthropic.base_url)
    both = Resilient([(first, None), (second, None)], retries=0)
    assert honours(both) == honours(second) < honours(first)
    for streamed in (True, False):
        server.fail(500)
        anthropic.reply("ok")
        await asked(both, {"temperature": 0.5}, streamed=streamed)
        assert server.requests[-1].body["temperature"] == anthropic.requests[-1].body["temperature"] == 0.5
    await refused(both, {"seed": 1})
    assert len(server.requests) == 2


async def test_a_custom_provider_never_gets_options_and_says_so():
    plain = Plain()
    assert honours(plain) == honours(object()) == frozenset()
    alone = Resilient([(plain, None)])
    assert (await alone.chat(ASK, options={"seed": None})).content == "plain"
    shown: list[Any] = [item async for item in alone.stream(ASK)]
    assert shown[-1].content == "plain"
    assert "temperature" in str(await refused(alone, {"temperature": 1}))
    assert option_keywords(plain, {"stop": None}) == option_keywords(plain, None) == {}


async def test_requesting_a_default_requests_nothing(anthropic):
    usual = {"tool_choice": "auto", "parallel_tool_calls": True, "frequency_penalty": 0.0, "logit_bias": {}}
    assert option_keywords(Plain(), usual) == {}
    provider = AnthropicProvider("k", "m", base_url=anthropic.base_url)
    body = await sent_to(anthropic, provider, {"presence_penalty": 0, "service_tier": "auto"})
    assert body == await sent_to(anthropic, provider, None)
    await refused(provider, {"presence_penalty": 0.5})
