"""Connections to PostgreSQL, and what goes wrong with them in one line that never shows the password."""

from __future__ import annotations

import logging
import re
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ...config.dsn import DSN
from ...errors import EverloopError, StoreError

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]
    Asked = psycopg.Cursor[tuple[Any, ...]]  # a statement whose answer can be looked at

CONNECT_SECONDS = 10
# A client that was frozen in the middle of a transaction must not hold a session's row for longer.
IDLE_SECONDS = 10
LOCK_SECONDS = 10
SETTINGS = {
    "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
    "lock_timeout": f"{LOCK_SECONDS}s",
    "client_min_messages": "warning",
    "synchronous_commit": "on",
}
# Found out within seconds instead of minutes: a peer that is gone without a word.
KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
MISSING = "a PostgreSQL store needs the extra `postgres`: pip install 'everloop[postgres]'"


def connect(dsn: DSN) -> Connection:
    """A connection in autocommit mode; a StoreError in one line when there is none to be had."""
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise StoreError(MISSING) from error
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # connections that break are ours to tell of
    try:
        given = conninfo_to_dict(dsn.secret) if dsn.well_formed else None
    except psycopg.Error:  # its text may quote the address, and so the password
        given = None
    if given is None:
        raise StoreError(
            f"{dsn} is no address of a PostgreSQL database: write postgresql://USER:PASSWORD@HOST/DATABASE, with "
            "special characters as in web addresses (@ is %40)"
        )
    defaults = {"connect_timeout": CONNECT_SECONDS, "application_name": "everloop", **KEEPALIVE}
    options: dict[str, Any] = {name: value for name, value in defaults.items() if name not in given}
    try:
        connection = psycopg.connect(dsn.secret, autocommit=True, **options)
    except psycopg.Error as error:
        raise Unreachable(
            f"cannot open the store {dsn} ({one_line(dsn, error)}): check that the server runs, and the address, the "
            "user and the password"
        ) from None
    try:
        sets = ", ".join(["set_config(%s, %s, false)"] * len(SETTINGS))
        connection.execute(f"SELECT {sets}", list(chain(*SETTINGS.items())))
    except psycopg.Error as error:
        connection.close()
        raise Unreachable(f"cannot use the store {dsn}: {one_line(dsn, error)}") from None
    return connection


class Unreachable(StoreError):
    """There is no connection to be had now; one may be had later."""


def explain(dsn: DSN, error: Exception) -> Exception:
    """An error of the database in one line that says what to do."""
    if isinstance(error, EverloopError):
        return error
    state, what = getattr(error, "sqlstate", None) or "", one_line(dsn, error)
    if state == "53100":
        what = f"the disk of the store {dsn} is full: free some space and try again"
    elif state == "25006":
        what = f"the store {dsn} is read-only: use the address of the primary server"
    elif state == "42501":
        what = f"the user of the store {dsn} lacks a right ({what}): give it the rights of the database's owner"
    elif state == "55P03":
        what = f"the store {dsn} is locked by another worker's write: it is tried again"
    elif state in ("42P01", "42703"):
        what = f"the tables of the store {dsn} are not as they were made ({what}): restore a copy"
    else:
        what = f"the store {dsn}: {what}"
    return StoreError(f"{what}. What was written before is safe.")


def one_line(dsn: DSN, error: Exception) -> str:
    """The error's own words, without the password, whatever else it may quote."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else type(error).__name__).removesuffix(".")
    for secret in passwords(dsn.secret):
        text = text.replace(secret, "…")
    return text


def passwords(dsn: str) -> list[str]:
    """What must not be shown of an address: the password as it is written and as it is meant."""
    try:
        written = [urlsplit(dsn).password or ""]
    except ValueError:
        written = []
    written += re.findall(r"[?&\s]password=([^&\s]+)", dsn)
    return [word for secret in written if secret for word in dict.fromkeys((secret, unquote(secret)))]
