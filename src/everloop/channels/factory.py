"""Makes the channels that the settings name. A network's code is imported only then."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from ..config import ChannelConfig
from ..errors import ConfigError
from ..store.base import Store
from .base import Channel, Options

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
    """A channel and its options; a `ConfigError` in one line if the settings are wrong. Reads files: not for the event
    loop. Some networks send only with a store."""
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
