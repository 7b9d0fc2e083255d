"""The SQLite schema as numbered migrations. A released migration is never changed; new ones are appended."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable


def m001_core(db: sqlite3.Connection) -> None:
    """Sessions with their leases, the log, turns, inbox, outbox, timers and workers."""
    db.execute(
        """CREATE TABLE session (
            id INTEGER PRIMARY KEY, owner TEXT NOT NULL, key TEXT NOT NULL,
            worker TEXT, fence INTEGER NOT NULL DEFAULT 0,
            history_from INTEGER NOT NULL DEFAULT 0,
            created_at REAL NOT NULL, updated_at REAL NOT NULL,
            UNIQUE (owner, key))"""
    )
    db.execute(
        """CREATE TABLE entry (
            session INTEGER NOT NULL REFERENCES session, seq INTEGER NOT NULL, turn TEXT,
            kind TEXT NOT NULL, data TEXT NOT NULL, at REAL NOT NULL,
            PRIMARY KEY (session, seq)) WITHOUT ROWID"""
    )
    db.execute(
        """CREATE TABLE inbox (
            id INTEGER PRIMARY KEY, owner TEXT NOT NULL, session INTEGER NOT NULL REFERENCES session,
            message_id TEXT, kind TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'new', data TEXT NOT NULL,
            at REAL NOT NULL, turn TEXT, first_seq INTEGER, opened INTEGER NOT NULL DEFAULT 0,
            ended_at REAL, reason TEXT)"""
    )
    db.execute("CREATE UNIQUE INDEX inbox_once ON inbox (owner, message_id) WHERE message_id IS NOT NULL")
    # The index of all open work: a turn in progress has taken a row here. SQLite uses it only for queries that contain
    # `state <> 'done'` literally.
    db.execute("CREATE INDEX inbox_open ON inbox (session, id) WHERE state <> 'done'")
    # A turn is the message that opened it: it has no row of its own to write.
    db.execute(
        """CREATE VIEW turn AS SELECT turn AS id, session, owner, first_seq,
            coalesce((SELECT at FROM entry WHERE entry.session = inbox.session AND seq = first_seq), at) AS started_at,
            ended_at, reason
            FROM inbox WHERE opened"""
    )
    db.execute(
        """CREATE TABLE outbox (
            id INTEGER PRIMARY KEY, owner TEXT NOT NULL, session INTEGER NOT NULL REFERENCES session,
            turn TEXT, data TEXT NOT NULL, worker TEXT, tries INTEGER NOT NULL DEFAULT 0,
            at REAL NOT NULL, sent_at REAL)"""
    )
    db.execute("CREATE INDEX outbox_waiting ON outbox (id) WHERE sent_at IS NULL")
    db.execute(
        """CREATE TABLE timer (
            owner TEXT NOT NULL, id TEXT NOT NULL, due_at REAL NOT NULL, data TEXT NOT NULL,
            PRIMARY KEY (owner, id)) WITHOUT ROWID"""
    )
    db.execute("CREATE INDEX timer_due ON timer (due_at)")
    db.execute("CREATE TABLE worker (id TEXT PRIMARY KEY, address TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID")


def m002_messages_of_tools(db: sqlite3.Connection) -> None:
    """Messages sent by a tool carry the key of their call, so that a repeated call sends nothing twice."""
    db.execute("ALTER TABLE outbox ADD COLUMN key TEXT")
    db.execute("CREATE UNIQUE INDEX outbox_once ON outbox (owner, key) WHERE key IS NOT NULL")


def m003_compaction(db: sqlite3.Connection) -> None:
    """The position of a conversation's latest compaction; 0 if it has none."""
    db.execute("ALTER TABLE session ADD COLUMN compacted INTEGER NOT NULL DEFAULT 0")


def m004_search(db: sqlite3.Connection) -> None:
    """The contents of the search index, and how far it has read each session.

    The first search creates the index itself, so that a SQLite without FTS5 can do everything else.
    """
    db.execute(
        """CREATE TABLE search_entry (
            id INTEGER PRIMARY KEY, owner TEXT NOT NULL, session INTEGER NOT NULL REFERENCES session,
            seq INTEGER NOT NULL, at REAL NOT NULL, untrusted INTEGER NOT NULL)"""
    )
    db.execute("CREATE INDEX search_entry_at ON search_entry (owner, at)")
    db.execute(
        """CREATE TABLE search_cursor (
            session INTEGER PRIMARY KEY REFERENCES session, seq INTEGER NOT NULL, untrusted INTEGER NOT NULL)"""
    )


