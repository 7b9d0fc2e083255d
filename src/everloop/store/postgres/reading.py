"""What is asked of PostgreSQL, and writes of a single statement."""

from __future__ import annotations

from ..tokens import COLUMNS
from .rows import FRESH, NOW, ROW

OF_INBOX = "i." + ROW.replace(", ", ", i.")

SESSIONS = """SELECT s.id, s.owner, s.key,
        (SELECT coalesce(max(seq), 0) FROM entry WHERE session = s.id), s.history_from, s.created_at, s.updated_at,
        (SELECT turn FROM inbox WHERE session = s.id AND state <> 'done' AND state IN ('taken', 'parked') LIMIT 1),
        s.worker, s.compacted,
        EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked')
    FROM session s WHERE s.owner = %s"""
READY = f"""SELECT s.owner, s.key, s.worker, {FRESH} FROM session s LEFT JOIN worker w ON w.id = s.worker
    WHERE (%s::text IS NULL OR s.owner = %s) AND s.id IN (
        SELECT session FROM inbox WHERE state <> 'done' AND kind <> 'urgent'
        EXCEPT SELECT session FROM inbox WHERE state <> 'done' AND state = 'parked') ORDER BY s.updated_at"""
WAITING = f"""SELECT {OF_INBOX} FROM session s JOIN inbox i ON i.session = s.id
    WHERE s.owner = %s AND s.key = %s AND i.state <> 'done' AND i.state = 'new' AND i.kind <> 'urgent' ORDER BY i.id"""
URGENT = f"""SELECT {OF_INBOX}, s.worker, {FRESH}
    FROM inbox i JOIN session s ON s.id = i.session LEFT JOIN worker w ON w.id = s.worker
    WHERE i.state <> 'done' AND i.kind = 'urgent' AND (%s::text IS NULL OR i.owner = %s) ORDER BY i.id"""
# The same of a few sessions.
READY_OF = f"""SELECT s.owner, s.key, s.worker, {FRESH} FROM session s LEFT JOIN worker w ON w.id = s.worker
    WHERE s.id = ANY(%s)
        AND EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND kind <> 'urgent')
        AND NOT EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done' AND state = 'parked')
    ORDER BY s.updated_at"""
URGENT_OF = f"""SELECT {OF_INBOX}, s.worker, {FRESH}
    FROM inbox i JOIN session s ON s.id = i.session LEFT JOIN worker w ON w.id = s.worker
    WHERE i.session = ANY(%s) AND i.state <> 'done' AND i.kind = 'urgent' ORDER BY i.id"""
UNFINISHED = f"SELECT {ROW} FROM inbox WHERE state <> 'done' AND owner = %s ORDER BY id"
INCOMING = f"SELECT {ROW} FROM inbox WHERE id = %s"
OVER = "SELECT id FROM inbox WHERE state IN ('done', 'parked') AND id = ANY(%s)"
FIND = f"SELECT {ROW} FROM inbox WHERE owner = %s AND message_id = %s"
LOG = "SELECT seq, turn, at, data FROM entry WHERE session = %s AND seq > %s AND seq <= %s ORDER BY seq"
TURN = """SELECT seq, turn, at, data FROM entry WHERE session = %s AND seq >= %s
    AND turn IS NOT DISTINCT FROM (SELECT turn FROM entry WHERE session = %s AND seq = %s) ORDER BY seq"""
HISTORY = "SELECT id, history_from FROM session WHERE owner = %s AND key = %s"
# From the newest on, so that a turn of late is found at once.
TURNS = """SELECT i.turn, i.session, s.key, i.owner, i.first_seq,
        coalesce((SELECT at FROM entry WHERE session = i.session AND seq = i.first_seq), i.at), i.ended_at, i.reason
    FROM inbox i JOIN session s ON s.id = i.session
    WHERE i.opened AND i.owner = %s AND starts_with(i.turn, %s) AND (%s::bigint IS NULL OR i.session = %s)
    ORDER BY i.id DESC LIMIT %s"""
SPENT = "SELECT scope, tokens, cost FROM spent WHERE owner = %s AND scope = ANY(%s)"
TIMERS = "SELECT owner, id, due_at, data FROM timer WHERE %s::text IS NULL OR owner = %s ORDER BY due_at LIMIT %s"
SET_TIMER = """INSERT INTO timer (owner, id, due_at, data) VALUES (%s, %s, %s, %s)
    ON CONFLICT (owner, id) DO UPDATE SET due_at = excluded.due_at, data = excluded.data"""
TOKENS = f"SELECT {COLUMNS} FROM token WHERE %s::text IS NULL OR owner = %s ORDER BY created_at, id"
PROBE = """INSERT INTO rate (owner, name, began, number) VALUES ('', 'probe', 0, 0)
    ON CONFLICT (owner, name) DO UPDATE SET number = rate.number + 1"""
TOKEN_USED = "UPDATE token SET last_used_at = %s WHERE id = %s AND (last_used_at IS NULL OR last_used_at <= %s)"
RELEASE = "UPDATE session SET worker = NULL WHERE id = %s AND fence = %s"
RELEASE_ALL = "UPDATE session SET worker = NULL WHERE worker = %s AND (%s::text IS NULL OR owner = %s)"
JOIN = f"""INSERT INTO worker (id, address, at) VALUES (%s, %s, {NOW})
    ON CONFLICT (id) DO UPDATE SET at = excluded.at, address = excluded.address"""
WORKERS = f"SELECT w.id, w.address, {FRESH} FROM worker w WHERE w.address IS NOT NULL"
# Nothing is kept of it, so nothing waits for the disk.
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, %s)"

MARK_FILES = f"""INSERT INTO file_mark (owner, digest, tainted, path, at)
    SELECT %s, *, {NOW} FROM unnest(%s::text[], %s::boolean[], %s::text[])
    ON CONFLICT (owner, digest) DO UPDATE SET
        tainted = file_mark.tainted AND excluded.tainted, path = excluded.path, at = excluded.at"""
FILE_MARKS = "SELECT digest, tainted FROM file_mark WHERE owner = %s AND digest = ANY(%s)"
TAINTED_PATHS = "SELECT path FROM file_mark WHERE owner = %s AND tainted ORDER BY at DESC LIMIT %s"
GRANT = f"""INSERT INTO session_grant (owner, key, name, at) SELECT %s, %s, name, {NOW} FROM unnest(%s::text[]) name
    ON CONFLICT DO NOTHING"""
GRANTS = "SELECT name FROM session_grant WHERE owner = %s AND key = %s"
