"""The model's window: how many tokens a model accepts, and how many a conversation has.

Limits are looked up by the model's name: what its vendor documents, or the smaller number if in doubt. A server may
accept less than the model could (Ollama and llama.cpp do by default); its error or the config says so. Tokens are
estimated without a tokenizer: the weight of the text, times a ratio per model that is learned from the counts of its
provider.
"""

from __future__ import annotations

import logging
import re
import string
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from ..messages import Conversation, Message, encode_json
from ..providers.base import ProviderError
from ..tools.registry import ToolRegistry

log = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------- what models take


class ModelInfo(msgspec.Struct, frozen=True):
    """A model's limits in tokens, and whether it sees pictures (None: unknown)."""

    window: int  # of a request; for most models it includes the answer
    vision: bool | None = None
    output: int = 4_096  # of an answer


UNKNOWN = ModelInfo(32_768)
_K = 1_024
_MILLION = 1_000_000
_Row = tuple[str, int, bool | None, int]  # a pattern, window, vision, output

# Patterns by family, a word in the name. The first match decides, so more specific patterns come first. A family whose
# name also occurs in models of another one (a DeepSeek distilled into Qwen) precedes it.
_FAMILIES: dict[str, list[_Row]] = {
    "deepseek": [
        (r"deepseek-(?:ocr|vl)", 8 * _K, True, 4_096),
        (r"r1-distill|distill-(?:qwen|llama)|r1-0528-qwen|r1[:-](?:1\.5|7|8|14|32|70)b", 32 * _K, False, 16 * _K),
        (r"deepseek.*vision|deepseek[.-]?v4\.1", _MILLION, True, 128 * _K),
        (r"deepseek[.-]?v4|deepseek-flash", _MILLION, None, 128 * _K),
        (r"deepseek-coder-?v2|deepseek[.-]?v2", 32 * _K, False, 8 * _K),
        (r"deepseek-coder", 16 * _K, False, 4_096),
        (r"deepseek-(?:chat|reasoner)|deepseek[.-]?(?:v3|r1)", 128_000, False, 8 * _K),
    ],
    "gpt-oss": [(r"gpt-oss", 128_000, False, 32 * _K)],
    "gpt": [
        (r"gpt-?3\.?5.*instruct", 4_096, False, 4_096),
        (r"gpt-?3\.?5", 16_385, False, 4_096),
        (r"gpt-4-?o|gpt-4-turbo|gpt-4-vision|gpt-4\.5", 128_000, True, 4_096),
        (r"gpt-4\.1", 1_047_576, True, 32 * _K),
        (r"gpt-4-(?:0125|1106)", 128_000, False, 4_096),
        (r"gpt-4-32k", 32 * _K, False, 4_096),
        (r"gpt-4", 8 * _K, False, 4_096),
        (r"gpt-5(?:\.\d)?-(?:chat|instant)|codex-spark", 128_000, True, 16 * _K),
        (r"gpt-(?:[5-9]|chat)", 272_000, True, 128_000),
        (r"chatgpt-4o", 128_000, True, 16 * _K),
    ],
    "o1": [(r"\bo1-(?:mini|preview)", 128_000, False, 32 * _K), (r"\bo1\b", 200_000, True, 100_000)],
    "o3": [(r"\bo3-mini", 200_000, False, 100_000), (r"\bo3\b", 200_000, True, 100_000)],
    "o4": [(r"\bo4-mini", 200_000, True, 100_000)],
    "codex": [(r"codex-mini", 200_000, True, 100_000)],
    "claude": [
        (r"claude-(?:v?[12]|instant)", 100_000, False, 4_096),
        (r"claude-3-5-haiku|claude-3\.5-haiku", 200_000, True, 8 * _K),
        (r"claude-3-(?:opus|sonnet|haiku)", 200_000, True, 4_096),
        (r"claude-3[.-]5", 200_000, True, 8 * _K),
        (r"claude-(?:opus-4|4-opus)(?:[.-]1|-2025|-latest|$|[@:])", 200_000, True, 32_000),
        (r"claude-(?:3[.-]7|4)|claude-(?:opus|sonnet|haiku)-4(?:[.-]5|-2025|-latest|$|[@:])", 200_000, True, 64_000),
        (r"claude-(?:opus|sonnet)-4[.-][6-9]|claude-[a-z]+-[5-9]|claude-mythos", _MILLION, True, 128_000),
        (r"claude", 200_000, True, 32_000),
    ],
    "gemma": [
        (r"gemma-?4", 128 * _K, True, 8 * _K),
        (r"gemma-?3n", 32 * _K, True, 8 * _K),
        (r"gemma-?3[:-](?:1b|270m)", 32 * _K, False, 8 * _K),
        (r"gemma-?3", 128 * _K, True, 8 * _K),
        (r"gemma", 8 * _K, False, 4_096),
    ],
    "gemini": [
        (r"gemini-(?:1\.0|pro(?:$|-vision))", 30_720, False, 2_048),
        (r"gemini-(?:.*computer-use|robotics|omni)", 128_000, True, 32 * _K),
        (r"gemini-(?:1\.5|2\.0|exp)", 1_000_000, True, 8 * _K),
        (r"gemini", 1_000_000, True, 64 * _K - 1),
    ],
    "qwq": [(r"qwq", 32 * _K, False, 16 * _K)],
    "qvq": [(r"qvq", 32 * _K, True, 8 * _K)],
    "qwen": [
        (r"qwen-?(?:2(?:\.5)?)?-?(?:vl|omni)", 32 * _K, True, 8 * _K),
        (r"qwen-?3-omni", 64 * _K, True, 16 * _K),
        (r"qwen-?3-?vl", 128 * _K, True, 32 * _K),
        (r"qwen-?3-coder-(?:plus|flash)", 997_952, False, 64 * _K),
        (r"qwen-?3-coder", 256_000, False, 32 * _K),
        (r"qwen-?3-(?:max|next)|qwen-?3.*2507", 256_000, False, 32 * _K),
        (r"qwen-?3\.[5-9]-(?:plus|flash)|qwen-?3\.8-max", 256_000, True, 64 * _K),
        (r"qwen-?3\.[5-9]-max", 256_000, False, 64 * _K),
        (r"qwen-?3\.[5-9]", 256_000, True, 32 * _K),
        (r"qwen-?3(?!\d*b)", 32_000, False, 16 * _K),
        (r"qwen-(?:turbo|plus|flash|coder)", 129_024, False, 8 * _K),
        (r"qwen-max", 30_720, False, 8 * _K),
        (r"qwen", 32 * _K, False, 8 * _K),
    ],
    "llava": [(r"llava", 4_096, True, 2_048)],
    "llama": [
        (r"code-?llama", 16 * _K, False, 4_096),
        (r"llama-?v?4", 128 * _K, True, 8 * _K),
        (r"llama-?v?3[.-]?2.*(?:vision|11b|90b)", 128_000, True, 4_096),
        (r"llama-?v?3[.-][1-3](?!\d*b)", 128_000, False, 4_096),
        (r"llama-?v?3(?!\d*b)", 8 * _K, False, 4_096),
        (r"llama-?v?2(?!\d*b)", 4_096, False, 2_048),
        (r"llama", 8 * _K, None, 2_048),
    ],
    "pixtral": [(r"pixtral", 128_000, True, 8 * _K)],
    "mixtral": [(r"mixtral.*8x22b", 64 * _K, False, 4_096), (r"mixtral", 32 * _K, False, 4_096)],
    "devstral": [
        (r"devstral-(?:small-)?2(?:-|:|$)|devstral-(?:small-|medium-)?2512", 256_000, False, 32 * _K),
        (r"devstral", 128_000, False, 32 * _K),
    ],
    "codestral": [
        (r"codestral-2(?:405)?$|codestral[:-]22b", 32_000, False, 8 * _K),
        (r"codestral", 128_000, False, 8 * _K),
    ],
    "magistral": [(r"magistral-(?:small|medium)-2509", 128_000, True, 32 * _K), (r"magistral", 40_000, None, 16 * _K)],
    "ministral": [
        (r"ministral.*(?:2512|latest)|ministral-3-", 128_000, True, 32 * _K),
        (r"ministral", 128_000, None, 8 * _K),
    ],
    "mistral": [
        (r"mistral-(?:large|medium|small)-?(?:4|2603|2604|2512)|mistral-large-3", 256_000, True, 32 * _K),
        (r"mistral-medium|mistral-small-?3[.-][12]|mistral-small.*(?:2503|2506)", 128_000, True, 8 * _K),
        (r"mistral-large-2402|mistral-small-?(?:24b|3|2402|2409|2501)|mistral-(?:tiny|saba)", 32_000, False, 8 * _K),
        (r"mistral-(?:large-(?:2|24\d\d)|nemo)", 128_000, False, 4_096),
        (r"mistral-(?:large|vibe|code)", 128_000, None, 8 * _K),
        (r"mistral-small", 32_000, None, 8 * _K),
        (r"mistral.*v0\.1", 8 * _K, False, 4_096),
        (r"mistral", 32_000, False, 4_096),
    ],
    "glm": [
        (r"glm-?4[.-]?[156]?v|glm-?5v|autoglm", 64 * _K, True, 16 * _K),
        (r"glm-?5[.-]3-flash", _MILLION, True, 128_000),
        (r"glm-?5[.-][2-9]", _MILLION, None, 128_000),
        (r"glm-?(?:5|4[.-][67])", 200_000, False, 128_000),
        (r"glm-?4[.-]5", 128_000, False, 32_000),
        (r"glm-?4[:-]?(?:32b|9b|z1)", 32_000, False, 8 * _K),
        (r"glm", 128_000, False, 4_096),
    ],
    "kimi": [
        (r"kimi-?k3", _MILLION, True, 128 * _K),
        (r"kimi-?k2[.-][5-7]", 256_000, True, 32 * _K),
        (r"kimi-?k2-?(?:thinking|turbo|instruct-0905|0905)", 256_000, False, 16 * _K),
        (r"kimi-vl", 128_000, True, 8 * _K),
        (r"kimi", 128_000, False, 16 * _K),
    ],
    "moonshot": [
        (r"moonshot-v1-8k", 8 * _K, False, 4_096),
        (r"moonshot-v1-32k", 32 * _K, False, 4_096),
        (r"moonshot", 128_000, False, 4_096),
    ],
    "grok": [
        (r"grok-(?:2-)?vision", 8 * _K, True, 4_096),
        (r"grok-code", 256_000, None, 32 * _K),
        (r"grok-[23]", 128 * _K, False, 16 * _K),
        (r"grok-4[.-]20|grok-4[.-]3", _MILLION, True, 32 * _K),
        (r"grok-4[.-][5-9]|grok-build", 500_000, True, 32 * _K),
        (r"grok-4[.-]1|grok-4-fast", 128_000, True, 32 * _K),
        (r"grok-4", 256_000, True, 32 * _K),
        (r"grok", 128 * _K, None, 16 * _K),
    ],
    "phi": [
        (r"phi-?[34](?:\.5)?-?(?:vision|multimodal)", 128_000, True, 4_096),
        (r"phi-?4-?(?:mini|flash)|phi-?3\.5", 128_000, False, 4_096),
        (r"phi-?4-reasoning", 32 * _K, False, 8 * _K),
        (r"phi-?4", 16 * _K, False, 4_096),
        (r"phi-?3.*128k", 128_000, False, 4_096),
        (r"phi-?3.*8k", 8 * _K, False, 4_096),
        (r"phi-?3", 4_096, False, 2_048),
        (r"\bphi-?[12]?\b", 2_048, False, 1_024),
    ],
    "granite": [
        (r"granite.*vision", 16 * _K, True, 4_096),
        (r"granite-?4", 128_000, False, 8 * _K),
        (r"granite-?3[.-][1-9](?!b)", 128_000, False, 8 * _K),
        (r"granite", 8 * _K, False, 4_096),
    ],
    "command": [
        (r"command-a-(?:vision|plus)", 128_000, True, 4_000),
        (r"command-a", 256_000, False, 4_000),
        (r"command-?r", 128_000, False, 4_000),
        (r"command", 4_096, False, 4_000),
    ],
    "minimax": [(r"minimax-?m3", 500_000, True, 64 * _K), (r"minimax-?m2", 192 * _K, False, 32 * _K)],
    "nemotron": [(r"nemotron.*(?:vl|omni)", 128_000, True, 8 * _K), (r"nemotron", 128_000, None, 8 * _K)],
    "nova": [
        (r"nova-micro", 128_000, False, 8 * _K),
        (r"nova-(?:2-|premier)", _MILLION, True, 10_000),
        (r"nova-(?:lite|pro)", 300_000, True, 8 * _K),
    ],
    "jamba": [(r"jamba-instruct", 70_000, False, 4_096), (r"jamba", 256_000, False, 4_096)],
    "hermes": [(r"hermes-?[34]", 128_000, False, 8 * _K)],
    "smollm": [
        (r"smolvlm", 8 * _K, True, 2_048),
        (r"smollm-?3", 64 * _K, False, 8 * _K),
        (r"smollm", 8 * _K, False, 2_048),
    ],
    "minicpm": [(r"minicpm-[vo]", 32 * _K, True, 4_096), (r"minicpm", 32 * _K, False, 4_096)],
}


