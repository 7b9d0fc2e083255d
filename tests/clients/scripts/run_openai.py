"""The OpenAI SDK for Python."""

# mypy: ignore-errors
from __future__ import annotations

import json

from openai import APITimeoutError, OpenAI

import driver


def client(asked):
    headers = {"X-Session": asked.session} if hasattr(asked, "session") else None
    return OpenAI(base_url=asked.base_url, api_key=asked.key, max_retries=0, default_headers=headers)


def said(prompt):
    return [{"role": "user", "content": prompt}]


def answer(completion):
    choice = completion.choices[0]
    return {
        "text": choice.message.content,
        "finish": choice.finish_reason,
        "calls": [
            {"id": call.id, "name": call.function.name, "arguments": json.loads(call.function.arguments)}
            for call in choice.message.tool_calls or ()
        ],
        "tokens": completion.usage.total_tokens,
    }


def chat(asked):
    return answer(client(asked).chat.completions.create(model=asked.model, messages=said(asked.prompt)))


def stream(asked):
    pieces, finish, tokens = [], None, 0
    for chunk in client(asked).chat.completions.create(
        model=asked.model, messages=said(asked.prompt), stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            pieces += [choice.delta.content] if choice.delta.content else []
            finish = choice.finish_reason or finish
        tokens = chunk.usage.total_tokens if chunk.usage else tokens
    return {"pieces": pieces, "finish": finish, "tokens": tokens}


def create(asked, messages, tools):
    """Return the completion; if streamed, the SDK assembles it from its chunks."""
    completions = client(asked).chat.completions
    if not asked.streamed:
        return completions.create(model=asked.model, messages=messages, tools=tools)
    options = {"include_usage": True}
    with completions.stream(model=asked.model, messages=messages, tools=tools, stream_options=options) as events:
        return events.get_final_completion()


def tools(asked):
    messages = said(asked.prompt)
    first = create(asked, messages, [driver.FORECAST])
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": asked.result} for call in message.tool_calls]
    return {**answer(first), "text": answer(create(asked, messages, [driver.FORECAST]))["text"]}


def image(asked):
    content = [
        {"type": "text", "text": asked.prompt},
        {"type": "image_url", "image_url": {"url": asked.image, "detail": "low"}},
    ]
    return answer(client(asked).chat.completions.create(model=asked.model, messages=said(content)))


def refused(asked):
    return answer(client(asked).chat.completions.create(model=asked.model, messages=said(asked.prompt), n=2))


def cancel(asked):
    with client(asked).chat.completions.create(model=asked.model, messages=said(asked.prompt), stream=True) as chunks:
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                return {"first": chunk.choices[0].delta.content}


def timeout(asked):
    try:
        client(asked).with_options(timeout=4).chat.completions.create(model=asked.model, messages=said(asked.prompt))
    except APITimeoutError:
        return {"timeout": True}


def models(asked):
    found = [model.id for model in client(asked).models.list()]
    return {"models": found, "first": client(asked).models.retrieve(found[0]).id}


driver.run(
    chat=chat, stream=stream, tools=tools, image=image, refused=refused, cancel=cancel, timeout=timeout, models=models
)
