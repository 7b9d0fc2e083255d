"""What the tests of many processes share."""

from __future__ import annotations

from ..postgres.fixtures import postgres as postgres
