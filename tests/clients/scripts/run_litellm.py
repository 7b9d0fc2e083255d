"""litellm, as a client of any OpenAI endpoint; or of another API, which the first argument names."""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import json
import sys

import litellm

import driver

API = sys.argv[1] if len(sys.argv) > 1 else "openai"


def options(asked, messages, **more):
    return {
        "model": f"{API}/{asked.model}",
        "api_base": asked.base_url if API == "openai" else asked.base_url.removesuffix("/v1"),
        "api_key": asked.key,
        "messages": messages,
        "max_retries": 0,
        **more,
    }


def said(prompt):
    return [{"role": "user", "content": prompt}]


def answer(response):
    choice = response.choices[0]
    return {
        "text": choice.message.content,
        "finish": choice.finish_reason,
        "calls": [
            {"id": call.id, "name": call.function.name, "arguments": json.loads(call.function.arguments)}
            for call in choice.message.tool_calls or ()
        ],
        "tokens": response.usage.total_tokens,
    }


def chat(asked):
    return answer(litellm.completion(**options(asked, said(asked.prompt))))


def stream(asked):
    usage = {"include_usage": True}
    chunks = list(litellm.completion(**options(asked, said(asked.prompt), stream=True, stream_options=usage)))
    whole = litellm.stream_chunk_builder(chunks, messages=said(asked.prompt))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    return {**answer(whole), "pieces": pieces}


def create(asked, messages):
    wanted = options(asked, messages, tools=[driver.FORECAST], stream=asked.streamed)
    response = litellm.completion(**wanted)
    return litellm.stream_chunk_builder(list(response), messages=messages) if asked.streamed else response


def tools(asked):
    messages = said(asked.prompt)
    first = create(asked, messages)
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": asked.result} for call in message.tool_calls]
    return {**answer(first), "text": answer(create(asked, messages))["text"]}


def image(asked):
    content = [{"type": "text", "text": asked.prompt}, {"type": "image_url", "image_url": {"url": asked.image}}]
    return answer(litellm.completion(**options(asked, said(content))))


def refused(asked):
    return answer(litellm.completion(**options(asked, said(asked.prompt), n=2)))


def cancel(asked):
    """Its asynchronous half, in which a cancelled task closes its connection."""

    async def first_piece(found):
        async for chunk in await litellm.acompletion(**options(asked, said(asked.prompt), stream=True)):
            if chunk.choices[0].delta.content and not found.done():
                found.set_result(chunk.choices[0].delta.content)

    async def main():
        found = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(first_piece(found))
        await asyncio.wait({task, found}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        await asyncio.wait({task})
        return {"first": await found}

    return asyncio.run(main())


driver.run(chat=chat, stream=stream, tools=tools, image=image, refused=refused, cancel=cancel)
