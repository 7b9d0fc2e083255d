"""Path strings: make them absolute and compare them, without file I/O."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..text import clean


def normalized(path: str, workspace: Path) -> str:
    """Return an absolute path without "..". A leading "~" is the home folder; "~user" is not expanded."""
    text = clean(path)
    if text == "~" or text.startswith("~/"):
        text = os.path.expanduser("~") + text[1:]
    root = str(workspace) if workspace.is_absolute() else os.path.abspath(workspace)
    return "/" + os.path.normpath(os.path.join(root, text)).lstrip("/")


def within(path: str, folder: str) -> bool:
    """Return whether a path is a folder or inside it. Both must be real paths, or both as they were written."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def within_any(path: str, folders: Iterable[str]) -> bool:
    return any(within(path, folder) for folder in folders)
