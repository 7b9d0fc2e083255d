"""The embedded store: one SQLite file, no service."""

from .store import SQLiteStore as SQLiteStore
