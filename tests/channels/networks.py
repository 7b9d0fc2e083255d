"""The networks whose tests start quickly, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .fake_discord import FakeDiscord
from .fake_slack import FakeSlack
from .fake_telegram import FakeTelegram
from .hooks import HookNetwork
from .ircd import IrcNetwork
from .mail import MailNetwork
from .xmppd import XmppNetwork

NETWORKS: dict[str, Callable[[], Any]] = {
    "webhook": HookNetwork,
    "telegram": FakeTelegram,
    "slack": FakeSlack,
    "discord": FakeDiscord,
    "xmpp": XmppNetwork,
    "irc": IrcNetwork,
    "email": MailNetwork,
}
