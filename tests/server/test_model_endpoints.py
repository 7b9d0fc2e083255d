"""Embeddings and text completions are passed on to the model's server, or refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from everloop.config import Config
from everloop.providers.factory import make_provider
from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI

from .serving import Client, Serving, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/embeddings": {"input": "x"},
    "/api/embed": {"model": "scripted", "input": "x"},
    "/api/embeddings": {"model": "scripted", "prompt": "x"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("endpoints"), server_models=("embed-*",)) as server:
        yield server


@pytest.fixture
def server(running: Serving) -> Serving:
    running.fake.forwarded.clear()
    running.fake.endpoints = FakeOpenAI.endpoints
    return running


async def post(client: Client, path: str, body: Any) -> tuple[int, Any]:
    async with client.http.post(client.url + path, json=body, headers=client.headers) as response:
        return response.status, await response.json()


async def test_texts_are_embedded_in_their_order(server: Serving):
    body = {"input": ["one", "three"], "model": "embed-small", "encoding_format": "float", "dimensions": 2}
    status, said = await post(server, "/v1/embeddings", body)
    assert status == 200
    assert [one["embedding"] for one in said["data"]] == [[3.0, 0.0], [5.0, 1.0]]
    assert (said["model"], said["usage"]["total_tokens"]) == ("embed-small", 2)
    assert server.fake.forwarded == [("embeddings", body)]


async def test_a_model_that_may_not_be_used_embeds_nothing(server: Serving):
    status, said = await post(server, "/v1/embeddings", {"input": "x", "model": "secret-large"})
    assert (status, said["error"]["param"]) == (404, "model")
    assert server.fake.forwarded == []


async def test_ollamas_requests_are_answered_in_its_formats(server: Serving):
    status, said = await post(server, "/api/embed", {"model": "embed-small:latest", "input": ["one", "three"]})
    assert (status, said["embeddings"], said["prompt_eval_count"]) == (200, [[3.0, 0.0], [5.0, 1.0]], 2)
    status, said = await post(server, "/api/embeddings", {"model": "scripted", "prompt": "one"})
    assert (status, said) == (200, {"embedding": [3.0, 0.0]})
    assert [body["model"] for _, body in server.fake.forwarded] == ["embed-small", "scripted"]


async def test_a_text_is_completed_even_as_a_stream(server: Serving):
    status, said = await post(server, "/v1/completions", {"prompt": "Once upon", "model": "any", "max_tokens": 5})
    assert (status, said["choices"][0]["text"], said["object"]) == (200, "Once upon...", "text_completion")
    assert server.fake.forwarded == [("completions", {"prompt": "Once upon", "model": "scripted", "max_tokens": 5})]
    body = {"prompt": ["a", "b"], "stream": True}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        first, last = (await response.text()).strip().split("\n\n")
    assert [choice["text"] for choice in json.loads(first.removeprefix("data: "))["choices"]] == ["a...", "b..."]
    assert last == "data: [DONE]"


@pytest.mark.parametrize("path", BODIES)
async def test_features_that_the_models_server_lacks_are_refused_by_name(server: Serving, path: str):
    server.fake.endpoints = frozenset()
    async with server.http.post(server.url + path, json=BODIES[path]) as response:
        body, status = await response.text(), response.status
    assert (status, path in body) == (400, True)
    assert "/v1/chat/completions" in body


async def test_features_that_the_provider_lacks_are_refused_by_name(tmp_path: Path):
    async with serving(tmp_path, provider="anthropic", api_key="k") as server:
        for path, asked in BODIES.items():
            status, said = await post(server, path, asked)
            assert status == 400
            assert path in str(said)
        assert server.fake.forwarded == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "x", "odd": 1}, "odd"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": "x", "temperature": 3}, "temperature"),
    ],
)
async def test_an_invalid_field_is_refused_by_name(server: Serving, path: str, body: Any, param: str):
    status, said = await post(server, path, body)
    assert (status, said["error"]["param"]) == (400, param)
    assert server.fake.forwarded == []


async def test_rates_budgets_and_tokens_apply(tmp_path: Path):
    async with serving(tmp_path, requests_per_minute=3, day_tokens=12) as server:
        asked = {"prompt": "x", "model": "scripted"}
        assert (await post(server, "/v1/completions", asked))[0] == 200  # four tokens
        status, said = await post(server, "/v1/completions", {**asked, "max_tokens": 9})
        assert (status, said["error"]["code"]) == (429, "insufficient_quota")
        assert (await post(server, "/v1/completions", asked))[0] == 200
        status, said = await post(server, "/v1/completions", asked)
        assert (status, said["error"]["code"]) == (429, "rate_limit_exceeded")
        assert len(server.fake.forwarded) == 2
        await server.store.add_token("other", "anna", hash_of(new_token()))
        assert (await post(server, "/v1/embeddings", {"input": "x"}))[0] == 401


async def test_a_providers_address_may_include_its_chat_path(tmp_path: Path):
    async with FakeOpenAI() as fake:
        address = f"{fake.base_url}/chat/completions"
        provider = make_provider(Config(home=tmp_path, base_url=address, model="m", retries=1))
        try:
            assert (await provider.forward("embeddings", {"input": "one"}))["data"][0]["embedding"] == [3.0, 0.0]
        finally:
            await provider.close()
