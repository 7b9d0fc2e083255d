"""The agents that there are: Markdown files in the workspace's `agents/`, and those shipped with the package."""

from __future__ import annotations

import functools
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from ..sandbox.reach import FOLDER, OutOfReach, Reach
from .definitions import NAME, AgentDefinition, DefinitionError

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "shipped"
FOLDER_NAME = "agents"
BIGGEST = 64_000  # bytes of a file
MOST = 200  # files in one folder
MOST_ENTRIES = 5_000  # of a folder that are looked at


@dataclass(slots=True)
class Definitions:
    """Agents by name. One of the workspace stands for one of the package, also when it is broken."""

    known: dict[str, AgentDefinition] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # what is wrong with a file, by the name of its agent
    problem: str = ""  # with the folder as a whole

    @property
    def problems(self) -> list[str]:
        """A line for each thing that is wrong."""
        return [problem for problem in (self.problem, *self.broken.values()) if problem]

    def get(self, name: str) -> AgentDefinition:
        """The agent of this name; a DefinitionError says why there is none."""
        if name in self.known:
            return self.known[name]
        if name in self.broken:
            raise DefinitionError(self.broken[name])
        close = get_close_matches(name, self.known, n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(sorted(self.known)) or 'none'}"
        raise DefinitionError(f'there is no agent "{name[:60]}" ({hint}); make one as {FOLDER_NAME}/NAME.md')


def load_definitions(workspace: str | Path) -> dict[str, AgentDefinition]:
    """All agents that a workspace has, with the shipped ones; a broken file is told to the log, and is no agent.

    It looks at the disk: call it in a thread.
    """
    found = read_definitions(Reach(Path(os.path.abspath(workspace))))
    for problem in found.problems:
        log.warning("%s", problem)
    return found.known


def read_definitions(reach: Reach, shipped: Path = SHIPPED, *, trusted: bool = True) -> Definitions:
    """The same, where a broken file is no more than that. `reach` says what of the workspace may be read; without
    `trusted` nothing of it is."""
    found = read_own_definitions(reach) if trusted else Definitions()
    others = {name: agent for name, agent in _shipped(shipped).items() if name not in found.broken}
    found.known = others | found.known
    return found


def read_own_definitions(reach: Reach) -> Definitions:
    """The agents of the workspace alone."""
    found = Definitions()
    try:
        for name, text in _files(reach, found):
            try:
                found.known[name] = _checked(name, text, f"{FOLDER_NAME}/{name}.md")
            except DefinitionError as error:
                found.broken[name] = str(error)
    except FileNotFoundError:
        pass  # most workspaces have none
    except (OSError, OutOfReach) as error:
        found.problem = f"{FOLDER_NAME}: {_reason(error)}"
    return found


def _files(reach: Reach, found: Definitions) -> Iterator[tuple[str, str]]:
    """(name, text) of the workspace's files; those that cannot be read are noted as broken."""
    with reach.open(FOLDER_NAME, FOLDER) as opened, os.scandir(opened.descriptor) as entries:
        names = sorted(entry.name for entry in islice(entries, MOST_ENTRIES))
    names = [name for name in names if name.endswith(".md") and not name.startswith(".")]
    if len(names) > MOST:
        found.problem = f"{FOLDER_NAME}: only the first {MOST} files are taken, by name; there are {len(names)}"
    for name in names[:MOST]:
        agent = name.removesuffix(".md")
        try:
            yield agent, _read(f"{FOLDER_NAME}/{name}", reach)
        except DefinitionError as error:
            found.broken[agent] = str(error)


def _read(path: str, reach: Reach) -> str:
    """A file by the rules of the file tools: whoever put it there may have put anything there."""
    try:
        with reach.open(path) as opened:
            if not stat.S_ISREG(os.fstat(opened.descriptor).st_mode):
                raise DefinitionError(f"{path}:1: it is not an ordinary file")
            with open(opened.descriptor, "rb", closefd=False) as file:
                data = file.read(BIGGEST + 1)
    except (OSError, OutOfReach) as error:
        raise DefinitionError(f"{path}:1: {_reason(error)}") from None
    if len(data) > BIGGEST:
        raise DefinitionError(f"{path}:1: it is larger than {BIGGEST // 1000} kB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DefinitionError(f"{path}:{line}: it is not UTF-8 text") from None


def _checked(name: str, text: str, where: str) -> AgentDefinition:
    if NAME.fullmatch(name) is None:
        raise DefinitionError(f"{where!r}:1: the name of the file must be of letters, digits, _ or -, at most 64")
    definition = AgentDefinition.from_markdown(text, where)
    if definition.name != name:
        raise DefinitionError(f'{where}:1: name is "{definition.name}": it must be that of the file, "{name}"')
    return definition


@functools.cache
def _shipped(folder: Path) -> dict[str, AgentDefinition]:
    """The agents of the package: they do not change while it runs."""
    paths = sorted(folder.glob("*.md"))
    return {path.stem: _checked(path.stem, path.read_text(encoding="utf-8"), str(path)) for path in paths}


def _reason(error: OSError | OutOfReach) -> str:
    return str(error) if isinstance(error, OutOfReach) else f"it cannot be read ({error.strerror or error})"
