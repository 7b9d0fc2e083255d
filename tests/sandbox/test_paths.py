"""Normalizing paths as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.sandbox.reach import normalized, within


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (".", "/w/s"), ("a//b/./c/", "/w/s/a/b/c"), ("../x", "/w/x"), ("../../../..", "/"), ("/etc", "/etc"),
        ("//etc//x", "/etc/x"), ("///etc", "/etc"), ("%2e%2e/x", "/w/s/%2e%2e/x"), ("~root/x", "/w/s/~root/x"),
        ("a/~/b", "/w/s/a/~/b"), ("\ud800", "/w/s/?"), ("", "/w/s"), ("..\\x", "/w/s/..\\x"),
    ],
)  # fmt: skip
def test_a_path_is_normalized_without_touching_the_disk(path, place):
    assert normalized(path, Path("/w/s")) == place


def test_only_the_current_users_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    assert normalized("~", Path("/w")) == "/h"
    assert normalized("~/a/../b", Path("/w")) == "/h/b"


@given(st.text(st.sampled_from("ab./~\0 %é"), max_size=20))
def test_normalizing_any_text_is_idempotent(path):
    place = normalized(path, Path("/w/s"))
    assert place.startswith("/")
    assert ".." not in place.split("/")
    assert normalized(place, Path("/w/s")) == place


def test_a_folder_that_only_shares_a_name_prefix_is_outside():
    assert within("/w/s/a", "/w/s")
    assert within("/w/s", "/w/s")
    assert not within("/w/s-evil", "/w/s")
    assert within("/a", "/")
