"""The list of skills in the prompt, within a budget."""

from __future__ import annotations

from collections.abc import Sequence

from ..text import one_line
from .skill import Skill

INTRODUCTION = (
    "## Skills\n\n"
    "A skill says how a kind of work is done well. When one fits the task, read its file with read_file first and "
    "follow it.\n"
)
_LENGTHS = (1024, 400, 200, 120, 60, 0)  # characters of a description, tried in turn


def list_skills(skills: Sequence[Skill], budget: int, shipped: str) -> str:
    """A line for each skill, in at most `budget` characters; "" if there are none, or no room at all.

    Descriptions are shortened first and left out then; last, skills are only counted. `shipped` is the folder of those
    that came with the package.
    """
    if not skills:
        return ""
    for length in _LENGTHS:
        text = "\n".join([INTRODUCTION, *(_line(skill, length) for skill in skills)])
        if len(text) <= budget:
            return text
    for count in range(len(skills) - 1, -1, -1):
        shown = [_line(skill, 0) for skill in skills[:count]]
        text = "\n".join([INTRODUCTION, *shown, _rest(skills[count:], shipped)])
        if len(text) <= budget:
            return text
    return ""


def _line(skill: Skill, length: int) -> str:
    name = one_line(skill.name, 80)
    if skill.problem:
        return f"- {name} [broken: {skill.problem}]" if length else f"- {name} [broken] ({one_line(skill.path)})"
    state = f" [not available: {skill.missing}]" if skill.missing else ""
    return f"- {name}{_shortened(skill.description, length)}{state} ({skill.path})"


def _shortened(description: str, length: int) -> str:
    if len(description) <= length:
        return f": {description}"
    cut = description[: length - 1].rstrip() if length else ""
    return f": {cut}…" if cut else ""


def _rest(skills: Sequence[Skill], shipped: str) -> str:
    of_package = sum(skill.shipped for skill in skills)
    counted = ((len(skills) - of_package, "skills/"), (of_package, shipped))
    return "- " + " and ".join(f"{count} more in {where}" for count, where in counted if count)
