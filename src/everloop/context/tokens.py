"""How many tokens a request has, by an estimate that needs no tokenizer: the weight of its text, and a ratio for each
model that is learned from what its provider counts."""

from __future__ import annotations

import string
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ..messages import Message, encode_json

PER_MESSAGE = 16  # units: the role and the marks that a chat template puts around a message
PER_CALL = 24  # and around a tool call, with its id
# A picture of 2048 x 1536 pixels, the largest that is sent, has about 1,600 tokens: OpenAI counts 170 for each of its
# 8 tiles and 85 more (1,445), Anthropic one for 750 pixels up to 1,600, Google 258 for each of 6 tiles (1,548).
# At a quarter of a token for a unit, that is 6,400 units, however many bytes its base64 has.
PICTURE = 6_400
START = 0.3  # tokens for a unit of a model that is not known yet: more than most have
_LEAST, _MOST = 0.12, 1.2  # what a tokenizer can have: other counts leave out what was cached, or are mistakes
_SMALLEST = 1_000  # units of a request that tells something: in a smaller one, what the provider adds counts too much
_MAX_MODELS = 64
_LOWER = string.ascii_lowercase.encode()
_SPACE = string.whitespace.encode()
_RARE = (string.ascii_uppercase + string.digits).encode()
_OTHERS = bytes(range(128))


def weigh(message: Message) -> int:
    """The units of one message."""
    content = message.get("content")
    units = PER_MESSAGE + (sum(map(_weigh_part, content)) if isinstance(content, list) else _weigh_part(content))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        units += PER_CALL + weigh_text(str(function.get("name", ""))) + weigh_text(str(function.get("arguments", "")))
    return units


def weigh_tools(tools: Sequence[dict[str, Any]]) -> int:
    """The units of the tools' definitions, which are sent with every request."""
    return sum(PER_CALL + weigh_text(encode_json(tool).decode()) for tool in tools)


def weigh_text(text: str) -> int:
    """The units of a text: about its bytes in UTF-8, and more where tokens are shorter.

    A token is a word or a good part of one, but few capitals, digits and marks, and hardly a space alone. Letters of
    two bytes (Cyrillic, Arabic) share a token more often than those of three (Chinese, Korean).
    """
    data = text.encode("utf-8", "replace")
    without_lower = data.translate(None, _LOWER)
    without_spaces = without_lower.translate(None, _SPACE)
    without_rare = without_spaces.translate(None, _RARE)
    beyond = len(without_rare.translate(None, _OTHERS))
    lower, spaces = len(data) - len(without_lower), len(without_lower) - len(without_spaces)
    rare, marks = len(without_spaces) - len(without_rare), len(without_rare) - beyond
    letters = beyond - (len(data) - len(text))  # beyond ASCII
    return lower + spaces // 4 + 4 * rare + 2 * marks + (4 * beyond - 5 * letters) // 2


def _weigh_part(part: Any) -> int:
    """The units of a part of a message: a text, or a picture, or anything else by its JSON."""
    if not isinstance(part, dict):  # a plain text, or what a library may have put there
        return weigh_text(part if isinstance(part, str) else "" if part is None else str(part))
    match part.get("type"):
        case "text":
            return weigh_text(str(part.get("text", "")))
        case "image_url" | "image" | "input_image":
            return PICTURE
    return weigh_text(encode_json(part).decode())


class Meter:
    """Turns units into tokens, better with every answer: each model has its own ratio, and the last few are kept."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[str, tuple[float, int]] = OrderedDict()  # with how many answers it was learned from

    def tokens(self, model: str, units: int) -> int:
        """About how many tokens so many units are for a model."""
        return round(units * self.ratio(model))

    def units(self, model: str, tokens: int) -> int:
        """About how many units make so many tokens for a model."""
        return int(tokens / self.ratio(model))

    def ratio(self, model: str) -> float:
        if model in self._ratios:
            self._ratios.move_to_end(model)
            return self._ratios[model][0]
        return START

    def observe(self, model: str, units: int, tokens: int) -> None:
        """Take in how many tokens a provider counted in a request of so many units; nonsense is left aside."""
        if units < _SMALLEST or not _LEAST <= tokens / units <= _MOST:
            return
        ratio, seen = self._ratios.get(model, (START, 0))
        ratio += (tokens / units - ratio) * max(1 / (seen + 1), 0.4)  # so it follows what a session is about
        self._ratios[model] = (ratio, seen + 1)
        self._ratios.move_to_end(model)
        while len(self._ratios) > _MAX_MODELS:
            self._ratios.popitem(last=False)
