"""Which model runs if none is set."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from everloop.providers.local.catalogue import CATALOGUE, DEFAULT, LARGER
from everloop.providers.local.choice import LARGER_NEEDS, default_model
from everloop.providers.local.weights import Sources, Weights

DATA = {DEFAULT: b"GGUF small", LARGER: b"GGUF larger"}
CARDS = {
    name: replace(CATALOGUE[name], size=len(data), sha256=hashlib.sha256(data).hexdigest())
    for name, data in DATA.items()
}


def weights(folder: Path, *there: str) -> Weights:
    for name in there:
        (folder / CARDS[name].file).write_bytes(DATA[name])
    return Weights(folder, Sources(hub=False, registry=False), CARDS)


@pytest.mark.parametrize(
    ("memory", "disk", "name", "word"),
    [
        (LARGER_NEEDS, LARGER_NEEDS, LARGER, "enough memory and disk"),
        (LARGER_NEEDS - 1, LARGER_NEEDS, DEFAULT, "memory"),
        (LARGER_NEEDS, LARGER_NEEDS - 1, DEFAULT, "disk"),
    ],
)
def test_without_files_the_larger_model_is_chosen_if_it_fits(memory, disk, name, word, tmp_path):
    choice = default_model(weights(tmp_path), memory, disk)
    assert choice.name == name
    assert word in choice.why


def test_a_pulled_model_is_used_so_that_nothing_is_downloaded(tmp_path):
    choice = default_model(weights(tmp_path, DEFAULT), LARGER_NEEDS, LARGER_NEEDS)
    assert choice.name == DEFAULT
    assert f"`everloop model pull {LARGER}`" in choice.why


def test_of_two_pulled_models_the_larger_is_used_if_it_fits_into_memory(tmp_path):
    both = weights(tmp_path, DEFAULT, LARGER)
    assert default_model(both, LARGER_NEEDS, 0).name == LARGER
    assert default_model(both, LARGER_NEEDS - 1, LARGER_NEEDS).name == DEFAULT


def test_for_a_missing_folder_the_free_space_of_its_parent_counts(tmp_path):
    assert default_model(Weights(tmp_path / "a" / "b", Sources(), CARDS), LARGER_NEEDS).name in CARDS
