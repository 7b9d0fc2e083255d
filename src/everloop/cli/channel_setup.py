"""Asks for a chat network, and writes its `[channels.NAME]` table into config.toml."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..config import ChannelConfig, Config
from ..errors import ConfigError
from .setup import append_table


class Question(NamedTuple):
    key: str
    text: str
    secret: bool = False


# What each network needs, in the order in which it is asked for.
NETWORKS: dict[str, tuple[Question, ...]] = {
    "telegram": (Question("token", "Token, from @BotFather", True),),
    "slack": (
        Question("bot_token", "Bot token (xoxb-…)", True),
        Question("app_token", "App-level token for Socket Mode (xapp-…)", True),
    ),
    "discord": (Question("token", "Token of the bot", True),),
    "matrix": (
        Question("server", "Address of the home server (https://…)"),
        Question("token", "Access token of the agent's account", True),
    ),
    "email": (
        Question("address", "Address of the agent's mailbox"),
        Question("password", "Its password", True),
        Question("imap_host", "IMAP server"),
        Question("smtp_host", "SMTP server"),
        Question("auth_server", "Name of your server in Authentication-Results"),
    ),
    "xmpp": (Question("jid", "Address of the agent's account"), Question("password", "Its password", True)),
    "irc": (Question("server", "Server"), Question("nick", "Nick")),
    "webhook": (Question("url", "Address that answers are sent to"),),
}


def offer(config: Config) -> None:
    """Ask whether to connect a chat network. An empty answer, or the end of the input, changes nothing."""
    print(f"\nThe agent can also answer in a chat network: {', '.join(NETWORKS)}.")
    try:
        while (network := input("Which one (Enter for none): ").strip().lower()) and network not in NETWORKS:
            print(f"There is no network {network[:30]!r} here; docs/channels.md shows how to add others.")
        if network:
            print(_write(config.home / "config.toml", network, _ask(network)))
    except EOFError:
        print()


def _ask(network: str) -> dict[str, str]:
    """Ask for the settings of a network. A setting that it refuses is asked for again."""
    import getpass

    from ..channels.base import make_channel

    while True:
        given: dict[str, str] = {}
        for question in NETWORKS[network]:
            read = getpass.getpass if question.secret else input
            while not (answer := read(f"{question.text}: ").strip()):
                pass
            given[question.key] = answer
        if network == "webhook":
            given["secret"] = secrets.token_hex(32)
        try:
            make_channel(ChannelConfig(name=network, options=dict(given)))
            return given
        except ConfigError as error:
            print(f"{error}. Try again:")


def _write(path: Path, network: str, given: Mapping[str, str]) -> str:
    """Append the table; return what was done."""
    try:
        before = path.read_text(encoding="utf-8-sig") if path.exists() else ""
        append_table(path, before, f"channels.{network}", {**given, "pairing": True})
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}): docs/channels.md shows what to write there."
    return (
        f"Written to {path}. `everloop channels test {network}` tries it, and `everloop serve` runs it. "
        "Who writes to it gets a code, which `everloop channels pair CODE` confirms."
    )
