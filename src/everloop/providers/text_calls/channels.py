"""Where a model thinks and where it answers: tags around thoughts, and the channels of harmony (gpt-oss)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .calls import CallBlock, OfferedTools
from .dialects import with_arguments
from .json_values import JsonReader, stop_pattern, value_end

# The tags between which models write what they think.
THOUGHT_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[think]": "[/think]",
    "<|start_thinking|>": "<|end_thinking|>",
}
THOUGHT_ENDS = {tag: re.compile(re.escape(end), re.IGNORECASE) for tag, end in THOUGHT_TAGS.items()}
# Some models start inside a thought, since the prompt template opened the tag for them.
STRAY_END = r"</think(?:ing)?>[ \t\r]*(?:\n|\Z)"


# ----------------------------------------------------------------------------------------- harmony

HARMONY_BEGIN = ("<|start|>", "<|channel|>")
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
LONGEST_HEADER = 240
HARMONY_END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>|(?=<\|start\|>|<\|channel\|>)")
_STOP = stop_pattern(HARMONY_END.pattern)
_TO = re.compile(r"\bto=([\w.:-]{1,160})")


@dataclass(slots=True, frozen=True)
class HarmonyHeader:
    """The header of a message; `to` is the tool that it calls, if any."""

    end: int
    thought: bool
    to: str


def harmony_header(text: str, at: int, final: bool) -> HarmonyHeader | bool | None:
    """The header that begins here; False if there is none, None while more text is needed."""
    end = text.find("<|message|>", at, at + LONGEST_HEADER)
    if end < 0:
        return None if not final and len(text) - at < LONGEST_HEADER else False
    words = text[at:end]
    recipient = _TO.search(words)
    return HarmonyHeader(end + len("<|message|>"), "analysis" in words, recipient[1] if recipient else "")


def harmony_call(
    text: str, at: HarmonyHeader, final: bool, offered: OfferedTools, json_reader: JsonReader
) -> CallBlock | None:
    """The call in a message to a tool; None while it is still arriving."""
    closed = value_end(text, at.end, _STOP) if text[at.end : at.end + 8].lstrip()[:1] == "{" else None
    end = HARMONY_END.search(text, closed[0] if closed else at.end)
    if end is None and not final:
        return None
    stop = end.start() if end else len(text)
    source = text[at.end : stop]
    written = with_arguments(at.to, source, json_reader, end is not None)
    return CallBlock(end.end() if end else stop, [offered.request(written)], source)
