"""Errors that a person can cause or must act on, each a single line that says what to do."""

from __future__ import annotations


class EverloopError(Exception):
    """An error whose text is meant for a person: what is wrong, where, and what to do."""


class ConfigError(EverloopError):
    """A wrong or missing setting."""


class BudgetReached(EverloopError):
    """A budget has no room for the next model call; the text is the answer shown to the person."""


class StoreError(EverloopError):
    """The store could not be read or written: full disk, corrupt or locked file."""


class OwnerMoved(StoreError):
    """The owner has moved to another database, so the write was refused."""


class StaleLease(StoreError):
    """Another worker has taken over this session, so the write was refused."""
