"""File marks and session grants, in both stores."""

from __future__ import annotations

from everloop.store.base import FileMark


async def test_a_content_is_known_by_its_digest_to_its_owner_alone(store):
    await store.mark_files("anna", [FileMark("aa", False, "/w/a"), FileMark("bb", True, "/w/b")])
    assert await store.file_marks("anna", ["aa", "bb", "cc"]) == {"aa": False, "bb": True}
    assert await store.file_marks("ben", ["aa", "bb"]) == {}
    assert await store.file_marks("anna", []) == {}


async def test_content_written_in_a_clean_session_stays_clean(store):
    for tainted in (True, False, True):
        await store.mark_files("me", [FileMark("aa", tainted, "/w/a")])
    assert await store.file_marks("me", ["aa"]) == {"aa": False}
    assert await store.tainted_paths("me") == []


async def test_tainted_paths_are_those_of_tainted_contents_latest_first(store):
    await store.mark_files("me", [FileMark("aa", True, "/w/old")])
    await store.mark_files("me", [FileMark("bb", True, "/w/new"), FileMark("cc", False, "/w/clean")])
    await store.mark_files("me", [FileMark("bb", True, "/w/new")])
    assert await store.tainted_paths("me") == ["/w/new", "/w/old"]
    assert await store.tainted_paths("me", 1) == ["/w/new"]
    assert await store.tainted_paths("ben") == []


async def test_grants_apply_to_one_session_until_they_are_revoked(store):
    await store.grant("me", "cli:direct", ["fetch:example.org", "tool:message"])
    await store.grant("me", "cli:direct", ["tool:message"])
    assert await store.grants("me", "cli:direct") == {"fetch:example.org", "tool:message"}
    assert await store.grants("me", "cli:other") == await store.grants("ben", "cli:direct") == frozenset()
    await store.revoke_grants("me", "cli:direct")
    assert await store.grants("me", "cli:direct") == frozenset()
