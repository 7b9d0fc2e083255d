"""Plugins: tools and providers from other installed packages, found through entry points.

A plugin is loaded only if the configuration names it; without plugins this module is not imported. Plugin code runs in
this process with all its rights, so every error in it is reported under the name of its package.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from .errors import ConfigError

TOOLS = "everloop.tools"
PROVIDERS = "everloop.providers"
MAX_REASON = 400  # maximum length of a plugin's own error message
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Plugin:
    """An imported entry point; `setting` is the configuration key that names it."""

    name: str
    package: str
    setting: str
    content: Any

    def use(self, make: Callable[[Any], T]) -> T:
        """Return `make(content)`. Anything it raises becomes a one-line ConfigError that names the package."""
        try:
            return make(self.content)
        except (Exception, SystemExit) as error:
            raise _unusable(self.name, self.package, self.setting, error) from error


def installed(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name; a name that two packages share has several."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, []).append(entry)
    return found


@cache  # agents may be created on the event loop, which must not wait for the disk
def find(group: str, name: str, setting: str) -> Plugin:
    """Import the plugin that a setting names, or raise a one-line ConfigError."""
    known = installed(group)
    entries = known.get(name, [])
    if not entries:
        close = difflib.get_close_matches(name, known, 1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(f'{setting}: there is no plugin "{name}"{hint}; installed for {group}: {there}')
    packages = sorted({_package(entry) for entry in entries})
    if len(packages) > 1:
        raise ConfigError(f'{setting}: {" and ".join(packages)} both have a plugin "{name}": uninstall one of them')
    try:
        return Plugin(name, packages[0], setting, entries[0].load())
    except (Exception, SystemExit) as error:
        raise _unusable(name, packages[0], setting, error) from error


def _unusable(name: str, package: str, setting: str, error: BaseException) -> ConfigError:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    reason = " ".join(reason.split())[:MAX_REASON]
    return ConfigError(
        f'{setting}: the plugin "{name}" of the package {package} cannot be used: {reason}; '
        "update or uninstall the package, or remove it from the configuration"
    )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.module
