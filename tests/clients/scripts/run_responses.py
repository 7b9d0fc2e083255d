"""The OpenAI SDK for Python, over the Responses API."""

# mypy: ignore-errors
from __future__ import annotations

import json

from openai import OpenAI

import driver

TOOL = {"type": "function", **driver.FORECAST["function"], "strict": False}


def responses(asked):
    return OpenAI(base_url=asked.base_url, api_key=asked.key, max_retries=0).responses


def answer(response):
    calls = [item for item in response.output if item.type == "function_call"]
    return {
        "text": response.output_text,
        "finish": "tool_calls" if calls else {"completed": "stop"}[response.status],
        "calls": [{"id": call.call_id, "name": call.name, "arguments": json.loads(call.arguments)} for call in calls],
        "tokens": response.usage.total_tokens,
        "reasoning": "".join(
            part.text for item in response.output if item.type == "reasoning" for part in item.summary
        ),
    }


def chat(asked):
    return answer(responses(asked).create(model=asked.model, input=asked.prompt))


def stream(asked):
    with responses(asked).stream(model=asked.model, input=asked.prompt) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        return {**answer(events.get_final_response()), "pieces": pieces}


def create(asked, **wanted):
    if not asked.streamed:
        return responses(asked).create(model=asked.model, tools=[TOOL], **wanted)
    with responses(asked).stream(model=asked.model, tools=[TOOL], **wanted) as events:
        return events.get_final_response()


def tools(asked):
    first = create(asked, input=asked.prompt)
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": asked.result} for call in calls]
    second = create(asked, input=results, previous_response_id=first.id)
    return {**answer(first), "text": second.output_text}


def image(asked):
    content = [{"type": "input_text", "text": asked.prompt}, {"type": "input_image", "image_url": asked.image}]
    return answer(responses(asked).create(model=asked.model, input=[{"role": "user", "content": content}]))


def refused(asked):
    return answer(responses(asked).create(model=asked.model, input=asked.prompt, conversation="conv_1"))


def cancel(asked):
    with responses(asked).create(model=asked.model, input=asked.prompt, stream=True) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                return {"first": event.delta}


def kept(asked):
    """A response is read again, continued and deleted, and a background response is awaited."""
    api = responses(asked)
    first = api.create(model=asked.model, input=asked.prompt, background=True)
    while first.status in ("queued", "in_progress"):
        first = api.retrieve(first.id)
    second = api.create(model=asked.model, input="And then?", previous_response_id=first.id)
    api.delete(second.id)
    return {"texts": [first.output_text, second.output_text], "gone": _gone(api, second.id)}


def _gone(api, id):
    try:
        api.retrieve(id)
    except Exception as error:
        return type(error).__name__


driver.run(chat=chat, stream=stream, tools=tools, image=image, refused=refused, cancel=cancel, kept=kept)
