"""Descriptions of settings: a setting's place in the file, its variable and flag, and its allowed values."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, field
from typing import Any, NamedTuple


class UnderHome(NamedTuple):
    """A default that is a path inside EVERLOOP_HOME."""

    name: str


def key(
    section: str,
    default: Any,
    text: str,
    *,
    key: str = "",
    env: str = "",
    flag: bool = False,
    secret: bool = False,
    url: bool = False,
    above: float | None = None,
    at_least: int | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    shape: str = "",
    record: type[Any] | None = None,
) -> Any:
    """Declare a dataclass field with the metadata for the readers of file, environment and flags."""
    limits = {"above": above, "at_least": at_least, "at_most": at_most}
    rules = {"url": url, **limits, "choices": choices, "shape": shape, "record": record}
    metadata = {"text": text, "section": section, "key": key, "env": env, "flag": flag, "secret": secret, **rules}
    if isinstance(default, dict):
        return field(default_factory=dict, repr=not secret, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


class Key(NamedTuple):
    """One setting; `attribute` is its field name."""

    attribute: str
    kind: str  # the annotation of the field
    default: Any
    text: str
    section: str
    key: str
    env: str
    flag: bool
    secret: bool
    url: bool
    above: float | None
    at_least: int | None
    at_most: float | None
    choices: tuple[str, ...]
    shape: str  # the required form of a text, or of each text in a list; a key of SHAPES
    record: type[Any] | None  # the class of each table, if there can be several

    @property
    def allowed(self) -> str:
        """The allowed values, for errors and for the documentation."""
        if self.choices:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        if self.shape:
            words = SHAPES[self.shape].words
            return words if self.kind == "str" else f"a list of strings, each {words}"
        if self.url:
            return "an http:// or https:// address"
        limit = f" above {self.above:g}" if self.above is not None else ""
        limit = f", at least {self.at_least}" if self.at_least is not None else limit
        limit += f" and at most {self.at_most:g}" if self.at_most is not None else ""
        return KINDS[self.kind] + limit

    @property
    def place(self) -> str:
        """Its section, as written in the file."""
        return f"[{self.section}]" if self.section else ""


class Shape(NamedTuple):
    """The required form of a text."""

    pattern: str
    words: str


SHAPES = {
    "host": Shape(r"(\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]]+)(:[0-9]{1,5})?", "`host` or `host:port`"),
    "chat": Shape(r"[^:]+:.+", "`channel:chat_id`"),
    "variable": Shape(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable"),
}
KINDS = {
    "str": "one line of text",
    "Path": "a path",
    "Path | DSN": "a path or a `postgresql://` address",
    "DSN | None": "a `postgresql://` address",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "Span": 'a time like "12h" or "30d", or "" for forever',
    "Taint": 'true, false or "outside"',
    "tuple[str, ...]": "a list of strings",
    "dict[str, str]": "a table of strings",
}


def keys_of(settings: type[Any]) -> tuple[Key, ...]:
    """Return the keys that a settings class declares."""
    found = []
    for item in dataclasses.fields(settings):
        if item.metadata:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            facts = {**item.metadata, "key": item.metadata["key"] or item.name}
            found.append(Key(attribute=item.name, kind=str(item.type), default=default, **facts))
    return tuple(found)


def reference(keys: tuple[Key, ...]) -> str:
    """Return the Markdown table of all keys in docs/config.md."""
    lines = ["| section | key | value | default | variable, flag | meaning |", "|---|---|---|---|---|---|"]
    for one in (part for key in keys for part in (keys_of(key.record) if key.record else [key])):
        names = [f"`{one.env}`"] if one.env else []
        names += [f"`--{one.attribute.replace('_', '-')}`"] if one.flag else []
        place = f"`{one.place}`" if one.place else ""
        cells = [place, f"`{one.key}`", one.allowed, _shown_default(one), ", ".join(names), one.text]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _shown_default(key: Key) -> str:
    if isinstance(key.default, UnderHome):
        return f"`{key.default.name}` in the home"
    if key.default in ("", (), None, MISSING) or key.default == {}:
        return ""
    if isinstance(key.default, tuple):
        return f"`{list(key.default)}`".replace("'", '"')
    return f"`{str(key.default).lower() if isinstance(key.default, bool) else key.default}`"
