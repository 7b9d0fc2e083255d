"""The default model: the larger one if it fits on this machine, otherwise the smaller one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from .catalogue import DEFAULT, LARGER
from .machine import available_memory
from .weights import Weights

LARGER_NEEDS = 3_000_000_000  # free bytes of memory, and of disk, that the larger model requires


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    why: str


def default_model(weights: Weights, memory: int | None = None, disk: int | None = None) -> Choice:
    """Return the model for this machine. A model that was pulled before is preferred, so as not to download another.

    `memory` and `disk` are the free bytes, measured if not given. Reads the disk.
    """
    memory = available_memory() if memory is None else memory
    fits = memory is None or memory >= LARGER_NEEDS
    if fits and weights.find(LARGER) is not None:
        return Choice(LARGER, "the larger of two, because there is enough memory for it")
    if weights.present(DEFAULT):
        return Choice(
            DEFAULT, f"the smaller of two, because its file is here; `everloop model pull {LARGER}` gets the larger"
        )
    disk = _free(weights.folder) if disk is None else disk
    if fits and disk >= LARGER_NEEDS:
        return Choice(LARGER, "the larger of two, because there is enough memory and disk for it")
    short = "disk" if fits else "memory"
    return Choice(DEFAULT, f"the smaller of two, because less than {LARGER_NEEDS / 1e9:.0f} GB of {short} are free")


def _free(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist yet."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return 0
