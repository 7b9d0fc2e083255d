"""Errors that a person can cause or must act on, each one line that says what to do."""

from __future__ import annotations


class EverloopError(Exception):
    """An error whose text is meant for a person: what is wrong, where, and what to do."""


class ConfigError(EverloopError):
    """A wrong or missing setting."""


class BudgetReached(EverloopError):
    """A budget has no room for the next model call; the text is the answer that the person gets."""


class StoreError(EverloopError):
    """The store could not be read or written: full disk, corrupt or locked file."""


class OwnerMoved(StoreError):
    """The owner is in another database now, so the write was refused."""


class StaleLease(StoreError):
    """Another worker has taken this session over, so the write was refused."""
