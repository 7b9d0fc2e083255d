"""Claims of work: whether an answer says that something was done, and whether a result says that it went wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_DONE = (
    "created|made|written|wrote|saved|stored|added|appended|inserted|updated|changed|replaced|edited|corrected|fixed|"
    "renamed|moved|copied|deleted|removed|erased|set|scheduled|run|ran|executed|remembered|noted|sent|installed|sorted"
)
_CLAIM = re.compile(
    rf"\b(?:i|i've|i’ve|we)\s+(?:have\s+|just\s+|now\s+|also\s+|already\s+)*(?:{_DONE})\b"
    rf"|\b(?:has|have|was|were|is|are)\s+(?:now\s+|just\s+|successfully\s+)*(?:been\s+)(?:now\s+|successfully\s+)*(?:{_DONE})\b"
    rf"|^(?:{_DONE})\b|\b(?:successfully|done)\b"
    r"|\bich\s+habe\b.*\b\w*ge\w+(?:t|en)\b|\bhabe ich\b|\bhe\s+\w+(?:ado|ido)\b|\bse ha \w+(?:ado|ido)\b"
    r"|\bj['’]ai\b|했습니다|했어요|已(?:经|创建|添加|修改|删除|更新|保存)",
    re.I | re.S,
)
_FAILED = re.compile(r'^\s*\{"status":\s*"error"|\[exit status [1-9]|^error:', re.M)


def claims_work(answer: str) -> bool:
    """Whether an answer says that the model has changed something."""
    return _CLAIM.search(answer) is not None


def failed(result: str) -> bool:
    """Whether a call's result says that it went wrong."""
    return _FAILED.search(result) is not None


def fingerprint(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name} {json.dumps(arguments, sort_keys=True)}"
