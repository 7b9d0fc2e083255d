"""Agent definitions in files: Markdown in the workspace's `agents/`, and the agents shipped with the package.

The catalogue tells a model which agents of the workspace it can spawn.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ..sandbox.reach import FOLDER, OutOfReach, Reach
from .definitions import NAME, AgentDefinition, DefinitionError

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "shipped"
FOLDER_NAME = "agents"
MAX_FILE_BYTES = 64_000  # maximum file size in bytes
MAX_FILES = 200  # maximum number of files in a folder
MAX_ENTRIES = 5_000  # directory entries read at most
MAX_LISTING = 12_000  # characters of the listing shown to a model


class Definitions(msgspec.Struct):
    """Agents by name. A file of the workspace overrides a shipped agent of the same name, even if it is broken."""

    known: dict[str, AgentDefinition] = {}
    broken: dict[str, str] = {}  # the error in a file, by agent name
    problem: str = ""  # a problem with the folder as a whole
    own: list[str] = []  # names of the workspace's agents

    @property
    def problems(self) -> list[str]:
        """One line for each problem."""
        return [problem for problem in (self.problem, *self.broken.values()) if problem]

    def get(self, name: str) -> AgentDefinition:
        """Return the agent of this name, or raise a DefinitionError that explains why there is none."""
        if name in self.known:
            return self.known[name]
        if name in self.broken:
            raise DefinitionError(self.broken[name])
        close = get_close_matches(name, self.known, n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(sorted(self.known)) or 'none'}"
        raise DefinitionError(f'there is no agent "{name[:60]}" ({hint}); make one as {FOLDER_NAME}/NAME.md')


def load_definitions(workspace: str | Path) -> dict[str, AgentDefinition]:
    """Return all agents of a workspace, including the shipped ones. Broken files are logged and skipped.

    Reads from disk: call it in a thread.
    """
    found = read_definitions(Reach(Path(os.path.abspath(workspace))))
    for problem in found.problems:
        log.warning("%s", problem)
    return found.known


def read_definitions(reach: Reach, shipped: Path = SHIPPED, *, trusted: bool = True) -> Definitions:
    """Return the agents and problems of a workspace, including the shipped agents.

    `reach` limits which files may be read; an untrusted workspace is not read at all.
    """
    found = read_own_definitions(reach) if trusted else Definitions()
    others = {name: agent for name, agent in _shipped(shipped).items() if name not in found.broken}
    found.known = others | found.known
    return found


def read_own_definitions(reach: Reach) -> Definitions:
    """Return the agents and problems of the workspace alone."""
    found = Definitions()
    try:
        for name, text in _files(reach, found):
            try:
                found.known[name] = _checked(name, text, f"{FOLDER_NAME}/{name}.md")
                found.own.append(name)
            except DefinitionError as error:
                found.broken[name] = str(error)
    except FileNotFoundError:
        pass  # most workspaces have no agents
    except (OSError, OutOfReach) as error:
        found.problem = f"{FOLDER_NAME}: {_reason(error)}"
    return found


class Catalogue:
    """Describes the workspace's agents to a model: names, descriptions and inputs.

    The text stays the same object, and the prompt the same bytes, until a file changes.
    """

    def __init__(self, definitions: Callable[[], Definitions]) -> None:
        self._definitions = definitions
        self._versions: list[tuple[str, int, int, int]] | None = None
        self.text = ""

    def read(self, workspace: Path) -> None:
        """Read the files again if any has changed. Reads from disk: call it in a thread."""
        versions = list(_versions(os.path.join(workspace, FOLDER_NAME)))
        if versions == (self._versions or []):
            return
        found = self._definitions()
        self._versions, self.text = versions, describe([found.known[name] for name in found.own])


def describe(definitions: list[AgentDefinition]) -> str:
    """Return the description of these agents for a model; "" if there are none."""
    lines: list[str] = []
    left = MAX_LISTING
    for definition in definitions:
        line = f"- {definition.name}: {' '.join(definition.description.split())} Inputs: {_inputs(definition)}."
        if (left := left - len(line)) < 0:
            lines.append(f"- and {len(definitions) - len(lines)} more in {FOLDER_NAME}/")
            break
        lines.append(line)
    return "\n".join(["Agents of this workspace:", *lines]) if lines else ""


def _inputs(definition: AgentDefinition) -> str:
    required = definition.inputs.get("required", ())
    declared: dict[str, Any] = definition.inputs.get("properties", {})
    return "; ".join(_input(name, schema, name in required) for name, schema in declared.items()) or "none, but a task"


def _input(name: str, schema: Any, required: bool) -> str:
    facts = schema if isinstance(schema, dict) else {}
    kind = facts.get("type", "any")
    shown = [" or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)]
    shown += [] if required else ["optional"]
    about = " ".join(str(facts.get("description", "")).split())
    return f"{name} ({', '.join(shown)})" + (f" {about}" if about else "")


def _versions(folder: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield a version of each file in the folder, in name order; it changes when the file does."""
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(islice(entries, MAX_ENTRIES), key=lambda entry: entry.name):
                if entry.name.endswith(".md"):
                    info = entry.stat()
                    yield entry.name, info.st_mtime_ns, info.st_size, info.st_ino
    except OSError:  # the folder is missing or unreadable
        return


def _files(reach: Reach, found: Definitions) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the workspace's files; unreadable ones are recorded as broken."""
    with reach.open(FOLDER_NAME, FOLDER) as opened, os.scandir(opened.descriptor) as entries:
        names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES))
    names = [name for name in names if name.endswith(".md") and not name.startswith(".")]
    if len(names) > MAX_FILES:
        found.problem = f"{FOLDER_NAME}: only the first {MAX_FILES} of {len(names)} files are used, by name"
    for name in names[:MAX_FILES]:
        agent = name.removesuffix(".md")
        try:
            yield agent, _read(f"{FOLDER_NAME}/{name}", reach)
        except DefinitionError as error:
            found.broken[agent] = str(error)


def _read(path: str, reach: Reach) -> str:
    """Read a file under the rules of the file tools: it may be a link, a pipe or endless."""
    try:
        with reach.open(path) as opened:
            if not stat.S_ISREG(os.fstat(opened.descriptor).st_mode):
                raise DefinitionError(f"{path}:1: it is not a regular file")
            with open(opened.descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, OutOfReach) as error:
        raise DefinitionError(f"{path}:1: {_reason(error)}") from None
    if len(data) > MAX_FILE_BYTES:
        raise DefinitionError(f"{path}:1: it is larger than {MAX_FILE_BYTES // 1000} kB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DefinitionError(f"{path}:{line}: it is not UTF-8 text") from None


def _checked(name: str, text: str, where: str) -> AgentDefinition:
    if NAME.fullmatch(name) is None:
        raise DefinitionError(f"{where!r}:1: the file's name must be 1 to 64 letters, digits, _ or -")
    definition = AgentDefinition.from_markdown(text, where)
    if definition.name != name:
        raise DefinitionError(f'{where}:1: name is "{definition.name}": it must be the file\'s, "{name}"')
    return definition


@functools.cache
def _shipped(folder: Path) -> dict[str, AgentDefinition]:
    """Read the agents of the package, which do not change while it runs."""
    paths = sorted(folder.glob("*.md"))
    return {path.stem: _checked(path.stem, path.read_text(encoding="utf-8"), str(path)) for path in paths}


def _reason(error: OSError | OutOfReach) -> str:
    return str(error) if isinstance(error, OutOfReach) else f"it cannot be read ({error.strerror or error})"
