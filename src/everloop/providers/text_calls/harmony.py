"""The channels of harmony: what is thought, what is said, and what is called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .mending import Mender, stops, value_end
from .offered import Offered
from .shapes import Block
from .tokens import with_arguments

BEGIN = ("<|start|>", "<|channel|>")
TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
LONGEST_HEADER = 240
END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>|<\|channel\|>)")
_STOP = stops(END.pattern)
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


def called(text: str, at: Header, final: bool, offered: Offered, mender: Mender) -> Block | None:
    """The call that a message is; None while it is still coming."""
    closed = value_end(text, at.end, _STOP) if text[at.end : at.end + 8].lstrip()[:1] == "{" else None
    end = END.search(text, closed[0] if closed else at.end)
    if end is None and not final:
        return None
    stop = end.start() if end else len(text)
    source = text[at.end : stop]
    written = with_arguments(at.to, source, mender, end is not None)
    return Block(end.end() if end else stop, [offered.told(written)], source)
