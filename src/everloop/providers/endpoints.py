"""The endpoints that are known by name: where they are, whose key they take, and how they depart from OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(slots=True, frozen=True)
class Quirks:
    """How a server departs from the usual: its own names of options, the options that it refuses, and whether it
    counts the tokens of a stream when asked."""

    names: Mapping[str, str] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    stream_options: bool = True


USUAL = Quirks()
OPENAI = Quirks(names={"max_tokens": "max_completion_tokens"})
HOSTS = {"api.openai.com": OPENAI}


def quirks_of(base_url: str) -> Quirks:
    """What is known of the server at a base URL."""
    try:
        return HOSTS.get(urlsplit(base_url).hostname or "", USUAL)
    except ValueError:  # whoever connects there says so better
        return USUAL
