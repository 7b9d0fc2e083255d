"""Skills: folders with a SKILL.md that describes how to do one kind of work.

They come from the workspace and from the package; a skill of the workspace replaces one of the package with the same
name. The prompt has the whole text of the always-on skills and one line for each of the others. It is built for every
turn, so a file is read only if it has changed.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ..sandbox.reach import FOLDER, OutOfReach, Reach
from ..text import clean
from .frontmatter import FrontMatter, FrontMatterError, read_front_matter

SHIPPED = Path(__file__).parent.parent / "skills"
BUDGET = 8000  # characters of the list of skills in the prompt
ALWAYS_LIMIT = 64_000  # characters of all always-on skills together
MAX_SKILLS = 200  # in one folder
MAX_ENTRIES = 5000  # entries of a folder that are examined
MAX_BYTES = 64_000  # per SKILL.md
MAX_NAME = 64
MAX_DESCRIPTION = 1024
MAX_MENTIONS = 50  # names in one message
RECHECK_SECONDS = 30.0  # between two checks for a missing program
KEYS = ("name", "description", "always", "requires")
OTHER_KEYS = ("license", "metadata", "version", "allowed-tools", "homepage", "compatibility")  # of other systems
NEEDS = {"bins": re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*"), "env": re.compile(r"[A-Za-z_][A-Za-z0-9_]*")}
INTRODUCTION = (
    "## Skills\n\n"
    "A skill says how a kind of work is done well. When one fits the task, read its file with read_file first and "
    "follow it.\n"
)

_DESCRIPTION_LENGTHS = (1024, 400, 200, 120, 60, 0)  # characters, tried in turn until the list fits its budget
_SETTLED = 50_000_000  # nanoseconds: two changes closer than this may have the same timestamp on disk
_BLANK_LINE = re.compile(r"\n\s*\n")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")

Version = tuple[int, ...]


class Skill(msgspec.Struct, frozen=True):
    """A skill as it is listed. `body` is set only for always-on skills, or if it was requested."""

    name: str  # that of its folder
    path: str  # for read_file
    shipped: bool = False
    description: str = ""
    always: bool = False
    bins: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    body: str = ""
    line: int = 1  # of `always`
    problem: str = ""  # what is wrong with the file; if set, no other field is valid
    missing: str = ""  # what it requires but this machine lacks

    def broken(self, line: int, message: str) -> Skill:
        """Return the same skill with what is wrong in its file."""
        return Skill(self.name, self.path, self.shipped, problem=f"{prompt_line(self.path)}:{line}: {message}")


class Skills:
    """The skills of one workspace. Its methods read the disk: call them in a thread."""

    def __init__(
        self,
        workspace: Path,
        shipped: Path = SHIPPED,
        *,
        budget: int = BUDGET,
        clock: Callable[[], float] = time.monotonic,
        trusted: bool = True,
    ) -> None:
        """Without `trusted`, the skills of the workspace are left out."""
        self.workspace = workspace
        self.shipped = shipped
        self._budget = budget
        self._trusted = trusted
        self._needs = Needs(clock)
        self._lock = threading.Lock()
        self._rules: tuple[object, ...] = ()  # the rules of the reach with which the files were read
        self._known: dict[str, tuple[Version, Skill]] = {}
        self._skills: list[Skill] = []
        self._blocks: list[str] = []
        self._folder_problem = ""
        self._only_listed: list[str] = []

    def blocks(self, reach: Reach) -> list[str]:
        """Return the blocks for the prompt: each always-on skill, then a list of the others. Same files, same bytes.

        `reach` limits which files of the workspace may be read.
        """
        with self._lock:
            skills = self._look(reach)
            if skills != self._skills:
                self._skills = skills
                self._blocks = [clean(block) for block in self._build(skills)]
            return list(self._blocks)

    def all(self, reach: Reach) -> list[Skill]:
        """Return all skills, including those with problems."""
        with self._lock:
            return list(self._look(reach))

    def load(self, name: str, reach: Reach) -> str | None:
        """Return the whole text of a skill, or what is wrong with it; None if there is no skill of that name."""
        with self._lock:
            skill = next((skill for skill in self._look(reach) if skill.name == name), None)
        if skill is None:
            return None
        if not skill.missing:
            bare = Skill(skill.name, skill.path, skill.shipped)
            skill = _read_shipped(bare, keep_body=True) if skill.shipped else _read(bare, reach, keep_body=True)
        if skill.problem:
            return clean(f"The skill {name} is broken and was not loaded: {skill.problem}")
        if skill.missing:
            return f"The skill {name} is not available here: it {skill.missing}."
        return clean(_whole(skill))

    def path(self, name: str, reach: Reach) -> str:
        """Return the path of a skill for read_file; "" if there is no skill of that name."""
        with self._lock:
            return next((skill.path for skill in self._look(reach) if skill.name == name), "")

    def problems(self) -> list[str]:
        """Return one line for each problem found when the skills were last read."""
        with self._lock:
            broken = [skill.problem for skill in self._skills if skill.problem]
            return [*broken, *([self._folder_problem] if self._folder_problem else []), *self._only_listed]

    def _build(self, skills: list[Skill]) -> list[str]:
        whole, listed, room = [], [], ALWAYS_LIMIT
        self._only_listed = []
        for skill in skills:
            fits = len(skill.body) <= room
            if skill.body and fits and not skill.missing:
                room -= len(skill.body)
                whole.append(_whole(skill))
                continue
            listed.append(skill)
            if not fits:
                why = f"always-on skills have more than {ALWAYS_LIMIT} characters together, so this one is only listed"
                self._only_listed.append(f"{skill.path}:{skill.line}: {why}")
        text = list_skills(listed, self._budget, f"{self.shipped}/")
        return [*whole, text] if text else whole

    def _look(self, reach: Reach) -> list[Skill]:
        """Return all current skills by name. One of the workspace replaces one of the package, even if it is broken."""
        rules = (reach.workspace, reach.restricted, reach.approved, reach.protected)
        if rules != self._rules:
            self._known = {}
        self._rules = rules  # the same objects make the next comparison quick
        self._look_at_workspace(reach)
        found = {skill.name: skill for skill in _shipped_skills(self.shipped)}
        found |= {name: skill for name, (_, skill) in self._known.items()}
        return [self._needs.checked(found[name]) for name in sorted(found)]

    def _look_at_workspace(self, reach: Reach) -> None:
        known, self._known, self._folder_problem = self._known, {}, ""
        if not self._trusted or not os.path.lexists(os.path.join(reach.workspace, "skills")):
            return
        try:
            with reach.open("skills", FOLDER) as opened:
                names, more = _folders(opened.descriptor)
                for name in names:
                    if (seen := _look_at(name, opened.descriptor, known.get(name), reach)) is not None:
                        self._known[name] = seen
            if more:
                self._folder_problem = f"skills: only the first {MAX_SKILLS} by name are used; there are more"
        except FileNotFoundError:
            return
        except (OSError, OutOfReach) as error:
            self._folder_problem = f"skills: {_reason(error)}"


class Needs:
    """Checks which programs and variables are present, and rechecks missing ones after a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked = -RECHECK_SECONDS
        self._programs: dict[str, bool] = {}

    def checked(self, skill: Skill) -> Skill:
        """Return the skill with `missing` set."""
        if not skill.bins and not skill.env:
            return skill
        if self._clock() - self._asked >= RECHECK_SECONDS:
            self._asked = self._clock()
            self._programs = {}
        programs = [f"the program {name}" for name in skill.bins if not self._has(name)]
        variables = [f"the variable {name}" for name in skill.env if not os.environ.get(name)]
        missing = programs + variables
        return replace(skill, missing=f"needs {' and '.join(missing)}") if missing else skill

    def _has(self, program: str) -> bool:
        if program not in self._programs:
            self._programs[program] = shutil.which(program) is not None
        return self._programs[program]


