"""One skill: what its SKILL.md says, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..text import clean, one_line
from .frontmatter import FrontMatter, FrontMatterError, read_front_matter

BIGGEST = 64_000  # bytes of a SKILL.md
LONGEST_NAME = 64
LONGEST_DESCRIPTION = 1024
KEYS = ("name", "description", "always", "requires")
OTHERS_KEYS = ("license", "metadata", "version", "allowed-tools", "homepage", "compatibility")  # of other systems
NEEDS = {"bins": re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*"), "env": re.compile(r"[A-Za-z_][A-Za-z0-9_]*")}

_BLANK_LINE = re.compile(r"\n\s*\n")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(slots=True, frozen=True)
class Skill:
    """A skill as it is listed. `body` is there only where it was asked for, or is always on."""

    name: str  # of its folder
    path: str  # for read_file
    shipped: bool = False
    description: str = ""
    always: bool = False
    bins: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    body: str = ""
    line: int = 1  # of `always`
    problem: str = ""  # what is wrong with the file: then nothing else of it counts
    missing: str = ""  # what it needs and this machine has not

    def broken(self, line: int, message: str) -> Skill:
        """The same skill with what is wrong in its file."""
        return Skill(self.name, self.path, self.shipped, problem=f"{one_line(self.path)}:{line}: {message}")


def parse_skill(skill: Skill, data: bytes, *, keep_body: bool) -> Skill:
    """Fill in what a file says; if something is wrong in it, `problem` says what and where."""
    if len(data) > BIGGEST:
        return skill.broken(1, f"it is larger than {BIGGEST // 1000} kB: move parts of it into files beside it")
    try:
        read = read_front_matter(data.decode())
        found = _checked(skill, read)
    except UnicodeDecodeError as error:
        return skill.broken(data.count(b"\n", 0, error.start) + 1, "it is not UTF-8 text")
    except FrontMatterError as error:
        return skill.broken(error.line, one_line(error.message))
    return replace(found, body=clean(read.body).strip()) if keep_body or found.always else found


def _checked(skill: Skill, read: FrontMatter) -> Skill:
    """The skill with what its front matter says; a FrontMatterError if that cannot be."""
    for key in read.values:
        _check_key(key, (*KEYS, *OTHERS_KEYS), read.line(key), "")
    _check_name(skill.name, read)
    always = read.values.get("always", False)
    if not isinstance(always, bool):
        raise FrontMatterError(read.line("always"), "always must be true or false")
    if not read.body.strip():
        raise FrontMatterError(1, "there is no text below the front matter")
    return replace(
        skill,
        description=_description(read),
        always=always,
        line=read.line("always"),
        bins=_needed("bins", read),
        env=_needed("env", read),
    )


def _check_name(folder: str, read: FrontMatter) -> None:
    name, line = read.values.get("name"), read.line("name")
    if _NAME.fullmatch(folder) is None or len(folder) > LONGEST_NAME:
        rule = f"must be of a-z and 0-9, parted by single hyphens, at most {LONGEST_NAME}"
        raise FrontMatterError(line, f"the name of the folder {rule}")
    if name != folder:
        what = "is missing" if name is None else f'is "{one_line(str(name), 70)}"'
        raise FrontMatterError(line, f'name {what}: it must be that of the folder, "{folder}"')


def _description(read: FrontMatter) -> str:
    text, line = read.values.get("description"), read.line("description")
    if not isinstance(text, str) or not text.strip():
        raise FrontMatterError(line, "description must say what the skill is for and when it is used")
    if _BLANK_LINE.search(text.strip()):
        raise FrontMatterError(line, "description must be one paragraph")
    if len(text) > LONGEST_DESCRIPTION:
        raise FrontMatterError(line, f"description is longer than {LONGEST_DESCRIPTION} characters")
    return one_line(text, LONGEST_DESCRIPTION)


def _needed(kind: str, read: FrontMatter) -> tuple[str, ...]:
    """The programs or variables that a skill requires."""
    requires = read.values.get("requires", {})
    if not isinstance(requires, dict):
        raise FrontMatterError(read.line("requires"), "requires must be like {bins: [git], env: [TOKEN]}")
    for key in requires:
        _check_key(key, tuple(NEEDS), read.line("requires", key), "requires: ")
    names, line = requires.get(kind, []), read.line("requires", kind)
    if not isinstance(names, list):
        raise FrontMatterError(line, f"requires: {kind} must be a list of names")
    for name in names:
        if not isinstance(name, str) or NEEDS[kind].fullmatch(name) is None:
            raise FrontMatterError(line, f'requires: {kind}: "{one_line(str(name), 70)}" is no name')
    return tuple(names)


def _check_key(key: str, known: tuple[str, ...], line: int, where: str) -> None:
    if key in known:
        return
    from difflib import get_close_matches

    close = get_close_matches(key, known, n=1)
    hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(known)}"
    raise FrontMatterError(line, f'{where}unknown key "{one_line(key, 70)}" ({hint})')
