"""The OpenAPI document says what the server does: the parser and the document are held against each other."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from everloop.config import Config
from everloop.runtime.agent import agent_of
from everloop.runtime.owners import Owners
from everloop.server.app import Server
from everloop.server.errors import ApiError
from everloop.server.openapi import EXAMPLES, PARAMETERS, document, effect, parameter_table
from everloop.server.requests import DEFAULTS, ChatBody, ChatRequest, read_chat
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]
VALID = Draft202012Validator({"$ref": "#/components/schemas/ChatBody", "components": DOCUMENT["components"]})
PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"
# What no schema can say: one part of a request must fit another, or a text must be something.
BETWEEN = re.compile(
    r"messages(\[\d+\](\.(content|tool_calls|tool_call_id)(\[\d+\](\.id|\.image_url(\.url)?)?)?)?)?"
    r"|messages\[\d+\]\.tool_calls\[\d+\]\.(function|custom)|tools\[\d+\]\.(function|custom)(\.name)?"
    r"|tool_choice|max_tokens|stream_options"
)


def read(body: Any, honours: frozenset[str] = frozenset(DEFAULTS)) -> ChatRequest | ApiError:
    try:
        return read_chat(json.dumps(body).encode(), honours=honours, messages_limit=1000)
    except ApiError as error:
        return error


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return {name for item in value for name in references(item)}
    if not isinstance(value, dict):
        return set()
    found = {name for item in value.values() for name in references(item)}
    return found | {value["$ref"]} if "$ref" in value else found


def test_every_reference_and_every_schema_is_valid():
    assert references(DOCUMENT["paths"]) | references(SCHEMAS) <= {f"#/components/schemas/{name}" for name in SCHEMAS}
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    assert document() == DOCUMENT


def test_every_operation_has_its_own_name_and_says_how_it_can_fail():
    paths = {path: list(found.values()) for path, found in DOCUMENT["paths"].items()}
    operations = [(path, operation) for path, found in paths.items() for operation in found]
    assert len({operation["operationId"] for _, operation in operations}) == len(operations)
    for path, operation in operations:
        ollama = path.startswith("/api/") and not operation["operationId"].startswith("page_")
        error = "MessagesError" if path.startswith("/v1/messages") else "OllamaError" if ollama else "Error"
        assert {"400", "403", "405", "500", "503"} <= operation["responses"].keys()
        assert {"200", "202"} & operation["responses"].keys()
        for code, response in operation["responses"].items():
            if code >= "300":
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": f"#/components/schemas/{error}"}
            else:
                assert all(content["schema"] for content in response["content"].values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_of_the_document_is_accepted(name):
    VALID.validate(EXAMPLES[name])
    assert isinstance(read(EXAMPLES[name]), ChatRequest)


def test_an_assistants_message_needs_one_of_three_fields():
    call = EXAMPLES["its result"]["messages"][1]["tool_calls"]
    cases: list[dict[str, Any]] = [
        {"content": "x"}, {"refusal": "x"}, {"tool_calls": call}, {"content": None}, {"tool_calls": []}, {},
    ]  # fmt: skip
    for said in cases:
        message = {"role": "assistant", **said}
        assert VALID.is_valid({"messages": [message]}) == any(said.values())


def test_fields_that_are_always_sent_are_required():
    assert set(SCHEMAS["Completion"]["required"]) == {"id", "object", "created", "model", "choices"}
    assert set(SCHEMAS["Chunk"]["required"]) == {"id", "object", "created", "model", "choices"}
    assert set(SCHEMAS["ErrorFacts"]["required"]) == {"message", "type", "param", "code"}


def test_every_path_that_the_server_has_is_in_the_document(tmp_path):
    """Except the metrics, and the files of the page."""
    config = Config(home=tmp_path, workspace=tmp_path)
    store, provider = SQLiteStore(tmp_path / "x.db"), ScriptedProvider([])
    routes = Server(config, Owners(config, store, provider, agent_of))._app().router.routes()
    served = {
        (route.method.lower(), re.sub(r":.*}", "}", getattr(route.resource, "canonical", ""))) for route in routes
    }
    described = {(method, path) for path, found in DOCUMENT["paths"].items() for method in found}
    files = {("get", "/"), ("get", "/web/{path}"), ("get", "/metrics")}
    others = {one for one in served if one[0] == "head"} | files
    assert served - others == described


def test_every_operation_of_the_page_is_on_the_page_of_the_api():
    text = PAGE.read_text()
    missing = [
        path
        for path, found in DOCUMENT["paths"].items()
        for method, operation in found.items()
        if operation["operationId"].startswith("page_")
        and f"`{method.upper()} {re.sub(r'{(.*?)}', lambda name: name[1].upper(), path)}" not in text
    ]
    assert missing == []


def test_every_parameter_is_described():
    assert list(PARAMETERS) == sorted(PARAMETERS, key=list(ChatBody.__struct_fields__).index)
    assert PARAMETERS.keys() == set(ChatBody.__struct_fields__) == SCHEMAS["ChatBody"]["properties"].keys()


def test_the_page_of_the_docs_has_the_generated_table():
    assert parameter_table() in PAGE.read_text(), f"docs/api.md must have this table:\n\n{parameter_table()}"


def test_the_table_says_how_each_parameter_is_handled():
    def outcome(name: str, value: Any, honours: frozenset[str]) -> str:
        request = read({"messages": [{"role": "user", "content": "x"}], "stream": True, name: value}, honours)
        if isinstance(request, ApiError):
            assert request.param == name
            return "refused"
        if request.ignored:
            return "ignored"
        plain = ChatRequest(messages=[{"role": "user", "content": "x"}], stream=True)
        return "passed on" if request.options else "no effect" if request == plain else "honoured"

    samples: dict[str, Any] = {
        "messages": [{"role": "user", "content": "y"}], "model": "m", "tools": EXAMPLES["its result"]["tools"],
        "tool_choice": "none", "parallel_tool_calls": False, "stream": False, "stream_options": {"include_usage": True},
        "response_format": {"type": "json_object"}, "logit_bias": {"1": 1}, "reasoning_effort": "low",
        "verbosity": "low", "metadata": {"a": "b"}, "n": 2, "top_logprobs": 2, "max_tokens": 2,
        "max_completion_tokens": 2,
        "seed": 2,
        "temperature": 0.5, "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    }  # fmt: skip
    for name in PARAMETERS:
        value = samples.get(name, "text" if name not in ("store", "logprobs") else True)
        everything = outcome(name, value, frozenset(DEFAULTS) - {"user"})
        assert everything == effect(name), name
        if effect(name) == "passed on" and name != "tool_choice":  # a model may always be offered no tools
            assert outcome(name, value, frozenset()) == "refused"


# ---------------------------------------------------------------------------------------------- whatever it allows


def values_of(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows."""
    if "$ref" in schema:
        return st.deferred(lambda: values_of(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema and "type" not in schema:
        return st.one_of([values_of(option, depth) for option in schema["anyOf"]])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"].replace("(?!\\n)$", r"\Z"))
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 5), 5))
        case "integer":
            return st.integers(low, high)
        case "number":
            return st.floats(low, high)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(values_of(schema["items"], depth), min_size=schema.get("minItems", 0), max_size=4)
        case "object":
            return objects_of(schema, depth)
    return st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner, max_size=2), max_leaves=3)