@lru_cache(maxsize=256)
def model_info(name: str) -> ModelInfo:
    """Return what is known about a model. The name may be a provider's, Ollama's, or that of a file."""
    known = re.sub(r"(?<=\d)p(?=\d)", ".", name.lower().replace("\\", "/").rstrip("/").rpartition("/")[2])
    known = re.sub(r"[_ ]", "-", known)
    for word, rows in _FAMILIES.items():
        if word in known:
            for pattern, window, vision, output in rows:
                if re.search(pattern, known):
                    return ModelInfo(window, vision, output)
    return UNKNOWN


# Error messages about a prompt that is too long, in lower case; the group is the window, if the message names it.
_NUMBER = r"([\d,_]{3,12})"
_OVERFLOWS = [
    rf"maximum context length (?:is|of) {_NUMBER}",  # OpenAI, vLLM, DeepSeek, OpenRouter, SGLang
    rf"{_NUMBER} maximum context length",  # Mistral
    rf"maximum (?:prompt|input) length (?:is|of) {_NUMBER}",  # xAI
    rf"prompt is too long: [\d,]+ tokens > {_NUMBER} maximum",  # Anthropic
    rf"exceed context limit: [\d,]+ \+ [\d,]+ > {_NUMBER}",  # Anthropic, together with the answer
    rf"input token count(?: \([\d,]+\))? exceeds the maximum number of tokens allowed \(?{_NUMBER}",  # Gemini
    rf"exceeds the available context size \({_NUMBER} tokens",  # llama.cpp
    rf"exceed_context_size_error.*?\"n_ctx\" ?: ?{_NUMBER}",
    rf"n_keep \([\d,]+\) >= n_ctx \({_NUMBER}\)",  # LM Studio
    rf"context length of only {_NUMBER} tokens",
    rf"exceeds? (?:the )?context (?:window|length|size|limit) (?:of|\() ?{_NUMBER}",  # llama-cpp-python, others
    rf"longer than the model's context length \({_NUMBER}",  # SGLang
    rf"prompt token count of [\d,]+ exceeds the limit of {_NUMBER}",  # GitHub
    rf"input tokens exceed the configured limit of {_NUMBER}",  # OpenAI
    rf"exceeded model token limit: ?{_NUMBER}",  # Moonshot
    rf"range of input length should be \[\d+, {_NUMBER}\]",  # Qwen
    rf"reduce the length of the messages or completion\. current length is [\d,]+ while limit is {_NUMBER}",  # Cerebras
    rf"total number of tokens in the prompt cannot exceed {_NUMBER}",  # Cohere
    rf"`inputs` (?:tokens \+ `max_new_tokens` must be <=|must have less than) {_NUMBER}",  # TGI, Together
]
_NAMELESS = [
    r"context_length_exceeded|context_window_exceeded|exceed_context_size_error|max_prompt_tokens_exceeded",
    r"exceeds? the (?:available |model's |maximum )?context (?:window|length|size)",
    r"prompt (?:is )?too long|input is too long|prompt exceeds max(?:imum)? length|context window exceeds limit",
    r"exceeded max context length|greater than the context length|longer than the model's context length",
    r"reduce the length of the (?:messages|prompt|input)",  # Groq, OpenAI
]
# Rate limits also mention tokens, but they are resolved by waiting, not by a shorter prompt.
_RATES = r"per min(?:ute)?\b|per (?:day|hour|second)|\(tp[md]\)|rate[ _-]limit|quota"
# The prompt's share of the window: requesting an answer that is too long is not an overflow.
_PROMPT = rf"{_NUMBER} (?:tokens )?(?:in (?:the|your) (?:messages|prompt)|of text input|input tokens|from the input)"
_MAX_TEXT = 10_000


