"""Chat networks: the `Channel` port, and what every channel shares."""

from .base import Can, Channel, Inbox, Later, Never, Options, Part, Received

__all__ = ["Can", "Channel", "Inbox", "Later", "Never", "Options", "Part", "Received"]
