"""The sources of settings: the file, the environment and flags. Each returns values by field name.

Also defines `DSN`, the address of a PostgreSQL database, whose password is never displayed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .keys import SHAPES, Key, keys_of

SCHEMES = ("postgresql:", "postgres:")
# An address in any other form is not interpreted: what looks like a host may be half of a password.
_HOST = r"(?:\[[0-9a-fA-F:.]+\]|[\w.%-]*)(?::[0-9]*)?"
_SHAPE = re.compile(
    rf"postgres(?:ql)?://(?:(?P<user>[^:@/?#\s]*)(?::(?P<password>[^@/?#\s]*))?@)?(?P<hosts>{_HOST}(?:,{_HOST})*)"
    r"(?P<name>/[^@:/?#\s]*)?(?:\?(?P<options>[^@#\s]*))?",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(?:^|&)password=[^&]*", re.IGNORECASE)


def is_dsn(text: str) -> bool:
    return text.strip().lower().startswith(SCHEMES)


class DSN:
    """The address of a PostgreSQL database. Its string form omits the password; `secret` is the full address."""

    __slots__ = ("secret",)

    def __init__(self, secret: str) -> None:
        self.secret = secret

    @property
    def well_formed(self) -> bool:
        return _SHAPE.fullmatch(self.secret) is not None

    def __str__(self) -> str:
        if (found := _SHAPE.fullmatch(self.secret)) is None:
            return "postgresql://…"
        return f"postgresql://{found['user'] + '@' if found['user'] else ''}{found['hosts']}{found['name'] or ''}"

    def __repr__(self) -> str:
        return f"DSN({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DSN) and other.secret == self.secret

    def __hash__(self) -> int:
        return hash(self.secret)

    @property
    def hosts(self) -> int:
        """The number of servers it names."""
        if (found := _SHAPE.fullmatch(self.secret)) is None:
            return 1
        named = re.findall(r"(?:^|&)host(?:addr)?=([^&]*)", found["options"] or "")
        return max(len(re.split(",|%2C", hosts, flags=re.IGNORECASE)) for hosts in (found["hosts"], *named))

    @property
    def has_several_hosts(self) -> bool:
        """Return whether it names several servers, of which the primary is to be used."""
        return self.hosts > 1

    @property
    def without_password(self) -> str:
        """The full address without the password, for other programs to connect with; "" if it is malformed."""
        if (found := _SHAPE.fullmatch(self.secret)) is None:
            return ""
        options = _PASSWORD.sub("", found["options"] or "").removeprefix("&")
        user = f"{found['user']}@" if found["user"] else ""
        return f"postgresql://{user}{found['hosts']}{found['name'] or ''}{'?' if options else ''}{options}"

    def with_password_of(self, other: DSN) -> DSN:
        """Return this address with the user and password of another one, if it has none of its own."""
        mine, theirs = _SHAPE.fullmatch(self.secret), _SHAPE.fullmatch(other.secret)
        if mine is None or theirs is None or mine["password"] or mine["user"] not in (None, "", theirs["user"]):
            return self
        options = [mine["options"] or "", *_PASSWORD.findall(theirs["options"] or "")]
        user = (theirs["user"] or "") + (f":{theirs['password']}" if theirs["password"] else "")
        tail = "&".join(filter(None, (one.removeprefix("&") for one in options)))
        return DSN(
            f"postgresql://{user}{'@' if user else ''}{mine['hosts']}{mine['name'] or ''}{'?' if tail else ''}{tail}"
        )

    def exists(self) -> bool:
        """Return whether there may be something to read, which only the server knows."""
        return True


DEFAULT_HOME = "~/.everloop"
ENDPOINT = frozenset({"provider", "base_url"})
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def over(below: dict[str, Any], above: dict[str, Any], tied: bool = True) -> dict[str, Any]:
    """Merge two sources; `above` wins.

    An address belongs to its provider, and a key to its endpoint (unless the key is not `tied` to one): neither is
    carried over to a different endpoint in `above`. Nor is a pool to another store.
    """
    kept = dict(below)
    usual = {"provider": "openai", "base_url": ""}  # the defaults
    moved = {name for name in ENDPOINT & above.keys() if above[name] != below.get(name, usual[name])}
    if "provider" in moved:
        kept.pop("base_url", None)
    if tied and moved:
        kept.pop("api_key", None)
    if "store" in above and below.get("store", above["store"]) != above["store"]:
        kept.pop("store_pool", None)
    return kept | above


_SPAN = re.compile(r"([1-9][0-9]{0,5})([mhdw])")


def seconds_in(span: str) -> float:
    """Return the seconds of a time span like "30d"; 0 for an empty one."""
    found = _SPAN.fullmatch(span)
    return int(found[1]) * {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}[found[2]] if found else 0.0


def default_home() -> Path:
    """Return the home folder according to the environment, without disk access."""
    return Path(os.environ.get("EVERLOOP_HOME", "").strip() or DEFAULT_HOME).expanduser().absolute()


def find_home(home: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Path:
    where, given = ("home", os.fspath(home)) if home is not None else ("EVERLOOP_HOME", env.get("EVERLOOP_HOME", ""))
    folder = _path(given.strip() or DEFAULT_HOME, None, where)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"{where}: {shown(folder)} is a file, not a folder; name a folder or move the file away")
    return folder


def from_file(path: Path, keys: Sequence[Key]) -> dict[str, Any]:
    where = shown(path)
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
    except ValueError:
        raise ConfigError(f"{where}: a number in it has too many digits; write a smaller one") from None
    reader = _File(where, path.parent, keys)
    values = reader.table(document, "")
    for section in reader.sections:
        table = document.get(section, {})
        values |= reader.table(table, section) if isinstance(table, dict) else {}
    return values


class _File:
    """Reads the tables of one file."""

    def __init__(self, where: str, folder: Path, keys: Sequence[Key]) -> None:
        self._where = where
        self._folder = folder
        self._keys = keys
        self.sections = tuple(dict.fromkeys(key.section for key in keys if key.section))

    def table(self, table: Mapping[str, Any], section: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        known = {key.key: key for key in self._keys if key.section == section}
        named = {key.key: key for key in self._keys if not key.section}
        if section in named:  # `store = "…"` and the section [store] cannot both be in one file
            known["path"] = named[section]
        for name, value in table.items():
            if not section and name in self.sections and (name not in known or isinstance(value, dict)):
                if not isinstance(value, dict):
                    raise ConfigError(
                        f"{self._where}: {name} is a section: write [{name}] and its keys on the lines below"
                    )
            elif name not in known:
                raise ConfigError(f"{self._where}: {_unknown(name, section, isinstance(value, dict), self._keys)}")
            elif known[name].record is not None:
                values[known[name].attribute] = self._records(known[name], value)
            else:
                label = f"{self._where}: [{section}] {name}" if section else f"{self._where}: {name}"
                values[known[name].attribute] = _typed(known[name], value, self._folder, label)
        return values

    def _records(self, key: Key, value: Any) -> tuple[Any, ...]:
        """Read settings that can occur several times: a list of tables, or named tables."""
        assert key.record is not None
        parts = keys_of(key.record)
        if parts[0].section.startswith("["):
            if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
                raise ConfigError(f"{self._where}: {key.key}: write [[{key.key}]] and its keys on the lines below")
            tables: list[tuple[str, dict[str, Any], Any]]
            tables = [(f"{self._where}: [[{key.key}]] {n}", {}, table) for n, table in enumerate(value, 1)]
        else:
            if not isinstance(value, dict) or not all(isinstance(table, dict) for table in value.values()):
                raise ConfigError(f"{self._where}: {key.key}: write [{key.key}.NAME] and its keys on the lines below")
            for name in value:
                if not name or len(name) > 32 or not _NAME_CHARACTERS.issuperset(name):
                    allowed = "a name must be 1 to 32 letters, digits, _ or -"
                    raise ConfigError(f"{self._where}: [{key.key}.{_quoted(name)}]: {allowed}")
            tables = [(f"{self._where}: [{key.key}.{name}]", {"name": name}, table) for name, table in value.items()]
        return tuple(self._record(key.record, parts, *table) for table in tables)

    def _record(
        self, record: type[Any], parts: Sequence[Key], where: str, values: dict[str, Any], table: Mapping[str, Any]
    ) -> Any:
        known = {key.key: key for key in parts}
        if (rest := getattr(record, "collects", "")) and isinstance(table, dict):
            values[rest] = {name: value for name, value in table.items() if name not in known}
            table = {name: value for name, value in table.items() if name in known}
        for name, value in table.items():
            if name not in known:
                allowed = ", ".join(known)
                raise ConfigError(f"{where} unknown key {_quoted(name)}{_guess(name, known)}; allowed: {allowed}")
            values[known[name].attribute] = _typed(known[name], value, self._folder, f"{where} {name}")
        for key in parts:
            if key.default is MISSING and key.attribute not in values:
                raise ConfigError(f"{where} needs the key {key.key}: {key.allowed}")
        made = record(**values)
        if problem := made.problem():
            raise ConfigError(f"{where} {problem}")
        return made


def from_environment(env: Mapping[str, str], keys: Sequence[Key]) -> dict[str, Any]:
    found = {key: env[key.env] for key in keys if key.env and env.get(key.env, "").strip()}
    return {key.attribute: _typed(key, _parsed(key, text), None, key.env) for key, text in found.items()}


def from_flags(flags: Mapping[str, Any], keys: Sequence[Key]) -> dict[str, Any]:
    known = {key.attribute: key for key in keys if key.flag}
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
    """Parse the text of a variable or flag; invalid text is left for `_typed` to reject."""
    if key.kind in ("bool", "Taint"):
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower(), text)
    if key.kind == "tuple[str, ...]":
        return [part.strip() for part in text.split(",") if part.strip()]
    if key.kind in ("int", "float"):
        try:
            return int(text) if key.kind == "int" else float(text)
        except ValueError:
            return text
    return text.strip() if not key.kind.startswith("Path") else text


def _typed(key: Key, value: Any, folder: Path | None, where: str) -> Any:
    """Convert the value to its field's type, or raise a ConfigError that states what is allowed, never a secret."""
    if key.kind in ("Path | DSN", "DSN | None") and (
        isinstance(value, DSN) or (isinstance(value, str) and is_dsn(value))
    ):
        return value if isinstance(value, DSN) else DSN(value.strip())
    if key.kind.startswith("Path") and isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return _path(os.fspath(value), folder, where)
    if key.kind == "tuple[str, ...]" and isinstance(value, list):
        value = tuple(value)
    if key.kind == "float" and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else float("inf")
    if not _fits(key, value):
        raise ConfigError(f"{where} must be {key.allowed}{_not_this(key, value)}")
    return value


