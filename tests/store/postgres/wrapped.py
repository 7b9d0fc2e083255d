"""A real connection to PostgreSQL whose statements a test sees, and may precede or follow with others."""

from __future__ import annotations

from typing import Any


class Wrapped:
    """`execute` is for the test to override."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