def _whole(skill: Skill) -> str:
    folder = os.path.dirname(skill.path)
    return f"## Skill: {skill.name}\n\nPaths in it start at {folder}.\n\n{skill.body}"


# ---------------------------------------------------------------------------------------------- reading the files


def _folders(descriptor: int) -> tuple[list[str], bool]:
    """Return the names of possible skill folders, and whether there are more than are used."""
    with os.scandir(descriptor) as entries:
        seen = list(islice(entries, MAX_ENTRIES))
    names = sorted(
        entry.name for entry in seen if not entry.name.startswith(".") and not entry.is_file(follow_symlinks=False)
    )
    return names[:MAX_SKILLS], len(names) > MAX_SKILLS or len(seen) == MAX_ENTRIES


def _look_at(name: str, folder: int, known: tuple[Version, Skill] | None, reach: Reach) -> tuple[Version, Skill] | None:
    """Return a skill with the version of its file, reading a new version; None if there is no SKILL.md."""
    file = f"{name}/SKILL.md"
    try:
        info = os.stat(file, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return (), Skill(name, f"skills/{file}").broken(1, _reason(error))
    version = info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino, info.st_dev
    if known is not None and known[0] == version:
        return known
    settled = time.time_ns() - info.st_ctime_ns > _SETTLED
    return (version if settled else ()), _read(Skill(name, f"skills/{file}"), reach)


def _read(skill: Skill, reach: Reach, *, keep_body: bool = False) -> Skill:
    """Read a skill of the workspace under the rules of the file tools.

    A command of the agent may have put anything there: a link to an inaccessible file, a pipe, an endless file.
    """
    try:
        with reach.open(skill.path) as opened:
            if not stat.S_ISREG(os.fstat(opened.descriptor).st_mode):
                return skill.broken(1, "it is not an ordinary file")
            with open(opened.descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, OutOfReach) as error:
        return skill.broken(1, _reason(error))
    return parse_skill(skill, data, keep_body=keep_body)


@functools.cache
def _shipped_skills(folder: Path) -> tuple[Skill, ...]:
    """Return the skills of the package, which do not change while the process runs."""
    paths = sorted(folder.glob("*/SKILL.md"))
    return tuple(_read_shipped(Skill(path.parent.name, str(path), shipped=True)) for path in paths)


def _read_shipped(skill: Skill, *, keep_body: bool = False) -> Skill:
    try:
        data = Path(skill.path).read_bytes()
    except OSError as error:  # the package was replaced while the process was running
        return skill.broken(1, _reason(error))
    return parse_skill(skill, data, keep_body=keep_body)


def _reason(error: OSError | OutOfReach) -> str:
    return str(error) if isinstance(error, OutOfReach) else f"it cannot be read ({error.strerror or error})"


def parse_skill(skill: Skill, data: bytes, *, keep_body: bool) -> Skill:
    """Return the skill with the contents of its file; if it is invalid, `problem` says what is wrong and where."""
    if len(data) > MAX_BYTES:
        return skill.broken(1, f"it is larger than {MAX_BYTES // 1000} kB: move parts of it into files beside it")
    try:
        read = read_front_matter(data.decode())
        found = _checked(skill, read)
    except UnicodeDecodeError as error:
        return skill.broken(data.count(b"\n", 0, error.start) + 1, "it is not UTF-8 text")
    except FrontMatterError as error:
        return skill.broken(error.line, prompt_line(error.message))
    return replace(found, body=clean(read.body).strip()) if keep_body or found.always else found


def prompt_line(text: str, limit: int = 300) -> str:
    """Return a text of unknown origin as one line for the prompt, without line breaks and control characters."""
    return _CONTROL.sub("\ufffd", " ".join(clean(text).split()))[:limit]


def _checked(skill: Skill, read: FrontMatter) -> Skill:
    """Return the skill with the values of its front matter; raises FrontMatterError if one is invalid."""
    for key in read.values:
        _check_key(key, (*KEYS, *OTHER_KEYS), read.line(key), "")
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
    if _NAME.fullmatch(folder) is None or len(folder) > MAX_NAME:
        rule = f"must be of a-z and 0-9, parted by single hyphens, at most {MAX_NAME}"
        raise FrontMatterError(line, f"the name of the folder {rule}")
    if name != folder:
        what = "is missing" if name is None else f'is "{prompt_line(str(name), 70)}"'
        raise FrontMatterError(line, f'name {what}: it must be that of the folder, "{folder}"')


def _description(read: FrontMatter) -> str:
    text, line = read.values.get("description"), read.line("description")
    if not isinstance(text, str) or not text.strip():
        raise FrontMatterError(line, "description must say what the skill is for and when it is used")
    if _BLANK_LINE.search(text.strip()):
        raise FrontMatterError(line, "description must be one paragraph")
    if len(text) > MAX_DESCRIPTION:
        raise FrontMatterError(line, f"description is longer than {MAX_DESCRIPTION} characters")
    return prompt_line(text, MAX_DESCRIPTION)


def _needed(kind: str, read: FrontMatter) -> tuple[str, ...]:
    """Return the programs or variables that a skill requires."""
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
            raise FrontMatterError(line, f'requires: {kind}: "{prompt_line(str(name), 70)}" is not a name')
    return tuple(names)


def _check_key(key: str, known: tuple[str, ...], line: int, where: str) -> None:
    if key in known:
        return
    from difflib import get_close_matches

    close = get_close_matches(key, known, n=1)
    hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(known)}"
    raise FrontMatterError(line, f'{where}unknown key "{prompt_line(key, 70)}" ({hint})')