def _fits(key: Key, value: Any) -> bool:
    shape = SHAPES[key.shape].pattern if key.shape else ".*"
    if key.choices:
        return value in key.choices
    if key.kind == "tuple[str, ...]":
        return isinstance(value, tuple) and all(
            isinstance(part, str) and part.isprintable() and re.fullmatch(shape, part) for part in value
        )
    if key.kind == "str":
        # A line break in a key or an address would end up in an HTTP header.
        if not (isinstance(value, str) and value.isprintable() and re.fullmatch(shape, value)):
            return False
        return not key.url or _is_url(value)
    if key.kind == "dict[str, str]":
        texts = [*value.keys(), *value.values()] if isinstance(value, dict) else [None]
        return all(isinstance(part, str) and part.isprintable() for part in texts)
    if key.kind == "bool":
        return isinstance(value, bool)
    if key.kind == "Span":
        return isinstance(value, str) and (not value or _SPAN.fullmatch(value) is not None)
    if key.kind == "Taint":
        return isinstance(value, bool) or value == "outside"
    if key.kind == "int":
        return type(value) is int and value >= (key.at_least or 0)
    if key.kind == "float":
        fits = type(value) is float and (key.above or 0.0) < value < float("inf")
        return fits and (key.at_most is None or value <= key.at_most)
    return False


