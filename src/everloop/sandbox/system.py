"""The part of the system that a confined command can see: installed programs, but no personal files."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from .reach import within, within_any

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
# Parts of /etc that programs read. Whole folders only if they never contain secrets, so not /etc/ssl.
SETTINGS = (
    "alternatives", "crypto-policies", "debian_version", "fonts", "gai.conf", "gitconfig", "group", "host.conf",
    "hosts", "inputrc", "java", "ld.so.cache", "ld.so.conf", "locale.alias", "locale.conf", "localtime", "magic",
    "mime.types", "networks", "nsswitch.conf", "os-release", "passwd", "pki/ca-trust", "pki/tls/cert.pem",
    "pki/tls/certs", "pki/tls/openssl.cnf", "protocols", "resolv.conf", "services", "ssl/cert.pem", "ssl/certs",
    "ssl/openssl.cnf", "timezone",
)  # fmt: skip
# Folders in a home that contain nothing but programs.
_MANAGERS = (".pyenv", ".rbenv", ".nodenv", ".nvm", ".volta", ".asdf", ".sdkman", ".bun", ".deno", ".linuxbrew")
# What programs need of a prefix inside a home. Never the whole prefix: ~/.cargo has a registry token next to bin/,
# and ~/.local a keyring next to lib/.
_BESIDE = ("bin", "sbin", "lib", "lib64", "libexec", "include", "pyvenv.cfg")
_MAX_LINKS = 500


class System(msgspec.Struct, frozen=True):
    """Paths that are visible read-only, and the PATH that refers to them."""

    paths: tuple[str, ...]
    search: str


@lru_cache(maxsize=8)
def system(search: str, home: str) -> System:
    """Return what the programs on a PATH need. Reads many folders: call it in a thread.

    Programs outside the system folders (pyenv in a home, /opt) are shown together with their installation prefix.
    """
    homes = {os.path.realpath(place) for place in (home, _home_of_user()) if place not in ("", "/")}
    paths: dict[str, None] = dict.fromkeys(path for path in PROGRAMS if os.path.lexists(path))
    paths |= dict.fromkeys(path for name in SETTINGS if os.path.exists(path := f"/etc/{name}"))
    entries = [entry for entry in search.split(":") if entry.startswith("/") and os.path.isdir(entry)]
    for entry in entries:
        for place in _places(entry):
            for path in _prefix(place, homes):
                if not within_any(path, PROGRAMS):
                    paths.setdefault(path)
    outer = [path for path in paths if not any(path != other and within(path, other) for other in paths)]
    return System(tuple(outer), ":".join(dict.fromkeys(entries)) or os.defpath)


def without(paths: Iterable[str], hidden: Sequence[str], workspace: str) -> list[str]:
    """Return the paths that are neither inside a hidden path nor inside the workspace."""
    shown = []
    for path in paths:
        place = os.path.realpath(path)
        if not within(place, workspace) and not within_any(place, hidden):
            shown.append(path)
    return shown


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def _places(entry: str) -> list[str]:
    """Return the folder of a PATH entry and the target folders of its links (such as a virtualenv's Python)."""
    places = {entry: None, os.path.realpath(entry): None}
    if within_any(os.path.realpath(entry), PROGRAMS):
        return []
    with os.scandir(entry) as names:
        for _, name in zip(range(_MAX_LINKS), names, strict=False):
            if name.is_symlink() and os.path.isfile(target := os.path.realpath(name.path)):
                places.setdefault(os.path.dirname(target))
    return list(places)


def _prefix(place: str, homes: set[str]) -> list[str]:
    """Return the paths that must be visible for the programs in a folder to run."""
    prefix, name = os.path.split(place)
    if name not in ("bin", "sbin", "shims") or any(within(home, prefix) for home in homes):
        return [place]  # a folder of single programs, or one next to personal files
    for home in homes:
        for manager in _MANAGERS:
            if within(place, whole := os.path.join(home, manager)):
                return [whole]
    if within_any(prefix, homes):
        return [path for beside in _BESIDE if os.path.exists(path := os.path.join(prefix, beside))]
    return [prefix] if prefix.count("/") > 1 else [place]
