"""What a worked example for a small model is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .results import quote


@dataclass(frozen=True, slots=True)
class Step:
    """A call and what it gave."""

    tool: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class Example:
    request: str
    steps: tuple[Step, ...]
    answer: str

    @property
    def tools(self) -> frozenset[str]:
        return frozenset(step.tool for step in self.steps)


def talk(request: str, answer: str) -> Example:
    return Example(request, (), answer)


def use(request: str, tool: str, result: str, answer: str, **arguments: Any) -> Example:
    return Example(request, (Step(tool, arguments, result),), answer)


def listing(request: str, result: str, answer: str = "", path: str = ".") -> Example:
    """The answer to a list is the list, and then perhaps a sentence."""
    listed = quote("list_dir", {}, result)
    return use(request, "list_dir", result, f"{listed}\n{answer}".strip(), path=path)


def show(request: str, path: str, result: str) -> Example:
    return use(request, "read_file", result, quote("read_file", {"path": path}, result), path=path)


def read(request: str, path: str, result: str, answer: str) -> Example:
    return use(request, "read_file", result, answer, path=path)


def write(request: str, path: str, content: str, answer: str) -> Example:
    return use(request, "write_file", f"Created {path}.", answer, path=path, content=content)


def edit(request: str, path: str, text: str, old: str, new: str, answer: str) -> Example:
    """A line in the place of another, once the file was read: what a small model believes to be in a file often is
    not."""
    changed = {"path": path, "old_text": old, "new_text": new}
    number = text.split("\n").index(old) + 1
    return Example(
        request,
        (Step("read_file", {"path": path}, text), Step("edit_file", changed, f"Edited {path} in line {number}.")),
        answer,
    )


def everywhere(request: str, path: str, old: str, new: str, answer: str) -> Example:
    """Words that were named, wherever they stand."""
    arguments = {"path": path, "old_text": old, "new_text": new, "replace_all": True}
    return use(request, "edit_file", f"Edited {path} in lines 1 and 3.", answer, **arguments)


def run(request: str, command: str, result: str, answer: str) -> Example:
    return use(request, "exec", result or "(no output)", answer, command=command)


def plan(request: str, answer: str, **arguments: Any) -> Example:
    return use(request, "cron", "Added job 7c2e.", answer, action="add", **arguments)


def note(request: str, text: str, answer: str) -> Example:
    return use(request, "remember", "Remembered.", answer, text=text)
