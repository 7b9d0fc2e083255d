"""The OpenAPI document of the server, generated from the types of its requests and responses."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET
from msgspec.structs import fields

from .. import __version__
from . import anthropic_messages, model_endpoints, ollama, openai_chat, openai_responses, responses
from .anthropic_messages import AnsweredMessages, CountBody, MessagesBody, MessagesError, TokenCount
from .model_endpoints import (
    CompletionsBody,
    Embeddings,
    EmbeddingsBody,
    OllamaEmbedBody,
    OllamaEmbedding,
    OllamaEmbeddingBody,
    OllamaEmbeddings,
    TextCompletion,
)
from .ollama import (
    OllamaAnswer,
    OllamaChatBody,
    OllamaError,
    OllamaGenerateBody,
    OllamaModels,
    OllamaShowBody,
    OllamaShown,
    OllamaVersion,
)
from .openai_chat import Chunk, Completion
from .openai_responses import DeletedResponse, Response, ResponsesBody
from .page_api import HANDLERS
from .page_routes import operations_of, paths_of
from .requests import DEFAULTS, FIXED, IGNORED, WITHOUT_EFFECT, ChatBody
from .responses import Error, Health, Model, Models

Json = dict[str, Any]
Effect = Literal["honoured", "passed on", "no effect", "ignored", "refused"]

PARAMETERS = {
    "messages": "The conversation; it ends with a user message, a tool result, or a reminder after one of these.",
    "model": "One of `GET /v1/models`; without it, or with another name, the server's default model answers.",
    "tools": "Up to 1,000 functions or custom tools of the client; their calls are handed back. Without them the agent "
    "uses its own.",
    "tool_choice": '"none", "auto", "required", one of `tools` by name, or `allowed_tools`.',
    "parallel_tool_calls": "Whether the model may make several calls in one answer.",
    "stream": "Whether the answer is sent as server-sent events.",
    "stream_options": "With `stream`: `include_usage` adds a chunk with the usage.",
    "temperature": "0 to 2.",
    "top_p": "0 to 1.",
    "max_tokens": "The maximum number of tokens of an answer, for each model call; -1 is none.",
    "max_completion_tokens": "The newer name of `max_tokens`; if both are sent, they must be equal.",
    "stop": "A string, or up to 4, at which the answer ends.",
    "seed": "A 64-bit integer.",
    "response_format": '"text", "json_object", or "json_schema" with a named schema.',
    "presence_penalty": "-2 to 2.",
    "frequency_penalty": "-2 to 2.",
    "logit_bias": "-100 to 100 by token.",
    "reasoning_effort": '"none", "minimal", "low", "medium", "high", "xhigh" or "max", which is "xhigh".',
    "verbosity": '"low", "medium" or "high".',
    "user": "Passed on to a model that supports it.",
    "metadata": "Up to 16 pairs of strings (64 and 512 characters), kept in the activity log.",
    "safety_identifier": "A string.",
    "prompt_cache_key": "A string.",
    "prompt_cache_retention": "A string.",
    "n": "How many answers, up to 8; more than 1 only from the model alone and outside a session. In a stream each "
    "chunk has the `index` of its answer.",
    "logprobs": "Whether the log probabilities of the answer's tokens are wanted.",
    "top_logprobs": "0 to 20 alternatives of each token.",
    "modalities": 'Only ["text"].',
    "audio": "Only null.",
    "prediction": "Only null.",
    "web_search_options": "Only null. The agent searches with its own tools.",
    "store": "Only false. Sessions are kept with the header `X-Session`.",
    "service_tier": 'Only "auto" or "default".',
    "functions": "Only null; `tools` is the newer name.",
    "function_call": "Only null; `tool_choice` is the newer name.",
    "top_k": "A number.",
    "min_p": "A number.",
    "chat_template_kwargs": "An object.",
    "enable_thinking": "Whether the model thinks; `reasoning_effort` is passed on.",
    "think": "The same.",
    "thinking": "The same.",
    "reasoning": "The same; its `effort` is taken for `reasoning_effort`.",
    "cache_prompt": "Whether the prompt is cached; it is.",
    "usage": "Whether the usage is reported; it is.",
}

ERRORS = {
    "400": "The request is invalid; `param` names the parameter.",
    "401": "The token is missing, unknown or revoked.",
    "403": "The Host or the Origin is not allowed, or the token lacks a right.",
    "404": "Unknown model or path.",
    "405": "The method is not allowed here.",
    "408": "The body arrived too slowly.",
    "409": "The turn was stopped, or a newer message replaced it.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests at once or per minute, or a budget is used up.",
    "500": "An internal error.",
    "502": "The model failed.",
    "503": "The server or the model is unavailable.",
    "504": "The model took too long.",
}
WAIT = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
HEADERS = {
    "401": {"WWW-Authenticate": {"description": "How to send a token.", "schema": {"type": "string"}}},
    "405": {"Allow": {"description": "The allowed methods.", "schema": {"type": "string"}}},
    "429": WAIT,
    "503": WAIT,
}
EFFECTS = {
    "honoured": "",
    "passed on": " Refused if the model does not support it.",
    "no effect": " Accepted, without effect.",
    "ignored": " Accepted, without effect; the header `Warning` names it.",
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


def effect(name: str) -> Effect:
    """Return what the server does with a parameter."""
    if name in FIXED:
        return "refused"
    if name in WITHOUT_EFFECT:
        return "no effect"
    if name in IGNORED:
        return "ignored"
    return "passed on" if name in DEFAULTS or name == "max_completion_tokens" else "honoured"


def parameter_table() -> str:
    """Return the Markdown table of all parameters, for the documentation."""
    rows = [f"| `{name}` | {effect(name)} | {PARAMETERS[name]} |" for name in ChatBody.__struct_fields__]
    return "\n".join(["| parameter | | |", "|---|---|---|", *rows])


def document() -> Json:
    """Return the whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Everloop",
            "version": __version__,
            "summary": "An agent behind the APIs of OpenAI, Anthropic and Ollama.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": {
            **_openai_paths(),
            **_anthropic_paths(),
            **_ollama_paths(),
            **_model_paths(),
            **_server_paths(),
            **paths_of(HANDLERS, _ref, _errors),
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


# ---------------------------------------------------------------------------------------------- operations


def _openai_paths() -> Json:
    """Return the operations of the OpenAI API that the agent answers."""
    return {
        "/v1/chat/completions": {"post": _chat()},
        "/v1/responses": {
            "post": _post("create_response", "Create a response.", ResponsesBody, Response, "A typed event.")
        },
        "/v1/responses/{id}": {
            "get": _response("get_response", "A stored response, as it is now.", Response, True),
            "delete": _response("delete_response", "Delete a stored response.", DeletedResponse),
        },
        "/v1/responses/{id}/cancel": {
            "post": _response("cancel_response", "Stop a response that runs in the background.", Response)
        },
    }


def _anthropic_paths() -> Json:
    """Return the operations of the Anthropic API."""
    return {
        "/v1/messages": {
            "post": _post(
                "create_message", "Create a message.", MessagesBody, AnsweredMessages, "An event.", MessagesError
            )
        },
        "/v1/messages/count_tokens": {
            "post": _post(
                "count_tokens",
                "Estimate the tokens of a message.",
                CountBody,
                TokenCount,
                "",
                MessagesError,
                in_session=False,
            )
        },
    }


def _ollama_paths() -> Json:
    """Return the operations of the Ollama API that the agent answers."""
    return {
        "/api/chat": {"post": _ollama("ollama_chat", "Chat.", OllamaChatBody)},
        "/api/generate": {"post": _ollama("ollama_generate", "Generate a text.", OllamaGenerateBody)},
        "/api/show": {
            "post": _post(
                "ollama_show",
                "A model's properties.",
                OllamaShowBody,
                OllamaShown,
                "",
                OllamaError,
                in_session=False,
            )
        },
        "/api/tags": {"get": _get("ollama_tags", "The models.", OllamaModels, error=OllamaError)},
        "/api/ps": {"get": _get("ollama_ps", "The models in memory.", OllamaModels, error=OllamaError)},
        "/api/version": {"get": _get("ollama_version", "The version of the API.", OllamaVersion, error=OllamaError)},
    }


def _model_paths() -> Json:
    """Return the operations that the model answers without the agent."""
    return {
        "/v1/embeddings": {
            "post": _plain("create_embeddings", "Embed texts, if the model can.", EmbeddingsBody, Embeddings)
        },
        "/v1/completions": {
            "post": _plain(
                "create_completion",
                "Complete a text, if the model can.",
                CompletionsBody,
                TextCompletion,
                event="A `TextCompletion`, then `[DONE]`.",
            )
        },
        "/api/embed": {
            "post": _plain("ollama_embed", "Embed texts.", OllamaEmbedBody, OllamaEmbeddings, error=OllamaError)
        },
        "/api/embeddings": {
            "post": _plain("ollama_embedding", "Embed a text.", OllamaEmbeddingBody, OllamaEmbedding, error=OllamaError)
        },
    }


def _server_paths() -> Json:
    """Return the operations that describe the server and its state."""
    return {
        "/v1/models": {"get": _get("list_models", "The models that a request may name.", Models)},
        "/v1/models/{id}": {"get": _model()},
        "/healthz": {"get": _get("health", "Whether the server is alive.", Health, token=False)},
        "/readyz": {
            "get": _get(
                "readiness",
                "Whether the server accepts requests, proven by a write to the store.",
                Health,
                token=False,
            )
        },
        "/openapi.json": {"get": _get("openapi", "This document.", None)},
    }


def _chat() -> Json:
    event = _events("A `Chunk`, or an `Error` when the answer fails; the last event is `[DONE]`.")
    return {
        "operationId": "create_chat_completion",
        "summary": "Create an answer of the agent.",
        "security": [{"token": []}, {}],
        "parameters": [
            _header(
                "X-Session", "A session that the server stores; only the last message of the request counts.", LENGTH
            ),
            _header("Idempotency-Key", "In a session: a repeated request gets the answer of the first one.", {}),
            _header("Last-Event-ID", "Resume a stream: the last event id that the client has.", {}),
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


def _post(
    name: str,
    summary: str,
    body: type,
    answer: type,
    event: str = "",
    error: type = Error,
    in_session: bool = True,
) -> Json:
    """Describe a request with a body; `event` describes the events of its stream, if it has one."""
    content: Json = {"application/json": {"schema": _ref(answer)}}
    if event:
        content["text/event-stream"] = {"schema": _events(event)}
    return {
        "operationId": name,
        "summary": summary,
        "security": [{"token": []}, {}],
        "parameters": list(SESSION_HEADERS) if in_session else [],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": {"200": {"description": summary, "content": content}, **_errors(*ERRORS, error=error)},
    }


def _plain(name: str, summary: str, body: type, answer: type, *, event: str = "", error: type = Error) -> Json:
    """Describe a request that is forwarded to the model's server."""
    return _post(name, summary, body, answer, event, error, in_session=False)


def _events(data: str) -> Json:
    """Return the schema of an event with this data."""
    return {"type": "object", "properties": {"data": {"type": "string", "description": data}}, "required": ["data"]}


def _ollama(name: str, summary: str, body: type) -> Json:
    operation = _post(name, summary, body, OllamaAnswer, "", OllamaError)
    operation["responses"]["200"]["content"]["application/x-ndjson"] = {"schema": {"type": "string"}}
    return operation


def _response(name: str, summary: str, body: type, stream: bool = False) -> Json:
    """Describe an operation on a stored response."""
    operation = _get(name, summary, body)
    operation["parameters"] = [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    if stream:
        after = {"type": "integer", "minimum": 0, "maximum": 10**12 - 1}
        operation["parameters"] += [
            {"name": "stream", "in": "query", "description": "Send it as a stream.", "schema": {"type": "boolean"}},
            {"name": "starting_after", "in": "query", "description": "Begin behind this event.", "schema": after},
        ]
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _events("A typed event.")}
    operation["responses"] |= _errors("404", "408", "409", "413", "415", "429", "502", "504")
    return operation


def _get(name: str, summary: str, body: type | None, *, token: bool = True, error: type = Error) -> Json:
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
            **_errors(*codes, error=error),
        },
    }


def _model() -> Json:
    operation = _get("get_model", "One of the models.", Model)
    operation["parameters"] = [
        {
            "name": "id",
            "in": "path",
            "required": True,
            "description": "Its name, which may contain slashes.",
            "schema": {"type": "string", "minLength": 1},
        }
    ]
    operation["responses"] |= _errors("404")
    return operation


def _header(name: str, words: str, limits: Json) -> Json:
    words = f"{words} 1 to 200 printable characters."
    return {"name": name, "in": "header", "description": words, "schema": {"type": "string", **limits}}


def _errors(*codes: str, error: type = Error) -> Json:
    return {
        code: {
            "description": ERRORS[code],
            "content": {"application/json": {"schema": _ref(error)}},
            **({"headers": HEADERS[code]} if code in HEADERS else {}),
        }
        for code in codes
    }


SESSION_HEADERS = (
    _header("X-Session", "A session that the server stores; only the last message of the request counts.", LENGTH),
    _header("X-Agent", 'Whose tools are used if the request has none: "own" or "client".', {"enum": ["own", "client"]}),
)

# ---------------------------------------------------------------------------------------------- schemas


def _ref(body: type) -> Json:
    return {"$ref": f"#/components/schemas/{body.__name__}"}


ANSWERS: list[type] = [
    Completion,
    Chunk,
    Models,
    Health,
    Error,
    Response,
    DeletedResponse,
    AnsweredMessages,
    TokenCount,
    MessagesError,
    OllamaAnswer,
    OllamaModels,
    OllamaShown,
    OllamaVersion,
    OllamaError,
    Embeddings,
    TextCompletion,
    OllamaEmbeddings,
    OllamaEmbedding,
]
PAGE = [made for handlers in HANDLERS for _, made in operations_of(handlers)]
PAGE_ANSWERS: list[type] = list(dict.fromkeys(made.answer for made in PAGE if made.answer is not None))
PAGE_BODIES: list[type] = list(dict.fromkeys(made.body for made in PAGE if made.body is not None))


def _answer(name: str) -> type[msgspec.Struct] | None:
    """Return the response type of this name, if there is one."""
    modules = (openai_chat, responses, anthropic_messages, openai_responses, ollama, model_endpoints)
    found: Any = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    return found if name in _ANSWER_NAMES else None


_, _answers = msgspec.json.schema_components(ANSWERS)
_ANSWER_NAMES = frozenset(_answers)


def _schemas() -> Json:
    requests: list[type] = [
        ChatBody,
        ResponsesBody,
        MessagesBody,
        CountBody,
        OllamaChatBody,
        OllamaGenerateBody,
        OllamaShowBody,
        EmbeddingsBody,
        CompletionsBody,
        OllamaEmbedBody,
        OllamaEmbeddingBody,
    ]
    types: list[type] = [*requests, *ANSWERS, *PAGE_ANSWERS, *PAGE_BODIES]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    properties = schemas["ChatBody"]["properties"]
    for name, values in FIXED.items():  # missing from the types, because 0 and False are equal
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
        if (answer := _answer(name)) is not None:  # fields with a value are always sent
            tag = [answer.__struct_config__.tag_field] if answer.__struct_config__.tag_field else []
            schema["required"] = [*tag, *(field.name for field in fields(answer) if field.default is not UNSET)]
    for name, words in PARAMETERS.items():
        properties[name]["description"] = words + EFFECTS[effect(name)]
    return schemas
