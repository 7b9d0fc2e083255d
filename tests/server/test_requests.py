"""What a client may ask for, and that everything else is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everloop.providers import base as providers
from everloop.server.requests import DEFAULTS, SAFE_NAME, WITHOUT_EFFECT, ChatBody, ChatRequest

from .chats import ALL, HELLO, NONE, PIXEL, calls, nested, parts, read, refused, result, tool


def test_the_smallest_request_has_nothing_but_its_messages():
    assert read() == ChatRequest(messages=[HELLO])


def test_null_is_the_same_as_absent_for_every_parameter():
    names: list[str] = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    assert len(names) > 30
    assert read(NONE, **dict.fromkeys(names)) == read()


OPTIONS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.1,
    "max_tokens": 7,
    "stop": ["a", "b"],
    "seed": -3,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "presence_penalty": -2,
    "frequency_penalty": 2,
    "logit_bias": {"50256": -100},
    "reasoning_effort": "minimal",
    "verbosity": "low",
    "user": "ada",
    "logprobs": True,
    "top_logprobs": 3,
}


def test_there_is_an_example_of_every_option():
    assert OPTIONS.keys() == DEFAULTS.keys()
    assert OPTIONS.keys() <= providers.OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_the_model_as_it_was_sent(name):
    request = read(frozenset({name}), tools=[tool()], **{name: OPTIONS[name]})
    assert request.options == {name: OPTIONS[name]}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in WITHOUT_EFFECT])
def test_an_option_that_the_model_does_not_support_is_refused_by_name(name):
    assert refused(ALL - {name}, tools=[tool()], **{name: OPTIONS[name]}).param == name


@pytest.mark.parametrize("name", [name for name, default in DEFAULTS.items() if default is not None])
def test_an_option_with_a_neutral_value_is_accepted_by_every_model(name):
    assert read(NONE, **{name: DEFAULTS[name]}).options == {}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_options_that_only_serve_bookkeeping_are_accepted_by_every_model(name):
    assert read(NONE, **{name: "x"}).options == {}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit_mean_the_same(name):
    assert read(ALL, **{name: 9}).options == {"max_tokens": 9}
    assert refused(NONE, **{name: 9}).param == name


@pytest.mark.parametrize(("name", "empty"), [("stop", []), ("logit_bias", {}), ("tools", []), ("metadata", {})])
def test_an_empty_list_is_the_same_as_none(name, empty):
    assert read(ALL, **{name: empty}) == read()


def test_both_names_of_the_token_limit_must_agree():
    assert read(max_tokens=9, max_completion_tokens=9).options == {"max_tokens": 9}
    assert refused(max_tokens=9, max_completion_tokens=8).param == "max_tokens"


OUT_OF_RANGE = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True),
    ("top_p", 1.1), ("top_p", -1), ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", 2**63), ("max_tokens", True),
    ("max_completion_tokens", -2), ("stop", ["a"] * 5), ("stop", ""), ("stop", [""]), ("stop", 5), ("stop", {"a": 1}),
    ("seed", 2**63), ("seed", "1"), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1\n": 1}), ("logit_bias", [1]),
    ("reasoning_effort", "huge"), ("verbosity", "loud"), ("user", 5), ("stream", "yes"), ("stream", 1), ("model", 5),
    ("metadata", {"a": 1}), ("metadata", {"a" * 65: "b"}), ("metadata", {"a": "b" * 513}),
    ("metadata", {str(n): "" for n in range(17)}), ("parallel_tool_calls", "no"),
    ("n", 0), ("n", 9), ("n", True), ("n", "1"), ("logprobs", 0), ("top_logprobs", 21), ("top_logprobs", False),
    ("messages", "hello"), ("messages", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_its_parameters_name(name, value):
    assert (refused(**{name: value}).param or "").replace("[0]", "") == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]), ("modalities", []), ("audio", {"voice": "alloy", "format": "wav"}),
        ("prediction", {"type": "content", "content": "x"}), ("web_search_options", {}), ("store", True),
        ("service_tier", "flex"), ("functions", []), ("functions", [{"name": "look"}]), ("function_call", "auto"),
    ],
)  # fmt: skip
def test_an_unsupported_feature_is_refused_by_name(name, value):
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1), ("modalities", ["text"]), ("store", False),
        ("service_tier", "auto"), ("service_tier", "default"),
    ],
)  # fmt: skip
def test_a_neutral_value_is_accepted(name, value):
    assert read(NONE, **{name: value}) == read()


@pytest.mark.parametrize("name", ["topk", "N", "messages ", "", "é", "a`b", "x" * 1000])
def test_an_unknown_parameter_is_refused_by_name(name):
    error = refused(ALL, **{name: 1})
    assert error.code == "unknown_parameter"
    assert error.param == (name.strip() if len(name) <= 64 else f"{name[:63]}…")


def test_streaming_and_its_options():
    assert read(stream=True).stream
    assert not read(stream=False).stream
    assert read(stream=True, stream_options={"include_usage": True}).include_usage
    assert not read(stream=True, stream_options={"include_usage": False, "include_obfuscation": False}).include_usage
    for alone in (read(stream_options={"include_usage": True}), read(stream=False, stream_options={})):
        assert not alone.include_usage
        assert alone.ignored == ("stream_options",)
    assert refused(stream=True, stream_options={"usage": True}).param == "stream_options.usage"
    error = refused(stream=True, stream_options={"include_obfuscation": True})
    assert error.param == "stream_options.include_obfuscation"
    assert refused(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


def test_metadata_and_the_model_are_kept():
    request = read(model="gpt/x", metadata={"run": "7"})
    assert (request.model, request.metadata) == ("gpt/x", {"run": "7"})


FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}, "strict": True}}


def test_an_answer_format_may_be_requested():
    assert read(response_format=FORMAT).options == {"response_format": FORMAT}
    assert read(response_format={"type": "text"}).options == {}
    assert refused(response_format={"type": "xml"}).param == "response_format.type"
    assert refused(response_format={}).param == "response_format.type"
    assert refused(response_format={"type": "json_schema"}).param == "response_format.json_schema"
    assert (
        refused(response_format={"type": "json_schema", "json_schema": {}}).param == "response_format.json_schema.name"
    )
    strange = {"type": "json_schema", "json_schema": {"name": "sum", "odd": 1}}
    assert refused(response_format=strange).param == "response_format.json_schema.odd"
    named = {"type": "json_schema", "json_schema": {"name": "a b"}}
    assert refused(response_format=named).param == "response_format.json_schema.name"
    assert refused(NONE, response_format=FORMAT).param == "response_format"
    deep = {"type": "json_schema", "json_schema": {"name": "sum", "schema": nested(100)}}
    assert refused(response_format=deep).param == "response_format.json_schema.schema"


# ---------------------------------------------------------------------------------------------- tools


def test_the_clients_tools_are_passed_on_unchanged():
    tools = [tool(description="Looks.", parameters={"type": "object", "properties": {}}, strict=True), tool("other")]
    assert read(tools=tools).tools == tools
    assert read(tools=[]).tools == []
    odd = [tool(parameters={"minimum": -(10**40), "anyOf": [{}] * 100, **nested(99)})]
    assert read(tools=odd).tools == odd


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "custom", "function": {"name": "x"}}], "tools[0].custom"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(), tool("a b")], "tools[1].function.name"),
        ([tool("look\n")], "tools[0].function.name"),
        ([tool("x" * 129)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(parameters="x")], "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters"),
        ([tool(parameters=nested(100))], "tools[0].function.parameters"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([tool(f"t{number}") for number in range(1001)], "tools"),
        ("look", "tools"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_by_its_place(tools, param):
    assert refused(tools=tools).param == param


def test_a_name_that_models_refuse_is_replaced_for_the_model():
    said = [HELLO, {**calls("c1"), "tool_calls": [_call("c1", "files.read")]}, result("c1"), HELLO]
    request = read(tools=[tool("files.read"), tool("files_read"), tool("x" * 100)], messages=said)
    offered = [one["function"]["name"] for one in request.tools]
    assert all(SAFE_NAME.fullmatch(name) for name in offered)
    assert len(set(offered)) == 3
    assert [request.names.get(name, name) for name in offered] == ["files.read", "files_read", "x" * 100]
    assert request.messages[1]["tool_calls"][0]["function"]["name"] == request.messages[2]["name"] == offered[0]
    chosen = {"type": "function", "function": {"name": "files.read"}}
    assert read(tools=[tool("files.read")], tool_choice=chosen).options["tool_choice"] == {
        "type": "function",
        "function": {"name": "files_read"},
    }


def _call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 40), ("min_p", 0.1), ("chat_template_kwargs", {"enable_thinking": False}), ("enable_thinking", True),
        ("think", True), ("thinking", {"type": "enabled"}), ("reasoning", {"enabled": True}), ("cache_prompt", True),
        ("usage", {"include": True}),
    ],
)  # fmt: skip
def test_parameters_that_other_servers_know_are_accepted_and_named(name, value):
    request = read(**{name: value})
    assert (request.ignored, request.options) == ((name,), {})


def test_clients_own_notations_are_understood():
    assert read(max_tokens=-1).options == {}
    assert read(reasoning_effort="max").options == {"reasoning_effort": "xhigh"}
    effort = read(reasoning={"effort": "low"})
    assert (effort.options, effort.ignored) == ({"reasoning_effort": "low"}, ())
    picture = read(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": PIXEL}]}])
    assert picture.messages[0]["content"] == [{"type": "image_url", "image_url": {"url": PIXEL}}]
    assert read(messages=[HELLO, {"role": "system", "content": "Be brief."}]).messages[-1]["role"] == "system"


def test_pictures_in_results_follow_the_last_of_them():
    shown = [{"type": "image_url", "image_url": {"url": PIXEL}}]
    both = [result("a", [*parts("one"), *shown]), result("b", shown)]
    made = read(messages=[HELLO, calls("a", "b"), *both, HELLO]).messages
    assert [one["role"] for one in made] == ["user", "assistant", "tool", "tool", "user", "user"]
    assert [one["content"] for one in made[2:5]] == ["one", "[a picture, which follows]", [*shown, *shown]]


def test_allowed_tools_are_the_only_ones_that_are_offered():
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
    request = read(tools=[tool(), tool("other")], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [one["function"]["name"] for one in request.tools] == ["look"]
    assert request.options == {"tool_choice": "required"}
    none = read(tools=[tool("other")], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (none.tools, none.client_is_agent) == ([], True)  # it must not get the agent's tools instead


def test_a_custom_tool_is_a_function_with_one_text():
    patch = {
        "type": "custom",
        "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {"definition": "G"}}},
    }
    made = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    chosen = {"type": "custom", "custom": {"name": "patch"}}
    said = [HELLO, {"role": "assistant", "tool_calls": [made]}, result("c1")]
    request = read(tools=[patch], messages=said, tool_choice=chosen)
    (offered,) = request.tools
    assert offered["function"]["parameters"]["required"] == ["input"]
    assert offered["function"]["description"].endswith("G")
    assert json.loads(request.messages[1]["tool_calls"][0]["function"]["arguments"]) == {"input": "*** Begin"}
    assert request.options["tool_choice"]["function"] == {"name": "patch"}
    assert request.custom == {"patch"}


def test_more_tools_than_openai_accepts_are_passed_on():
    assert len(read(tools=[tool(f"t{number}") for number in range(300)]).tools) == 300


def test_the_choice_of_a_tool_must_be_possible():
    named = {"type": "function", "function": {"name": "look"}}
    assert read(tools=[tool()], tool_choice=named).options == {"tool_choice": named}
    assert refused(tools=[tool("other")], tool_choice=named).param == "tool_choice"
    assert refused(tool_choice=named).param == "tool_choice"
    assert refused(tool_choice="required").param == "tool_choice"
    assert refused(tool_choice="any", tools=[tool()]).param == "tool_choice"
    assert refused(tool_choice={"type": "allowed_tools", "allowed_tools": {}}, tools=[tool()]).param
    assert read(tool_choice="auto").options == {"tool_choice": "auto"}


def test_a_model_that_cannot_be_told_to_call_no_tool_is_offered_none():
    assert read(NONE, tools=[tool()], tool_choice="none").answer_only
    assert read(tools=[tool()], tool_choice="none").options == {"tool_choice": "none"}
    assert not read(tools=[tool()], tool_choice="auto").answer_only
    assert refused(NONE, reasoning_effort="none").param == "reasoning_effort"
