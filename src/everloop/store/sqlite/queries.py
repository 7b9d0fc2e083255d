"""The SQL of single statements; that of a transaction is next to its code."""

from __future__ import annotations

from ..claims import INBOX_COLUMNS
from ..tokens import COLUMNS
from .transactions import INBOX_ROW

_INBOX = "i." + INBOX_COLUMNS.replace(", ", ", i.").replace("i.data", "CAST(i.data AS BLOB)")

SESSIONS = """SELECT s.id, s.owner, s.key,
        (SELECT coalesce(max(seq), 0) FROM entry WHERE session = s.id), s.history_from, s.created_at, s.updated_at,
        (SELECT turn FROM inbox WHERE session = s.id AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1),
        s.worker, s.compacted,
        EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked'),
        s.title, s.named_by, s.naming_usage, s.archived_at
    FROM session s WHERE s.owner = ?"""
READY = """SELECT owner, key, worker FROM session WHERE id IN (
        SELECT session FROM inbox WHERE state <> 'done' AND kind <> 'urgent'
        EXCEPT SELECT session FROM inbox WHERE state <> 'done' AND state = 'parked') ORDER BY updated_at"""
HOLDERS = """SELECT id FROM worker
    UNION SELECT s.worker FROM inbox i JOIN session s ON s.id = i.session
        WHERE i.state <> 'done' AND s.worker IS NOT NULL"""
WAITING = f"""SELECT {_INBOX} FROM session s JOIN inbox i ON i.session = s.id
    WHERE s.owner = ? AND s.key = ? AND i.state <> 'done' AND i.state = 'new' AND i.kind <> 'urgent' ORDER BY i.id"""
URGENT = f"""SELECT {_INBOX}, s.worker FROM inbox i JOIN session s ON s.id = i.session
    WHERE i.state <> 'done' AND i.kind = 'urgent' AND coalesce(i.owner = ?, 1) ORDER BY i.id"""
UNFINISHED = f"SELECT {INBOX_ROW} FROM inbox WHERE state <> 'done' AND owner = ? ORDER BY id"
INCOMING = f"SELECT {INBOX_ROW} FROM inbox WHERE id = ?"
FIND = f"SELECT {INBOX_ROW} FROM inbox WHERE owner = ? AND message_id = ? AND NOT hidden"
TURN_OF = """SELECT session, first_seq FROM inbox
    WHERE owner = ? AND message_id = ? AND NOT hidden AND first_seq IS NOT NULL"""
HIDE = "UPDATE inbox SET hidden = 1 WHERE owner = ? AND message_id = ? AND NOT hidden"
OVER = "SELECT id FROM inbox WHERE state IN ('done', 'parked') AND id IN (SELECT value FROM json_each(?))"
LOG = "SELECT seq, turn, at, CAST(data AS BLOB) FROM entry WHERE session = ? AND seq > ? AND seq <= ? ORDER BY seq"
# Latest first, so that a recent turn is found quickly.
TURNS = """SELECT i.turn, i.session, s.key, i.owner, i.first_seq,
        coalesce((SELECT at FROM entry WHERE session = i.session AND seq = i.first_seq), i.at), i.ended_at, i.reason,
        i.flushed
    FROM inbox i JOIN session s ON s.id = i.session
    WHERE i.opened AND i.owner = ?1 AND substr(i.turn, 1, length(?2)) = ?2"""
KEEP_REQUEST_TEXT = "INSERT OR IGNORE INTO request_text (owner, hash, key, data, at) VALUES (?, ?, ?, ?, ?)"
REQUEST_TEXTS = "SELECT hash, data, key FROM request_text WHERE owner = ? AND hash IN (SELECT value FROM json_each(?))"
NOTE_FLUSH = "UPDATE inbox SET flushed = flushed + ? WHERE id = ?"
SPENT = "SELECT scope, tokens, cost FROM spent WHERE owner = ? AND scope IN (SELECT value FROM json_each(?))"
TIMERS = "SELECT owner, id, due_at, data FROM timer WHERE ? IS NULL OR owner = ? ORDER BY due_at LIMIT ?"
SET_TIMER = "INSERT OR REPLACE INTO timer (owner, id, due_at, data) VALUES (?, ?, ?, ?)"
TOKEN = f"SELECT {COLUMNS} FROM token WHERE hash = ? AND revoked_at IS NULL"
TOKENS = f"SELECT {COLUMNS} FROM token WHERE ?1 IS NULL OR owner = ?1 ORDER BY created_at, id"
TOKEN_USED = "UPDATE token SET last_used_at = ?1 WHERE id = ?2 AND (last_used_at IS NULL OR last_used_at <= ?1 - ?3)"
REVOKE_TOKEN = "UPDATE token SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
FILE_MARKS = "SELECT digest, tainted FROM file_mark WHERE owner = ? AND digest IN (SELECT value FROM json_each(?))"
TAINTED_PATHS = "SELECT path FROM file_mark WHERE owner = ? AND tainted ORDER BY at DESC LIMIT ?"
DELIVERIES = "SELECT id, at, parts FROM outbox WHERE id IN (SELECT value FROM json_each(?))"
HOLD_BACK = """UPDATE outbox SET tries = 0
    WHERE worker = ? AND sent_at IS NULL AND id IN (SELECT value FROM json_each(?))"""
RELEASE_OUTGOING = "UPDATE outbox SET worker = NULL WHERE worker = ? AND channel = ? AND sent_at IS NULL"
MARK_PARTS = """UPDATE outbox SET parts = ?, tries = 1, sent_at = ?
    WHERE id = ? AND worker = ? AND sent_at IS NULL AND damaged IS NULL"""
BURY = "UPDATE outbox SET failed = ?, sent_at = ? WHERE id = ? AND worker = ? AND sent_at IS NULL"
DEAD_LETTERS = """SELECT id, at, channel, chat_id, failed, CAST(data AS BLOB) FROM outbox
    WHERE failed IS NOT NULL AND (?1 IS NULL OR channel = ?1) ORDER BY id LIMIT ?2"""
CHANNEL_STATE = "SELECT key, value FROM channel_state WHERE channel = ?"
SET_CHANNEL_STATE = "INSERT OR REPLACE INTO channel_state (channel, key, value) VALUES (?, ?, ?)"
GRANTS = "SELECT name FROM session_grant WHERE owner = ? AND key = ?"
