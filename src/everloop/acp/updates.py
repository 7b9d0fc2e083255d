"""Session updates for an editor, from a session's log and from the events of a running turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from acp import (
    text_block,
    tool_content,
    tool_diff_content,
    update_agent_message_text,
    update_agent_thought_text,
    update_user_message_text,
)
from acp.schema import (
    AgentPlanUpdate,
    BlobResourceContents,
    EmbeddedResourceContentBlock,
    ImageContentBlock,
    PlanEntry,
    ResourceContentBlock,
    TextContentBlock,
    TextResourceContents,
    ToolCallLocation,
    ToolCallProgress,
    ToolCallStart,
)

from .. import events
from ..log import CallEnded, Logged, ModelAnswered, TurnEnded, UserSaid, text_of
from ..text import clean, one_line

MAX_SHOWN = 20_000  # characters of a tool's result
Update = Any  # any kind of update of the SDK
Kind = Literal["read", "edit", "search", "execute", "fetch", "other"]
KINDS: dict[str, Kind] = {
    "read_file": "read",
    "list_dir": "read",
    "write_file": "edit",
    "edit_file": "edit",
    "find_files": "search",
    "grep": "search",
    "web_search": "search",
    "memory_search": "search",
    "exec": "execute",
    "process": "execute",
    "web_fetch": "fetch",
}
CHANGES = ("edit_file", "write_file")  # shown as a diff


# --------------------------------------------------------------------------------------- what happens in a turn


class TurnUpdates:
    """Converts the events of a turn to updates, including its plan whenever it changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan = TurnPlan()

    def after(self, event: events.Event) -> list[Update]:
        updates = (of_event(event, self._folder), self._plan.after(event))
        return [update for update in updates if update is not None]


def of_event(event: events.Event, folder: Path) -> Update | None:
    """Return the update for an event; None if the protocol has none."""
    match event:
        case events.Text(text=text):
            return update_agent_message_text(clean(text))
        case events.Reasoning(text=text):
            return update_agent_thought_text(clean(text))
        case events.Restarted():
            return update_agent_thought_text("\nThe connection was lost; the answer begins again.\n")
        case events.ToolStarted(call=call, name=name, arguments=arguments):
            return tool_started(call, name, arguments, folder)
        case events.ToolProgress(call=call, text=text):
            return ToolCallProgress(
                session_update="tool_call_update", tool_call_id=call, status="in_progress", content=_shown(text)
            )
        case events.ToolEnded():
            return tool_ended(event)
    return None


def tool_started(call: str, name: str, arguments: dict[str, Any], folder: Path) -> ToolCallStart:
    """Return the start of a tool call with its file and, for an edit, the change."""
    path = arguments.get("path")
    line = arguments.get("offset")
    place = str(folder / path) if isinstance(path, str) and path else None
    return ToolCallStart(
        session_update="tool_call",
        tool_call_id=call,
        title=one_line(" ".join([name, *(str(value) for value in arguments.values() if _is_short(value))]), 120),
        kind=KINDS.get(name, "other"),
        status="in_progress",
        content=change_of(name, arguments, place),
        locations=[ToolCallLocation(path=place, line=line if isinstance(line, int) else None)] if place else None,
        raw_input=arguments,
    )


def change_of(name: str, arguments: dict[str, Any], place: str | None) -> list[Any] | None:
    """Return the change that a call would make, as a diff."""
    new = arguments.get("new_text") if name == "edit_file" else arguments.get("content")
    old = arguments.get("old_text") if name == "edit_file" else None
    if name not in CHANGES or place is None or not isinstance(new, str):
        return None
    return [tool_diff_content(place, clean(new), clean(old) if isinstance(old, str) else None)]


