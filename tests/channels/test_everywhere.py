"""The long forms of the kit: every point of a short conversation, and a thousand messages with twenty kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everloop.testing.channels import conform, storm

from .fake_discord import FakeDiscord
from .fake_slack import FakeSlack
from .fake_telegram import FakeTelegram
from .hooks import HookNetwork
from .ircd import IrcNetwork
from .mail import MailNetwork
from .synapse import EncryptedNetwork, MatrixNetwork, people, synapse
from .xmppd import XmppNetwork

NETWORKS: dict[str, Callable[[], Any]] = {
    "webhook": lambda: HookNetwork(rough=True).running(),
    "telegram": lambda: FakeTelegram(rough=True).running(),
    "slack": lambda: FakeSlack(rough=True).running(),
    "slack-events": lambda: FakeSlack(rough=True, http=True).running(),
    "discord": lambda: FakeDiscord(rough=True).running(),
    "xmpp": lambda: XmppNetwork().running(),
    "irc": lambda: IrcNetwork().running(),
    "email": lambda: MailNetwork().running(),
}
PEOPLE = {
    "slack": ("D1", "D2"),
    "slack-events": ("D1", "D2"),
    "xmpp": ("anna@localhost", "bert@localhost"),
    "irc": ("anna", "bert"),
    "email": ("anna@example.org", "bert@example.org"),
}


@pytest.mark.chaos
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_channel_is_killed_before_and_after_every_write(network: str, tmp_path: Path) -> None:
    report = await conform(NETWORKS[network], tmp_path, chats=PEOPLE.get(network, ("1", "2")), files=True)
    assert report.problems == []
    assert report.kills >= 10


@pytest.mark.chaos
async def test_matrix_is_killed_before_and_after_every_write(tmp_path: Path) -> None:
    with synapse() as server:
        report = await conform(lambda: MatrixNetwork(server).running(), tmp_path, files=True)
    assert report.problems == []
    assert report.kills >= 10


CHATS = {
    "slack": [f"D{number}" for number in range(101, 151)],
    "slack-events": [f"D{number}" for number in range(101, 151)],
    "xmpp": [f"p{number}@localhost" for number in range(101, 151)],
    "irc": [f"p{number}" for number in range(101, 151)],
    "email": [f"p{number}@example.org" for number in range(101, 151)],
}
MANY = {
    **NETWORKS,
    "xmpp": lambda: XmppNetwork(people=[chat.partition("@")[0] for chat in CHATS["xmpp"]]).running(),
    "email": lambda: MailNetwork(people=CHATS["email"]).running(),
}


@pytest.mark.chaos
@pytest.mark.parametrize("network", MANY)
async def test_a_thousand_messages_in_fifty_chats_and_twenty_kills(network: str, tmp_path: Path) -> None:
    chats = CHATS.get(network, [str(number) for number in range(101, 151)])
    report = await storm(MANY[network], tmp_path, chats=chats, each=20, kills=20)
    assert report.problems == []
    assert (report.messages, report.kills) == (1000, 20)


class ManyRooms(MatrixNetwork):
    """A person with fifty rooms."""

    def _begin(self) -> None:
        super()._begin()
        for number in range(3, 51):
            self.add_room(str(number), self.anna)


@pytest.mark.chaos
async def test_a_thousand_messages_in_fifty_rooms_of_matrix_and_twenty_kills(tmp_path: Path) -> None:
    with synapse() as server:
        chats = [str(number) for number in range(1, 51)]
        report = await storm(lambda: ManyRooms(server).running(), tmp_path, chats=chats, each=20, kills=20)
    assert report.problems == []
    assert (report.messages, report.kills) == (1000, 20)


class ManyEncryptedRooms(ManyRooms, EncryptedNetwork):
    """The same with encrypted rooms, in which she writes with a real client."""


@pytest.mark.chaos
async def test_a_thousand_messages_in_fifty_encrypted_rooms_and_twenty_kills(tmp_path: Path) -> None:
    with synapse() as server, people() as clients:
        chats = [str(number) for number in range(1, 51)]
        report = await storm(
            lambda: ManyEncryptedRooms(server, clients).running(), tmp_path, chats=chats, each=20, kills=20
        )
    assert report.problems == []
    assert (report.messages, report.kills) == (1000, 20)


@pytest.mark.chaos
async def test_matrix_is_killed_before_and_after_every_write_in_encrypted_rooms(tmp_path: Path) -> None:
    with synapse() as server, people() as clients:
        report = await conform(lambda: EncryptedNetwork(server, clients).running(), tmp_path, files=True)
    assert report.problems == []
    assert report.kills >= 20