# ---------------------------------------------------------------------------------------------- the list in the prompt


def list_skills(skills: Sequence[Skill], budget: int, shipped: str) -> str:
    """Return one line for each skill, in at most `budget` characters; "" if there are no skills, or no room at all.

    Descriptions are shortened first, then left out; as a last resort, skills are only counted. `shipped` is the folder
    of the package's skills.
    """
    if not skills:
        return ""
    for length in _DESCRIPTION_LENGTHS:
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
    name = prompt_line(skill.name, 80)
    if skill.problem:
        return f"- {name} [broken: {skill.problem}]" if length else f"- {name} [broken] ({prompt_line(skill.path)})"
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


# ---------------------------------------------------------------------------------------------- names in a message

# Letters of other scripts may directly adjoin a name, as in Korean and Chinese text; Latin ones may not.
_MENTION = re.compile(
    r"(?<![A-Za-z0-9_$\\/.\-À-ɏ])\$([a-z0-9]++(?:-[a-z0-9]++)*+)(?![A-Za-z0-9_À-ɏ]|[./:=(\[][A-Za-z0-9_])"
)
_FENCED = re.compile(
    r"^ {0,3}(?:(`{3,}+)[^`\n]*|(~{3,}+)[^\n]*)\n(?:.*?^ {0,3}(?:\1`*|\2~*)[ \t]*$|.*)", re.MULTILINE | re.DOTALL
)
_PARAGRAPHS = re.compile(r"\n[ \t]*\n")
_TICKS = re.compile("`+")


