"""Everloop: a self-hosted agent runtime that never drops a turn."""

__version__ = "0.1.0"
