"""Chat networks: the `Channel` port, and what every channel shares."""

from .base import Button, Can, Channel, Inbox, Later, Never, Options, Part, Received

__all__ = ["Button", "Can", "Channel", "Inbox", "Later", "Never", "Options", "Part", "Received"]
