"""What is known of models by their names: how much they take in, how much they write, whether they see pictures.

Windows are what the model's maker documents; where there is doubt, the smaller one. A server may give less than the
model could take (Ollama and llama.cpp do unless told otherwise): then its error tells, or the config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """A model's limits in tokens, and whether it sees pictures (None: nobody knows)."""

    window: int  # of a request; for most models the answer has to fit in as well
    vision: bool | None = None
    output: int = 4_096  # of an answer


UNKNOWN = ModelInfo(32_768)
_K = 1_024
_MILLION = 1_000_000
_Row = tuple[str, int, bool | None, int]  # a pattern, window, vision, output

# By a word in the name, the patterns of a family: the first that is found in the name decides, so special ones are
# first. Families whose names stand in those of others' models (a DeepSeek distilled into Qwen) come before them.
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
    """What is known of a model; the name may be one of a provider, of Ollama, or a file's."""
    known = re.sub(r"(?<=\d)p(?=\d)", ".", name.lower().replace("\\", "/").rstrip("/").rpartition("/")[2])
    known = re.sub(r"[_ ]", "-", known)
    for word, rows in _FAMILIES.items():
        if word in known:
            for pattern, window, vision, output in rows:
                if re.search(pattern, known):
                    return ModelInfo(window, vision, output)
    return UNKNOWN


# What the APIs say of a prompt that is too long, in lower case; where they name the window, it is the group.
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
# Limits of a minute or a day pass by waiting, not by a shorter prompt, though they speak of tokens as well.
_RATES = r"per min(?:ute)?\b|per (?:day|hour|second)|\(tp[md]\)|rate[ _-]limit|quota"
# How much of the window the prompt itself took: an answer that was asked for at too great a length is no overflow.
_PROMPT = rf"{_NUMBER} (?:tokens )?(?:in (?:the|your) (?:messages|prompt)|of text input|input tokens|from the input)"
_MOST_TEXT = 10_000


def is_overflow(text: str) -> bool:
    """Whether a model API's error says that the prompt was too long."""
    text = text[:_MOST_TEXT].lower()
    if re.search(_RATES, text):
        return False
    named = _named(text, _OVERFLOWS)
    if named and (prompt := _named(text, [_PROMPT])):
        return prompt * 2 > named
    return bool(named) or any(re.search(pattern, text) for pattern in _NAMELESS)


def window_in_error(text: str) -> int | None:
    """The window that a model API's error names, in tokens."""
    text = text[:_MOST_TEXT].lower()
    named = 0 if re.search(_RATES, text) else _named(text, _OVERFLOWS)
    return named if 256 <= named <= 100 * _MILLION else None


def _named(text: str, patterns: Sequence[str]) -> int:
    """The number that the first pattern with a match names; 0 for none."""
    found = next((match for pattern in patterns if (match := re.search(pattern, text))), None)
    return int(re.sub(r"\D", "", found[1]) or 0) if found else 0
