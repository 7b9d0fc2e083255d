"""What steers the agent and came to be while a command ran, after untrusted content was read.

A command may not change such files, but no wall can keep it from making one that is not there yet.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

from ...sandbox.confinement import STEERING

State = dict[str, tuple[int, int, str]]


def steering_state(workspace: str) -> State:
    """What of it is there now, and how a link among it leads. Call it in a thread."""
    found: State = {}
    for name in STEERING:
        with suppress(OSError):
            path = os.path.join(workspace, name)
            info = os.lstat(path)
            found[name] = info.st_dev, info.st_ino, os.readlink(path) if os.path.islink(path) else ""
    return found


def put_aside(workspace: str, before: State) -> list[str]:
    """Give another name to what was not there before, so that it steers nobody; in words. Call it in a thread."""
    notes = []
    for name, state in steering_state(workspace).items():
        was = before.get(name)
        if was is not None and (was == state or not was[2]):
            continue  # a file that was there is behind the wall: a person did it
        aside = f"{name}.untrusted-{secrets.token_hex(3)}"
        with suppress(FileNotFoundError):
            os.rename(os.path.join(workspace, name), os.path.join(workspace, aside))
            notes.append(f"[{name} would steer the agent and was made after untrusted content was read: now {aside}]")
    return notes
