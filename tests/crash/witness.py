"""A witness inside the database: triggers that record who changed a lease and who wrote under it.

It is independent of the product, so it records actual writes, whatever a process believes.
"""

from __future__ import annotations

from typing import Any

import psycopg

from .history import History, Lease, Write, read_store

NOW = "extract(epoch FROM clock_timestamp())::float8"
WRITER = "CASE WHEN application ~ '^[0-9]+$' THEN application::int ELSE 0 END"
TABLES = """
CREATE TABLE witness_lease (
    n bigint GENERATED ALWAYS AS IDENTITY, at float8, xid text, session bigint, fence_before bigint, fence bigint,
    before text, after text, alive boolean);
CREATE TABLE witness_write (
    n bigint GENERATED ALWAYS AS IDENTITY, xid text, application text, session bigint, holder text, what text);
CREATE TABLE witness_lapse (worker text, at float8);
CREATE FUNCTION witness_lapse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'DELETE' THEN
        INSERT INTO witness_lapse VALUES (OLD.id, {now});
    ELSIF TG_OP = 'INSERT' THEN
        INSERT INTO witness_lapse SELECT NEW.id, {now} WHERE NEW.id IN (SELECT worker FROM witness_lapse);
    ELSIF NEW.at - greatest(OLD.at, extract(epoch FROM pg_postmaster_start_time())) > {lease} THEN
        INSERT INTO witness_lapse VALUES (NEW.id, {now});
    END IF;
    RETURN NULL; END $$;
CREATE TRIGGER witness_lapse AFTER INSERT OR UPDATE OR DELETE ON worker
    FOR EACH ROW EXECUTE FUNCTION witness_lapse();
CREATE FUNCTION witness_lease() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO witness_lease (at, xid, session, fence_before, fence, before, after, alive) VALUES (
        {now}, pg_current_xact_id()::text, NEW.id, OLD.fence, NEW.fence, OLD.worker, NEW.worker,
        EXISTS (SELECT 1 FROM worker w WHERE w.id = OLD.worker
            AND greatest(w.at, extract(epoch FROM pg_postmaster_start_time())) > {now} - {lease})
        -- One that wakes renews its lease while another, which saw that it had ended, is taking it.
        AND NOT EXISTS (SELECT 1 FROM witness_lapse l WHERE l.worker = OLD.worker AND l.at > {now} - 1));
    RETURN NULL; END $$;
CREATE TRIGGER witness_lease AFTER UPDATE ON session FOR EACH ROW
    WHEN (OLD.fence <> NEW.fence OR OLD.worker IS DISTINCT FROM NEW.worker) EXECUTE FUNCTION witness_lease();
CREATE FUNCTION witness_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO witness_write (xid, application, session, holder, what)
        SELECT pg_current_xact_id()::text, current_setting('application_name'), s.id, s.worker,
            CASE WHEN TG_TABLE_NAME = 'entry' THEN 'entry ' || (to_jsonb(NEW) ->> 'seq') ELSE 'an answer' END
        FROM session s WHERE s.id = NEW.session;
    RETURN NULL; END $$;
CREATE TRIGGER witness_entry AFTER INSERT ON entry FOR EACH ROW
    WHEN (NEW.turn IS NOT NULL AND NEW.kind <> 'decided') EXECUTE FUNCTION witness_write();
CREATE TRIGGER witness_outbox AFTER INSERT ON outbox FOR EACH ROW
    WHEN (NEW.turn IS NOT NULL) EXECUTE FUNCTION witness_write();
"""


def set_up(dsn: str, lease: float) -> None:
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(TABLES.replace("{now}", NOW).replace("{lease}", str(lease)))


def read_postgres(dsn: str, history: History) -> History:
    """The contents of the store at this DSN, and the witness's records."""
    with psycopg.connect(dsn, autocommit=True) as db:

        def rows(sql: str) -> list[Any]:
            return db.execute(sql).fetchall()

        read_store(rows, history)
        leases = "SELECT session, at, xid, fence_before, fence, before, after, alive FROM witness_lease ORDER BY n"
        history.leases = [Lease(*row) for row in rows(leases)]
        history.writes = [
            Write(*row) for row in rows(f"SELECT session, xid, {WRITER}, holder, what FROM witness_write ORDER BY n")
        ]
    taken = [lease for lease in history.leases if lease.before and lease.after and lease.before != lease.after]
    history.takeovers = len(taken)
    return history
