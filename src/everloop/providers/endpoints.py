"""The endpoints known by name: their addresses, their keys, and how they differ from OpenAI's API.

To add one, add an entry to `ENDPOINTS`; `docs/providers.md` has the table that `endpoints_table` makes of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import msgspec

from .http import Origin, origin_of

Api = Literal["openai", "anthropic", "litellm"]
COMPLETION = {"max_tokens": "max_completion_tokens"}


class Quirks(msgspec.Struct, frozen=True):
    """How a server differs from OpenAI's API: its own names for options, the options that it rejects or silently
    ignores, and whether it accepts `stream_options`."""

    names: Mapping[str, str] = {}
    refused: frozenset[str] = frozenset()
    stream_options: bool = True


USUAL = Quirks()


class Known(msgspec.Struct, frozen=True):
    """An endpoint: its base URL (none if each user has their own), the usual environment variable of its key (none if
    it needs no key), and its API. `hosts` are further addresses of it."""

    base_url: str
    key: str = ""
    api: Api = "openai"
    quirks: Quirks = USUAL
    hosts: str = ""
    note: str = ""

    @property
    def needs_key(self) -> bool:
        return bool(self.key)


ENDPOINTS: dict[str, Known] = {
    "openai": Known("https://api.openai.com/v1", "OPENAI_API_KEY", quirks=Quirks(COMPLETION)),
    "ollama": Known(
        "http://127.0.0.1:11434/v1",
        quirks=Quirks(refused=frozenset({"tool_choice", "logit_bias"})),
        note="local; give it a window that is long enough (`OLLAMA_CONTEXT_LENGTH`)",
    ),
    "vllm": Known(
        "http://127.0.0.1:8000/v1",
        note="local; start it with `--enable-auto-tool-choice` and a `--tool-call-parser`",
    ),
    "llamacpp": Known("http://127.0.0.1:8080/v1", note="local; start it with `--jinja`"),
    "lmstudio": Known("http://127.0.0.1:1234/v1", note="local"),
    "sglang": Known("http://127.0.0.1:30000/v1", note="local; start it with a `--tool-call-parser`"),
    "anthropic": Known("https://api.anthropic.com", "ANTHROPIC_API_KEY", api="anthropic", note="Anthropic's own API"),
    "azure": Known(
        "",
        "AZURE_OPENAI_API_KEY",
        quirks=Quirks(COMPLETION),
        hosts=".openai.azure.com",
        note="`EVERLOOP_BASE_URL=https://RESOURCE.openai.azure.com/openai/v1`; the model is the deployment's name",
    ),
    "cerebras": Known(
        "https://api.cerebras.ai/v1",
        "CEREBRAS_API_KEY",
        quirks=Quirks(COMPLETION, frozenset({"presence_penalty", "frequency_penalty", "logit_bias"})),
    ),
    "dashscope": Known("https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY", note="Qwen"),
    "deepinfra": Known("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "deepseek": Known("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "fireworks": Known("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "gemini": Known("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "groq": Known(
        "https://api.groq.com/openai/v1", "GROQ_API_KEY", quirks=Quirks(COMPLETION, frozenset({"logit_bias"}))
    ),
    "huggingface": Known("https://router.huggingface.co/v1", "HF_TOKEN"),
    "mistral": Known(
        "https://api.mistral.ai/v1",
        "MISTRAL_API_KEY",
        # It rejects fields that it does not know, and always counts the tokens of a stream.
        quirks=Quirks(
            {"seed": "random_seed"},
            frozenset({"logit_bias", "user", "verbosity", "safety_identifier", "service_tier"}),
            stream_options=False,
        ),
    ),
    "moonshot": Known("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY", note="Kimi"),
    "nvidia": Known("https://integrate.api.nvidia.com/v1", "NVIDIA_API_KEY"),
    "openrouter": Known("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "sambanova": Known("https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY"),
    "together": Known("https://api.together.xyz/v1", "TOGETHER_API_KEY"),
    "xai": Known("https://api.x.ai/v1", "XAI_API_KEY", quirks=Quirks(refused=frozenset({"logit_bias"}))),
    "zai": Known("https://api.z.ai/api/paas/v4", "ZAI_API_KEY", note="GLM"),
    "litellm": Known(
        "", api="litellm", note="the extra `litellm`; the model's name says whose it is, such as `bedrock/…`"
    ),
}


def known_at(base_url: str) -> Known | None:
    """Return the endpoint with the scheme, host and port of a base URL."""
    try:
        asked = _place(origin_of(base_url.strip()))
    except ValueError:
        return None
    for known in ENDPOINTS.values():
        if known.base_url and _known_place(known.base_url) == asked:
            return known
        if known.hosts and asked[0] == "https" and asked[1].endswith(known.hosts):
            return known
    return None


def quirks_of(base_url: str) -> Quirks:
    """Return what is known about the server at a base URL."""
    known = known_at(base_url)
    return USUAL if known is None else known.quirks


def key_for(base_url: str, environment: Mapping[str, str]) -> str:
    """Return the key that the environment has for the known endpoint at a base URL. No other endpoint gets it."""
    known = known_at(base_url)
    return environment.get(known.key, "").strip() if known is not None and known.key else ""


def endpoints_table() -> str:
    """Return all endpoints as a Markdown table."""
    lines = ["| name | address | key | |", "|---|---|---|---|"]
    for name, known in ENDPOINTS.items():
        cells = [f"`{name}`", f"`{known.base_url}`" if known.base_url else "", f"`{known.key}`" if known.key else ""]
        lines.append("| " + " | ".join([*cells, known.note]) + " |")
    return "\n".join(lines) + "\n"


@functools.cache
def _known_place(base_url: str) -> tuple[str, str, int]:
    """Return the scheme, host and port of an endpoint, cached because each provider's are compared with all of them."""
    return _place(origin_of(base_url))


def _place(origin: Origin) -> tuple[str, str, int]:
    host = "127.0.0.1" if origin.host in ("localhost", "::1") else origin.host.lower().removesuffix(".")
    return origin.scheme, host, origin.port
