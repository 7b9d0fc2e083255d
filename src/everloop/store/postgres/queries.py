"""The SQL of single statements; that of a transaction is next to its code."""

from __future__ import annotations

from ..claims import INBOX_COLUMNS
from ..tokens import COLUMNS
from .transactions import FRESH, NOW

_INBOX = "i." + INBOX_COLUMNS.replace(", ", ", i.")

SESSIONS = """SELECT s.id, s.owner, s.key,
        (SELECT coalesce(max(seq), 0) FROM entry WHERE session = s.id), s.history_from, s.created_at, s.updated_at,
        (SELECT turn FROM inbox WHERE session = s.id AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1),
        s.worker, s.compacted,
        EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked'),
        s.title, s.named_by, s.naming_usage, s.archived_at
    FROM session s WHERE s.owner = %s"""
READY = "SELECT * FROM everloop_ready(%s, %s)"
WAITING = f"""SELECT {_INBOX} FROM session s JOIN inbox i ON i.session = s.id
    WHERE s.owner = %s AND s.key = %s AND i.state <> 'done' AND i.state = 'new' AND i.kind <> 'urgent' ORDER BY i.id"""
URGENT = "SELECT * FROM everloop_urgent(%s, %s)"
URGENT_IN = f"""SELECT {INBOX_COLUMNS} FROM inbox WHERE session = ANY(%s) AND state <> 'done' AND kind = 'urgent'
    ORDER BY id"""
UNFINISHED = f"SELECT {INBOX_COLUMNS} FROM inbox WHERE state <> 'done' AND owner = %s ORDER BY id"
INCOMING = f"SELECT {INBOX_COLUMNS} FROM inbox WHERE id = %s"
OVER = "SELECT id FROM inbox WHERE state IN ('done', 'parked') AND id = ANY(%s)"
FIND = f"SELECT {INBOX_COLUMNS} FROM inbox WHERE owner = %s AND message_id = %s AND NOT hidden"
TURN_OF = """SELECT session, first_seq FROM inbox
    WHERE owner = %s AND message_id = %s AND NOT hidden AND first_seq IS NOT NULL"""
HIDE = "UPDATE inbox SET hidden = true WHERE owner = %s AND message_id = %s AND NOT hidden"
LOG = "SELECT seq, turn, at, data FROM entry WHERE session = %s AND seq > %s AND seq <= %s ORDER BY seq"
TURN = """SELECT seq, turn, at, data FROM entry WHERE session = %s AND seq >= %s
    AND turn IS NOT DISTINCT FROM (SELECT turn FROM entry WHERE session = %s AND seq = %s) ORDER BY seq"""
HISTORY = "SELECT id, history_from FROM session WHERE owner = %s AND key = %s"
# Latest first, so that a recent turn is found quickly.
TURNS = """SELECT i.turn, i.session, s.key, i.owner, i.first_seq,
        coalesce((SELECT at FROM entry WHERE session = i.session AND seq = i.first_seq), i.at), i.ended_at, i.reason,
        i.flushed
    FROM inbox i JOIN session s ON s.id = i.session
    WHERE i.opened AND i.owner = %s AND starts_with(i.turn, %s) AND (%s::bigint IS NULL OR i.session = %s)
    ORDER BY i.id DESC LIMIT %s"""
KEEP_REQUEST_TEXTS = f"""INSERT INTO request_text (owner, hash, key, data, at)
    SELECT %s, t.hash, %s, t.data, {NOW} FROM unnest(%s::text[], %s::text[]) AS t (hash, data) ORDER BY t.hash
    ON CONFLICT DO NOTHING"""
REQUEST_TEXTS = "SELECT hash, data, key FROM request_text WHERE owner = %s AND hash = ANY(%s)"
NOTE_FLUSHES = "SELECT everloop_note_flushes(%s, %s, %s, %s)"
SPENT = "SELECT scope, tokens, cost FROM spent WHERE owner = %s AND scope = ANY(%s)"
TIMERS = "SELECT owner, id, due_at, data FROM timer WHERE %s::text IS NULL OR owner = %s ORDER BY due_at LIMIT %s"
SET_TIMER = """INSERT INTO timer (owner, id, due_at, data) VALUES (%s, %s, %s, %s)
    ON CONFLICT (owner, id) DO UPDATE SET due_at = excluded.due_at, data = excluded.data"""