def is_overflow(text: str) -> bool:
    """Return whether a model API's error says that the prompt was too long."""
    text = text[:_MAX_TEXT].lower()
    if re.search(_RATES, text):
        return False
    named = _named(text, _OVERFLOWS)
    if named and (prompt := _named(text, [_PROMPT])):
        return prompt * 2 > named
    return bool(named) or any(re.search(pattern, text) for pattern in _NAMELESS)


def window_in_error(text: str) -> int | None:
    """Return the window, in tokens, that a model API's error message names; 0 if it names none."""
    text = text[:_MAX_TEXT].lower()
    named = 0 if re.search(_RATES, text) else _named(text, _OVERFLOWS)
    return named if 256 <= named <= 100 * _MILLION else None


def _named(text: str, patterns: Sequence[str]) -> int:
    """Return the number in the first pattern that matches; 0 if none does."""
    found = next((match for pattern in patterns if (match := re.search(pattern, text))), None)
    return int(re.sub(r"\D", "", found[1]) or 0) if found else 0


# ---------------------------------------------------------------------------------------------- what a request weighs

PER_MESSAGE = 16  # units for the role and the markers that a chat template puts around a message
PER_CALL = 24  # units for the same around a tool call, with its id
# A picture of 2048 x 1536 pixels, the largest that is sent, has about 1,600 tokens: OpenAI counts 170 for each of its
# 8 tiles plus 85 (1,445), Anthropic one per 750 pixels up to 1,600, Google 258 for each of 6 tiles (1,548).
# At a quarter of a token per unit, that is 6,400 units, however many bytes its base64 form has.
PICTURE = 6_400
START = 0.3  # tokens per unit for a model without observations; higher than for most models
_MIN_RATIO, _MAX_RATIO = 0.12, 1.2  # plausible ratios; other counts omit cached tokens, or are wrong
_MIN_LEARNED_UNITS = 1_000  # units of a request to learn from; in smaller ones the provider's overhead dominates
_MAX_MODELS = 64
LONG = 1_000_000  # characters; a longer text is weighed by samples, a longer conversation in a thread
SAMPLES = 50
_LOWER = string.ascii_lowercase.encode()
_SPACE = string.whitespace.encode()
_RARE = (string.ascii_uppercase + string.digits).encode()
_OTHERS = bytes(range(128))


