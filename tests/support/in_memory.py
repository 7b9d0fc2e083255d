"""Puts the temporary files of the tests into memory, where that is possible.

The tests make and delete hundreds of thousands of files, most of them in databases that live for one test. For minutes,
ext4 does not use the place of a deleted file again, and looks through all such places for each new file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 2**30  # bytes, several times what a run needs at once


def keep_in_memory(memory: Path = MEMORY) -> None:
    """For this process and those that it starts, unless the person who runs the tests has chosen a folder."""
    if "TMPDIR" not in os.environ and memory.is_dir() and os.access(memory, os.W_OK) and is_fit(os.statvfs(memory)):
        os.environ["TMPDIR"] = tempfile.tempdir = str(memory)


def is_fit(system: os.statvfs_result) -> bool:
    """Whether programs can be run from a file system, and there is room. In containers it is often too small."""
    return not system.f_flag & os.ST_NOEXEC and system.f_bavail * system.f_frsize >= ROOM
