"""Pydantic AI with the model that `openai:…` stands for, which uses the Responses API."""

# mypy: ignore-errors
from __future__ import annotations

import base64

from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models import infer_model
from pydantic_ai.providers.openai import OpenAIProvider

import driver


def agent(asked):
    provider = OpenAIProvider(base_url=asked.base_url, api_key=asked.key)
    return Agent(infer_model(f"openai:{asked.model}", provider_factory=lambda _: provider))


def answer(result):
    usage = result.usage
    return {"text": result.output, "finish": "stop", "calls": [], "tokens": usage.input_tokens + usage.output_tokens}


async def whole(own, content):
    return answer(await own.run(content))


async def streamed(own, content):
    async with own.run_stream(content) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        usage = result.usage
        return {
            "text": "".join(pieces),
            "pieces": pieces,
            "finish": "stop",
            "calls": [],
            "tokens": usage.input_tokens + usage.output_tokens,
        }


def chat(asked):
    return driver.wait(whole(agent(asked), asked.prompt))


def stream(asked):
    return driver.wait(streamed(agent(asked), asked.prompt))


def tools(asked):
    own, calls = agent(asked), []

    @own.tool_plain
    def forecast(city: str) -> str:
        """Tell tomorrow's weather."""
        calls.append({"name": "forecast", "arguments": {"city": city}})
        return asked.result

    said = driver.wait(streamed(own, asked.prompt) if asked.streamed else whole(own, asked.prompt))
    return {**said, "calls": sorted(calls, key=lambda call: call["arguments"]["city"]), "finish": "tool_calls"}


def image(asked):
    kind, _, data = asked.image.removeprefix("data:").partition(";base64,")
    picture = BinaryContent(base64.b64decode(data), media_type=kind)
    return driver.wait(whole(agent(asked), [asked.prompt, picture]))


def refused(asked):
    return answer(driver.wait(agent(asked).run(asked.prompt, model_settings={"temperature": 3})))


def cancel(asked):
    async def main():
        async with agent(asked).run_stream(asked.prompt) as result:
            async for piece in result.stream_text(delta=True, debounce_by=None):
                return {"first": piece}

    return driver.wait(main())


driver.run(chat=chat, stream=stream, tools=tools, image=image, refused=refused, cancel=cancel)
