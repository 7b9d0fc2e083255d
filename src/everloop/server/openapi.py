"""The OpenAPI document of the server, made from the types that read its requests and write its answers."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import fields

from .._version import __version__
from . import responses as bodies
from .parameters import WORDS, effect
from .responses import Chunk, Completion, Error, Health, Model, Models
from .shapes import FIXED, ChatBody

Json = dict[str, Any]

ERRORS = {
    "400": "Something is wrong with the request; `param` names it.",
    "401": "There is no token, or a wrong one.",
    "403": "The server does not answer to this name, or not to pages of this origin.",
    "404": "There is no such model, or nothing at this address.",
    "405": "The method is not allowed here.",
    "408": "The body came too slowly.",
    "409": "The turn was stopped, or another message took its place.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests at once or in a minute, or a budget is used up.",
    "500": "An error inside the server.",
    "502": "The model behind the server failed.",
    "503": "The server, or the model behind it, cannot answer now.",
    "504": "The model behind the server took too long.",
}
WAIT = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
HEADERS = {
    "401": {"WWW-Authenticate": {"description": "How to show a token.", "schema": {"type": "string"}}},
    "405": {"Allow": {"description": "The methods that are.", "schema": {"type": "string"}}},
    "429": WAIT,
    "503": WAIT,
}
EFFECTS = {
    "honoured": "",
    "passed on": " Refused if the model behind the server does not take it.",
    "no effect": " Accepted, without effect.",
    "refused": " Any other value is refused.",
}
LENGTH = {"minLength": 1, "maxLength": 200}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
EXAMPLES: dict[str, Json] = {
    "plain": {"messages": [{"role": "user", "content": "Hello."}]},
    "streamed": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "a tool of the client": {"messages": [{"role": "user", "content": "Is it cold in Oslo?"}], "tools": [TOOL]},
    "its result": {
        "messages": [
            {"role": "user", "content": "Is it cold in Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "-3 °C"},
        ],
        "tools": [TOOL],
    },
    "a picture": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
                ],
            }
        ]
    },
}


def document() -> Json:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Everloop",
            "version": __version__,
            "summary": "An agent behind OpenAI's chat completions.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": {
            "/v1/chat/completions": {"post": _chat()},
            "/v1/models": {"get": _get("list_models", "The models that a request may name.", Models)},
            "/v1/models/{id}": {"get": _model()},
            "/healthz": {"get": _get("health", "Whether the server is alive.", Health, token=False)},
            "/readyz": {"get": _get("readiness", "Whether the server takes requests.", Health, token=False)},
            "/openapi.json": {"get": _get("openapi", "This document.", None)},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


# ---------------------------------------------------------------------------------------------- operations


def _chat() -> Json:
    data = "A `Chunk`, or an `Error` when the answer breaks off; at the end `[DONE]`."
    event = {"type": "object", "properties": {"data": {"type": "string", "description": data}}, "required": ["data"]}
    return {
        "operationId": "create_chat_completion",
        "summary": "An answer of the agent.",
        "security": [{"token": []}, {}],
        "parameters": [
            _header("X-Session", "The session that the server keeps, where only the last message counts.", LENGTH),
            _header("Idempotency-Key", "In a session: a request that is repeated gets the answer of the first.", {}),
            _header("Last-Event-ID", "Of a stream that is asked for again: the last id that the client has.", {}),
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _ref(ChatBody),
                    "examples": {name: {"value": value} for name, value in EXAMPLES.items()},
                }
            },
        },
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {
                    "application/json": {"schema": _ref(Completion)},
                    "text/event-stream": {"schema": event},
                },
            },
            **_errors(*ERRORS),
        },
    }


def _get(name: str, summary: str, body: type | None, *, token: bool = True) -> Json:
    codes = ("400", "401", "403", "405", "429", "500", "503") if token else ("400", "403", "405", "500", "503")
    return {
        "operationId": name,
        "summary": summary,
        "security": [{"token": []}, {}] if token else [],
        "responses": {
            "200": {
                "description": summary,
                "content": {"application/json": {"schema": _ref(body) if body else {"type": "object"}}},
            },
            **_errors(*codes),
        },
    }


def _model() -> Json:
    operation = _get("get_model", "One of the models.", Model)
    operation["parameters"] = [
        {
            "name": "id",
            "in": "path",
            "required": True,
            "description": "Its name, which may hold slashes.",
            "schema": {"type": "string", "minLength": 1},
        }
    ]
    operation["responses"] |= _errors("404")
    return operation


def _header(name: str, words: str, limits: Json) -> Json:
    words = f"{words} 1 to 200 printable characters."
    return {"name": name, "in": "header", "description": words, "schema": {"type": "string", **limits}}


def _errors(*codes: str) -> Json:
    return {
        code: {
            "description": ERRORS[code],
            "content": {"application/json": {"schema": _ref(Error)}},
            **({"headers": HEADERS[code]} if code in HEADERS else {}),
        }
        for code in codes
    }


# ---------------------------------------------------------------------------------------------- schemas


def _ref(body: type) -> Json:
    return {"$ref": f"#/components/schemas/{body.__name__}"}


def _schemas() -> Json:
    types = [ChatBody, Completion, Chunk, Models, Health, Error]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    properties = schemas["ChatBody"]["properties"]
    for name, values in FIXED.items():  # the types cannot say this: 0 and False are the same to them
        properties[name]["enum"] = list(values)
    for name in ("function_call", "audio"):
        schemas["AssistantMessage"]["properties"][name]["enum"] = [None]
    schemas["AssistantMessage"]["anyOf"] = [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"required": ["refusal"], "properties": {"refusal": {"type": "string"}}},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ]
    schemas["StreamOptions"]["properties"]["include_obfuscation"]["enum"] = [False, None]
    for name, schema in schemas.items():
        if (answer := getattr(bodies, name, None)) is not None:  # what has a value is always sent
            schema["required"] = [field.name for field in fields(answer) if field.default is not UNSET]
    for name, words in WORDS.items():
        properties[name]["description"] = words + EFFECTS[effect(name)]
    return schemas