def m005_budgets(db: sqlite3.Connection) -> None:
    """An owner's usage per turn and per day, if there are budgets."""
    db.execute(
        """CREATE TABLE spent (
            owner TEXT NOT NULL, scope TEXT NOT NULL, tokens INTEGER NOT NULL, cost REAL NOT NULL,
            PRIMARY KEY (owner, scope)) WITHOUT ROWID"""
    )


def m006_tokens(db: sqlite3.Connection) -> None:
    """Bearer tokens, stored only as hashes."""
    db.execute(
        """CREATE TABLE token (
            id TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL, owner TEXT NOT NULL,
            created_at REAL NOT NULL, last_used_at REAL, revoked_at REAL) WITHOUT ROWID"""
    )
    db.execute("CREATE UNIQUE INDEX token_name ON token (name) WHERE revoked_at IS NULL")


def m007_rates(db: sqlite3.Connection) -> None:
    """Event counts of rate limits, per time window."""
    db.execute(
        """CREATE TABLE rate (
            owner TEXT NOT NULL, name TEXT NOT NULL, began REAL NOT NULL, number INTEGER NOT NULL,
            PRIMARY KEY (owner, name)) WITHOUT ROWID"""
    )


def m008_trust(db: sqlite3.Connection) -> None:
    """File contents that the agent wrote, and whether their session was tainted; a person's grants for the rest of a
    session; the rights of a token."""
    db.execute(
        """CREATE TABLE file_mark (
            owner TEXT NOT NULL, digest TEXT NOT NULL, tainted INTEGER NOT NULL, path TEXT NOT NULL, at REAL NOT NULL,
            PRIMARY KEY (owner, digest)) WITHOUT ROWID"""
    )
    db.execute("CREATE INDEX file_mark_tainted ON file_mark (owner, path) WHERE tainted")
    db.execute(
        """CREATE TABLE session_grant (
            owner TEXT NOT NULL, key TEXT NOT NULL, name TEXT NOT NULL, at REAL NOT NULL,
            PRIMARY KEY (owner, key, name)) WITHOUT ROWID"""
    )
    db.execute("ALTER TABLE token ADD COLUMN rights TEXT NOT NULL DEFAULT 'use'")
    # Before there were rights, tokens of the machine's own person could read the metrics of all owners.
    db.execute("UPDATE token SET rights = 'admin,use' WHERE owner = 'me'")


def m009_outbox_by_channel(db: sqlite3.Connection) -> None:
    """The channel and chat of an outgoing message, so that each channel reads its own; why a row was set aside; and the
    number of commits, which reveals whether any were lost (see `writer.CommitMark`)."""
    # NULL until a row written by an older version is first read
    db.execute("ALTER TABLE outbox ADD COLUMN channel TEXT")
    db.execute("ALTER TABLE outbox ADD COLUMN chat_id TEXT")
    db.execute("ALTER TABLE outbox ADD COLUMN damaged TEXT")
    db.execute("CREATE TABLE commit_mark (number INTEGER NOT NULL, lost INTEGER NOT NULL DEFAULT 0, lost_at REAL)")
    db.execute("INSERT INTO commit_mark (number) VALUES (0)")


def m010_damaged_incoming(db: sqlite3.Connection) -> None:
    """The reason why an incoming message was set aside."""
    db.execute("ALTER TABLE inbox ADD COLUMN damaged TEXT")
    db.execute("CREATE INDEX inbox_damaged ON inbox (id) WHERE damaged IS NOT NULL")


def m011_token_agent(db: sqlite3.Connection) -> None:
    """Whether a token's requests may use the agent's own tools; '' leaves it to the server's settings."""
    db.execute("ALTER TABLE token ADD COLUMN agent TEXT NOT NULL DEFAULT ''")


def m012_hidden_messages(db: sqlite3.Connection) -> None:
    """Messages that a client has deleted: they stay in the log, but can no longer be found by their ids."""
    db.execute("ALTER TABLE inbox ADD COLUMN hidden INTEGER NOT NULL DEFAULT 0")