def named(text: str) -> list[str]:
    """Return the names of the form `$name` in a message, each once, in order, except in code. They need not exist."""
    if "$" not in text:
        return []
    found: dict[str, None] = {}
    for paragraph in _PARAGRAPHS.split(_FENCED.sub("\n\n", text.replace("\r\n", "\n"))):
        for prose in _prose(paragraph):
            for name in _MENTION.findall(prose):
                if len(name) <= MAX_NAME and not name.replace("-", "").isdecimal():
                    found[name] = None
                    if len(found) == MAX_MENTIONS:
                        return list(found)
    return list(found)


def _prose(paragraph: str) -> Iterator[str]:
    """Return the text outside of backticks. Code ends at a run of as many backticks as began it."""
    ticks = list(_TICKS.finditer(paragraph))
    closing: dict[int, int] = {}  # for each run of backticks the next of the same length
    last: dict[int, int] = {}
    for number in range(len(ticks) - 1, -1, -1):
        length = len(ticks[number][0])
        if length in last:
            closing[number] = last[length]
        last[length] = number
    start, number = 0, 0
    while number < len(ticks):
        if number in closing:
            yield paragraph[start : ticks[number].start()]
            number = closing[number]
            start = ticks[number].end()
        number += 1
    yield paragraph[start:]
