"""Fixtures of the PostgreSQL store's tests."""

from __future__ import annotations

from tests.server.fixtures import fake as fake
from tests.server.fixtures import http as http

from .fixtures import database as database
from .fixtures import postgres as postgres
