"""Where a model thinks and where it answers: tags around thoughts and answers, and the channels of harmony."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .calls import CallBlock, OfferedTools
from .dialects import with_arguments
from .json_values import JsonReader, stop_pattern, value_end

# The tags between which models write what they think. Many models start inside a thought, since the prompt template
# opened the tag for them.
THOUGHT_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<longcat_think>": "</longcat_think>",
    "[think]": "[/think]",
    "◁think▷": "◁/think▷",
    "<|start_thinking|>": "<|end_thinking|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "<|channel>thought": "<channel|>",
}
THOUGHT_ENDS = {tag: re.compile(re.escape(end), re.IGNORECASE) for tag, end in THOUGHT_TAGS.items()}
STRAY_ENDS = tuple(end for end in THOUGHT_TAGS.values() if end != "<channel|>")
# What some models put around an answer. Words count only behind a thought: a user may have asked for such a tag.
WRAPPERS = ("<answer>", "<response>", "</answer>", "</response>")
WRAPPER_TOKENS = (
    "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>",
    "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>",
    "<|message_sep|>",
)  # fmt: skip


# ------------------------------------------------------------------------- harmony (gpt-oss), Muse

HARMONY_BEGIN = ("<|start|>", "<|channel|>")
HARMONY_TOKENS = (
    *HARMONY_BEGIN, "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>", "<|eom|>", "<|eot|>",
)  # fmt: skip
LONGEST_HEADER = 240
HARMONY_END = re.compile(r"<\|end\|>|<\|return\|>|<\|call\|>|<\|eom\|>|<\|eot\|>|(?=<\|start\|>|<\|channel\|>)")
_STOP = stop_pattern(HARMONY_END.pattern)
_TO = re.compile(r"\bto=([\w.:-]{1,160})")
_TAGS = "<atem:"  # Muse calls with tags in a message to a tool


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
    recipient = found[1] if (found := _TO.search(words)) else ""
    end += len("<|message|>")
    body = text[end : end + 40].lstrip()[: len(_TAGS)]
    if recipient and not final and _TAGS.startswith(body) and body != _TAGS:
        return None
    thought = "analysis" in words or recipient == "self"
    return HarmonyHeader(end, thought, "" if recipient in ("user", "self", "all") or body == _TAGS else recipient)


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
