"""Requests forwarded to the model's server: `/v1/embeddings`, `/v1/completions`, and Ollama's `/api/embed`.

They only work if the server supports them. They are not turns: no agent sees them, and nothing is logged. Rate limits
and the daily budget apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from ..errors import BudgetReached
from ..messages import encode_json
from ..providers.base import ProviderError
from ..runtime.owners import OWN
from ..text import one_line
from .agent_choice import model_of
from .errors import ApiError, bad_gateway, model_failure, not_found
from .guard import OWNER, SPOKEN, without_content_type
from .ollama import LATEST
from .requests import MAX_INT, Penalty, cleaned, parse_body
from .responses import DONE, Usage, escape_line_ends
from .turns import Turns, json_response

MISSING = frozenset({404, 405, 501})  # statuses of a server that lacks the endpoint
MAX_TEXTS = 2048
CHARS_PER_TOKEN = 4
T = TypeVar("T")

Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_INT)]], Meta(min_length=1)]

# ---------------------------------------------------------------------------------------------- requests


class EmbeddingsBody(Struct, forbid_unknown_fields=True):
    """The body of `/v1/embeddings`: texts, or texts as tokens."""

    input: Text | Annotated[list[Text | TokenIds | int], Meta(min_length=1, max_length=MAX_TEXTS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    user: str | None = None


class CompletionsBody(Struct, forbid_unknown_fields=True):
    """The body of `/v1/completions`."""

    prompt: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]
    model: str | None = None
    suffix: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=8)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[int, Meta(ge=-100, le=100)]] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class OllamaEmbedBody(Struct):
    """The body of `/api/embed`."""

    model: str
    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]
    dimensions: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class OllamaEmbeddingBody(Struct):
    """The body of `/api/embeddings`."""

    model: str
    prompt: Text


_embeddings = msgspec.json.Decoder(EmbeddingsBody)
_completions = msgspec.json.Decoder(CompletionsBody)
_ollama = msgspec.json.Decoder(OllamaEmbedBody)
_ollama_older = msgspec.json.Decoder(OllamaEmbeddingBody)

# ---------------------------------------------------------------------------------------------- responses


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(Struct, frozen=True):
    prompt_tokens: int = 0
    total_tokens: int = 0


class Embeddings(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage = EmbeddingsUsage()
    object: Literal["list"] = "list"


class TextChoice(Struct):
    text: str
    index: int = 0
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class TextCompletion(Struct):
    choices: list[TextChoice]
    id: str = ""
    created: int = 0
    model: str = ""
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType = UNSET


class OllamaEmbeddings(Struct):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int = 0
    total_duration: int = 0
    load_duration: int = 0


class OllamaEmbedding(Struct):
    embedding: list[float]


class ModelEndpoints:
    """Forwards requests to the model's server."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await self._turns.read(request, lambda data: parse_body(data, _embeddings))
        return json_response(encode_json(await self._embedded(request, body)))

    @without_content_type
    async def ollama_embed(self, request: web.Request) -> web.StreamResponse:
        """Handle `/api/embed`."""
        body = await self._turns.read(request, lambda data: parse_body(data, _ollama))
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors, tokens = await self._vectors(request, texts, body.model, body.dimensions)
        return json_response(encode_json(OllamaEmbeddings(body.model, vectors, tokens)))

    @without_content_type
    async def ollama_embedding(self, request: web.Request) -> web.StreamResponse:
        """Handle `/api/embeddings`, its older form."""
        body = await self._turns.read(request, lambda data: parse_body(data, _ollama_older))
        vectors, _ = await self._vectors(request, [body.prompt], body.model)
        return json_response(encode_json(OllamaEmbedding(vectors[0] if vectors else [])))

    async def _vectors(
        self, request: web.Request, texts: Sequence[str], model: str, dimensions: int | None = None
    ) -> tuple[list[list[float]], int]:
        """Return the vectors of texts, and the number of tokens in the texts."""
        made = await self._embedded(request, EmbeddingsBody([*texts], model.removesuffix(LATEST), "float", dimensions))
        return [one.embedding for one in made.data if isinstance(one.embedding, list)], made.usage.prompt_tokens

    async def _embedded(self, request: web.Request, body: EmbeddingsBody) -> Embeddings:
        agent = await self._turns.agent(request)
        if body.model and not agent.may_use(model_of(body.model)):  # vectors from another model would be useless
            name = one_line(body.model, 80)
            raise not_found(f"model: {name!r} is not allowed; add it to [server] models", "model", "model_not_found")
        answer = await self._ask(request, "embeddings", msgspec.to_builtins(body), _size(body.input))
        made = _converted(answer, Embeddings, "embeddings")
        made.data.sort(key=lambda one: one.index)
        return made

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._turns.read(request, lambda data: parse_body(data, _completions))
        agent, streamed = await self._turns.agent(request), bool(body.stream)
        body.stream = body.stream_options = None
        body.model = agent.model_for(model_of(body.model))
        tokens = _size(body.prompt) + (body.max_tokens or 0)
        answer = await self._ask(request, "completions", msgspec.to_builtins(body), tokens)
        data = encode_json(_converted(answer, TextCompletion, "text completions"))
        if not streamed:
            return json_response(data)
        return web.Response(body=b"data: " + escape_line_ends(data) + b"\n\n" + DONE, content_type="text/event-stream")

    async def _ask(self, request: web.Request, endpoint: str, body: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """Return the response of the model's server; an ApiError if there is none."""
        agent, owner = await self._turns.agent(request), request[OWNER]
        sent = {name: value for name, value in body.items() if value is not None}
        refusal = ApiError(
            400,
            f"{request.path}: the model of this server makes no {endpoint}; {SPOKEN}",
            code="unsupported_endpoint",
        )
        if endpoint not in agent.plain_calls.endpoints:
            raise refusal
        await self._turns.count(owner)
        try:
            return await agent.plain_calls.ask(owner, endpoint, sent, tokens)
        except BudgetReached as error:
            raise ApiError(429, str(error), "insufficient_quota", code="insufficient_quota") from None
        except ProviderError as error:
            if error.status in MISSING:
                raise refusal from None
            raise model_failure(str(error), error.status or 0, owner == OWN) from None


def _converted(answer: dict[str, Any], type: type[T], what: str) -> T:
    try:
        return msgspec.convert(cleaned(answer), type)
    except msgspec.ValidationError:
        raise bad_gateway(f"the model's server sent something other than {what}") from None


def _size(input: str | Sequence[Any]) -> int:
    """Return the approximate number of tokens in an input."""
    if isinstance(input, str):
        return len(input) // CHARS_PER_TOKEN + 1
    return sum(len(one) // CHARS_PER_TOKEN + 1 if isinstance(one, str) else 1 for one in input)
