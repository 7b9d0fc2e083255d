"""The cores and the memory that this process may use, from the kernel and the limits of its cgroups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def cores(root: Path = _ROOT) -> int:
    """Return the number of usable physical cores: two threads of one core compute no faster than one."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    found = set()
    for cpu in allowed:
        place = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        found.add((_text(place / "physical_package_id"), _text(place / "core_id") or f"cpu{cpu}"))
    return max(1, min(len(found), *(math.ceil(share) for share in _shares(root)), len(allowed)))


def available_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that can be used before the kernel kills a process; None if unknown."""
    lines = _text(root / "proc/meminfo").splitlines()
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for folder in _groups(root, "memory"):
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            if (most := _number(folder / limit)) is not None and (used := _number(folder / usage)) is not None:
                limits.append(max(0, most - used + _reclaimable(folder)))
    return min(limits, default=None)


def _reclaimable(folder: Path) -> int:
    """Return the bytes of the page cache, which the kernel drops when it needs memory."""
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdecimal():
            return int(value)
    return 0


def _shares(root: Path) -> Iterator[float]:
    """Yield the CPU limits of the process's cgroups, in cores."""
    for folder in _groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not period:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.strip().isdecimal() and int(period):
            yield int(quota) / int(period)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's cgroups, up to the root of each hierarchy."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        top = base if number == "0" else base / controllers
        if number != "0" and not top.is_dir():
            top = base / controller
        folder = top / path.strip("/")
        while True:
            yield folder
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    text = _text(path)
    # Version 1 reports a number near 2**63 for no limit.
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
