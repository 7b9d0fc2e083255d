"""Rates: how often something may happen within a time, counted over all processes of a store.

A window begins with the first that is counted in it, and the next one with the first after its end. There is one row
for each owner and name, which is used again for every window, so nothing piles up. What is refused changes nothing.
"""

from __future__ import annotations

import sqlite3
import time

# A window that seems to begin later than it could is one of a clock that was wrong: it must not shut anybody out.
ADMIT = """INSERT INTO rate (owner, name, began, number) VALUES (?1, ?2, ?3, 1)
    ON CONFLICT DO UPDATE SET
        began = iif(abs(?3 - began) < ?4, began, ?3), number = iif(abs(?3 - began) < ?4, number + 1, 1)
    WHERE abs(?3 - began) >= ?4 OR number < ?5
    RETURNING number"""
LEFT = "SELECT began + ?3 - ?4 FROM rate WHERE owner = ?1 AND name = ?2"


def admit(db: sqlite3.Connection, owner: str, name: str, most: int, seconds: float) -> float:
    """Count one more if there is room for it; otherwise the seconds until there is."""
    now = time.time()
    if db.execute(ADMIT, (owner, name, now, seconds, most)).fetchall():
        return 0.0
    (left,) = db.execute(LEFT, (owner, name, seconds, now)).fetchone()
    return max(float(left), 0.001)
