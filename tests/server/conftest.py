"""Fixtures shared by the tests of the server."""

from __future__ import annotations

from .fixtures import ada as ada
from .fixtures import fake as fake
from .fixtures import http as http
from .fixtures import running as running
from .fixtures import server as server
