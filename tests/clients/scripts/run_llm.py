"""llm, through its Python API. Its models are those of a file in its folder, as a user writes it."""

# mypy: ignore-errors
from __future__ import annotations

import base64
import json

import llm

import driver


def client(asked):
    entry = {
        "model_id": "everloop",
        "model_name": asked.model,
        "api_base": asked.base_url,
        "api_key_name": "everloop",
        "supports_tools": True,
        "vision": True,
    }
    (llm.user_dir() / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    model = llm.get_model("everloop")
    model.key = asked.key
    return model


def answer(response):
    usage = response.usage()
    return {
        "text": response.text(),
        "finish": "stop",
        "calls": [
            {"id": call.tool_call_id, "name": call.name, "arguments": call.arguments} for call in response.tool_calls()
        ],
        "tokens": (usage.input or 0) + (usage.output or 0),
    }


def chat(asked):
    return answer(client(asked).prompt(asked.prompt, stream=False))


def stream(asked):
    response = client(asked).prompt(asked.prompt, stream=True)
    pieces = [piece for piece in response if piece]
    return {**answer(response), "pieces": pieces}


def tools(asked):
    function = driver.FORECAST["function"]
    forecast = llm.Tool(
        name=function["name"],
        description=function["description"],
        input_schema=function["parameters"],
        implementation=lambda city: asked.result,
    )
    chain = client(asked).chain(asked.prompt, tools=[forecast], stream=asked.streamed)
    first, last = list(chain.responses())
    return {**answer(first), "text": last.text(), "finish": "tool_calls"}


def image(asked):
    data = base64.b64decode(asked.image.partition(",")[2])
    return answer(client(asked).prompt(asked.prompt, attachments=[llm.Attachment(content=data)], stream=False))


def refused(asked):
    return answer(client(asked).prompt(asked.prompt, max_tokens=0, stream=False))


driver.run(chat=chat, stream=stream, tools=tools, image=image, refused=refused)
