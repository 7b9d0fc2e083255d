"""The counts of `store/rates.py` in PostgreSQL, by the database's clock: all machines have the same minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .rows import NOW

if TYPE_CHECKING:
    from .connecting import Connection

# The row is locked by whoever counts, and its number is read behind the lock: two at once are never the same one.
ADMIT = f"""INSERT INTO rate (owner, name, began, number) VALUES (%(owner)s, %(name)s, {NOW}, 1)
    ON CONFLICT (owner, name) DO UPDATE SET
        began = CASE WHEN abs(excluded.began - rate.began) < %(seconds)s THEN rate.began ELSE excluded.began END,
        number = CASE WHEN abs(excluded.began - rate.began) < %(seconds)s THEN rate.number + 1 ELSE 1 END
    WHERE abs(excluded.began - rate.began) >= %(seconds)s OR rate.number < %(most)s
    RETURNING number"""
LEFT = f"SELECT began + %(seconds)s - {NOW} FROM rate WHERE owner = %(owner)s AND name = %(name)s"


def admit(db: Connection, owner: str, name: str, most: int, seconds: float) -> float:
    """Count one more if there is room for it; otherwise the seconds until there is."""
    values = {"owner": owner, "name": name, "most": most, "seconds": seconds}
    if db.execute(ADMIT, values).fetchone() is not None:
        return 0.0
    left = db.execute(LEFT, values).fetchone()
    return max(float(left[0]), 0.001) if left is not None else 0.001