def _is_url(value: str) -> bool:
    scheme, _, rest = value.partition("://")
    return not value or (scheme.lower() in ("http", "https") and rest[:1] not in ("", "/") and " " not in value)


def _path(text: str, folder: Path | None, where: str) -> Path:
    """Return the absolute path: `~` is the user's home, and a relative path starts at the given or current folder."""
    # The address of a database often contains a password, so it is never shown.
    if is_dsn(text):
        raise ConfigError(f"{where} must be a path, not the address of a database")
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


def shown(path: Path) -> str:
    """Return the path for a message, with `~` for the user's home."""
    home = os.environ.get("HOME") or "\0"
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _not_this(key: Key, value: Any) -> str:
    """Return the rejected value for a message, unless it is or may contain a secret."""
    if (
        key.secret
        or key.kind == "DSN | None"
        or not isinstance(value, (str, int, float))
        or (key.url and "@" in str(value))
    ):
        return ""
    if isinstance(value, str):
        return f", not {_quoted(value)}"
    return f", not {str(value).lower()}"


def _quoted(text: str) -> str:
    """Return the text in quotes, shortened and on one line."""
    short = text if len(text) <= 60 else text[:59] + "…"
    return f'"{short}"' if short.isprintable() else ascii(short)


def _unknown(name: str, section: str, is_section: bool, keys: Sequence[Key]) -> str:
    """Return the message for an unknown key or section, with the closest known one."""
    if is_section and not section:
        places = list(dict.fromkeys(key.section for key in keys if key.section))
        records = [key for key in keys if key.record is not None]
        places += [key.key for key in records]
        lists = {key.key for key in records if keys_of(key.record or object)[0].section.startswith("[")}
        sections = ", ".join(f"[[{known}]]" if known in lists else f"[{known}]" for known in places)
        return f"unknown section {_quoted(name)}{_guess(name, places)}; allowed: {sections}"
    place = f"[{section}] " if section else ""
    known = [key.key for key in keys if key.section == section and key.record is None]
    homes = [key.section for key in keys if key.key == name]
    if homes:
        guess = f" (did you mean [{homes[0]}] {name}?)" if homes[0] else " (it belongs above all sections)"
    else:
        guess = _guess(name, known)
    return f"{place}unknown key {_quoted(name)}{guess}; allowed: {', '.join(known)}"


def _guess(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name.lower().replace("-", "_"), list(known), 1)
    return f' (did you mean "{near[0]}"?)' if near else ""
