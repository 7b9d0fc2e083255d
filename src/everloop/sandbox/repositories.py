"""Detect and undo changes to git repositories that would make the user's git execute programs.

Git executes hooks, filters, file system monitors and pagers that a repository configures, already for `git status`. A
command may create repositories and commit to them, so it could configure such programs, which the user's own git would
then execute outside of the sandbox. After each command, repositories are compared with their state before it, and
what is new and unsafe is renamed.

Concurrent commands may swap files for links meanwhile: every path is opened through directory descriptors, component
by component, without following links.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from .folders import ASIDE, FolderTree, Part, lstat, move_aside, opened_folder, put_back, read_part
from .git_config import safe_subset, settings, unsafe_settings
from .reach import within

_MAX_HOOKS = 200
_TRIES = 3
_GLOBAL = ("~/.gitconfig", "~/.config/git/config", "/etc/gitconfig")
_MAX_SETTINGS = 1024 * 1024
_SINGLE = ("config", "config.worktree", "commondir", "info/attributes")
_INNER = ("info", "hooks")  # subfolders that must not be links


Parts = dict[str, Part]  # by path in the repository; "" for a `.git` file or link itself
State = dict[str, Parts]  # by path in the workspace; with a trailing slash for a folder of hooks


class Plant(msgspec.Struct, frozen=True):
    """An unsafe change: where it is, and why it is unsafe."""

    place: str
    name: str
    why: str

    @property
    def path(self) -> str:
        return os.path.join(self.place, self.name).rstrip("/")


def read_state(tree: FolderTree) -> State:
    """Read the files that control what git executes, in all repositories of a refreshed tree."""
    state: State = {}
    with opened_folder(tree.root, "") as root:
        if root is None:
            return state
        for path in tree.repositories():
            with opened_folder(root, path) as folder:
                if folder is not None:
                    state[path] = _parts(folder)
        for path in _hook_folders(state, tree.root):
            state[f"{path}/"] = _own_hooks(root, path)
        for path in tree.pointers():
            above, name = os.path.split(path)
            with opened_folder(root, above) as folder:
                if folder is not None and (part := read_part(folder, name)) is not None:
                    state[path] = {"": part}
    return state


def plants(before: State, after: State, workspace: str, frozen: Collection[str] = ()) -> list[Plant]:
    """Return what is unsafe in `after` and differs from `before`. `frozen` paths were read-only for commands."""
    found: list[Plant] = []
    folders = {path for path, parts in after.items() if "" not in parts}
    for place, parts in after.items():
        old = before.get(place, {})
        for name, part in parts.items():
            path = os.path.join(workspace, place, name) if name else os.path.join(workspace, place)
            if old.get(name) == part or any(path == each or path.startswith(each + "/") for each in frozen):
                continue
            if why := _why_unsafe(place, name, part, old.get(name), folders, workspace):
                found.append(Plant(place, name, why))
    return found


def put_aside(workspace: str, before: State, found: list[Plant]) -> list[str]:
    """Rename each plant and restore what was there before. Returns notes for the model."""
    notes = []
    with opened_folder(workspace, "") as root:
        for plant in found if root is not None else ():
            inside, name = os.path.split(plant.path)
            with opened_folder(root, inside) as folder:
                if folder is None:
                    continue
                try:
                    text = read_part(folder, name)
                    aside = move_aside(folder, name)
                    old = before.get(plant.place, {}).get(plant.name)
                    if old is None and plant.name == "config" and text is not None and text.kind == "file":
                        old = Part("file", safe_subset(text.data or b""), text.mode)
                    if old is not None:
                        put_back(folder, name, old)
                    notes.append(f"[{plant.path} {plant.why}; it is now {os.path.join(inside, aside)}]")
                except FileNotFoundError:
                    continue  # a concurrent command has just removed it
                except OSError as error:
                    notes.append(f"[{plant.path} {plant.why}, and cannot be renamed ({error.strerror}): delete it]")
    return notes


def check(tree: FolderTree, before: State, frozen: Collection[str] = ()) -> list[str]:
    """Undo unsafe changes to the repositories of a workspace since `before`. Returns notes for the model."""
    notes: list[str] = []
    for _ in range(_TRIES):  # a concurrent command may plant again; its own end is checked, too
        tree.refresh(unlock=True)
        found = plants(before, read_state(tree), tree.root, frozen)
        if not found:
            return notes
        notes += put_aside(tree.root, before, found)
    return notes


def to_json(state: State) -> dict[str, Any]:
    """Convert a state for storage as JSON."""
    return {
        place: {
            name: [part.kind, None if part.data is None else base64.b64encode(part.data).decode(), part.mode]
            for name, part in parts.items()
        }
        for place, parts in state.items()
    }


def from_json(value: Mapping[str, Any]) -> State:
    return {
        place: {
            name: Part(kind, None if data is None else base64.b64decode(data), mode)
            for name, (kind, data, mode) in parts.items()
        }
        for place, parts in value.items()
    }


def _why_unsafe(place: str, name: str, part: Part, old: Part | None, folders: set[str], workspace: str) -> str:
    """Return why a new or changed part is unsafe; "" if it is safe."""
    if place.endswith("/") or name.startswith("hooks"):
        return "would be executed by the user's git"
    if name in ("config", "config.worktree"):
        if part.kind != "file" or part.data is None:
            return "is not a regular config file"
        trusted = old.data if old is not None and old.kind == "file" else None
        bad = unsafe_settings(part.data, trusted, worktree=_worktree(place, workspace))
        return f"would make the user's git execute programs ({', '.join(bad[:5])})" if bad else ""
    if name == "commondir":
        above = os.path.dirname(os.path.dirname(place))
        linked = os.path.basename(os.path.dirname(place)) == "worktrees" and above in folders
        usual = part.kind == "file" and part.data is not None and part.data.strip() == b"../.."
        return "" if linked and usual else "redirects the user's git to other settings"
    if name == "":
        return "" if _target(place, part, workspace) in folders else "redirects the user's git to another repository"
    return "redirects the user's git to other settings"


def _worktree(place: str, workspace: str) -> bytes:
    """Return the value of core.worktree that git itself writes for a submodule."""
    above, modules, inside = place.partition("/modules/")
    if not modules or os.path.basename(above) != ".git":
        return b""
    tree = os.path.join(os.path.dirname(above), inside.replace("/modules/", "/"))
    return os.fsencode(os.path.relpath(os.path.join(workspace, tree), os.path.join(workspace, place)))


def _target(place: str, part: Part, workspace: str) -> str | None:
    """Return the folder of the workspace that a `.git` file refers to; None if links could be involved."""
    if part.kind != "file" or part.data is None or not part.data.startswith(b"gitdir: "):
        return None
    text = os.fsdecode(part.data[8:].rstrip(b"\n"))
    if text.startswith(workspace + "/"):
        text = os.path.relpath(text, os.path.join(workspace, os.path.dirname(place)))
    parts = text.split("/")
    while parts and parts[0] == "..":
        del parts[0]
    if not parts or any(each in ("", ".", "..") for each in parts):
        return None
    target = os.path.normpath(os.path.join("/", os.path.dirname(place), text))
    ups = text.count("../")
    return target[1:] if ups <= os.path.dirname(place).count("/") + bool(os.path.dirname(place)) else None


def _parts(folder: int) -> Parts:
    parts: Parts = {}
    linked = set()
    for name in _INNER:
        info = lstat(folder, name)
        if info is not None and not stat.S_ISDIR(info.st_mode):
            linked.add(name)
            if (part := read_part(folder, name)) is not None:
                parts[name] = part
    for name in _SINGLE:
        if name.split("/")[0] in linked:
            continue
        above, last = os.path.split(name)
        with opened_folder(folder, above) as inner:
            if inner is not None and (part := read_part(inner, last)) is not None:
                parts[name] = part
    if "hooks" not in linked:
        with opened_folder(folder, "hooks") as hooks:
            if hooks is not None:
                parts |= {f"hooks/{name}": part for name, part in _hooks(hooks).items()}
    return parts


def _hooks(folder: int) -> Parts:
    parts: Parts = {}
    for name in os.listdir(folder):
        if not name.endswith(".sample") and not ASIDE.search(name):
            # No user has that many hooks: do not keep their contents in memory.
            part = read_part(folder, name) if len(parts) < _MAX_HOOKS else Part("other")
            if part is not None:
                parts[name] = part
    return parts


def _hook_folders(state: State, workspace: str) -> set[str]:
    """Return the folders of the workspace that core.hooksPath refers to."""
    found = set()
    own = [part.data for parts in state.values() for name, part in parts.items() if name.startswith("config")]
    for data in (*own, *map(_global_settings, _GLOBAL)):
        for each in (settings(data) if data else None) or ():
            if each.name == "core.hookspath":
                value = os.path.expanduser(os.fsdecode(each.value.strip(b'"')))
                for top in {os.path.dirname(place) for place in state} | {""}:
                    path = os.path.normpath(os.path.join(workspace, top, value))
                    if within(path, workspace) and path != workspace:
                        found.add(os.path.relpath(path, workspace))
    return found


def _own_hooks(root: int, path: str) -> Parts:
    with opened_folder(root, path) as folder:
        if folder is not None:
            return _hooks(folder)
    above, name = os.path.split(path)
    with opened_folder(root, above) as folder:
        part = read_part(folder, name) if folder is not None else None
    return {} if part is None else {"": part}  # a link to a folder


def _global_settings(path: str) -> bytes | None:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return file.read(_MAX_SETTINGS)
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------ objects

_MAGIC = b"\xfftOc\x00\x00\x00\x02"
_FANOUT = 8
_NAMES = _FANOUT + 256 * 4


def is_older_blob(tree: FolderTree, path: str, data: bytes, time: int) -> bool:
    """Return whether the repository of a file contained this text before `time` (nanoseconds).

    Decided by the ctime of the object files, which a command cannot set.
    """
    folder = os.path.dirname(path)
    while not tree.has(os.path.join(folder, ".git")):
        if not folder:
            return False
        folder = os.path.dirname(folder)
    name = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    objects = os.path.join(folder, ".git", "objects")
    return _is_loose(tree.root, objects, name.hexdigest(), time) or _is_packed(tree.root, objects, name.digest(), time)


def _is_loose(root: str, objects: str, name: str, time: int) -> bool:
    with opened_folder(root, os.path.join(objects, name[:2])) as folder:
        info = lstat(folder, name[2:]) if folder is not None else None
        return info is not None and info.st_ctime_ns < time


def _is_packed(root: str, objects: str, name: bytes, time: int) -> bool:
    with opened_folder(root, os.path.join(objects, "pack")) as folder:
        for index in os.listdir(folder) if folder is not None else ():
            if folder is None or not index.endswith(".idx"):
                continue
            info = lstat(folder, index)
            if info is None or info.st_ctime_ns >= time:
                continue
            with suppress(OSError, struct.error):
                descriptor = os.open(index, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                try:
                    if _is_listed(descriptor, name):
                        return True
                finally:
                    os.close(descriptor)
    return False


def _is_listed(index: int, name: bytes) -> bool:
    """Search a pack index (version 2): a fan-out table by first byte, then sorted object names."""
    head = os.pread(index, _NAMES, 0)
    if not head.startswith(_MAGIC):
        return False
    counts = struct.unpack(">256I", head[_FANOUT:])
    low, high = counts[name[0] - 1] if name[0] else 0, counts[name[0]]
    while low < high:
        middle = (low + high) // 2
        found = os.pread(index, 20, _NAMES + 20 * middle)
        if found == name:
            return True
        low, high = (middle + 1, high) if found < name else (low, middle)
    return False
