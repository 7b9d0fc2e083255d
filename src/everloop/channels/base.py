"""The port of a chat network: what a channel receives, what it sends, and how it is set up.

A channel only speaks its network's protocol. The rest is shared: `runner` handles the lease, the inbox and outbox,
retries and dead letters, `access` decides who is answered, and `text` splits and renders.
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

    `repeats` says how it treats a part that is sent twice: with "key" it recognises the part's key and shows it once;
    with "window" it does so for some minutes; with "none" a possible repeat is marked in the text.
    """

    text: int = 4000  # maximum length of a part's text
    unit: Unit = "characters"  # what `text` is counted in
    lines: bool = True  # a part may have more than one line
    form: Form = "plain"  # what Markdown is converted to
    repeats: Repeats = "none"
    ids: bool = True  # messages have ids, so that one that is delivered again is recognised
    case: bool = True  # ids of people are case-sensitive
    nicks: bool = False  # a direct chat is identified by a nick, which another person may take later
    edit: bool = False  # messages can be edited, so that `show` can stream into one
    pace: float = 2.0  # minimum seconds between two edits
    threads: bool = False
    always_threads: bool = False  # every message is in a thread, even in direct chats, as in e-mail
    typing: bool = False
    buttons: bool = False  # a question can have buttons
    media: int = 0  # maximum size of a file to send, in bytes; 0 for no files
    attaches: bool = False  # files are sent with the text, not as separate messages; `media` limits their total size


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a received message. It is read only once the message is accepted; `read` is given the size limit."""

    name: str
    read: Callable[[int], Awaitable[bytes]]
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message as the network delivered it."""

    chat: str
    sender: str
    text: str
    id: str | None = None  # assigned by the network; None if it assigns none
    name: str = ""  # the sender's display name
    group: bool = False  # several people are in the chat
    mentioned: bool = False  # in a group: the message mentions the agent, or replies to it
    thread: str = ""  # each thread of a chat has its own session
    files: tuple[Attachment, ...] = ()
    button: str = ""  # the value of a pressed button; the text is then empty
    extra: Mapping[str, str] = field(default_factory=dict)  # what the channel needs for the reply, such as a subject


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
    is_picture: bool = False  # an image format that networks display


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a message to send; `text` is in the channel's form, `plain` without any markup.

    A network that accepts files gets one in each part without text, or all of them with the last text if it attaches
    files.
    """

    chat: str
    text: str
    plain: str
    thread: str = ""
    reply_to: str | None = None  # in the first part: the network's id of the message being answered
    extra: Mapping[str, str] = field(default_factory=dict)  # copied from the message being answered
    number: int = 1  # from 1
    buttons: tuple[Button, ...] = ()  # only if the network has buttons
    files: tuple[OutgoingFile, ...] = ()  # only if the network accepts files
    repeat: bool = False  # the network may already have it; unless it recognises keys, the text says so


class Later(Exception):
    """The network did not accept the part and asks for a retry after some seconds."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(reason or f"try again in {seconds:g} s")
        self.seconds = seconds


class Never(Exception):
    """The network refuses the part, and would refuse every retry."""


class NoFile(Exception):
    """The network does not accept this file. The part was not sent; the chat gets a note instead."""


class Inbox(Protocol):
    """Where a channel delivers what it receives."""

    async def accept(self, message: Received) -> bool:
        """Store a message, or refuse it. Acknowledge it to the network only after this returns.

        Return whether it was accepted. The buttons of an accepted button press can be removed.
        """
        ...

    async def ready(self) -> None:
        """Report that the channel is connected. A later failure is reported anew."""
        ...

    async def knows(self, sender: str) -> bool:
        """Return whether a person may be answered in a direct chat. Invitations from anyone else are ignored."""
        ...

    async def cursor(self) -> str:
        """Return the stored cursor; "" if there is none."""
        ...

    async def keep_cursor(self, value: str) -> None: ...

    async def state(self, space: str) -> dict[str, str]:
        """Return what the channel has stored in one of its spaces, by key."""
        ...

    async def write_state(self, rows: Sequence[StateRow], expected: StateRow) -> bool:
        """Write all of these rows, or none. Return False if the value of `expected` has changed in the meantime."""
        ...


class Channel(Protocol):
    """One account at a chat network. It is created with its `Options`, and connects when `receive` is called.

    Two more methods are optional, both without arguments: `close` ends what is still connected once `receive` and
    `send` have been cancelled, and `check` connects for `everloop channels test` and returns the name of the account.
    """

    name: str
    can: Can

    async def receive(self, inbox: Inbox) -> None:
        """Receive messages until cancelled. A message is accepted before it is acknowledged."""
        ...

    async def send(self, part: Part, key: str) -> str:
        """Send a part and return the id that the network gives it. `key` is the same each time this part is sent.

        Raise `Later`, `Never` or `NoFile`; after any other error it is unknown whether the network has the part.
        """
        ...

    async def show(self, chat: str, key: str, text: str) -> str | None:
        """Show that an answer is on its way. This is best-effort: the answer itself comes through `send`.

        Without key and text, show that the agent is typing. With a text, which requires `Can.edit`, post a draft and
        return its id; with that id as the key, edit the draft, or remove it if there is no text.
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

    Reading a setting declares it; any undeclared key in the table is an error. A secret may also be in a file
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
NEED_STORE = frozenset({"push"})  # networks that need the store


def make_channel(config: ChannelConfig, store: Store | None = None) -> tuple[Channel, Options]:
    """Create a channel and its options; raise a one-line `ConfigError` if the settings are wrong.

    Reads files: call it in a thread. Some networks need the store in order to send.
    """
    network = config.network or config.name
    options = Options(config.name, config.options)
    if network in SHIPPED:
        module, _, name = SHIPPED[network].partition(":")
        make = getattr(import_module(f"{__package__}.{module}"), name)
        made = make(options, store) if network in NEED_STORE else make(options)
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
