"""What a token consists of, and which part of it is on disk."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
from contextlib import closing
from pathlib import Path

from everloop.store.sqlite import SQLiteStore
from everloop.store.sqlite.schema import MIGRATIONS
from everloop.store.tokens import hash_of, new_token


def test_a_token_is_256_random_bits_after_our_prefix():
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    for token in tokens:
        assert token.startswith("ev_")
        assert len(base64.urlsafe_b64decode(token.removeprefix("ev_") + "=")) == 32


def test_any_text_has_a_hash_even_if_it_is_no_valid_unicode():
    assert len({hash_of(text) for text in ("", "\udcff", "\ud800", "x" * 100_000, "\0")}) == 5


async def test_the_token_itself_is_nowhere_on_disk(tmp_path: Path):
    token = new_token()
    store = SQLiteStore(tmp_path / "store.db")
    made = await store.add_token("laptop", "anna", hash_of(token))
    await store.token(hash_of(token))
    await store.token_used(made.id, 1.0)
    written = b"".join(file.read_bytes() for file in tmp_path.glob("store.db*"))
    await store.close()
    assert hash_of(token).encode() in written
    for part in (token, token.removeprefix("ev_"), token[3:23]):
        assert part.encode() not in written
    assert base64.urlsafe_b64decode(token.removeprefix("ev_") + "=") not in written


async def test_a_store_older_than_tokens_gets_their_table_and_keeps_its_data(tmp_path: Path):
    path = tmp_path / "store.db"
    await asyncio.to_thread(_make_old_store, path)
    store = SQLiteStore(path)
    assert await store.tokens() == []
    await store.add_token("laptop", "anna", hash_of(new_token()))
    assert await store.session("me", "cli:direct") is not None
    await store.close()


async def test_a_token_older_than_rights_keeps_its_abilities(tmp_path: Path):
    """It may use the server; those of the machine's own person may read the numbers of all owners."""
    path = tmp_path / "store.db"
    await asyncio.to_thread(_make_old_tokens, path)
    store = SQLiteStore(path)
    assert {token.owner: token.rights for token in await store.tokens()} == {"me": {"use", "admin"}, "anna": {"use"}}
    await store.close()


def _make_old_tokens(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for step in MIGRATIONS[:7]:
            step(db)
        db.execute("PRAGMA user_version = 7")
        for owner in ("me", "anna"):
            db.execute(
                "INSERT INTO token (id, hash, name, owner, created_at) VALUES (?, ?, ?, ?, 1)",
                (owner, hash_of(owner), owner, owner),
            )


def _make_old_store(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for step in MIGRATIONS[:5]:
            step(db)
        db.execute("PRAGMA user_version = 5")
        db.execute("INSERT INTO session (owner, key, created_at, updated_at) VALUES ('me', 'cli:direct', 1, 1)")
