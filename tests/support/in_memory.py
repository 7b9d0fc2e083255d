"""Put the tests' temporary files into memory if possible.

The tests create and delete hundreds of thousands of files, mostly in databases that live for one test. For minutes,
ext4 does not reuse the place of a deleted file, and searches all such places for each new file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 2**30  # bytes, several times what a run needs at once


def keep_in_memory(memory: Path = MEMORY) -> None:
    """Set this up for this process and its children, unless the person who runs the tests has chosen a folder."""
    if "TMPDIR" not in os.environ and memory.is_dir() and os.access(memory, os.W_OK) and is_fit(os.statvfs(memory)):
        os.environ["TMPDIR"] = tempfile.tempdir = str(memory)


def is_fit(system: os.statvfs_result) -> bool:
    """Return whether a file system is large enough and may run programs. In containers it is often too small."""
    return not system.f_flag & os.ST_NOEXEC and system.f_bavail * system.f_frsize >= ROOM