def m013_titles(db: sqlite3.Connection) -> None:
    """Titles of sessions, with the model call that wrote one; the number of deleted sessions; and indexes to delete a
    session without reading the others."""
    db.execute("ALTER TABLE session ADD COLUMN title TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE session ADD COLUMN named_by TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE session ADD COLUMN naming_usage TEXT NOT NULL DEFAULT ''")
    db.execute("CREATE TABLE deletion (sessions INTEGER NOT NULL)")
    db.execute("INSERT INTO deletion (sessions) VALUES (0)")
    for table in ("inbox", "outbox", "search_entry"):
        db.execute(f"CREATE INDEX {table}_session ON {table} (session)")


def m014_channels(db: sqlite3.Connection) -> None:
    """The parts of an outgoing message that its network has accepted; why a message became a dead letter; named leases;
    and the stored state of channels."""
    db.execute("ALTER TABLE outbox ADD COLUMN parts TEXT")
    db.execute("ALTER TABLE outbox ADD COLUMN failed TEXT")
    db.execute("CREATE INDEX outbox_dead ON outbox (id) WHERE failed IS NOT NULL")
    db.execute("CREATE TABLE channel_lease (name TEXT PRIMARY KEY, worker TEXT NOT NULL) WITHOUT ROWID")
    db.execute(
        """CREATE TABLE channel_state (
            channel TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (channel, key)) WITHOUT ROWID"""
    )


def m015_entries_in_order_of_writing(db: sqlite3.Connection) -> None:
    """Entries in the order in which they were written, with an index to find them.

    Clustered by (session, seq), they were inserted into the middle of full pages, and a commit rewrote the neighbouring
    pages.
    """
    # A table can only be renamed while no view refers to it.
    (view,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = 'turn'").fetchone()
    db.execute("DROP VIEW turn")
    db.execute(
        """CREATE TABLE entry_log (
            session INTEGER NOT NULL REFERENCES session, seq INTEGER NOT NULL, turn TEXT,
            kind TEXT NOT NULL, data TEXT NOT NULL, at REAL NOT NULL,
            PRIMARY KEY (session, seq))"""
    )
    db.execute(
        """INSERT INTO entry_log (session, seq, turn, kind, data, at)
            SELECT session, seq, turn, kind, data, at FROM entry ORDER BY session, seq"""
    )
    db.execute("DROP TABLE entry")
    db.execute("ALTER TABLE entry_log RENAME TO entry")
    db.execute(view)


def m016_archive(db: sqlite3.Connection) -> None:
    """Archived sessions, each with its number of entries at that time: the next entry unarchives it."""
    db.execute("ALTER TABLE session ADD COLUMN archived_at INTEGER NOT NULL DEFAULT 0")


def m017_requests(db: sqlite3.Connection) -> None:
    """The parts of model requests that are not in the log, each text once per owner by hash; with a session's key, it
    is deleted with that session. And the time that a turn spent on flushes in the writes that closed or parked it."""
    db.execute(
        """CREATE TABLE request_text (
            owner TEXT NOT NULL, hash TEXT NOT NULL, key TEXT NOT NULL, data TEXT NOT NULL, at REAL NOT NULL,
            PRIMARY KEY (owner, hash, key))"""
    )
    db.execute("ALTER TABLE inbox ADD COLUMN flushed REAL NOT NULL DEFAULT 0")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    m001_core,
    m002_messages_of_tools,
    m003_compaction,
    m004_search,
    m005_budgets,
    m006_tokens,
    m007_rates,
    m008_trust,
    m009_outbox_by_channel,
    m010_damaged_incoming,
    m011_token_agent,
    m012_hidden_messages,
    m013_titles,
    m014_channels,
    m015_entries_in_order_of_writing,
    m016_archive,
    m017_requests,
)


def migrate(db: sqlite3.Connection) -> None:
    """Apply the missing migrations, each in its own transaction. Several processes may do so concurrently."""
    while (version := _version(db)) < len(MIGRATIONS):
        db.execute("BEGIN IMMEDIATE")
        try:
            if _version(db) == version:
                MIGRATIONS[version](db)
                db.execute(f"PRAGMA user_version = {version + 1}")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
    if version > len(MIGRATIONS):
        raise NewerSchema(version)


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


class NewerSchema(Exception):
    """The file was written by a newer version of Everloop."""
