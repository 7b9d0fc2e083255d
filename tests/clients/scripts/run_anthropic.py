"""The Anthropic SDK for Python."""

# mypy: ignore-errors
from __future__ import annotations

from anthropic import Anthropic

import driver

FUNCTION = driver.FORECAST["function"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
REASONS = {"end_turn": "stop", "tool_use": "tool_calls"}


def messages(asked):
    return Anthropic(base_url=asked.base_url.removesuffix("/v1"), api_key=asked.key, max_retries=0).messages


def wanted(asked, content, **more):
    said = content if isinstance(content, list) and "role" in content[0] else [{"role": "user", "content": content}]
    return {"model": asked.model, "max_tokens": 1000, "messages": said, **more}


def answer(message):
    return {
        "text": "".join(block.text for block in message.content if block.type == "text"),
        "finish": REASONS[message.stop_reason],
        "calls": [
            {"id": block.id, "name": block.name, "arguments": block.input}
            for block in message.content
            if block.type == "tool_use"
        ],
        "tokens": message.usage.input_tokens + message.usage.output_tokens,
        "reasoning": "".join(block.thinking for block in message.content if block.type == "thinking"),
    }


def chat(asked):
    return answer(messages(asked).create(**wanted(asked, asked.prompt)))


def stream(asked):
    with messages(asked).stream(**wanted(asked, asked.prompt)) as events:
        return {"pieces": list(events.text_stream), **answer(events.get_final_message())}


def create(asked, said):
    if not asked.streamed:
        return messages(asked).create(**wanted(asked, said, tools=[TOOL]))
    with messages(asked).stream(**wanted(asked, said, tools=[TOOL])) as events:
        return events.get_final_message()


def tools(asked):
    said = [{"role": "user", "content": asked.prompt}]
    first = create(asked, said)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": asked.result} for call in calls]
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    return {**answer(first), "text": answer(create(asked, said))["text"]}


def image(asked):
    kind, _, data = asked.image.removeprefix("data:").partition(";base64,")
    picture = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    return answer(messages(asked).create(**wanted(asked, [{"type": "text", "text": asked.prompt}, picture])))


def refused(asked):
    return answer(
        messages(asked).create(**wanted(asked, asked.prompt, tools=[TOOL], tool_choice={"type": "tool", "name": "x"}))
    )


def cancel(asked):
    with messages(asked).stream(**wanted(asked, asked.prompt)) as events:
        for text in events.text_stream:
            return {"first": text}


def count(asked):
    """What else the SDK can do: it counts tokens and lists models."""
    client = Anthropic(base_url=asked.base_url.removesuffix("/v1"), api_key=asked.key)
    counted = client.messages.count_tokens(model=asked.model, messages=[{"role": "user", "content": asked.prompt}])
    return {"tokens": counted.input_tokens, "models": [model.id for model in client.models.list()]}


driver.run(chat=chat, stream=stream, tools=tools, image=image, refused=refused, cancel=cancel, count=count)
