"""What the tests of the PostgreSQL store share."""

from __future__ import annotations

from .fixtures import database as database
from .fixtures import postgres as postgres
