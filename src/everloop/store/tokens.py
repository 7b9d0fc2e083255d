"""Bearer tokens: creation, storage, validation, and their rights."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import EverloopError
from .base import Token

PREFIX = "ev_"  # makes tokens recognisable, including to secret scanners
OWNER = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NOTED_EVERY = 3600.0  # seconds; a write per request would make it wait for the disk

USE, ADMIN = "use", "admin"
RIGHTS = frozenset({USE, ADMIN})
AGENTS = ("own", "client")  # whose tools a request without `tools` uses

COLUMNS = "id, name, owner, created_at, last_used_at, revoked_at, rights, agent"
EXIST = "SELECT EXISTS (SELECT 1 FROM token)"


def new_token() -> str:
    """Return a new secret with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Return the hash under which a token is stored and looked up.

    A slow hash protects guessable passwords; 256 random bits cannot be guessed, and a fast hash can be computed for
    every request. The timing of a lookup reveals nothing: a similar hash belongs to an entirely different token.
    """
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def checked_owner(owner: str) -> str:
    if OWNER.fullmatch(owner) is None:
        raise EverloopError(
            f"the owner {owner[:60]!r} must be at most 32 of a-z, 0-9, _ and -, the first a letter or a digit"
        )
    return owner


def checked_name(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise EverloopError(
            f"the token's name {name[:60]!r} must be at most 64 of a-z, A-Z, 0-9, dot, _ and -, the first a letter "
            "or a digit"
        )
    return name


def checked_rights(rights: Iterable[str]) -> frozenset[str]:
    found = frozenset(rights)
    if not found or not found <= RIGHTS:
        said = ", ".join(sorted(found))
        raise EverloopError(f"the rights {said[:60]!r} must be {USE}, {ADMIN}, or both with a comma between them")
    return found


def checked_agent(agent: str) -> str:
    if agent and agent not in AGENTS:
        raise EverloopError(f"the agent {agent[:60]!r} must be own or client")
    return agent


def checked_fields(name: str, owner: str, rights: Iterable[str], agent: str) -> frozenset[str]:
    """Return the rights of a new token, or raise an EverloopError about any of its fields."""
    checked_name(name)
    checked_owner(owner)
    checked_agent(agent)
    return checked_rights(rights)


def name_taken(name: str) -> EverloopError:
    return EverloopError(f'there is a token "{name}" already: choose another name, or revoke that one first')


def joined_rights(rights: Iterable[str]) -> str:
    """Encode the rights of a token for storage; `token_of` decodes them."""
    return ",".join(sorted(rights))


def token_of(row: Sequence[Any]) -> Token:
    """Build a token from a row of COLUMNS."""
    id, name, owner, created_at, last_used_at, revoked_at, rights, agent = row
    return Token(id, name, owner, created_at, last_used_at, revoked_at, frozenset(rights.split(",")), agent)
