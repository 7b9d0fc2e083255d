"""The folder that a command works in: whether its files that steer the agent are trusted, and where its store is.

A folder that was cloned or unpacked may bring its own instructions. The agent follows them only if the user has agreed,
once per folder; the answer is kept in EVERLOOP_HOME/trust.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import sys
from itertools import islice
from pathlib import Path

from ..config import Config
from ..errors import ConfigError
from ..store.location import OwnStore, find_earlier, find_own, folder_identity
from ..text import printable

STEERING_FILES = ("AGENTS.md", "SOUL.md", "USER.md", "TOOLS.md", "IDENTITY.md", "HEARTBEAT.md")
STEERING_FOLDERS = ("skills", "agents", "memory")
MAX_ENTRIES = 5000  # per folder, as many as the readers of skills and agents look at
MAX_SHOWN = 20


def enter(config: Config, *, person: bool, trust: bool = False) -> Config:
    """Return the settings with the trust and the store of their workspace, which exists.

    A `person` at the terminal is asked; otherwise untrusted files are left out, and a folder without sessions starts
    with none. Both are reported on standard error.
    """
    return with_own_store(with_trust(config, person=person, trust=trust), person=person, claim=True)


def with_trust(config: Config, *, person: bool, trust: bool = False) -> Config:
    """Return the settings with the decision whether workspace files that steer the agent are used."""
    if trust or config.is_home_workspace(config.workspace):
        return config
    found = steering_files(config.workspace)
    known = Trust(config.home)
    answer = known.answer(config.workspace, found)
    if answer is None and person:
        answer = _ask_trust(config.workspace, found)
        known.keep(config.workspace, found, answer)
    if answer:
        return config
    names = ", ".join(found[:MAX_SHOWN]) + (", …" if len(found) > MAX_SHOWN else "")
    said = f"{names} left out because {config.workspace} is not trusted; --trust uses them"
    print(f"everloop: {printable(said)}", file=sys.stderr)
    return dataclasses.replace(config, trusted=False)


def steering_files(folder: Path) -> list[str]:
    """Return the names of a folder's files that the agent would follow: instructions, skills, agents and memory."""
    found = [name for name in STEERING_FILES if os.path.lexists(folder / name)]
    for name in STEERING_FOLDERS:
        try:
            with os.scandir(folder / name) as entries:
                inside = sorted(entry.name for entry in islice(entries, MAX_ENTRIES))
        except OSError:  # missing or unreadable
            continue
        if name == "skills":
            inside = [one for one in inside if os.path.lexists(folder / name / one / "SKILL.md")]
        elif name == "agents":
            inside = [one for one in inside if one.endswith(".md")]
        else:  # only this file of the memory is in the prompt
            inside = [one for one in inside if one == "MEMORY.md"]
        found += [f"{name}/{one}" for one in inside if not one.startswith(".")]
    return found


class Trust:
    """The user's answers by folder: the file names at the time, and whether the user trusted them.

    A folder is asked about again when it has a new name, or when another folder is at its path. Changed contents are
    not asked about: the user and the agent change these files all the time.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / "trust.json"

    def answer(self, folder: Path, found: list[str]) -> bool | None:
        """Return whether these files are trusted; None if the user has not been asked about all of them."""
        if not found:
            return True
        entry = self._entry(str(folder.resolve()), folder_identity(folder))
        if entry is None:
            return None
        names = entry.get("names")
        known = isinstance(names, list) and set(found) <= set(map(str, names))
        return entry.get("trusted") is True if known else None

    def keep(self, folder: Path, found: list[str], trusted: bool) -> None:
        identity = folder_identity(folder)
        others = self._read().items()
        answers = {path: entry for path, entry in others if not identity or entry.get("folder") != identity}
        answers[str(folder.resolve())] = {"trusted": trusted, "names": found, "folder": identity}
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps(answers, indent=1), encoding="utf-8", errors="surrogateescape")
        draft.replace(self._path)

    def _entry(self, path: str, identity: str) -> dict[str, object] | None:
        """Return the answer about a folder: by its identity, which survives moves, else by its path."""
        answers = self._read()
        if identity:
            for entry in answers.values():
                if entry.get("folder") == identity:
                    return entry
        found = answers.get(path)
        return None if found is None or (identity and found.get("folder")) else found

    def _read(self) -> dict[str, dict[str, object]]:
        try:
            answers = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(answers, dict):
            return {}
        return {path: entry for path, entry in answers.items() if isinstance(entry, dict)}


def with_own_store(config: Config, *, person: bool = False, claim: bool = False) -> Config:
    """Return the settings with the workspace's store, unless they name one.

    With `claim`, the store is about to be used: a `person` is asked about a folder that may have become this one, and
    the store is recorded as this folder's.
    """
    if config.store_named or config.is_home_workspace(config.workspace):
        return config
    found = find_own(config.workspace, config.home)
    if found.earlier is not None:
        if not (claim and person):
            print(f"everloop: {found.notice}", file=sys.stderr)
        elif _ask_earlier(found):
            found = found.adopt(found.earlier)
    if claim or not found.new:
        found.claim()
    return dataclasses.replace(config, store=found.path, store_named=True)


def adopt(config: Config, workspace: str) -> None:
    """Continue the sessions of a vanished folder in the workspace of the settings."""
    if config.store_named or config.is_home_workspace(config.workspace):
        raise ConfigError("--adopt is for a folder with a store of its own: name it with --workspace, without --store")
    if not config.workspace.is_dir():
        raise ConfigError(f"workspace: {config.workspace} is not a folder")
    found = find_own(config.workspace, config.home)
    found.adopt(find_earlier(config.home, workspace, found))


def _ask_trust(folder: Path, found: list[str]) -> bool:
    print(f"{printable(str(folder))} has files that tell the agent what to do:", file=sys.stderr)
    for name in found[:MAX_SHOWN]:
        print(f"  {printable(name)}", file=sys.stderr)
    if len(found) > MAX_SHOWN:
        print(f"  … and {len(found) - MAX_SHOWN} more", file=sys.stderr)
    return _yes("Use them only if you know who wrote them. Trust this folder? [y/N] ")


def _ask_earlier(found: OwnStore) -> bool:
    assert found.earlier is not None
    here, there = printable(str(found.folder.path)), printable(str(found.earlier.workspace))
    if found.is_replaced:
        said = f"{here} had sessions, but the folder that had them is gone and this is another one."
    else:
        said = f"{here} has no sessions yet. {there} had some, and is gone."
    print(said, file=sys.stderr)
    return _yes("Is this the same folder, and do they continue here? [y/N] ")


def _yes(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line.endswith("\n"):  # Ctrl-D
        print(file=sys.stderr)
    return line.strip().lower() in ("y", "yes")
