"""Removes secrets from what is logged or exported: those of the settings and environment, and their usual shapes."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property

from . import KEYS, Config

HIDDEN = "[secret]"
# Shapes of keys and tokens that are never meant to be read by others.
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bhf_[A-Za-z0-9]{20,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{12,}=*",
    re.S,
)
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.I)
_MIN_LENGTH = 8  # characters of a value that counts as a secret because of its name
Redact = Callable[[str], str]


class Secrets:
    """The secrets of the settings and the environment. They are collected when the first text is redacted."""

    def __init__(self, config: Config, *more: str | None, env: Mapping[str, str] = os.environ) -> None:
        """`more` are secrets from elsewhere, such as the key of a provider that a program has made."""
        self._config = config
        self._more = more
        self._env = env

    def redact(self, text: str) -> str:
        """Return the text without secrets, and without whatever looks like a key or a token."""
        text = self._values.sub(HIDDEN, text) if self._values is not None else text
        return _SHAPES.sub(HIDDEN, text)

    def strip(self, error: Exception) -> Exception:
        """Return the error without secrets in its text and in those of its causes."""
        return stripped(error, self.redact)

    @cached_property
    def _values(self) -> re.Pattern[str] | None:
        own = [str(getattr(self._config, key.attribute)) for key in KEYS if key.secret]
        own += [value for name, value in self._env.items() if _NAMES.search(name)]
        own += [value for value in self._more if value]
        known = sorted({value for value in own if len(value) >= _MIN_LENGTH}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, known))) if known else None


def secrets_of(config: Config, provider: object) -> Secrets:
    """Return the secrets of an agent: those of its settings, and the key of a provider that a program has made."""
    return Secrets(config, getattr(provider, "api_key", None))


def stripped(error: Exception, redact: Redact) -> Exception:
    """Redact the texts of an error and of its causes, and return it, or a substitute if it keeps secrets elsewhere."""
    if not _tells(error, redact):
        return error
    _redact_chain(error, redact, set())
    if not _tells(error, redact):
        return error
    kind = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})
    made: Exception = kind(redact(str(error)))
    return made.with_traceback(error.__traceback__)


def _tells(error: BaseException, redact: Redact) -> bool:
    """Return whether the traceback, as a log shows it, contains a secret."""
    text = "".join(traceback.format_exception(error))
    return redact(text) != text


def _redact_chain(error: BaseException | None, redact: Redact, known: set[int]) -> None:
    if error is None or id(error) in known:
        return
    known.add(id(error))
    error.args = tuple(redact(one) if isinstance(one, str) else one for one in error.args)
    if notes := getattr(error, "__notes__", None):
        error.__notes__ = [redact(str(note)) for note in notes]
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for one in (error.__cause__, error.__context__, *inner):
        _redact_chain(one, redact, known)
