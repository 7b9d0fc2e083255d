"""The address of a PostgreSQL database, which is never shown with its password."""

from __future__ import annotations

import re

SCHEMES = ("postgresql:", "postgres:")
# An address of another form is not interpreted: what looks like a host may be half of a password.
_HOST = r"(?:\[[0-9a-fA-F:.]+\]|[\w.%-]*)(?::[0-9]*)?"
_SHAPE = re.compile(
    rf"postgres(?:ql)?://(?:(?P<user>[^:@/?#\s]*)(?::[^@/?#\s]*)?@)?(?P<hosts>{_HOST}(?:,{_HOST})*)"
    r"(?P<name>/[^@:/?#\s]*)?(?:\?[^@#\s]*)?",
    re.IGNORECASE,
)


def is_dsn(text: str) -> bool:
    return text.strip().lower().startswith(SCHEMES)


class DSN:
    """The address of a PostgreSQL database. Shown, it has no password; `secret` is the whole of it."""

    __slots__ = ("secret",)

    def __init__(self, secret: str) -> None:
        self.secret = secret

    @property
    def well_formed(self) -> bool:
        return _SHAPE.fullmatch(self.secret) is not None

    def __str__(self) -> str:
        if (found := _SHAPE.fullmatch(self.secret)) is None:
            return "postgresql://…"
        return f"postgresql://{found['user'] + '@' if found['user'] else ''}{found['hosts']}{found['name'] or ''}"

    def __repr__(self) -> str:
        return f"DSN({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DSN) and other.secret == self.secret

    def __hash__(self) -> int:
        return hash(self.secret)

    def exists(self) -> bool:
        """Whether there may be something to read, which only its server knows."""
        return True
