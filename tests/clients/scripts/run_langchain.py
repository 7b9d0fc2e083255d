"""LangChain's ChatOpenAI."""

# mypy: ignore-errors
from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

import driver


def client(asked, **more):
    return ChatOpenAI(
        base_url=asked.base_url, api_key=asked.key, model=asked.model, max_retries=0, stream_usage=True, **more
    )


def answer(message):
    return {
        "text": message.text,
        "finish": message.response_metadata["finish_reason"],
        "calls": [{"id": call["id"], "name": call["name"], "arguments": call["args"]} for call in message.tool_calls],
        "tokens": message.usage_metadata["total_tokens"],
    }


def chat(asked):
    return answer(client(asked).invoke(asked.prompt))


def whole(chunks):
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    return message


def stream(asked):
    chunks = list(client(asked).stream(asked.prompt))
    return {**answer(whole(chunks)), "pieces": [chunk.text for chunk in chunks if chunk.text]}


def tools(asked):
    model = client(asked).bind_tools([driver.FORECAST])

    def create(messages):
        return whole(list(model.stream(messages))) if asked.streamed else model.invoke(messages)

    messages = [HumanMessage(asked.prompt)]
    first = create(messages)
    messages += [first, *(ToolMessage(asked.result, tool_call_id=call["id"]) for call in first.tool_calls)]
    return {**answer(first), "text": create(messages).text}


def image(asked):
    content = [{"type": "text", "text": asked.prompt}, {"type": "image_url", "image_url": {"url": asked.image}}]
    return answer(client(asked).invoke([HumanMessage(content)]))


def refused(asked):
    return answer(client(asked, n=2).invoke(asked.prompt))


def cancel(asked):
    chunks = client(asked).stream(asked.prompt)
    for chunk in chunks:
        if chunk.text:
            chunks.close()
            return {"first": chunk.text}


driver.run(chat=chat, stream=stream, tools=tools, image=image, refused=refused, cancel=cancel)