def weigh(message: Message) -> int:
    """Return the units of one message."""
    content = message.get("content")
    units = PER_MESSAGE + (sum(map(_weigh_part, content)) if isinstance(content, list) else _weigh_part(content))
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        units += PER_CALL + weigh_text(str(function.get("name", ""))) + weigh_text(str(function.get("arguments", "")))
    return units


def weigh_tools(tools: Sequence[dict[str, Any]]) -> int:
    """Return the units of the tools' definitions, which are sent with every request."""
    return sum(PER_CALL + weigh_text(encode_json(tool).decode()) for tool in tools)


def weigh_text(text: str) -> int:
    """Return the units of a text: about its bytes in UTF-8, and more if its tokens are shorter.

    A token is a word or a large part of one, but only a few capitals, digits or punctuation marks, and rarely just a
    space. Two-byte letters (Cyrillic, Arabic) share a token more often than three-byte ones (Chinese, Korean).
    """
    if len(text) > LONG:  # too long for any model: weighed by samples, so as not to block anything else
        samples = [text[start : start + LONG // SAMPLES] for start in range(0, len(text), len(text) // SAMPLES + 1)]
        return sum(map(weigh_text, samples)) * len(text) // sum(map(len, samples))
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
    """Return the units of a part of a message: a text, a picture, or the JSON of anything else."""
    if not isinstance(part, dict):  # a plain text, or anything that a library put there
        return weigh_text(part if isinstance(part, str) else "" if part is None else str(part))
    match part.get("type"):
        case "text":
            return weigh_text(str(part.get("text", "")))
        case "image_url" | "image" | "input_image":
            return PICTURE
    return weigh_text(encode_json(part).decode())


class Meter:
    """Converts units to tokens by a ratio per model, which improves with every answer."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[str, tuple[float, int]] = OrderedDict()  # with the number of answers behind each

    def tokens(self, model: str, units: int) -> int:
        """Estimate the tokens of some units."""
        return round(units * self.ratio(model))

    def units(self, model: str, tokens: int) -> int:
        """Estimate the units of some tokens."""
        return int(tokens / self.ratio(model))

    def ratio(self, model: str) -> float:
        if model in self._ratios:
            self._ratios.move_to_end(model)
            return self._ratios[model][0]
        return START

    def observe(self, model: str, units: int, tokens: int) -> None:
        """Learn from the tokens that a provider counted in a request. Implausible counts are ignored."""
        if units < _MIN_LEARNED_UNITS or not _MIN_RATIO <= tokens / units <= _MAX_RATIO:
            return
        ratio, seen = self._ratios.get(model, (START, 0))
        ratio += (tokens / units - ratio) * max(1 / (seen + 1), 0.4)  # adapts to the kind of text in use
        self._ratios[model] = (ratio, seen + 1)
        self._ratios.move_to_end(model)
        while len(self._ratios) > _MAX_MODELS:
            self._ratios.popitem(last=False)


# ---------------------------------------------------------------------------------------------- how full the window is

ANSWER_SHARE = 4  # at most one in so many tokens of the window is reserved for the answer
USABLE_SHARE = 0.95  # share of the rest that may be filled, since the estimate is inexact
MAX_TOKENS_PER_CHARACTER = 5  # maximum tokens per character, for any text and tokenizer
MIN_WINDOW = 2_000  # tokens; an error that names a smaller window means something else
REPORTED_WINDOW_SECONDS = 3600.0  # validity of a window named in an error: servers change, and errors quote text


class Measure:
    """Measures how much of one model's window a conversation fills."""

    def __init__(self, model: str, window: int, meter: Meter, tools: ToolRegistry, own_prompt: int = 0) -> None:
        """`window` is the configured one; with 0, the model's name decides. `own_prompt` is the number of tokens that
        the provider sends instead of the system prompt and the tools, if it omits those."""
        self.model = model
        self._set = window
        self._meter = meter
        self._tools = tools
        self._own_prompt = own_prompt
        self._weight_of_tools: tuple[Sequence[Any], int] = ((), 0)
        self._named = (0, 0.0)  # a window named by an error, and until when it is valid
        self._warned = False
        self._answers = 0

    @property
    def window(self) -> int:
        """The number of tokens that the model accepts."""
        known = self._set or model_info(self.model).window
        named, until = self._named
        return min(named, known) if named and time.monotonic() < until else known

    @property
    def room(self) -> int:
        """The number of tokens that a request may have, with room left for the answer."""
        return self.window - min(model_info(self.model).output, self.window // ANSWER_SHARE)

    @property
    def limit(self) -> float:
        """The maximum number of tokens of a request that fits."""
        return USABLE_SHARE * self.room

    def weight(self, conversation: Conversation) -> int:
        """Return the units of a request. Each message is weighed only once."""
        count, units = conversation.weighed
        if count < len(conversation):
            units += sum(map(weigh, conversation[count:]))
            conversation.weighed = (len(conversation), units)
        if self._own_prompt and conversation:
            return units - weigh(conversation[0]) + self.fixed(conversation)
        return units + self._weigh_tools()

    def is_small(self, conversation: Conversation, share: float) -> bool:
        """Return whether a request certainly fills less than this share of the room, without weighing it."""
        return MAX_TOKENS_PER_CHARACTER * (conversation.characters + self._weigh_tools()) < share * self.room

    def learn(self, answered: str | None, conversation: Conversation, counted: int) -> None:
        """Learn from the provider's count for a request: for the first few answers, then for every 32nd, and for each
        request that has been weighed anyway."""
        self._answers += 1
        if self._answers <= 4 or self._answers % 32 == 0 or conversation.weighed[0] == len(conversation):
            self.observe(answered, self.weight(conversation), counted)

    def tokens(self, conversation: Conversation) -> int:
        return self._meter.tokens(self.model, self.weight(conversation))

    def in_tokens(self, units: int) -> int:
        return self._meter.tokens(self.model, units)

    def in_units(self, tokens: float) -> int:
        return self._meter.units(self.model, int(tokens))

    def fixed(self, conversation: Conversation) -> int:
        """Return the units of the parts of every request: the system prompt and the tools."""
        if self._own_prompt:
            return self.in_units(self._own_prompt)
        return weigh(conversation[0]) + self._weigh_tools()

    def tokens_at(self, share: float, conversation: Conversation) -> float:
        """Return the tokens of a request that fills this share of the room besides the system prompt and the tools."""
        fixed = self.in_tokens(self.fixed(conversation))
        return fixed + share * max(self.room - fixed, 0)

    def can_fit(self, conversation: Conversation) -> bool:
        """Return whether the system prompt and the tools leave any room for a conversation."""
        fixed = int(self.tokens_at(0, conversation))
        if fixed < self.limit:
            return True
        if not self._warned:
            what = (
                f"the system prompt and the tools have about {fixed:,} tokens, and {self.model} takes {self.window:,}"
            )
            log.warning("%s: set window under [provider] if it takes more", what)
        self._warned = True
        return False

    def observe(self, answered: str | None, units: int, counted: int) -> None:
        """Learn from the provider's count for a request, for the model that answered and for the one that was
        called."""
        for name in dict.fromkeys((answered or self.model, self.model)):
            self._meter.observe(name, units, counted)
        if self._named[0] and counted > self._named[0]:  # it accepts more than the error said
            self._named = (0, 0.0)

    def overflows(self, refused: ProviderError, conversation: Conversation) -> bool:
        """Return whether the model API rejected the request as too long.

        A window that its error names is used for a while, unless it is implausible or another model's.
        """
        text = str(refused)
        if not is_overflow(text):
            return False
        named = window_in_error(text)
        if named and not refused.several and MIN_WINDOW <= named <= 1.5 * self.tokens(conversation):
            if named < self.window:
                log.warning("%s says that it takes %s tokens: set window under [provider]", self.model, f"{named:,}")
            self._named = (named, time.monotonic() + REPORTED_WINDOW_SECONDS)
        return True

    def _weigh_tools(self) -> int:
        tools = self._tools.get_definitions()
        if self._weight_of_tools[0] is not tools:
            self._weight_of_tools = (tools, weigh_tools(tools))
        return self._weight_of_tools[1]
