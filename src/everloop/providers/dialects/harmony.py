"""The channels of harmony: what is thought, what is said, and what is called."""

from __future__ import annotations

import re
from dataclasses import dataclass

BEGIN = ("<|start|>", "<|channel|>")
TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
LONGEST_HEADER = 240
END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>|<\|channel\|>)")
_TO = re.compile(r"\bto=([\w.:-]{1,160})")


@dataclass(slots=True, frozen=True)
class Header:
    """What a message is: `to` names who is called, if anybody."""

    end: int
    thought: bool
    to: str


def header(text: str, at: int, final: bool) -> Header | bool | None:
    """The header that begins here; False if it is none, None while it may become one."""
    end = text.find("<|message|>", at, at + LONGEST_HEADER)
    if end < 0:
        return None if not final and len(text) - at < LONGEST_HEADER else False
    words = text[at:end]
    recipient = _TO.search(words)
    return Header(end + len("<|message|>"), "analysis" in words, recipient[1] if recipient else "")
