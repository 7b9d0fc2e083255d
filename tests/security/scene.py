"""The scene of an attack: a complete agent whose model obeys the attacker, and canaries that must not leak.

The model makes the calls it is given, one per round, and then answers. The attacker's gain is what the model was
shown (`Attack.seen`) and what changed outside; tests check that, and never the wording of a message.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everloop import AgentLoop, MessageBus, Tool
from everloop.config import Config
from everloop.providers.base import ToolCallRequest
from everloop.testing import ScriptedProvider
from tests.support.web_servers import Server

Step = ToolCallRequest | list[ToolCallRequest] | Callable[[list[dict[str, Any]], Any], Any]


def canary(what: str = "canary") -> str:
    """A secret that occurs nowhere else."""
    return f"{what}-{secrets.token_hex(12)}"


def running(text: str) -> list[str]:
    """The processes with this text in their arguments."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                arguments = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            found += [name] if text in arguments else []
    return found


def settings(*servers: Server, **more: Any) -> Config:
    """The settings of an agent that may reach these servers."""
    return Config(private_hosts=tuple(f"127.0.0.1:{server.port}" for server in servers), **more)


@dataclass
class Attack:
    """The outcome of an attacked turn."""

    answer: str
    results: list[str] = field(default_factory=list)  # of the calls, as the model saw them
    seen: str = ""  # everything the model was ever sent, as JSON


@dataclass
class Scene:
    """A restricted workspace with secrets around it."""

    root: Path
    options: dict[str, Any] = field(default_factory=dict)  # for AgentLoop
    tools: Iterable[Tool] = ()  # in addition to the built-in ones, or replacing those of the same name

    def __post_init__(self) -> None:
        self.workspace = self.root / "workspace"
        self.outside = self.root / "outside"
        self.workspace.mkdir(parents=True, exist_ok=True)
        self.outside.mkdir(exist_ok=True)
        self.secret = canary("secret")
        (self.outside / "secret.txt").write_text(self.secret)

    async def run(
        self, *calls: Step, say: str = "do it", session: str = "direct", attended: bool = False, **options: Any
    ) -> Attack:
        """Let the model make these calls one after another through the whole loop."""
        model = ScriptedProvider([*calls, "done"])
        settings = {"restrict_to_workspace": True, "store": self.root / "store.db", **self.options, **options}
        async with AgentLoop(MessageBus(), model, self.workspace, **settings) as agent:
            for tool in self.tools:
                agent.tools.register(tool)
            answer = await agent.process_direct(say, f"cli:{session}", "cli", session, attended=attended)
        last = model.requests[-1].messages
        results = [message["content"] for message in last if message["role"] == "tool"]
        return Attack(answer, results, json.dumps([request.messages for request in model.requests], ensure_ascii=False))
