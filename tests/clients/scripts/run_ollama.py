"""The Ollama library for Python."""

# mypy: ignore-errors
from __future__ import annotations

import base64

from ollama import Client

import driver


def client(asked):
    return Client(host=asked.base_url.removesuffix("/v1"), headers={"Authorization": f"Bearer {asked.key}"})


def answer(response):
    calls = response.message.tool_calls or []
    return {
        "text": response.message.content,
        "finish": "tool_calls" if calls else response.done_reason,
        "calls": [{"name": call.function.name, "arguments": dict(call.function.arguments)} for call in calls],
        "tokens": response.prompt_eval_count + response.eval_count,
        "reasoning": response.message.thinking,
    }


def said(prompt, **more):
    return [{"role": "user", "content": prompt, **more}]


def chat(asked):
    return answer(client(asked).chat(asked.model, said(asked.prompt)))


def stream(asked):
    parts = list(client(asked).chat(asked.model, said(asked.prompt), stream=True))
    return {"pieces": [part.message.content for part in parts if part.message.content], "finish": parts[-1].done_reason}


def create(asked, messages):
    """Return the complete answer, and its message."""
    response = client(asked).chat(asked.model, messages, tools=[driver.FORECAST], stream=asked.streamed)
    if not asked.streamed:
        return answer(response), response.message
    parts = list(response)
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    last = parts[-1]
    last.message.content = "".join(part.message.content or "" for part in parts)
    last.message.tool_calls = calls or None
    return answer(last), last.message


def tools(asked):
    messages = said(asked.prompt)
    first, message = create(asked, messages)
    messages.append(message)
    messages += [{"role": "tool", "tool_name": call["name"], "content": asked.result} for call in first["calls"]]
    return {**first, "text": create(asked, messages)[0]["text"]}


def image(asked):
    data = base64.b64decode(asked.image.partition(",")[2])
    return answer(client(asked).chat(asked.model, said(asked.prompt, images=[data])))


def refused(asked):
    return answer(client(asked).chat(asked.model, said(asked.prompt), options={"temperature": 3}))


def cancel(asked):
    parts = client(asked).chat(asked.model, said(asked.prompt), stream=True)
    for part in parts:
        if part.message.content:
            parts.close()
            return {"first": part.message.content}


def beside(asked):
    """What else the library can do."""
    own = client(asked)
    return {
        "generated": own.generate(asked.model, asked.prompt).response,
        "models": [model.model for model in own.list().models],
        "capabilities": own.show(asked.model).capabilities,
        "loaded": [model.model for model in own.ps().models],
    }


driver.run(chat=chat, stream=stream, tools=tools, image=image, refused=refused, cancel=cancel, beside=beside)
