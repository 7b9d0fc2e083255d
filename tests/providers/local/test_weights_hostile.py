"""Hostile servers, and files that change while they are read: one line, no more disk than the model needs, and no wrong
bytes that count as right.
"""

from __future__ import annotations

import os

import pytest

from everloop.providers.local import sources, weights

from .servers import BYTES, CARD, OTHER, Answer, refused
from .test_weights import HUB, is_installed, shelf
from .test_weights import _short_pauses as _short_pauses
from .test_weights import server as server

DIGITS = "9" * 5_000  # more digits than Python converts to a number


def test_a_redirect_to_itself_is_a_one_line_error(tmp_path, server):
    server.gives(HUB, Answer(status=302, location=HUB))
    assert "302" in refused(shelf(tmp_path, server))


def test_the_body_of_a_redirect_is_not_read(tmp_path, server, monkeypatch):
    monkeypatch.setattr(sources, "TIMEOUT", 10.0)
    server.gives(HUB, Answer(bytes(60_000), status=302, location=f"{server.url}/blob", length=10**12, hold=20_000))
    server.gives("/blob", Answer(BYTES))
    assert is_installed(shelf(tmp_path, server).pull("tiny"))


@pytest.mark.parametrize("said", [f"bytes {DIGITS}-{DIGITS}/*", f"bytes 100000-{DIGITS}/{DIGITS}"])
def test_a_range_that_is_not_a_number_is_refused_and_the_partial_file_kept(tmp_path, server, said):
    server.gives(HUB, Answer(BYTES, cut=100_000), Answer(BYTES, content_range=said))
    shelved = shelf(tmp_path, server)
    assert len(refused(shelved)) < 1_000
    assert shelved.downloaded_bytes("tiny") == 100_000


def test_a_length_that_is_not_a_number_is_refused_and_the_partial_file_kept(tmp_path, server):
    server.gives(HUB, Answer(BYTES, cut=100_000), Answer(BYTES, length=10**4_200))
    shelved = shelf(tmp_path, server)
    assert len(refused(shelved)) < 1_000
    assert shelved.downloaded_bytes("tiny") == 100_000


def test_a_file_that_changes_during_its_check_does_not_count_as_checked(tmp_path, server, monkeypatch):
    server.gives(HUB, Answer(BYTES))
    shelved = shelf(tmp_path, server)
    path = shelved.pull("tiny")
    os.utime(path, (1, 1))  # long ago: a coarse clock would not tell two writes apart
    checked = weights._sha256

    def and_then_changed(*arguments):
        found = checked(*arguments)
        path.write_bytes(OTHER)
        return found

    monkeypatch.setattr(weights, "_sha256", and_then_changed)
    shelved.find("tiny", again=True)
    monkeypatch.setattr(weights, "_sha256", checked)
    assert path.stat().st_size == CARD.size
    assert shelved.find("tiny") is None
