"""The messages that a small model is shown: a short system prompt, worked examples, and the conversation like them."""

from __future__ import annotations

from collections.abc import Sequence

from .example import Example
from .examples import FIXED
from .grammar import call_text
from .results import cut, short_result
from .turn import Message, calls_of, text_of, without_clock

RESULT_LIMIT = 1_600  # characters of a result that is being looked at
OLD_LIMIT = 300  # and of one of an earlier turn
NOTES_LIMIT = 1_200  # characters of what the system prompt says beside the tools
_SYSTEM = (
    "You are a helpful assistant that works in a folder on the user's computer. "
    "To do something or to look something up, answer with one call of a tool as JSON. "
    "Say only what a result says. When the request is done, or needs no tool, answer in one short sentence, "
    "in the user's language."
)
_BREAK = "\n\n---\n\n"


def prefix(names: frozenset[str]) -> list[Message]:
    """The system prompt and the examples that fit the tools there are: the same bytes for all conversations."""
    if not names:
        return [{"role": "system", "content": "You are a helpful assistant. Answer in short."}]
    shown: list[Message] = [{"role": "system", "content": _SYSTEM}]
    for example in FIXED:
        if example.tools <= names:
            shown += example_messages(example)
    return shown


def example_messages(example: Example) -> list[Message]:
    shown: list[Message] = [{"role": "user", "content": example.request}]
    for step in example.steps:
        shown.append({"role": "assistant", "content": call_text(step.tool, step.arguments)})
        shown.append({"role": "user", "content": _result(short_result(step.tool, step.result, RESULT_LIMIT))})
    return [*shown, {"role": "assistant", "content": example.answer}]


def _result(text: str) -> str:
    return f"Result:\n{text}"


def notes(system: str) -> list[Message]:
    """What the agent's own prompt says beside its tools and skills, as a short exchange before the conversation.

    It stands behind the examples, so that they need not be read again when the memory or the workspace is another.
    """
    blocks = [block for block in system.split(_BREAK) if not block.startswith("## Skills")]
    if blocks and blocks[0].startswith("# "):
        lines = [line for line in blocks[0].splitlines()[2:] if not line.startswith(("Runtime:", "Time zone:"))]
        blocks[0] = " ".join(lines).replace(". You work with tools and then answer the user.", ".")
    text = cut("\n\n".join(blocks).strip(), NOTES_LIMIT)
    if not text:
        return []
    return [
        {"role": "user", "content": f"{text}\n\nThe examples end here."},
        {"role": "assistant", "content": "I am ready."},
    ]


def memory_in(system: str) -> str:
    """What the agent's own prompt says that it remembers."""
    return "\n".join(block for block in system.split(_BREAK) if block.startswith("## Memory"))


def told(conversation: Sequence[Message], limit: int) -> list[Message]:
    """Messages in the shapes that the examples have: calls as their JSON, results as what a person would paste."""
    shown: list[Message] = []
    for message in conversation:
        role, text = message.get("role"), text_of(message)
        if role == "tool":
            shown.append({"role": "user", "content": _result(short_result(str(message.get("name")), text, limit))})
        elif role == "assistant":
            if text:
                shown.append({"role": "assistant", "content": cut(text, limit)})
            for name, arguments in calls_of(message):
                shown.append({"role": "assistant", "content": call_text(name, arguments)})
        elif text:
            shown.append({"role": "user", "content": without_clock(text)})
    return shown


def joined(messages: Sequence[Message]) -> list[Message]:
    """Messages of one role after another as one: many models' templates want the roles to take turns."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**message, "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append(dict(message))
    return joined
