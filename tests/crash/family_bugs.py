"""Bugs in sub-agents and scheduled work to plant in a killed program. The product has no such switch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from everloop.bus import InboundMessage
from everloop.cron.service import CronService
from everloop.runtime.subagents import SubagentManager
from everloop.store.base import Timer
from everloop.store.sqlite import SQLiteStore

from . import bugs


def plant(name: str) -> None:
    own = {"late-report": _late_report, "new-ids": _new_ids, "late-slot": _late_slot, "made-again": _made_again}
    own.get(name, lambda: bugs.plant(name))()


def _late_report() -> None:
    """Write the consequences of a sub-agent's end separately, after that end."""
    turn_spec, end = SubagentManager.turn_spec, SubagentManager.ended
    late: dict[tuple[str, str], list[InboundMessage]] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def without(self: Any, claim: Any) -> Any:
        made = await turn_spec(self, claim)
        if made is None:
            return None

        def follow(*how: Any) -> tuple[()]:
            late[claim.owner, claim.key] = list(made.follow(*how))
            return ()

        return msgspec.structs.replace(made, follow=follow)

    async def send(self: Any, messages: list[InboundMessage]) -> None:
        for message in messages:
            await self._store.accept(message)
            self._dispatcher.kick(message.owner, message.session_key)

    async def after(self: Any, claim: Any, ended: Any) -> None:
        tasks.add(asyncio.get_running_loop().create_task(send(self, late.pop((claim.owner, claim.key), []))))
        await end(self, claim, ended)

    SubagentManager.turn_spec, SubagentManager.ended = without, after  # type: ignore[method-assign]


def _new_ids() -> None:
    """A repeated call starts another sub-agent."""
    spawn: Callable[..., Any] = SubagentManager.spawn
    SubagentManager.spawn = lambda self, task, **how: spawn(  # type: ignore[method-assign]
        self, task, **how | {"key": ""}
    )


def _late_slot() -> None:
    """Advance a job first, and add its message to the inbox in a second write."""

    async def fire(self: Any, timer: Timer, message: InboundMessage, next_due: float | None) -> bool:
        assert next_due is None
        if not await self.cancel_timer(timer.owner, timer.id):
            return False
        await self.accept(message)
        return True

    SQLiteStore.fire_timer = fire  # type: ignore[method-assign]


def _made_again() -> None:
    """A repeated call creates its job again, although it has already fired."""

    async def nothing(*_: Any) -> None:
        return None

    CronService._was_fired = nothing  # type: ignore[method-assign,assignment]