TOKENS = f"SELECT {COLUMNS} FROM token WHERE %s::text IS NULL OR owner = %s ORDER BY created_at, id"
TOKEN = f"SELECT {COLUMNS} FROM token WHERE hash = %s AND revoked_at IS NULL"
REVOKE_TOKEN = f"UPDATE token SET revoked_at = {NOW} WHERE id = %s AND revoked_at IS NULL"
PROBE = """INSERT INTO rate (owner, name, began, number) VALUES ('', 'probe', 0, 0)
    ON CONFLICT (owner, name) DO UPDATE SET number = rate.number + 1"""
TOKEN_USED = "UPDATE token SET last_used_at = %s WHERE id = %s AND (last_used_at IS NULL OR last_used_at <= %s)"
RELEASE = "UPDATE session SET worker = NULL WHERE id = %s AND fence = %s"
RELEASE_ALL = "UPDATE session SET worker = NULL WHERE worker = %s AND (%s::text IS NULL OR owner = %s)"
JOIN = f"""INSERT INTO worker (id, address, at) VALUES (%s, %s, {NOW})
    ON CONFLICT (id) DO UPDATE SET at = excluded.at, address = excluded.address"""
WORKERS = f"SELECT w.id, w.address, {FRESH} FROM worker w WHERE w.address IS NOT NULL"
SESSION_HOLDERS = f"SELECT w.id, {FRESH} FROM worker w"
FILE_MARKS = "SELECT digest, tainted FROM file_mark WHERE owner = %s AND digest = ANY(%s)"
TAINTED_PATHS = "SELECT path FROM file_mark WHERE owner = %s AND tainted ORDER BY at DESC LIMIT %s"
HOLDERS = f"SELECT l.name, l.worker, {FRESH} FROM channel_lease l LEFT JOIN worker w ON w.id = l.worker"
DELIVERIES = """SELECT o.id, o.at, s.key, o.parts FROM outbox o JOIN session s ON s.id = o.session
    WHERE o.id = ANY(%s)"""
HOLD_BACK = "UPDATE outbox SET tries = 0 WHERE worker = %s AND sent_at IS NULL AND id = ANY(%s)"
RELEASE_OUTGOING = "UPDATE outbox SET worker = NULL WHERE worker = %s AND channel = %s AND sent_at IS NULL"
MARK_PARTS = f"""UPDATE outbox SET parts = %s, tries = 1, sent_at = CASE WHEN %s THEN {NOW} END
    WHERE id = %s AND worker = %s AND sent_at IS NULL AND damaged IS NULL"""
BURY = f"UPDATE outbox SET failed = %s, sent_at = {NOW} WHERE id = %s AND worker = %s AND sent_at IS NULL"
DEAD_LETTERS = """SELECT id, at, channel, chat_id, failed, data FROM outbox
    WHERE failed IS NOT NULL AND (%s::text IS NULL OR channel = %s) ORDER BY id LIMIT %s"""
REVIVE = """UPDATE outbox SET failed = NULL, sent_at = NULL, worker = NULL, tries = 0
    WHERE id = ANY(%s) AND failed IS NOT NULL RETURNING id"""
CHANNEL_STATE = "SELECT key, value FROM channel_state WHERE channel = %s"
LOCKED_CHANNEL_STATE = "SELECT value FROM channel_state WHERE channel = %s AND key = %s FOR UPDATE"
NEW_CHANNEL_STATE = """INSERT INTO channel_state (channel, key, value) VALUES (%s, %s, '')
    ON CONFLICT (channel, key) DO NOTHING RETURNING channel"""
REMOVE_CHANNEL_STATE = "DELETE FROM channel_state WHERE channel = %s AND key = %s"
SET_CHANNEL_STATE = """INSERT INTO channel_state (channel, key, value) VALUES (%s, %s, %s)
    ON CONFLICT (channel, key) DO UPDATE SET value = excluded.value"""
GRANTS = "SELECT name FROM session_grant WHERE owner = %s AND key = %s"
