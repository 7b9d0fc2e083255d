"""Fixtures for the tests of several processes."""

from __future__ import annotations

from ..store.postgres.fixtures import postgres as postgres
