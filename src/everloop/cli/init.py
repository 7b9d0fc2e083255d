"""`everloop init`: create a workspace with short starter files. Existing files are left alone."""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from ..errors import EverloopError
from ..text import printable
from .common import at_terminal, load_config, prepare_workspace
from .folder import Trust, steering_files

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
TEMPLATES = Path(__file__).parent / "workspace"
FILES = {
    "AGENTS.md": "how to work",
    "SOUL.md": "its tone",
    "USER.md": "about you",
    "TOOLS.md": "notes about the tools and this machine",
    "HEARTBEAT.md": "tasks to look at from time to time",
    "memory/MEMORY.md": "what should always be known",
    "skills/README.md": "how to add a skill",
}


def command(options: argparse.Namespace) -> int:
    """Create the missing files of a folder, by default the workspace of the settings."""
    named = getattr(options, "folder", None)
    if named == "":
        raise EverloopError('"" is not a folder: name one, or none for the workspace of the settings')
    folder = Path(os.path.abspath(os.path.expanduser(named))) if named is not None else load_config(options).workspace
    prepare_workspace(folder)
    before, trust = steering_files(folder), Trust(load_config(options).home)
    made, left = make_files(folder)
    if trust.answer(folder, before):  # the other files are the runtime's
        trust.keep(folder, steering_files(folder), True)
    shown = printable(str(folder))
    if not made:
        print(f"Nothing is missing in {shown}, and nothing was changed.")
        _offer_channels(options)
        return 0
    print(f"Created in {shown}:")
    for name in made:
        print(f"  {name:<18}{FILES[name]}")
    if left:
        print(f"Already there, and not changed: {', '.join(left)}")
    start = f"everloop --workspace {shlex.quote(shown)}" if named is not None else "everloop"
    print(f"Edit them as you like, above all USER.md. `{start}` starts a chat.")
    _offer_channels(options)
    return 0


def _offer_channels(options: argparse.Namespace) -> None:
    """At a terminal, ask for a chat network if the settings have none."""
    if not at_terminal(sys.stdout):
        return
    config = load_config(options)
    if not config.channels:
        from .channel_setup import offer

        offer(config)


def make_files(folder: Path) -> tuple[list[str], list[str]]:
    """Create the missing files; return those created and those left alone. No link is followed."""
    made: list[str] = []
    left: list[str] = []
    with ExitStack() as opened:
        root = os.open(folder, FOLDER)
        opened.callback(os.close, root)
        places: dict[str, int | None] = {"": root}
        for name in ("memory", "skills"):
            places[name] = place = _open_folder(root, name, folder / name)
            if place is not None:
                opened.callback(os.close, place)
        for path in FILES:
            above, name = os.path.split(path)
            place = places[above]
            new = place is not None and _write(place, name, folder / path, (TEMPLATES / path).read_bytes())
            (made if new else left).append(path)
    return made, left


def _open_folder(root: int, name: str, path: Path) -> int | None:
    """Open a folder of the workspace, created if missing; None for a link, which may lead anywhere."""
    try:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=root)
        if stat.S_ISLNK(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode):
            return None
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=root)
    except NotADirectoryError:
        raise EverloopError(f"{path} is a file where a folder must be: give it another name, then try again") from None
    except OSError as error:
        raise _failed(path, error) from None


def _write(place: int, name: str, path: Path, text: bytes) -> bool:
    """Write a new file completely or not at all; return False if the name is taken."""
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=place)
    except FileExistsError:
        return False
    except OSError as error:
        raise _failed(path, error) from None
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
    except BaseException as error:
        os.unlink(name, dir_fd=place)  # a partial file would count as existing the next time
        if isinstance(error, OSError):
            raise _failed(path, error) from None
        raise
    return True


def _failed(path: Path, error: OSError) -> EverloopError:
    return EverloopError(f"{path} cannot be created ({error.strerror or error}): fix that, then try again")
