"""The settings: defaults, then EVERLOOP_HOME/config.toml, then environment variables, then flags.

The fields of `Config` are the one list of all keys. A new key is one line there; the TOML reader, the
environment, the flags and docs/config.md follow from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from everloop.errors import ConfigError

Busy = Literal["queue", "steer", "interrupt"]
Decision = Literal["allow", "ask", "deny"]

DEFAULT_HOME = "~/.everloop"
ENDPOINT = frozenset({"provider", "base_url"})


class UnderHome(NamedTuple):
    """A default that is a path inside EVERLOOP_HOME."""

    name: str


def _key(
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
) -> Any:
    """A field of Config with what the readers of files, environment and flags need to know about it."""
    rules = {"url": url, "above": above, "at_least": at_least}
    metadata = {"text": text, "section": section, "key": key, "env": env, "flag": flag, "secret": secret, **rules}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of the policy, a `[[policy]]` table: the calls that it fits, and what happens to them.

    A part that is empty fits everything. Patterns are shell globs.
    """

    do: Decision
    tool: str = ""  # name of the tool
    command: str = ""  # one simple command of a shell's command line, as words joined by single spaces
    path: str = ""  # a file, relative to the workspace when inside it, absolute otherwise
    arguments: dict[str, str] = field(default_factory=dict)  # pattern by argument
    origin: str = ""  # "channel:chat_id" of the chat that the turn came from
    tainted: bool = False  # an `allow` that also holds after the conversation has read untrusted content
    why: str = ""  # told to the model and to the person who is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """An MCP server, an `[mcp.NAME]` table: a program that is started, or an address."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    tools: tuple[str, ...] = ("*",)  # patterns of the tools' own names that may be used
    timeout: float = 60.0  # seconds a call may take
    connect_timeout: float = 20.0  # seconds until the server must have answered at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings. `Config()` is the defaults and reads nothing; `Config.load()` reads what the person has set."""

    home: Path = field(default_factory=lambda: Path(DEFAULT_HOME).expanduser())

    # fmt: off
    workspace: Path = _key("", UnderHome("workspace"), "the folder it works in", env="EVERLOOP_WORKSPACE", flag=True)
    store: Path = _key("", UnderHome("everloop.db"), "the database file", env="EVERLOOP_STORE", flag=True)

    provider: str = _key("provider", "", "which model API to use", key="name", env="EVERLOOP_PROVIDER", flag=True)
    base_url: str = _key("provider", "", "address of the model API", env="EVERLOOP_BASE_URL", flag=True, url=True)
    api_key: str = _key("provider", "", "key of the model API", env="EVERLOOP_API_KEY", secret=True)
    model: str = _key("provider", "", "the model to ask", env="EVERLOOP_MODEL", flag=True)
    fallbacks: tuple[str, ...] = _key("provider", (), "models to try, in order, when the first one fails")
    connect_timeout: float = _key("provider", 10.0, "seconds to reach the model API", above=0)
    first_token_timeout: float = _key("provider", 120.0, "seconds until an answer begins", above=0)
    token_timeout: float = _key("provider", 60.0, "seconds between two pieces of an answer", above=0)
    request_timeout: float = _key("provider", 600.0, "seconds for a whole answer", above=0)
    retries: int = _key("provider", 4, "further tries after a failure that may pass", at_least=0)

    name: str = _key("agent", "Everloop", "the agent's name")
    max_iterations: int = _key("agent", 20, "rounds a turn may take", at_least=1)
    busy: Busy = _key("agent", "queue", "what a message does while its session is busy")
    restrict_to_workspace: bool = _key("agent", True, "keep files and commands inside the workspace")
    tool_timeout: float = _key("agent", 120.0, "seconds a tool call may take", above=0)
    # fmt: on

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, UnderHome):
                object.__setattr__(self, item.name, self.home / value.name)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] = os.environ,
        home: str | os.PathLike[str] | None = None,
    ) -> Config:
        """The settings of this person. Flags that are None and empty variables count as not set."""
        folder = _find_home(home, env)
        file, variables = _from_file(folder / "config.toml"), _from_environment(env)
        values = _over(file, variables)
        tied = "api_key" not in variables or not ENDPOINT.isdisjoint(variables)
        return cls(home=folder, **_over(values, _from_flags(flags or {}), tied))


