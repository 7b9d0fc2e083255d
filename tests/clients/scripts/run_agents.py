"""OpenAI's Agents SDK, which uses the Responses API by default."""

# mypy: ignore-errors
from __future__ import annotations

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from openai.types.responses import ResponseTextDeltaEvent

import driver


def config(asked):
    return RunConfig(model_provider=OpenAIProvider(base_url=asked.base_url, api_key=asked.key))


def agent(asked, **more):
    return Agent(name="gardener", instructions="Be brief.", model=asked.model, **more)


async def run(asked, content, **more):
    return await Runner.run(agent(asked, **more), content, run_config=config(asked))


async def streamed(asked, content, **more):
    """Return the result of a run, and the pieces of its text."""
    result = Runner.run_streamed(agent(asked, **more), content, run_config=config(asked))
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    return result, pieces


def answer(result):
    return {
        "text": result.final_output,
        "finish": "stop",
        "calls": [],
        "tokens": result.context_wrapper.usage.total_tokens,
    }


def chat(asked):
    return answer(driver.wait(run(asked, asked.prompt)))


def stream(asked):
    result, pieces = driver.wait(streamed(asked, asked.prompt))
    return {**answer(result), "pieces": pieces}


def tools(asked):
    calls = []

    @function_tool
    def forecast(city: str) -> str:
        """Tell tomorrow's weather."""
        calls.append({"name": "forecast", "arguments": {"city": city}})
        return asked.result

    if asked.streamed:
        result, _ = driver.wait(streamed(asked, asked.prompt, tools=[forecast]))
    else:
        result = driver.wait(run(asked, asked.prompt, tools=[forecast]))
    return {**answer(result), "calls": calls, "finish": "tool_calls"}


def image(asked):
    content = [{"type": "input_text", "text": asked.prompt}, {"type": "input_image", "image_url": asked.image}]
    return answer(driver.wait(run(asked, [{"role": "user", "content": content}])))


def refused(asked):
    return answer(driver.wait(run(asked, asked.prompt, model_settings=ModelSettings(temperature=3))))


def cancel(asked):
    async def main():
        result = Runner.run_streamed(agent(asked), asked.prompt, run_config=config(asked))
        first = None
        async for event in result.stream_events():
            if first is None and isinstance(getattr(event, "data", None), ResponseTextDeltaEvent):
                first = event.data.delta
                result.cancel()
        return {"first": first}

    return driver.wait(main())


driver.run(chat=chat, stream=stream, tools=tools, image=image, refused=refused, cancel=cancel)
