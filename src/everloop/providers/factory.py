"""From settings to a provider: which endpoint, which model, which fallbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError
from .base import LLMProvider


@dataclass(slots=True, frozen=True)
class Known:
    """An endpoint, and the API that it speaks."""

    base_url: str
    needs_key: bool = True
    api: Literal["openai", "anthropic"] = "openai"


ENDPOINTS = {
    "openai": Known("https://api.openai.com/v1"),
    "ollama": Known("http://127.0.0.1:11434/v1", needs_key=False),
    "vllm": Known("http://127.0.0.1:8000/v1", needs_key=False),
    "llamacpp": Known("http://127.0.0.1:8080/v1", needs_key=False),
    "lmstudio": Known("http://127.0.0.1:1234/v1", needs_key=False),
    "openrouter": Known("https://openrouter.ai/api/v1"),
    "deepseek": Known("https://api.deepseek.com/v1"),
    "groq": Known("https://api.groq.com/openai/v1"),
    "mistral": Known("https://api.mistral.ai/v1"),
    "together": Known("https://api.together.xyz/v1"),
    "anthropic": Known("https://api.anthropic.com", api="anthropic"),
}


def make_provider(config: Any) -> LLMProvider:
    """The provider that the settings describe, with retries and its fallback models.

    Reads provider, base_url, api_key, model, fallbacks, retries, connect_timeout, first_token_timeout, token_timeout
    and request_timeout; what is missing or None has its default.
    """
    name = getattr(config, "provider", None) or "openai"
    known = ENDPOINTS.get(name)
    if known is None:
        raise ConfigError(f'provider "{name}" is not known: set EVERLOOP_PROVIDER to one of {", ".join(ENDPOINTS)}')
    base_url = getattr(config, "base_url", None)
    api_key = getattr(config, "api_key", None)
    model = getattr(config, "model", None)
    if not model:
        raise ConfigError(f"no model for provider {name}: set EVERLOOP_MODEL to the name of one it has")
    if known.needs_key and not base_url and not api_key:
        raise ConfigError(
            f"no API key for {known.base_url}: set EVERLOOP_API_KEY, or EVERLOOP_BASE_URL to a server that needs none"
        )
    from .resilient import Resilient

    provider = _speaker(known.api, base_url or known.base_url, api_key, model, _timeouts(config))
    models = [None, *(getattr(config, "fallbacks", None) or ())]
    retries = getattr(config, "retries", None)
    return Resilient([(provider, other) for other in models], retries=4 if retries is None else retries)


def _speaker(api: str, base_url: str, api_key: str | None, model: str, timeouts: Any) -> LLMProvider:
    """The provider that speaks an API."""
    if api == "anthropic":
        from .anthropic import AnthropicProvider

        return AnthropicProvider(api_key, model, base_url=base_url, timeouts=timeouts)
    from .openai import OpenAIProvider

    return OpenAIProvider(base_url, api_key, model, timeouts=timeouts)


def _timeouts(config: Any) -> Any:
    """The time-outs that are set, the usual ones where none is."""
    from .http import Timeouts

    settings = {
        "connect": "connect_timeout",
        "first_token": "first_token_timeout",
        "token": "token_timeout",
        "total": "request_timeout",
    }
    values = {field: getattr(config, setting, None) for field, setting in settings.items()}
    return Timeouts(**{field: value for field, value in values.items() if value is not None})