class Key(NamedTuple):
    """One setting as its readers see it; `attribute` is its name on Config."""

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

    @property
    def allowed(self) -> str:
        """What a value must be, for errors and for the documentation."""
        if self.kind == "Busy":
            return "one of " + ", ".join(f'"{choice}"' for choice in get_args(Busy))
        if self.url:
            return "an http:// or https:// address"
        limit = f" above {self.above:g}" if self.above is not None else ""
        limit = f", at least {self.at_least}" if self.at_least is not None else limit
        return _KINDS[self.kind] + limit


_KINDS = {
    "str": "one line of text",
    "Path": "a path",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple[str, ...]": "a list of texts",
}


def _keys() -> tuple[Key, ...]:
    found = []
    for item in dataclasses.fields(Config):
        if item.metadata:
            facts = {**item.metadata, "key": item.metadata["key"] or item.name}
            found.append(Key(attribute=item.name, kind=str(item.type), default=item.default, **facts))
    return tuple(found)


KEYS = _keys()
_SECTIONS = tuple(dict.fromkeys(key.section for key in KEYS if key.section))


def reference() -> str:
    """Every key as a Markdown table, the one in docs/config.md."""
    lines = ["| section | key | value | default | variable, flag | meaning |", "|---|---|---|---|---|---|"]
    for key in KEYS:
        names = [f"`{key.env}`"] if key.env else []
        names += [f"`--{key.attribute.replace('_', '-')}`"] if key.flag else []
        place = f"`[{key.section}]`" if key.section else ""
        cells = [place, f"`{key.key}`", key.allowed, _shown_default(key), ", ".join(names), key.text]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _shown_default(key: Key) -> str:
    if isinstance(key.default, UnderHome):
        return f"`{key.default.name}` in the home"
    if key.default in ("", ()):
        return ""
    return f"`{str(key.default).lower() if key.kind == 'bool' else key.default}`"


def _over(below: dict[str, Any], above: dict[str, Any], tied: bool = True) -> dict[str, Any]:
    """One source of settings over another. An address belongs to its provider, and a key to the endpoint it was set
    for (unless it is not `tied` to one): neither is carried to another endpoint that the upper source names."""
    kept = dict(below)
    usual = {"provider": "openai", "base_url": ""}  # what it is when nobody says
    moved = {name for name in ENDPOINT & above.keys() if above[name] != below.get(name, usual[name])}
    if "provider" in moved:
        kept.pop("base_url", None)
    if tied and moved:
        kept.pop("api_key", None)
    return kept | above


def _find_home(home: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Path:
    where, given = ("home", os.fspath(home)) if home is not None else ("EVERLOOP_HOME", env.get("EVERLOOP_HOME", ""))
    folder = _path(given.strip() or DEFAULT_HOME, None, where)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"{where}: {_shown(folder)} is a file, not a folder; name a folder or move the file away")
    return folder


def _from_file(path: Path) -> dict[str, Any]:
    where = _shown(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}); check its path and permissions") from None
    import tomllib

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid TOML: nested too deeply") from None
    values = _from_table(document, "", where, path.parent)
    for section in _SECTIONS:
        values |= _from_table(document.get(section, {}), section, where, path.parent)
    return values


def _from_table(table: Mapping[str, Any], section: str, where: str, folder: Path) -> dict[str, Any]:
    values = {}
    known = {key.key: key for key in KEYS if key.section == section}
    for name, value in table.items():
        if not section and name in _SECTIONS:
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {name} is a section: write [{name}] and its keys on the lines below")
        elif name not in known:
            raise ConfigError(f"{where}: {_unknown(name, section, isinstance(value, dict))}")
        else:
            label = f"{where}: [{section}] {name}" if section else f"{where}: {name}"
            values[known[name].attribute] = _typed(known[name], value, folder, label)
    return values


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    found = {key: env[key.env] for key in KEYS if key.env and env.get(key.env, "").strip()}
    return {key.attribute: _typed(key, _parsed(key, text), None, key.env) for key, text in found.items()}


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    known = {key.attribute: key for key in KEYS if key.flag}
    values = {}
    for name, value in flags.items():
        if name not in known:
            allowed = ", ".join(known)
            raise ConfigError(f'unknown flag "{name}"{_guess(name, known)}; allowed: {allowed}')
        if value is not None:
            label = "--" + name.replace("_", "-")
            value = _parsed(known[name], value) if isinstance(value, str) else value
            values[name] = _typed(known[name], value, None, label)
    return values


