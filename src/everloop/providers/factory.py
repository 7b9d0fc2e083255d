"""Make a provider from the settings: the endpoint, the model and its fallbacks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .base import LLMProvider
from .endpoints import ENDPOINTS, USUAL, Known, key_for, known_at

__all__ = ["ENDPOINTS", "make_provider"]


def make_provider(config: Any, environment: Mapping[str, str] = os.environ) -> LLMProvider:
    """Return the provider that the settings describe, with retries and its fallback models.

    Reads provider, base_url, api_key, model, fallbacks, retries, temperature (unset below 0), answer_tokens (unset at
    0) and the timeouts; a setting that is missing or None has its default. Without api_key, a known endpoint gets its
    key from its usual environment variable.
    """
    name = getattr(config, "provider", None) or "openai"
    if name == "local":
        from .local.provider import local_provider

        return _with_retries(config, local_provider(config))
    known = ENDPOINTS.get(name)
    if known is None:
        return _with_retries(config, _plugin(config, name))
    model = getattr(config, "model", None)
    if not model:
        raise ConfigError(f"no model for provider {name}: set EVERLOOP_MODEL to the name of one it has")
    return _with_retries(config, _endpoint_provider(config, name, known, model, environment))


def _plugin(config: Any, name: str) -> LLMProvider:
    """Return the provider of another package, by the name of its entry point in `everloop.providers`."""
    from ..plugins import PROVIDERS, find, installed

    if name not in (known := installed(PROVIDERS)):
        raise ConfigError(
            f'provider "{name}" is not known: set EVERLOOP_PROVIDER to local or one of '
            f"{', '.join([*ENDPOINTS, *sorted(known)])}"
        )
    return find(PROVIDERS, name, "provider").use(lambda made: _from_plugin(made, config))


def _from_plugin(made: Any, config: Any) -> LLMProvider:
    """Return the provider for the object of an entry point."""
    if isinstance(made, type) and issubclass(made, LLMProvider):
        made = made(
            api_key=getattr(config, "api_key", None) or None,
            base_url=getattr(config, "base_url", None) or None,
            model=getattr(config, "model", None) or None,
        )
    elif not isinstance(made, LLMProvider) and callable(made):
        made = made(config)
    if not isinstance(made, LLMProvider):
        raise TypeError("it must be a subclass of LLMProvider, or a callable(config) that returns a provider")
    return made


def _with_retries(config: Any, provider: LLMProvider) -> LLMProvider:
    """Return the provider with retries and its fallback models."""
    from .retry import Resilient

    models = [None, *(getattr(config, "fallbacks", None) or ())]
    retries = getattr(config, "retries", None)
    return Resilient([(provider, other) for other in models], retries=4 if retries is None else retries)


def _endpoint_provider(config: Any, name: str, known: Known, model: str, environment: Mapping[str, str]) -> LLMProvider:
    """Return a provider for the endpoint's API."""
    base_url, api_key = getattr(config, "base_url", None), getattr(config, "api_key", None)
    temperature, answer_tokens = _answer_settings(config)
    if known.api == "litellm":
        from .litellm import LiteLLMProvider

        return LiteLLMProvider(
            model, api_key, base_url, timeouts=_timeouts(config), temperature=temperature, max_tokens=answer_tokens
        )
    address = base_url or known.base_url
    if not address:
        raise ConfigError(f"provider {name} has no address of its own: set EVERLOOP_BASE_URL to yours ({known.note})")
    api_key = api_key or key_for(address, environment)
    if known.needs_key and not base_url and not api_key:
        raise ConfigError(
            f"no API key for {address}: set EVERLOOP_API_KEY (or {known.key}), or EVERLOOP_BASE_URL to a server that "
            "needs none"
        )
    extra = {} if temperature is None else {"temperature": temperature}
    if known.api == "anthropic":
        from .anthropic import AnthropicProvider

        return AnthropicProvider(
            api_key, model, base_url=address, timeouts=_timeouts(config), max_tokens=answer_tokens, extra=extra
        )
    from .openai import OpenAIProvider

    # `openai` with another address is any compatible server; any other name means a server of that kind.
    found = known_at(address) or (None if name == "openai" else known)
    quirks = USUAL if found is None else found.quirks
    if answer_tokens is not None:
        extra[quirks.names.get("max_tokens", "max_tokens")] = answer_tokens
    return OpenAIProvider(address, api_key, model, timeouts=_timeouts(config), extra=extra, quirks=quirks)


def _answer_settings(config: Any) -> tuple[float | None, int | None]:
    """Return the temperature and the length of an answer, if they are set."""
    temperature = getattr(config, "temperature", None)
    answer_tokens = getattr(config, "answer_tokens", None)
    return None if temperature is None or temperature < 0 else temperature, answer_tokens or None


def _timeouts(config: Any) -> Any:
    """Return the timeouts in the settings, with defaults."""
    from .http import Timeouts

    settings = {
        "connect": "connect_timeout",
        "first_token": "first_token_timeout",
        "token": "token_timeout",
        "total": "request_timeout",
    }
    values = {field: getattr(config, setting, None) for field, setting in settings.items()}
    return Timeouts(**{field: value for field, value in values.items() if value is not None})
