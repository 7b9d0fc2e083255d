"""Chat networks: the `Channel` port, and what every channel shares."""

from .base import (
    Attachment,
    Button,
    Can,
    Channel,
    Inbox,
    Later,
    Never,
    NoFile,
    Options,
    OutgoingFile,
    Part,
    Received,
)

__all__ = [
    "Attachment",
    "Button",
    "Can",
    "Channel",
    "Inbox",
    "Later",
    "Never",
    "NoFile",
    "Options",
    "OutgoingFile",
    "Part",
    "Received",
]