def _parsed(key: Key, text: str) -> Any:
    """The value that a variable's or flag's text stands for; text that is none is left for `_typed` to refuse."""
    if key.kind == "bool":
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower(), text)
    if key.kind == "tuple[str, ...]":
        return [part.strip() for part in text.split(",") if part.strip()]
    if key.kind in ("int", "float"):
        try:
            return int(text) if key.kind == "int" else float(text)
        except ValueError:
            return text
    return text.strip() if key.kind != "Path" else text


def _typed(key: Key, value: Any, folder: Path | None, where: str) -> Any:
    """The value as its field wants it, or a ConfigError that says what is allowed (and never shows a secret)."""
    if key.kind == "Path" and isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return _path(os.fspath(value), folder, where)
    if key.kind == "tuple[str, ...]" and isinstance(value, list):
        value = tuple(value)
    if key.kind == "float" and type(value) is int:
        value = float(value)
    if not _fits(key, value):
        raise ConfigError(f"{where} must be {key.allowed}{_not_this(key, value)}")
    return value


def _fits(key: Key, value: Any) -> bool:
    if key.kind == "tuple[str, ...]":
        return isinstance(value, tuple) and all(isinstance(part, str) and part.isprintable() for part in value)
    if key.kind == "str":
        # A line break in a key or an address would end up inside an HTTP header.
        return isinstance(value, str) and value.isprintable() and (not key.url or _is_url(value))
    if key.kind == "Busy":
        return value in get_args(Busy)
    if key.kind == "bool":
        return isinstance(value, bool)
    if key.kind == "int":
        return type(value) is int and value >= (key.at_least or 0)
    if key.kind == "float":
        return type(value) is float and (key.above or 0.0) < value < float("inf")
    return False


def _is_url(value: str) -> bool:
    scheme, _, rest = value.partition("://")
    return not value or (scheme.lower() in ("http", "https") and rest[:1] not in ("", "/") and " " not in value)


def _path(text: str, folder: Path | None, where: str) -> Path:
    """The absolute path: `~` is the person's home, and a relative one starts at the folder (or where we are)."""
    # The address of a database often holds a password, so it is never shown.
    if text.lower().startswith(("postgresql:", "postgres:")):
        raise ConfigError(f"{where}: PostgreSQL is not supported yet; use a path")
    if "\0" in text or "://" in text:
        raise ConfigError(f"{where} must be a path, not an address")
    try:
        path = Path(text).expanduser()
        return path if path.is_absolute() else (folder or Path.cwd()) / path
    except RuntimeError:
        user = text.partition("/")[0]
        raise ConfigError(f"{where}: no home folder is known for {user}; write the whole path") from None
    except OSError:
        raise ConfigError(f"{where}: the current folder is gone; write the whole path or change folder") from None


def _shown(path: Path) -> str:
    home = os.environ.get("HOME") or "\0"
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _not_this(key: Key, value: Any) -> str:
    """What was given instead, unless it is or may hold a secret."""
    if key.secret or not isinstance(value, (str, int, float)) or (key.url and "@" in str(value)):
        return ""
    if isinstance(value, str):
        return f", not {_quoted(value)}"
    return f", not {str(value).lower()}"


def _quoted(text: str) -> str:
    """The text in quotes, short and on one line whatever is in it."""
    short = text if len(text) <= 60 else text[:59] + "…"
    return f'"{short}"' if short.isprintable() else ascii(short)


def _unknown(name: str, section: str, is_section: bool) -> str:
    """The message for a key or section that does not exist, with the nearest one that does."""
    if is_section and not section:
        sections = ", ".join(f"[{known}]" for known in _SECTIONS)
        return f"unknown section {_quoted(name)}{_guess(name, _SECTIONS)}; allowed: {sections}"
    place = f"[{section}] " if section else ""
    known = [key.key for key in KEYS if key.section == section]
    homes = [key.section for key in KEYS if key.key == name]
    if homes:
        guess = f" (did you mean [{homes[0]}] {name}?)" if homes[0] else " (it belongs above all sections)"
    else:
        guess = _guess(name, known)
    return f"{place}unknown key {_quoted(name)}{guess}; allowed: {', '.join(known)}"


def _guess(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name.lower().replace("-", "_"), list(known), 1)
    return f' (did you mean "{near[0]}"?)' if near else ""
