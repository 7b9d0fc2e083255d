"""FunctionGemma's calls: `call:name{key:<escape>text<escape>,count:3}`."""

from __future__ import annotations

import re
from typing import Any

from .mending import BROKEN, Mender
from .shapes import CUT_OFF, MAX_CALLS, UNREADABLE, Written

_CALL = re.compile(r"call:\s*([\w.-]{1,200})\s*\{")
_TEXT = re.compile(r"<escape>(.*?)<escape>|<\|\"\|>(.*?)<\|\"\|>", re.DOTALL)
_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]{0,100})\s*:")


def read_gemma(body: str, mender: Mender, complete: bool) -> list[Written]:
    starts = list(_CALL.finditer(body))[:MAX_CALLS]
    calls = []
    for number, start in enumerate(starts):
        stop = starts[number + 1].start() if number + 1 < len(starts) else len(body)
        whole = complete or number + 1 < len(starts)
        calls.append(_one(start[1], body[start.end() - 1 : stop].strip(), mender, whole))
    return calls


def _one(name: str, text: str, mender: Mender, whole: bool) -> Written:
    """Its texts are taken out first, so that what stands in them is not taken for structure."""
    texts: list[str] = []

    def keep(found: re.Match[str]) -> str:
        texts.append(found[1] if found[1] is not None else found[2])
        return f'"\x00{len(texts) - 1}"'

    outline = _KEY.sub(r'\1"\2":', _TEXT.sub(keep, text))
    if not whole and not outline.endswith("}"):
        return Written(name, problem=CUT_OFF)
    value = _restore(mender.read(outline), texts)
    return Written(name, value) if isinstance(value, dict) else Written(name, problem=UNREADABLE)


def _restore(value: Any, texts: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _restore(inner, texts) for key, inner in value.items()}
    if isinstance(value, list):
        return [_restore(inner, texts) for inner in value]
    if isinstance(value, str) and value[:1] == "\x00" and value[1:].isdecimal() and int(value[1:]) < len(texts):
        return texts[int(value[1:])]
    return value if value is not BROKEN else None
