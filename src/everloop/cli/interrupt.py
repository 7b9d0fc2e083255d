"""Ctrl-C where no prompt hears it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from ..runtime.agent import AgentLoop


class CtrlC:
    """The first Ctrl-C stops the turn that runs, or the one about to start; the second leaves at once."""

    def __init__(self, agent: AgentLoop, key: str, leave: Callable[[], object]) -> None:
        self.pressed = False
        self.idle: Callable[[], object] | None = None  # what to call instead while no turn runs
        self._agent = agent
        self._key = key
        self._leave = leave
        self._tasks: set[asyncio.Task[str]] = set()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._press)

    def stop(self) -> None:
        """Stop the running turn; its log is closed."""
        task = asyncio.create_task(self._agent.process_direct("/stop", self._key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _press(self) -> None:
        if self.pressed:
            self._leave()
        self.pressed = True
        if self.idle is not None:
            self.idle()
        else:
            self.stop()
