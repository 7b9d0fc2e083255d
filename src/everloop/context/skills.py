"""Skills: folders with a SKILL.md that say how a kind of work is done, in the workspace and shipped with the package.

The prompt has the whole text of those that are always on, and a line for each of the others. It is built for every
turn, so a file is read only when it has changed.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ..sandbox.reach import FOLDER, OutOfReach, Reach
from ..text import clean
from .mentions import named as named  # part of this module's door
from .skill import BIGGEST, Skill, parse_skill
from .skill_list import list_skills

SHIPPED = Path(__file__).parent.parent / "skills"
BUDGET = 8000  # characters of the list of skills in the prompt
ALWAYS_LIMIT = 64_000  # characters of all always-on skills together
MOST = 200  # skills in one folder
MOST_ENTRIES = 5000  # of a folder that are looked at
LOOK_AGAIN = 30.0  # seconds until a program that was missing may have been installed
_SETTLED = 50_000_000  # nanoseconds: changes that are closer may have the same time on disk

Version = tuple[int, ...]


class Skills:
    """The skills of one workspace. Its methods look at the disk: call them in a thread."""

    def __init__(
        self,
        workspace: Path,
        shipped: Path = SHIPPED,
        *,
        budget: int = BUDGET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workspace = workspace
        self.shipped = shipped
        self._budget = budget
        self._needs = Needs(clock)
        self._lock = threading.Lock()
        self._rules: tuple[object, ...] = ()  # of the reach that the files were read with
        self._known: dict[str, tuple[Version, Skill]] = {}
        self._skills: list[Skill] = []
        self._blocks: list[str] = []
        self._folder_problem = ""
        self._only_listed: list[str] = []

    def blocks(self, reach: Reach) -> list[str]:
        """Blocks for the prompt: each always-on skill whole, then a list of the others. Same files, same bytes.

        `reach` says what of the workspace may be read.
        """
        with self._lock:
            skills = self._look(reach)
            if skills != self._skills:
                self._skills = skills
                self._blocks = [clean(block) for block in self._build(skills)]
            return list(self._blocks)

    def load(self, name: str, reach: Reach) -> str | None:
        """The whole text of one skill, or what is wrong with it; None when there is none of that name."""
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
        """Where read_file finds a skill; "" when there is none of that name."""
        with self._lock:
            return next((skill.path for skill in self._look(reach) if skill.name == name), "")

    def problems(self) -> list[str]:
        """A line for each thing that was wrong when the skills were last looked at."""
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

    # ------------------------------------------------------------------------------------------ looking

    def _look(self, reach: Reach) -> list[Skill]:
        """All skills as they are now, by name. One of the workspace stands for one of the package, also when broken."""
        rules = (reach.workspace, reach.restricted, reach.approved, reach.protected)
        if rules != self._rules:
            self._rules, self._known = rules, {}
        self._look_at_workspace(reach)
        found = {skill.name: skill for skill in _shipped_skills(self.shipped)}
        found |= {name: skill for name, (_, skill) in self._known.items()}
        return [self._needs.checked(found[name]) for name in sorted(found)]

    def _look_at_workspace(self, reach: Reach) -> None:
        known, self._known, self._folder_problem = self._known, {}, ""
        try:
            with reach.open("skills", FOLDER) as opened:
                names, more = _folders(opened.descriptor)
                for name in names:
                    if (seen := _look_at(name, opened.descriptor, known.get(name), reach)) is not None:
                        self._known[name] = seen
            if more:
                self._folder_problem = f"skills: only the first {MOST} are taken, by name; there are more"
        except FileNotFoundError:
            return
        except (OSError, OutOfReach) as error:
            self._folder_problem = f"skills: {_reason(error)}"


class Needs:
    """Which programs and variables there are; asked again after a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked = -LOOK_AGAIN
        self._programs: dict[str, bool] = {}

    def checked(self, skill: Skill) -> Skill:
        """The skill with what is missing for it."""
        if not skill.bins and not skill.env:
            return skill
        if self._clock() - self._asked >= LOOK_AGAIN:
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


def _folders(descriptor: int) -> tuple[list[str], bool]:
    """The names of what may be folders of skills, and whether there are more than are taken."""
    with os.scandir(descriptor) as entries:
        seen = list(islice(entries, MOST_ENTRIES))
    names = sorted(
        entry.name for entry in seen if not entry.name.startswith(".") and not entry.is_file(follow_symlinks=False)
    )
    return names[:MOST], len(names) > MOST or len(seen) == MOST_ENTRIES


def _look_at(name: str, folder: int, known: tuple[Version, Skill] | None, reach: Reach) -> tuple[Version, Skill] | None:
    """A skill and the version of its file, read if that is another than before; None when there is no SKILL.md."""
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
    """Read a skill of the workspace by the rules of the file tools.

    A command of the agent may have put anything there: a link out of reach, a pipe, a file without an end.
    """
    try:
        with reach.open(skill.path) as opened:
            if not stat.S_ISREG(os.fstat(opened.descriptor).st_mode):
                return skill.broken(1, "it is not an ordinary file")
            with open(opened.descriptor, "rb", closefd=False) as file:
                data = file.read(BIGGEST + 1)
    except (OSError, OutOfReach) as error:
        return skill.broken(1, _reason(error))
    return parse_skill(skill, data, keep_body=keep_body)


@functools.cache
def _shipped_skills(folder: Path) -> tuple[Skill, ...]:
    """The skills of the package: they do not change while it runs."""
    paths = sorted(folder.glob("*/SKILL.md"))
    return tuple(_read_shipped(Skill(path.parent.name, str(path), shipped=True)) for path in paths)


def _read_shipped(skill: Skill, *, keep_body: bool = False) -> Skill:
    try:
        data = Path(skill.path).read_bytes()
    except OSError as error:  # the package was replaced meanwhile
        return skill.broken(1, _reason(error))
    return parse_skill(skill, data, keep_body=keep_body)


def _reason(error: OSError | OutOfReach) -> str:
    return str(error) if isinstance(error, OutOfReach) else f"it cannot be read ({error.strerror or error})"
