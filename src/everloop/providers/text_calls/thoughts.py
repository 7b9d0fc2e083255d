"""The tags between which models write what they think."""

from __future__ import annotations

import re

TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[think]": "[/think]",
    "<|start_thinking|>": "<|end_thinking|>",
}
CLOSE = {tag: re.compile(re.escape(end), re.IGNORECASE) for tag, end in TAGS.items()}
# Some models begin in their thoughts, since the prompt has opened the tag for them.
STRAY = r"</think(?:ing)?>[ \t\r]*(?:\n|\Z)"
