"""The messages that a small model is shown: a short system prompt, worked examples, and the conversation like them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....tools.narrow import cut, short_result
from ....tools.seen import Seen
from .conversation import Message, calls_of, text_of, without_clock
from .examples import CLIENT, FIXED, PROMPTS, Example
from .grammar import call_text

RESULT_LIMIT = 1_600  # characters of a result that is being looked at
FULL_LIMIT = 800  # and of one of the last turns
OLD_LIMIT = 300  # and of one of an earlier turn
NOTES_LIMIT = 1_200  # characters of what the system prompt says beside the tools
CLIENT_LIMIT = 400  # characters that describe a client's tool
MOST_FILES = 20  # names of files in the prompt
RECENT = 8  # messages of the conversation that are told in full
_BEGAN = "This conversation began on"
_BREAK = "\n\n---\n\n"


def prefix(names: frozenset[str]) -> list[Message]:
    """The system prompt and the examples that fit the tools there are: the same bytes for all conversations."""
    if not names:
        return [{"role": "system", "content": PROMPTS["no_tools"]}]
    shown: list[Message] = [{"role": "system", "content": PROMPTS["system"]}]
    for example in FIXED:
        if example.tools <= names:
            shown += example_messages(example)
    return shown


def client_prefix(system: str, tools: Iterable[Mapping[str, Any]]) -> list[Message]:
    """What stands before a conversation with tools that no example shows: the form of a call of each, what it does,
    and examples of when to call and when to answer."""
    forms = []
    for tool in tools:
        properties = (tool.get("parameters") or {}).get("properties") or {}
        kinds = {key: f"<{kind.get('type', 'any')}>" for key, kind in properties.items()}
        forms.append(f"{call_text(str(tool.get('name')), kinds)} – {tool.get('description') or ''}"[:CLIENT_LIMIT])
    about = "\n\n".join(part for part in (surroundings(system), PROMPTS["client"], "\n".join(forms)) if part)
    examples = [message for example in CLIENT for message in example_messages(example)]
    return [{"role": "system", "content": about}, *examples]


def example_messages(example: Example) -> list[Message]:
    shown: list[Message] = [{"role": "user", "content": example.request}]
    for tool, arguments, result in example.steps:
        shown.append({"role": "assistant", "content": call_text(tool, arguments)})
        shown.append({"role": "user", "content": _result(short_result(tool, result, RESULT_LIMIT))})
    return [*shown, {"role": "assistant", "content": example.answer}]


def _result(text: str) -> str:
    return f"Result:\n{text}"


def surroundings(system: str, left_out: tuple[str, ...] = ("Runtime:", "Time zone:")) -> str:
    """What the agent's own prompt says beside its tools and skills, without the lines that begin like this."""
    blocks = [block for block in system.split(_BREAK) if not block.startswith("## Skills")]
    if blocks and blocks[0].startswith("# "):
        lines = [line for line in blocks[0].splitlines()[2:] if not line.startswith(left_out)]
        blocks[0] = " ".join(lines).replace(". You work with tools and then answer the user.", ".")
    return cut("\n\n".join(blocks).strip(), NOTES_LIMIT)


def notes(system: str, there: Seen) -> list[Message]:
    """What is known beside the examples, as a short exchange between them and the conversation."""
    files = [*reversed(there.touched), *(path for path in there.files if path not in there.touched)]
    known = f"Files here: {', '.join(files[:MOST_FILES])}" if files else ""
    # The day stands here, too: "save the date" would mean it. There is the command `date`.
    around = surroundings(system, ("Workspace:", "Runtime:", "Time zone:"))  # a call would begin with its path
    about = "\n\n".join(part for part in around.split("\n\n") if not part.startswith(_BEGAN))
    text = "\n\n".join(part for part in (about, known) if part)
    if not text:
        return []
    return [
        {"role": "user", "content": f"{text}\n\nThe examples end here. Now it is real."},
        {"role": "assistant", "content": "I am ready."},
    ]


def talk(system: str, conversation: Sequence[Message], there: Seen) -> list[Message]:
    """The messages of a request that is talk: no tools and no examples, only what was said and what is known."""
    files = [
        f"{path} says now:\n" + "\n".join(there.texts[path]) for path in there.touched[-2:] if there.texts.get(path)
    ]
    about = "\n\n".join(part for part in (surroundings(system), *(text[:600] for text in files)) if part)
    shown: list[Message] = [{"role": "system", "content": f"{PROMPTS['talk']}\n\n{about}".strip()}]
    said = [message for message in conversation if message.get("role") in ("user", "assistant") and text_of(message)]
    limits = [OLD_LIMIT if at < len(said) - RECENT else RESULT_LIMIT for at in range(len(said))]
    for message, limit in zip(said, limits, strict=True):
        shown.append({"role": message["role"], "content": cut(without_clock(text_of(message)), limit)})
    if shown[-1]["role"] == "user" and said:
        shown[-1] = {"role": "user", "content": without_clock(text_of(said[-1]))}
    return shown


def told(conversation: Sequence[Message], limit: int, request: str = "") -> list[Message]:
    """Messages in the shapes that the examples have: calls as their JSON, results as what a person would paste. The
    last ones are longer than `limit`. The first is told as `request`, where that is given."""
    shown: list[Message] = []
    whole, short = len(conversation) - RECENT, limit
    for at, message in enumerate(conversation):
        limit = short if at < whole else max(short, FULL_LIMIT)
        role, text = message.get("role"), text_of(message)
        if role == "tool":
            shown.append({"role": "user", "content": _result(short_result(str(message.get("name")), text, limit))})
        elif role == "assistant":
            if text:
                shown.append({"role": "assistant", "content": cut(text, limit)})
            for name, arguments in calls_of(message):
                shown.append({"role": "assistant", "content": call_text(name, arguments)})
        elif text:
            shown.append({"role": "user", "content": request if request and not at else without_clock(text)})
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