def objects_of(schema: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    properties = {name: values_of(inner, depth + 1) for name, inner in schema.get("properties", {}).items()}
    required = set(schema.get("required", ()))
    optional = {name: values for name, values in properties.items() if name not in required}
    known = st.fixed_dictionaries({name: properties[name] for name in required}, optional=optional)
    extra = schema.get("additionalProperties", depth > 0 and {})
    if extra is False:
        return known
    names = values_of({"type": "string", **schema.get("propertyNames", {})})
    more = st.dictionaries(names, values_of(extra or {}), max_size=2)
    return st.builds(lambda known, more: {**more, **known}, known, more)


BODIES = values_of(SCHEMAS["ChatBody"])
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 1.5, 2**70, "", "x", [], {}, [None], {"type": "x"}, [{}], "a" * 600]
)


@settings(max_examples=75)
@given(BODIES)
def test_what_the_document_allows_is_accepted_unless_its_parts_contradict_each_other(body):
    assume(VALID.is_valid(body))
    outcome = read(body)
    if isinstance(outcome, ApiError):
        assert outcome.param is not None
        assert BETWEEN.fullmatch(outcome.param), outcome.message
        missing = outcome.param.endswith((".function", ".custom"))
        assert outcome.code is None or not outcome.param.startswith("messages") or missing, outcome.message


def spoilt(body: dict[str, Any], draw: st.DataObject) -> dict[str, Any]:
    """The body with one thing in it changed, taken away or added, anywhere."""
    body = copy.deepcopy(body)
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if isinstance(place, dict):
            keys.append("odd")
        if not keys:
            return body
        key = draw.draw(st.sampled_from(keys))
        inner = place[key] if key != "odd" else None
        if isinstance(inner, dict | list) and inner and draw.draw(st.booleans()):
            place = inner
        elif inner is not None and draw.draw(st.booleans()):
            del place[key]
            return body
        else:
            place[key] = draw.draw(ODD)
            return body


TYPICAL = st.sampled_from(list(EXAMPLES.values())) | BODIES


@settings(max_examples=125)
@given(TYPICAL, st.data())
def test_what_the_document_does_not_allow_is_refused(body, data):
    body = spoilt(body, data)
    outcome = read(body)
    if not VALID.is_valid(body):
        assert isinstance(outcome, ApiError), body
    elif isinstance(outcome, ApiError):
        assert BETWEEN.fullmatch(outcome.param or ""), outcome.message
