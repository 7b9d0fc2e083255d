"""The address of a PostgreSQL database, which is never shown with its password."""

from __future__ import annotations

SCHEMES = ("postgresql:", "postgres:")


def is_dsn(text: str) -> bool:
    return text.strip().lower().startswith(SCHEMES)


class DSN:
    """The address of a PostgreSQL database. Shown, it has no password; `secret` is the whole of it."""

    __slots__ = ("secret",)

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __str__(self) -> str:
        from urllib.parse import urlsplit

        try:
            parts = urlsplit(self.secret)
            user = f"{parts.username}@" if parts.username else ""
            return f"postgresql://{user}{parts.netloc.rpartition('@')[2]}{parts.path}"
        except ValueError:
            return "postgresql://…"

    def __repr__(self) -> str:
        return f"DSN({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DSN) and other.secret == self.secret

    def __hash__(self) -> int:
        return hash(self.secret)

    def exists(self) -> bool:
        """Whether there is something to read: a database is asked for it, which only its server can answer."""
        return True
