"""The messages for a small model: a short system prompt, worked examples, and the conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....tools.simple_tools import short_result, truncate
from ....tools.workspace_view import WorkspaceView
from .conversation import Message, Turn, calls_of, text_of, without_clock
from .examples import CLIENT, FIXED, PROMPTS, Example, Tool
from .grammar import call_text

RESULT_LIMIT = 1_600  # characters of a result in the current turn
RECENT_LIMIT = 800  # of a message among the recent ones
OLD_LIMIT = 300  # of an earlier one
RECENT_MESSAGES = 8
CONTEXT_LIMIT = 1_200  # characters of the agent's own prompt
TOOL_LIMIT = 400  # characters that describe a client's tool
MAX_FILES = 20  # file names in the prompt


def shared_prefix(names: frozenset[str]) -> list[Message]:
    """Return the system prompt and the fixed examples of these tools: the same bytes for all conversations."""
    if not names:
        return [{"role": "system", "content": PROMPTS["no_tools"]}]
    return [
        {"role": "system", "content": PROMPTS["system"]},
        *example_messages(one for one in FIXED if one.tools <= names),
    ]


def client_prefix(system: str, tools: Iterable[Tool]) -> list[Message]:
    """Return the beginning of a prompt with a client's own tools: the form of a call of each, its purpose, and examples
    of when to call and when to answer."""
    forms = []
    for tool in tools:
        properties = (tool.get("parameters") or {}).get("properties") or {}
        types = {key: f"<{schema.get('type', 'any')}>" for key, schema in properties.items()}
        forms.append(f"{call_text(str(tool.get('name')), types)} – {tool.get('description') or ''}"[:TOOL_LIMIT])
    about = "\n\n".join(part for part in (agent_context(system), PROMPTS["client"], "\n".join(forms)) if part)
    return [{"role": "system", "content": about}, *example_messages(CLIENT)]


def example_messages(examples: Iterable[Example]) -> list[Message]:
    shown: list[Message] = []
    for example in examples:
        shown.append({"role": "user", "content": example.request})
        for tool, arguments, result in example.steps:
            shown.append({"role": "assistant", "content": call_text(tool, arguments)})
            shown.append(_result_message(tool, result, RESULT_LIMIT))
        shown.append({"role": "assistant", "content": example.answer})
    return shown


def _result_message(tool: str, result: str, limit: int) -> Message:
    return {"role": "user", "content": f"Result:\n{short_result(tool, result, limit)}"}


def agent_context(system: str, left_out: tuple[str, ...] = ("Runtime:", "Time zone:")) -> str:
    """Return the agent's own prompt without tools, skills and the lines that begin with one of `left_out`."""
    blocks = [block for block in system.split("\n\n---\n\n") if not block.startswith("## Skills")]
    if blocks and blocks[0].startswith("# "):
        lines = [line for line in blocks[0].splitlines()[2:] if not line.startswith(left_out)]
        blocks[0] = " ".join(lines).replace(". You work with tools and then answer the user.", ".")
    return truncate("\n\n".join(blocks).strip(), CONTEXT_LIMIT)


def context_messages(system: str, workspace: WorkspaceView) -> list[Message]:
    """Return the agent's context and the known files as a short exchange between the examples and the conversation."""
    files = [*reversed(workspace.touched), *(path for path in workspace.files if path not in workspace.touched)]
    known = f"Files here: {', '.join(files[:MAX_FILES])}" if files else ""
    # Otherwise paths in calls would begin with the workspace, and "save the date" would mean today's.
    context = agent_context(system, ("Workspace:", "Runtime:", "Time zone:")).split("\n\n")
    about = [part for part in (*context, known) if part and not part.startswith("This conversation began on")]
    if not about:
        return []
    return [
        {"role": "user", "content": "\n\n".join([*about, "The examples end here. Now it is real."])},
        {"role": "assistant", "content": "I am ready."},
    ]


def talk_messages(turn: Turn) -> list[Message]:
    """Return the prompt of talk: the conversation and the files touched last, without tools and examples."""
    texts = turn.workspace.texts
    files = [f"{path} says now:\n" + "\n".join(texts[path]) for path in turn.workspace.touched[-2:] if texts.get(path)]
    about = "\n\n".join(part for part in (agent_context(turn.system), *(text[:600] for text in files)) if part)
    shown: list[Message] = [{"role": "system", "content": f"{PROMPTS['talk']}\n\n{about}".strip()}]
    said = [one for one in turn.messages if one.get("role") in ("user", "assistant") and text_of(one)]
    for left, message in zip(range(len(said), 0, -1), said, strict=True):
        text, limit = without_clock(text_of(message)), RESULT_LIMIT if left <= RECENT_MESSAGES else OLD_LIMIT
        asked = left == 1 and message["role"] == "user"
        shown.append({"role": message["role"], "content": text if asked else truncate(text, limit)})
    return shown


def task_messages(turn: Turn, introduction: str) -> list[Message]:
    """Return a task's prompt without the examples: the context, the conversation, and the current turn."""
    return [
        *context_messages(turn.system, turn.workspace_before),
        *conversation_messages(turn.messages[: turn.start], OLD_LIMIT),
        *([{"role": "user", "content": introduction}] if introduction else []),
        *conversation_messages(turn.messages[turn.start :], RESULT_LIMIT, turn.request if turn.file else ""),
    ]


def conversation_messages(conversation: Sequence[Message], limit: int, request: str = "") -> list[Message]:
    """Return messages in the form of the examples: calls as JSON, results as messages of the user.

    Recent ones may be longer than `limit`. `request` replaces the first message.
    """
    shown: list[Message] = []
    for left, message in zip(range(len(conversation), 0, -1), conversation, strict=True):
        longest = max(limit, RECENT_LIMIT) if left <= RECENT_MESSAGES else limit
        role, text = message.get("role"), text_of(message)
        if role == "tool":
            shown.append(_result_message(str(message.get("name")), text, longest))
        elif role == "assistant":
            calls = [call_text(name, arguments) for name, arguments in calls_of(message)]
            shown += [{"role": "assistant", "content": one} for one in (truncate(text, longest), *calls) if one]
        elif text:
            shown.append({"role": "user", "content": request or without_clock(text)})
        request = ""
    return shown


def merge_roles(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of one role: the templates of many models require alternating roles."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1] = {**message, "content": f"{merged[-1]['content']}\n{message['content']}"}
        else:
            merged.append(dict(message))
    return merged
