"""What is known about models by name, and how their APIs report a prompt that is too long."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.context.window import UNKNOWN, ModelInfo, is_overflow, model_info, window_in_error

from ..support.cases import each

K = 1_024


# (window, vision): names as used by providers, OpenRouter, Ollama and in file names.
KNOWN = {
    (4_096, False): ("llama2 phi3:mini /home/gemma/llama2.gguf C:\\gemma\\llama2.gguf"),
    (4_096, True): ("llava:13b"),
    (8 * K, False): (
        "gpt-4 gemma2:9b llama3:8b meta-llama/Meta-Llama-3-8B-Instruct Mistral-7B-Instruct-v0.1.Q4_K_M.gguf "
        "granite3-dense:8b"
    ),
    (16 * K, False): ("codellama:13b deepseek-coder:6.7b phi4"),
    (16_385, False): ("gpt-3.5-turbo gpt-35-turbo"),
    (30_720, False): ("qwen-max"),
    (32_000, False): ("qwen3:8b mistral:7b glm4:9b"),
    (32 * K, False): (
        "gemma3:1b qwen2.5:7b Qwen/Qwen2.5-Coder-32B-Instruct qwq:32b /models/qwen2.5-0.5b-instruct-q4_k_m.gguf "
        "mixtral:8x7b deepseek-r1:7b deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"
    ),
    (32 * K, True): ("google/gemma-3n-e4b-it qwen2.5vl:7b Qwen2.5-VL-72B-Instruct"),
    (64 * K, False): ("mistralai/Mixtral-8x22B-Instruct-v0.1"),
    (64 * K, True): ("zai-org/GLM-4.5V"),
    (100_000, False): ("claude-2.1"),
    (128_000, False): (
        "o1-mini gpt-oss:20b openai/gpt-oss-120b:free llama3.1 meta-llama/llama-3.3-70b-instruct:free llama3.2:3b "
        "llama-v3p1-8b-instruct meta.llama3-1-8b-instruct-v1:0 mistral-nemo devstral:24b "
        "mistralai/devstral-small-2505:free mistral-large-2411 codestral-latest deepseek-chat "
        "deepseek/deepseek-r1:free deepseek.v3-v1:0 z-ai/glm-4.5-air:free moonshotai/kimi-k2:free "
        "microsoft/Phi-3-mini-128k-instruct phi4-mini granite3.3:8b ibm/granite-4-h-small command-r "
        "c4ai-command-r-plus hermes-3-llama-3.1-8b"
    ),
    (128_000, True): (
        "gpt-4o gpt-4o-mini-2024-07-18 openai/gpt-4o:extended gpt-4-turbo gpt-5-chat-latest ft:gpt-4o-mini:acme::1 "
        "llama3.2-vision:11b Llama-3.2-11B-Vision-Instruct mistral-small3.2 mistral-small3.1:24b pixtral-12b "
        "mistral-medium-latest grok-4-fast Phi-4-multimodal-instruct"
    ),
    (128 * K, False): ("grok-3-mini"),
    (128 * K, True): ("gemma3:12b gemma-4-31b-it llama-4-scout qwen3-vl:8b"),
    (200_000, False): ("o3-mini glm-4.6"),
    (200_000, True): (
        "o1 openai/o3 o4-mini-high claude-3-haiku-20240307 claude-3-5-sonnet-latest "
        "anthropic/claude-3.7-sonnet:thinking claude-sonnet-4-20250514 claude-opus-4-1-20250805 claude-haiku-4-5 "
        "us.anthropic.claude-sonnet-4-5-20250929-v1:0"
    ),
    (256_000, False): (
        "qwen/qwen3-235b-a22b-2507:free qwen3-coder:30b hf.co/unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:UD-Q4_K_XL "
        "kimi-k2-0905-preview command-a-03-2025"
    ),
    (256_000, True): ("qwen3.6-27b mistral-large-2512 kimi-k2.5 x-ai/grok-4"),
    (272_000, True): ("gpt-5 gpt-5.2-codex gpt-6-sol"),
    (1_000_000, True): (
        "anthropic/claude-opus-4.6 claude-sonnet-5 gemini-2.5-flash google/gemini-2.0-flash-exp:free "
        "models/gemini-1.5-pro"
    ),
    (1_047_576, True): ("gpt-4.1-nano"),
}


@each(("name", "window", "vision"), [(name, *known) for known, names in KNOWN.items() for name in names.split()])
def test_a_model_is_known_by_its_name(name, window, vision):
    info = model_info(name)
    assert (info.window, info.vision) == (window, vision)
    assert 1_000 <= info.output <= info.window


@pytest.mark.parametrize("name", ["", "my-deployment", "everloop/scripted", "auto", "a/b/c", "philosopher-9b", "novel"])
def test_an_unknown_model_gets_a_conservative_window(name):
    assert model_info(name) == UNKNOWN == ModelInfo(32_768, None, 4_096)


def test_a_model_that_may_have_vision_is_not_treated_as_without():
    for name in ("mistral-large-latest", "mistral-small-latest", "grok-5", "deepseek-v4-flash", "some-new-model"):
        assert model_info(name).vision is not False


@given(st.text(max_size=200))
def test_any_model_name_gets_an_answer(name):
    info = model_info(name)
    assert info.window > 0
    assert info.output > 0


def test_repeated_lookups_are_cheap():
    model_info("hf.co/unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:UD-Q4_K_XL")
    start = time.process_time()
    for _ in range(10_000):
        model_info("hf.co/unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:UD-Q4_K_XL")
    assert time.process_time() - start < 0.02


# ---------------------------------------------------------------------------------------------- prompts too long

TOO_LONG = {
    "OpenAI": (
        "This model's maximum context length is 128000 tokens. However, your messages resulted in 204308 tokens. "
        "Please reduce the length of the messages. (code: context_length_exceeded)",
        128_000,
    ),
    "OpenAI, with tools": (
        "This model's maximum context length is 16385 tokens. However, your messages resulted in 17000 tokens "
        "(16000 in the messages, 1000 in the functions).",
        16_385,
    ),
    "OpenAI, with the answer": (
        "This model's maximum context length is 4097 tokens. However, you requested 4203 tokens (3703 in the messages, "
        "500 in the completion). Please reduce the length of the messages or completion.",
        4_097,
    ),
    "OpenAI, responses": ("Your input exceeds the context window of this model. Please adjust your input.", None),
    "OpenAI, configured": (
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 300210 tokens.",
        272_000,
    ),
    "vLLM": (
        "This model's maximum context length is 32768 tokens. However, you requested 40000 tokens in the messages, "
        "Please reduce the length of the messages.",
        32_768,
    ),
    "vLLM, hardly room": (
        "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum context length is 32768 "
        "tokens and your request has 31000 input tokens (4096 > 32768 - 31000).",
        32_768,
    ),
    "llama.cpp": (
        '{"error":{"code":400,"message":"request (9012 tokens) exceeds the available context size (8192 tokens), try '
        'increasing it","type":"exceed_context_size_error","n_prompt_tokens":9012,"n_ctx":8192}}',
        8_192,
    ),
    "llama.cpp, older": (
        '{"error":{"code":500,"message":"the request exceeds the available context size. try increasing the context '
        'size or enable context shift","type":"exceed_context_size_error","n_prompt_tokens":1407,"n_ctx":256}}',
        256,
    ),
    "llama-cpp-python": ("Requested tokens (2285) exceed context window of 2048", 2_048),
    "Ollama": ('{"error":"the input length exceeds the context length"}', None),
    "Ollama, newer": ("prompt too long; exceeded max context length by 4242 tokens", None),
    "Anthropic": ("prompt is too long: 210003 tokens > 200000 maximum", 200_000),
    "Anthropic, with the answer": (
        "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000, decrease input length or "
        "`max_tokens` and try again",
        200_000,
    ),
    "Bedrock": ("Input is too long for requested model.", None),
    "Gemini": (
        "The input token count (1200293) exceeds the maximum number of tokens allowed (1048576).",
        1_048_576,
    ),
    "Gemini, without a count": (
        "The input token count exceeds the maximum number of tokens allowed 1048576.",
        1_048_576,
    ),
    "Mistral": (
        "Prompt contains 34209 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
        32_768,
    ),
    "OpenRouter": (
        "This endpoint's maximum context length is 131072 tokens. However, you requested about 150021 tokens (142021 "
        "of text input, 8000 in the output). Please reduce the length of either one.",
        131_072,
    ),
    "Groq": ("Please reduce the length of the messages or completion. (code: context_length_exceeded)", None),
    "Cerebras": (
        "Please reduce the length of the messages or completion. Current length is 9012 while limit is 8192",
        8_192,
    ),
    "xAI": ("This model's maximum prompt length is 131072 but the request contains 537812 tokens.", 131_072),
    "LM Studio": (
        "Trying to keep the first 111490 tokens when context the overflows. However, the model is loaded with context "
        "length of only 32768 tokens, which is not enough.",
        32_768,
    ),
    "LM Studio, newer": ("Cannot truncate prompt with n_keep (15028) >= n_ctx (7424)", 7_424),
    "LM Studio, other": (
        "The number of tokens to keep from the initial prompt is greater than the context length.",
        None,
    ),
    "SGLang": (
        "The input (45000 tokens) is longer than the model's context length (32768 tokens).",
        32_768,
    ),
    "Moonshot": ("Invalid request: Your request exceeded model token limit: 131072", 131_072),
    "Qwen": ("<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 30720]", 30_720),
    "GLM": ("Prompt exceeds max length", None),
    "MiniMax": ("invalid params, context window exceeds limit", None),
    "GitHub": ("prompt token count of 140012 exceeds the limit of 128000", 128_000),
    "Cohere": (
        "too many tokens: total number of tokens in the prompt cannot exceed 128,000 - received 130,120.",
        128_000,
    ),
    "TGI": ("Input validation error: `inputs` must have less than 4095 tokens. Given: 5012", 4_095),
    "Together": ("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193.", 8_193),
}  # fmt: skip


@each(("text", "window"), TOO_LONG.values())
def test_a_context_length_error_is_recognised_with_its_window(text, window):
    assert is_overflow(text)
    assert is_overflow(f"HTTP 400 from the model: {text}".upper())
    assert window_in_error(text) == window


OTHERS = {
    "rate, OpenAI": (
        "Rate limit reached for gpt-4o in organization org-x on tokens per min (TPM): Limit 30000, Used 20000, "
        "Requested 15000. Please try again in 10s."
    ),
    "too large for a minute": (
        "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 43210. The input or output "
        "tokens must be reduced in order to run successfully."
    ),
    "rate, Groq": (
        "Request too large for model `llama-3.1-8b-instant` on tokens per minute (TPM): Limit 6000, Requested 9012, "
        "please reduce your message size and try again."
    ),
    "rate, Anthropic": (
        "This request would exceed your organization's rate limit of 30,000 input tokens per minute. Reduce the prompt "
        "length or the maximum tokens requested."
    ),
    "quota": "You exceeded your current quota: input token count exceeds the maximum number of tokens allowed 250000.",
    "answer, OpenAI": "max_tokens is too large: 50000. This model supports at most 16384 completion tokens.",
    "answer, Anthropic": (
        "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens for claude-sonnet-4"
    ),
    "answer, vLLM": (
        "'max_tokens' or 'max_completion_tokens' is too large: 40000. This model's maximum context length is 32768 "
        "tokens and your request has 1000 input tokens (40000 > 32768 - 1000)."
    ),
    "answer, OpenRouter": (
        "This endpoint's maximum context length is 8192 tokens. However, you requested about 9021 tokens (1021 of text "
        "input, 8000 in the output)."
    ),
    "picture": "Image size exceeds the maximum of 5 MB: 7340032 bytes > 5242880 bytes",
    "key": "Incorrect API key provided.",
    "nothing": "",
}


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_other_errors_are_not_mistaken_for_a_context_length_error(text):
    assert not is_overflow(text)
    if "per min" in text or "quota" in text:
        assert window_in_error(text) is None


@pytest.mark.parametrize("number", ["0", "17", "999999999999", "1_2", "," * 5])
def test_an_impossible_window_is_ignored(number):
    assert window_in_error(f"This model's maximum context length is {number} tokens.") is None


@pytest.mark.parametrize(
    "unit", ["prompt token count of 1 ", "exceed_context_size_error", "1,", "input token count (1"]
)
def test_a_long_error_is_parsed_quickly(unit):
    start = time.process_time()
    is_overflow(unit * 200_000)
    window_in_error(unit * 200_000)
    assert time.process_time() - start < 1
