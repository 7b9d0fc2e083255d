"""The machine's cores and memory, what a model needs, and the error if memory is short."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from everloop.errors import EverloopError
from everloop.providers.base import ProviderError
from everloop.providers.local.gguf import read_head
from everloop.providers.local.machine import available_memory, cores
from everloop.providers.local.memory import RESERVE, check_memory, needs

GB = 10**9


def laid_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def machine_with(root: Path, cpus: int, threads_a_core: int = 1, **files: str) -> Path:
    topology = "sys/devices/system/cpu/cpu{}/topology"
    found = {"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\nSwapFree: 0 kB"}
    for cpu in range(cpus):
        found[f"{topology.format(cpu)}/physical_package_id"] = "0"
        found[f"{topology.format(cpu)}/core_id"] = str(cpu // threads_a_core)
    return laid_out(root, {**found, **files})


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def allow(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))

    return allow


def test_there_are_as_many_threads_as_physical_cores(tmp_path, allowed):
    allowed(8)
    assert cores(machine_with(tmp_path / "plain", 8)) == 8
    assert cores(machine_with(tmp_path / "twins", 8, threads_a_core=2)) == 4
    assert cores(tmp_path / "nothing known") == 8


def test_only_cores_available_to_this_process_count(tmp_path, allowed):
    allowed(2)
    assert cores(machine_with(tmp_path, 8)) == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),  # above our own group
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 8),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/box",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
)
def test_a_containers_quota_counts(tmp_path, allowed, files, expected):
    allowed(8)
    assert cores(machine_with(tmp_path, 8, **files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8_192_000_000),
        (
            {
                "proc/self/cgroup": "0::/box",
                "sys/fs/cgroup/box/memory.max": "3000000000",
                "sys/fs/cgroup/box/memory.current": "1000000000",
                "sys/fs/cgroup/box/memory.stat": "anon 600000000\ninactive_file 400000000",
            },
            2_400_000_000,
        ),
        (
            {
                "proc/self/cgroup": "0::/box/inner",
                "sys/fs/cgroup/box/memory.max": "1000000000",
                "sys/fs/cgroup/box/memory.current": "2000000000",
            },
            0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/box",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "3000000000",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "500000000",
            },
            2_500_000_000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/box",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "500000000",
            },
            8_192_000_000,
        ),
    ],
)
def test_the_smallest_limit_applies(tmp_path, files, expected):
    assert available_memory(machine_with(tmp_path, 1, **files)) == expected


def test_without_known_limits_nothing_is_refused(tmp_path):
    assert available_memory(tmp_path) is None


# ------------------------------------------------------------------------------------------------------ needs


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(path: Path, **facts: Any) -> Path:
    """Write a file with a model's metadata and nothing else."""
    data = b""
    for name, value in facts.items():
        data += _string(name.replace("__", "."))
        if isinstance(value, str):
            data += struct.pack("<I", 8) + _string(value)
        elif isinstance(value, list):
            data += struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
        else:
            data += struct.pack("<II", 4, value)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(facts)) + data)
    return path


FACTS = {
    "general__architecture": "qwen2",
    "qwen2__block_count": 24,
    "qwen2__embedding_length": 896,
    "qwen2__attention__head_count": 14,
    "qwen2__attention__head_count_kv": 2,
}


def test_a_conversation_costs_what_its_layers_keep(tmp_path):
    plain = gguf(tmp_path / "a.gguf", **FACTS)
    assert needs(plain, 1_000, 2).token == 24 * 2 * (64 + 64) * 2
    assert needs(plain, 1_000, 2).total == plain.stat().st_size + 2_000 * 12_288 + RESERVE
    wide = gguf(tmp_path / "b.gguf", **FACTS, qwen2__attention__key_length=128, qwen2__attention__value_length=128)
    assert needs(wide, 1_000, 2).token == 24 * 2 * 256 * 2
    mixed = gguf(tmp_path / "c.gguf", **{**FACTS, "qwen2__attention__head_count_kv": [2] * 12 + [0] * 12})
    assert needs(mixed, 1_000, 2).token == 12 * 2 * 128 * 2


def test_with_too_little_memory_the_error_names_the_need_and_a_window_that_fits(tmp_path):
    path = gguf(tmp_path / "a.gguf", **FACTS)
    window = 8_192
    enough = needs(path, window, 2).total
    check_memory(path, window, 2, enough)
    with pytest.raises(ProviderError) as caught:
        check_memory(path, window, 2, enough - 60_000_000)
    assert "411 MB" in str(caught.value)
    assert "EVERLOOP_WINDOW=5120" in str(caught.value)
    check_memory(path, 5_120, 2, enough - 60_000_000)
    with pytest.raises(ProviderError) as caught:
        check_memory(path, window, 2, 100_000_000)
    assert "EVERLOOP_WINDOW" not in str(caught.value)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "data",
    [b"", b"GGUF", b"ELF!" + bytes(100), b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), b"GGUF" + bytes(40)],
)
def test_a_file_that_is_not_a_model_is_a_one_line_error(tmp_path, data):
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(EverloopError) as caught:
        read_head(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [2**62, 2**31])
def test_a_header_with_false_lengths_is_not_believed(tmp_path, length):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", length) + b"x" * 100)
    with pytest.raises(EverloopError):
        read_head(path)


def test_a_missing_file_is_a_one_line_error(tmp_path):
    with pytest.raises(EverloopError):
        read_head(tmp_path / "none.gguf")


def test_a_header_with_nonsensical_numbers_is_an_error(tmp_path):
    for pairs in ("two", [2, 2]):
        odd = gguf(tmp_path / "a.gguf", **{**FACTS, "qwen2__attention__head_count_kv": pairs})
        assert needs(odd, 1_000, 2).total > 0
    path = tmp_path / "b.gguf"
    nested = struct.pack("<IQ", 9, 1) * 5_000  # a list in a list in a list …
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _string("a") + struct.pack("<I", 9) + nested)
    with pytest.raises(EverloopError):
        read_head(path)
