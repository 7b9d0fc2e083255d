"""The port of a chat network: what a channel receives, what it sends, and how it is set up.

A channel only speaks its network's protocol. Everything else is done once for all of them: `runner` has the lease, the
inbox and outbox, retries and dead letters, `access` decides who is answered, `text` splits and renders.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from ..errors import ConfigError

if TYPE_CHECKING:
    import ssl

    from ..config import ChannelConfig
    from ..store.base import Store

Repeats = Literal["key", "window", "none"]
Form = Literal["plain", "markdown", "html", "telegram", "slack"]
Unit = Literal["characters", "utf16", "bytes"]
StateRow = tuple[str, str, str | None]  # space, key and value; None for no value


def space_of(channel: str, space: str) -> str:
    """Return the store's name for a space of a channel."""
    return f"{channel}:{space}"


def fold_case(id: str) -> str:
    """Return the id with A to Z in lower case. No other letter is folded: some would become another person's id."""
    return id.translate(_SMALL)


_SMALL = str.maketrans(ascii_uppercase, ascii_lowercase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Can:
    """What a network can do.

    `repeats` is its class of repeats: with "key" it takes a key with each part and shows a part that is sent twice
    once; with "window" it does so for some minutes; with "none" a part that may be there already is marked.
    """

    text: int = 4000  # the longest text of a part
    unit: Unit = "characters"  # that `text` counts
    lines: bool = True  # a part may have more than one line
    form: Form = "plain"  # what Markdown is turned into
    repeats: Repeats = "none"
    ids: bool = True  # its messages have ids, so that each is taken once however often it comes
    case: bool = True  # ids of people that differ by case are of different people
    nicks: bool = False  # a direct chat is named by a nick, which another person may have later
    edit: bool = False  # a message can be changed: `show` can stream into one
    pace: float = 2.0  # seconds between two changes
    threads: bool = False
    always_threads: bool = False  # each message is in a thread, as in e-mail: a direct chat consists of them
    typing: bool = False
    buttons: bool = False  # a question can have buttons that answer it
    media: int = 0  # the largest file that can be sent, in bytes; 0 for none
    attaches: bool = False  # files are sent with the text, not as messages of their own; `media` is for all of them


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a received message. It is read only once the message is accepted; `read` takes the largest size."""

    name: str
    read: Callable[[int], Awaitable[bytes]]
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message as the network delivered it."""

    chat: str
    sender: str
    text: str
    id: str | None = None  # the network's; None where it has none
    name: str = ""  # of the sender, to be shown
    group: bool = False  # several people are in the chat
    mentioned: bool = False  # in a group: it names the agent, or replies to it
    thread: str = ""  # a thread of the chat has a session of its own
    files: tuple[Attachment, ...] = ()
    button: str = ""  # the value of the button that was pressed; then there is no text
    extra: Mapping[str, str] = field(default_factory=dict)  # what the channel needs to answer it, such as a subject


@dataclass(frozen=True, slots=True)
class Button:
    """A button below a question. `value` comes back in `Received.button`; it has at most 64 characters."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class OutgoingFile:
    """A file to send."""

    name: str
    type: str  # such as image/png
    data: bytes = field(repr=False)
    is_picture: bool = False  # of a kind that networks show


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a message to send; `text` is in the channel's form, `plain` without any markup.

    A network that takes files gets one with each part that has no text, or several with a text if it attaches them.
    """

    chat: str
    text: str
    plain: str
    thread: str = ""
    reply_to: str | None = None  # in the first part: the network's id of the message that is answered
    extra: Mapping[str, str] = field(default_factory=dict)  # of the message that is answered
    number: int = 1  # from 1
    buttons: tuple[Button, ...] = ()  # where the network has them
    files: tuple[OutgoingFile, ...] = ()  # where the network takes them
    repeat: bool = False  # the network may have it already; where it takes no key, the text says so


class Later(Exception):
    """The network did not accept the part and asks for a retry after some seconds."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(reason or f"try again in {seconds:g} s")
        self.seconds = seconds


class Never(Exception):
    """The network refuses the part, and would refuse every retry."""


class NoFile(Exception):
    """The network does not accept this file. The part was not sent; the chat is told so instead."""


class Inbox(Protocol):
    """Where a channel delivers what it receives."""

    async def accept(self, message: Received) -> bool:
        """Return when the message is on disk, or was refused: only then may the network be told that it arrived.

        The result says whether it was taken. A button that was taken can be removed.
        """
        ...

    async def ready(self) -> None:
        """Report that the channel is connected; a later failure is a new one."""
        ...

    async def knows(self, sender: str) -> bool:
        """Whether a person may be answered in a direct chat. Invitations from anyone else are ignored."""
        ...

    async def cursor(self) -> str:
        """Return the value that was stored last; "" if there is none."""
        ...

    async def keep_cursor(self, value: str) -> None: ...

    async def state(self, space: str) -> dict[str, str]:
        """Return what the channel has stored in one of its spaces, by key."""
        ...

    async def write_state(self, rows: Sequence[StateRow], expected: StateRow) -> bool:
        """Write all of these rows, or none. Returns False if the value of `expected` has changed meanwhile."""
        ...


class Channel(Protocol):
    """One account at a chat network. It is made with its `Options`, and may connect when `receive` is called.

    Two more methods are optional, both without arguments: `close` ends what is still connected once `receive` and
    `send` have been cancelled, and `check` connects for `everloop channels test` and returns the name of the account.
    """

    name: str
    can: Can

    async def receive(self, inbox: Inbox) -> None:
        """Receive messages until cancelled. A message is accepted before it is acknowledged."""
        ...

    async def send(self, part: Part, key: str) -> str:
        """Send a part and return the network's id for it. `key` is the same whenever this part is sent.

        Raises `Later`, `Never` or `NoFile`; after anything else it is unknown whether the network has the part.
        """
        ...

    async def show(self, chat: str, key: str, text: str) -> str | None:
        """Show that an answer is on its way. It may get lost, and is never the truth.

        Without a key and a text: typing. With a text, where the network can edit: a draft, whose id is returned; with
        that id as the key, its text is changed, and without a text it is removed.
        """
        ...


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Return the settings for TLS, with the certificates of a file if one is named. Call it in a thread."""
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise Never(f"ca_file {ca_file} cannot be read ({error.strerror})") from None


class Options:
    """The network's own settings of a `[channels.NAME]` table.

    Reading a setting declares it: what the table has besides is an error. A secret may also be in a file
    (`token_file`) or in the environment (`EVERLOOP_CHANNEL_NAME_TOKEN`), and is removed from everything that is logged.
    """

    def __init__(self, name: str, table: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> None:
        self.name = name
        self._table = table
        self._env = env
        self._known: list[str] = []
        self._secrets: list[str] = []

    def text(self, key: str, default: str | None = None, *, choices: Iterable[str] = ()) -> str:
        """Read a text. Without a default it must be set."""
        found = self._read(key, str, "a text", default)
        if choices and found not in (allowed := tuple(choices)):
            raise self._wrong(key, "must be one of " + ", ".join(f'"{choice}"' for choice in allowed))
        return str(found)

    def address(self, key: str, default: str | None = None) -> str:
        """Read the address of a server. Without a default it must be set."""
        from ..providers.http import origin_of

        found = self.text(key, default)
        try:
            origin_of(found)
        except ValueError as error:
            raise self.problem(f"{key} is not an address: {error}") from None
        return found

    def number(self, key: str, default: int) -> int:
        found = self._read(key, int, "a whole number of 0 or more", default)
        if isinstance(found, bool) or found < 0:
            raise self._wrong(key, "must be a whole number of 0 or more")
        return int(found)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._read(key, bool, "true or false", default))

    def texts(self, key: str) -> tuple[str, ...]:
        found = self._read(key, list, "a list of texts", [])
        if not all(isinstance(one, str) for one in found):
            raise self._wrong(key, "must be a list of texts")
        return tuple(found)

    def secret(self, key: str, default: str | None = None) -> str:
        """Read a secret from the environment, the table, or the file that the table names."""
        variable = f"EVERLOOP_CHANNEL_{self.name}_{key}".upper().replace("-", "_")
        self._known.append(f"{key}_file")
        value = self._env.get(variable, "").strip() or self._table.get(key) or self._from_file(key) or default
        self._known.append(key)
        if value is None:
            raise self._wrong(key, f"is missing: set it, or {key}_file, or the variable {variable}")
        if not isinstance(value, str) or not value.isprintable():
            raise self._wrong(key, "must be one line of text")
        if value:
            self._secrets.append(value)
        return value

    def token(self, key: str, default: str | None = None) -> str:
        """Read a secret that goes into a header or a URL as it is."""
        value = self.secret(key, default)
        if not value.isascii() or " " in value:
            raise self._wrong(key, "has characters that no token has: copy it again")
        return value

    def check(self) -> None:
        """Reject settings that the channel did not read."""
        for key in self._table:
            if key not in self._known:
                raise self._wrong(key, f"is unknown; allowed: {', '.join(sorted(self._known))}")

    def redacted(self, text: str) -> str:
        """Return the text with the secrets removed."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text

    def problem(self, what: str) -> ConfigError:
        return ConfigError(f"[channels.{self.name}] {what}")

    def _read(self, key: str, kind: type, words: str, default: Any) -> Any:
        self._known.append(key)
        value = self._table.get(key, default)
        if value is None:
            raise self._wrong(key, f"is missing: it must be {words}")
        if not isinstance(value, kind):
            raise self._wrong(key, f"must be {words}")
        return value

    def _from_file(self, key: str) -> str | None:
        if (path := self._table.get(f"{key}_file")) is None:
            return None
        if not isinstance(path, str):
            raise self._wrong(f"{key}_file", "must be a path")
        try:
            return Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise self._wrong(f"{key}_file", f"cannot be read ({why}): {path}") from None

    def _wrong(self, key: str, what: str) -> ConfigError:
        return self.problem(f"{key} {what}")


# ---------------------------------------------------------------------------------------- the configured channels


GROUP = "everloop.channels"  # the entry points of other packages
SHIPPED = {
    "webhook": "webhook:Webhook",
    "telegram": "telegram:Telegram",
    "irc": "irc:Irc",
    "email": "email:Email",
    "slack": "slack:Slack",
    "discord": "discord:Discord",
    "xmpp": "xmpp:Xmpp",
    "matrix": "matrix:Matrix",
    "push": "push:Push",
}
KEEP_THINGS = frozenset({"push"})  # networks that are given the store


def make_channel(config: ChannelConfig, store: Store | None = None) -> tuple[Channel, Options]:
    """Create a channel and its options; raises a one-line `ConfigError` if the settings are wrong.

    It reads files, so call it in a thread. Some networks can send only if they are given the store.
    """
    network = config.network or config.name
    options = Options(config.name, config.options)
    if network in SHIPPED:
        module, _, name = SHIPPED[network].partition(":")
        make = getattr(import_module(f"{__package__}.{module}"), name)
        made = make(options, store) if network in KEEP_THINGS else make(options)
    else:
        made = _plugin(network, options)
    options.check()
    return cast(Channel, made), options


def _plugin(network: str, options: Options) -> Any:
    from ..plugins import find, installed

    known = installed(GROUP)
    if network not in known:
        allowed = ", ".join([*SHIPPED, *sorted(known)])
        raise ConfigError(f'[channels.{options.name}]: there is no network "{network}"; known: {allowed}')
    return find(GROUP, network, f"[channels.{options.name}]").use(lambda make: make(options))
