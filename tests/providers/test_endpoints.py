"""The registry of known endpoints: every entry is valid, and a server is recognised by its address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everloop.providers.base import OPTIONS
from everloop.providers.endpoints import ENDPOINTS, USUAL, endpoints_table, known_at, quirks_of
from everloop.providers.http import origin_of

PAGE = Path(__file__).parents[2] / "docs" / "providers.md"


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_entry_is_valid(name):
    known = ENDPOINTS[name]
    assert re.fullmatch(r"[a-z]+", name)
    assert re.fullmatch(r"([A-Z]+_)*(API_KEY|TOKEN)|", known.key)
    assert {*known.quirks.names, *known.quirks.refused} <= OPTIONS
    assert len({known.quirks.names.get(option, option) for option in OPTIONS}) == len(OPTIONS)
    assert not known.note.endswith(".")
    if not known.base_url:
        assert known.note, "somebody must be told what to set instead of an address"
        return
    origin = origin_of(known.base_url)
    assert not known.base_url.endswith("/")
    local = origin.host == "127.0.0.1"
    assert origin.scheme == ("http" if local else "https"), "a key must not travel in the clear"
    assert known.needs_key is not local
    assert known_at(known.base_url) is known


def test_no_two_endpoints_share_an_address_or_a_key():
    addresses = [known.base_url for known in ENDPOINTS.values() if known.base_url]
    keys = [known.key for known in ENDPOINTS.values() if known.key]
    assert len(set(addresses)) == len(addresses)
    assert len(set(keys)) == len(keys)


def test_the_page_has_the_table_of_the_registry():
    assert endpoints_table() in PAGE.read_text(), f"put this into docs/providers.md:\n{endpoints_table()}"


def test_a_server_is_recognised_by_scheme_host_and_port():
    assert known_at("https://API.openai.com./v2/other") is ENDPOINTS["openai"]
    assert known_at("http://localhost:11434") is known_at("http://[::1]:11434/v1") is ENDPOINTS["ollama"]
    assert known_at("https://some.openai.azure.com/openai/v1") is ENDPOINTS["azure"]
    for other in ("http://api.openai.com/v1", "https://api.openai.com:444/v1", "https://x-openai.azure.com", "nothing"):
        assert known_at(other) is None
        assert quirks_of(other) is USUAL
