"""What the tests of many processes share."""

from __future__ import annotations

from ..store.postgres.fixtures import postgres as postgres
