"""What the tests of the PostgreSQL store share."""

from __future__ import annotations

from ..server.fixtures import fake as fake
from ..server.fixtures import http as http
from .fixtures import database as database
from .fixtures import postgres as postgres
