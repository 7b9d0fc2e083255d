"""What every network keeps: two workers share an account, a flood of one sender delays no other, and order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everloop.testing.channels import Forker, Report, take_over

from .flood import check_flood
from .networks import NETWORKS

# The chats of two people, and how they write there, where the network's own person is always the same one.
CHATS = {
    "webhook": ("anna", "bert"),
    "telegram": ("7", "8"),
    "slack": ("D7", "D8"),
    "discord": ("7", "8"),
    "xmpp": ("anna@localhost", "bert@localhost"),
    "irc": ("anna", "bert"),
    "email": ("anna@example.org", "bert@example.org"),
}
WHO: dict[str, Callable[[str], dict[str, Any]]] = {
    "webhook": lambda chat: {"sender": chat},
    "telegram": lambda chat: {"sender": int(chat)},
    "slack": lambda chat: {"user": f"U{chat[1:]}"},
    "discord": lambda chat: {"user": chat},
}


def _oneself(chat: str) -> dict[str, Any]:
    return {}


ALLOWED = {"webhook": ["anna", "bert"], "telegram": ["7", "8"], "slack": ["U7", "U8"], "discord": ["7", "8"]}


@pytest.mark.timeout(300)
async def test_one_of_two_workers_polls_and_the_other_takes_over(tmp_path: Path) -> None:
    made = {kind: new() for kind, new in NETWORKS.items()}
    report = Report()
    async with Forker() as forker:
        for kind, network in made.items():
            report.add(await take_over(network.running, tmp_path / kind, chats=CHATS[kind], forker=forker))
    assert report.problems == []
    assert report.kills == len(NETWORKS)
    assert made["telegram"].conflicts == 0


@pytest.mark.parametrize("kind", NETWORKS)
async def test_a_flood_of_one_person_delays_no_other_and_is_answered_in_its_order(kind: str, tmp_path: Path) -> None:
    loud, quiet = CHATS[kind]
    async with NETWORKS[kind]().running() as network:
        if kind in ALLOWED:
            network.settings["allow"] = ALLOWED[kind]
        await check_flood(network, tmp_path, loud, quiet, WHO.get(kind, _oneself))