def _is_short(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and "\n" not in str(value)


def tool_ended(event: events.ToolEnded) -> ToolCallProgress:
    """Return the end of a call. The editor keeps the diff of a successful edit: its result adds nothing."""
    keeps_diff = event.status == "ok" and event.name in CHANGES
    return ToolCallProgress(
        session_update="tool_call_update",
        tool_call_id=event.call,
        status="completed" if event.status == "ok" else "failed",
        raw_output=clean(event.content[:MAX_SHOWN]),
        content=None if keeps_diff else _shown(event.content),
    )


def _shown(text: str) -> list[Any]:
    return [tool_content(text_block(clean(text[:MAX_SHOWN])))]


# --------------------------------------------------------------------------------------- what is in the log


def of_log(logged: Sequence[Logged], folder: Path) -> Iterator[Update]:
    """Yield the updates that replay a session."""
    turn = TurnUpdates(folder)
    for one in logged:
        match one.entry:
            case UserSaid(inside=False) as said if text := text_of(said.with_note()):
                yield update_user_message_text(clean(text))
            case ModelAnswered() as answered:
                if answered.reasoning:
                    yield update_agent_thought_text(clean(answered.reasoning))
                if answered.content:
                    yield update_agent_message_text(clean(answered.content))
                for call in answered.calls:
                    yield from turn.after(events.ToolStarted(call.id, call.name, call.arguments))
            case CallEnded() as ended:
                yield from turn.after(
                    events.ToolEnded(ended.id, ended.name, ended.content, ended.status, ended.seconds)
                )
            case TurnEnded(reason=reason, text=text):
                if reason != "answer" and text:
                    yield update_agent_message_text(clean(text))
                turn = TurnUpdates(folder)


# --------------------------------------------------------------------------------------- plans

Status = Literal["pending", "in_progress", "completed"]
STATUSES: dict[str, Status] = {
    "in_progress": "in_progress",
    "in-progress": "in_progress",
    "active": "in_progress",
    "doing": "in_progress",
    "completed": "completed",
    "complete": "completed",
    "done": "completed",
}
LISTS = ("todos", "plan", "steps", "tasks", "items", "entries")  # arguments that contain the steps of a plan
TEXTS = ("content", "step", "text", "title", "description", "task")  # keys that contain the text of a step
MAX_STEPS = 100


class TurnPlan:
    """The plan that an editor shows beside a turn.

    It consists of the steps that the model records with a planning tool, such as one from an MCP server, and the
    sub-agents that it has started.
    """

    def __init__(self) -> None:
        self._written: dict[str, list[PlanEntry]] = {}  # by call, until the tool has accepted them
        self._steps: list[PlanEntry] = []
        self._agents: dict[str, PlanEntry] = {}  # by the call that started each one

    def after(self, event: events.Event) -> AgentPlanUpdate | None:
        """Return the plan after an event; None if it has not changed."""
        match event:
            case events.ToolStarted(call=call, name="spawn", arguments=arguments):
                self._agents[call] = _step(_task_of(arguments), "in_progress")
            case events.ToolStarted(call=call, name=name, arguments=arguments):
                if steps := steps_of(name, arguments):
                    self._written[call] = steps
                return None
            case events.ToolEnded(call=call) if call in self._agents:
                self._agents[call] = _step(self._agents[call].content, "completed")
            case events.ToolEnded(call=call, status="ok") if call in self._written:
                self._steps = self._written.pop(call)
            case _:
                return None
        return AgentPlanUpdate(session_update="plan", entries=[*self._steps, *self._agents.values()])


def steps_of(name: str, arguments: dict[str, Any]) -> list[PlanEntry]:
    """Return the plan steps in a call; none for other kinds of calls."""
    if "todo" not in name.lower() and "plan" not in name.lower():
        return []
    given = next((value for key in LISTS if isinstance(value := arguments.get(key), list)), [])
    steps = []
    for one in given[:MAX_STEPS]:
        text = next((one[key] for key in TEXTS if isinstance(one.get(key), str)), "") if isinstance(one, dict) else one
        if isinstance(text, str) and text.strip():
            status = str(one.get("status", "")) if isinstance(one, dict) else ""
            steps.append(_step(text, STATUSES.get(status.lower(), "pending")))
    return steps


def _task_of(arguments: dict[str, Any]) -> str:
    agent, task = str(arguments.get("agent") or ""), str(arguments.get("task") or "")
    return f"{agent}: {task}" if agent and task else task or agent or "a sub-agent"


def _step(text: str, status: Status) -> PlanEntry:
    return PlanEntry(content=one_line(text, 200), priority="medium", status=status)


# --------------------------------------------------------------------------------------- what a person sends


def read_prompt(blocks: Sequence[Any]) -> tuple[str, list[dict[str, Any]] | None]:
    """Return the text of a prompt with its files, and its parts if it contains images."""
    texts: list[str] = []
    pictures: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextContentBlock():
                texts.append(block.text)
            case ImageContentBlock():
                pictures.append(_picture(block.mime_type, block.data))
            case ResourceContentBlock():
                texts.append(f"[file {path_of(block.uri)}]")
            case EmbeddedResourceContentBlock(resource=TextResourceContents() as file):
                texts.append(f"\n[file {path_of(file.uri)}]\n```\n{file.text}\n```\n")
            case EmbeddedResourceContentBlock(resource=BlobResourceContents() as file):
                if (file.mime_type or "").startswith("image/"):
                    pictures.append(_picture(file.mime_type or "", file.blob))
                else:
                    texts.append(f"[file {path_of(file.uri)}]")
    text = clean("".join(texts))
    if not pictures:
        return text, None
    return text, [*([{"type": "text", "text": text}] if text else ()), *pictures]


def _picture(kind: str, data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def path_of(uri: str) -> str:
    """Return the path of a file URL; any other URL unchanged."""
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" else uri
