"""What an executor works with: the listed tools and nothing else, under the policy, in one workspace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..config.sources import DSN
from ..context.skills import SHIPPED
from ..log import Call
from ..messages import Conversation
from ..providers.base import LLMProvider
from ..runtime.tool_calls import Context
from ..store.location import home
from ..threads import in_thread
from ..tools.base import Tool
from ..tools.builtin import builtin_tools
from ..tools.context import CallContext
from ..tools.policy.policy import Policy
from ..tools.registry import ToolRegistry, outputs_folder
from ..tools.trust import Marks, MemoryMarks
from .approvals import always_refused
from .definitions import AgentDefinition, DefinitionError

if TYPE_CHECKING:
    from ..store.base import Found

CHANNEL = "executor"
OWNER = "me"


@dataclass(slots=True, frozen=True)
class Surroundings:
    """Where the calls of an executor take place."""

    agent: str
    workspace: Path
    real_workspace: Path
    home: Path
    protected: tuple[Path, ...]  # the runtime's own files, which no call may touch where the workspace is restricted
    frozen: tuple[Path, ...]  # its code, which none may change
    restricted: bool
    own: ToolRegistry  # the tools that were made for this executor
    marks: Marks = field(default_factory=MemoryMarks)

    def context(self, run: str, conversation: Conversation, registry: ToolRegistry, policy: Policy) -> Context:
        """What makes the contexts of a run's calls."""
        session = f"{CHANNEL}:{run}"
        if registry.described_outside:
            conversation.untrusted = conversation.outside = True
        outputs = outputs_folder(self.home, OWNER, session)

        def make(call: Call, progress: Callable[[str], None], approved: bool = False) -> CallContext:
            made = CallContext(
                owner=OWNER,
                session=session,
                turn=run,
                call=call.id,
                channel=CHANNEL,
                chat_id=self.agent,
                workspace=self.workspace,
                restricted=self.restricted,
                idempotency_key=f"{run}/{call.id}",
                progress=progress,
                approved=approved,
                tainted=bool(policy.taint) and conversation.untrusted,
                taint=policy.taint,
                marks=self.marks,
                outputs=outputs,
                readable=(SHIPPED,),
                protected=self.protected,
                frozen=self.frozen,
                real_workspace=self.real_workspace,
            )
            guard = policy.guard(made, call.name, call.arguments, partial(_paths, registry, call, made))
            return made if guard is None else replace(made, guard=guard)

        return make

    async def close(self) -> None:
        """Let the executor's own tools go of everything; they can be used again."""
        await self.own.close()


def _paths(registry: ToolRegistry, call: Call, context: CallContext) -> Sequence[str]:
    planned = registry.plan(call, context)
    return planned[1].paths if planned is not None else ()


async def goal_registry(
    definition: AgentDefinition,
    provider: LLMProvider | None,
    workspace: str | Path | None,
    tools: ToolRegistry | None,
    config: Config | None,
    *,
    restricted: bool,
    brave_api_key: str | None = None,
    exec_config: Any = None,
) -> tuple[ToolRegistry, Policy, Surroundings]:
    """The tools that a definition lists, the policy and the place; a DefinitionError if it cannot run with them."""
    settings = config if isinstance(config, Config) else Config()
    _check(definition, provider, workspace, tools, config)
    assert workspace is not None
    own_home = settings.home if isinstance(config, Config) else home()
    policy = await in_thread(Policy, settings.policy, taint=settings.taint, addresses=settings.addresses)
    made = builtin_tools(settings, _nothing_found, brave_api_key=brave_api_key, exec_config=exec_config)
    registry, own = _listed(definition, made, tools, settings)
    surroundings = await in_thread(
        _surroundings, definition.name, Path(workspace), own_home, settings.store, restricted, own
    )
    make = surroundings.context("check", Conversation(), registry, policy)
    for name in definition.tools:
        if why := always_refused(name, registry, policy, lambda call: make(call, lambda text: None)):
            raise DefinitionError(
                f"agent {definition.name}: tools: {name} would need a person's approval for every call, and nobody "
                f"is there to give it: {why}. Take it off the list, or change the policy"
            )
    return registry, policy, surroundings


def _check(definition: Any, provider: Any, workspace: Any, tools: Any, config: Any) -> None:
    if not isinstance(definition, AgentDefinition):
        raise DefinitionError(f"the definition must be an AgentDefinition, not {type(definition).__name__}")
    about = f"agent {definition.name}: "
    if provider is None:
        raise DefinitionError(f"{about}provider is None: give one, such as everloop.providers.openai.OpenAIProvider(…)")
    if isinstance(provider, type) or not callable(getattr(provider, "chat", None)):
        shown = f"the class {provider.__name__}" if isinstance(provider, type) else type(provider).__name__
        raise DefinitionError(f"{about}provider must be an LLMProvider with a method chat, not {shown}")
    if not isinstance(workspace, str | os.PathLike):
        raise DefinitionError(f"{about}workspace must be the path of a folder, not {type(workspace).__name__}")
    if tools is not None and not isinstance(tools, ToolRegistry):
        raise DefinitionError(f"{about}tools must be a ToolRegistry of further tools, not {type(tools).__name__}")
    if config is not None and not isinstance(config, Config):
        raise DefinitionError(f"{about}config must be a Config, not {type(config).__name__}")


def _listed(
    definition: AgentDefinition, built_in: Sequence[Tool], further: ToolRegistry | None, settings: Config
) -> tuple[ToolRegistry, ToolRegistry]:
    """(the tools that the definition lists, in its order; those of them that are ours to close)."""
    limits = {"timeout": settings.tool_timeout, "result_limit": settings.result_limit}
    own = {tool.name: tool for tool in built_in}
    given = {name: tool for name in (further.names if further else ()) if further and (tool := further.get(name))}
    known = own | given
    if unknown := [name for name in definition.tools if name not in known]:
        close = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
        raise DefinitionError(f"agent {definition.name}: tools: there is no tool {', '.join(unknown)} ({hint})")
    registry = ToolRegistry([known[name] for name in definition.tools], **limits)  # type: ignore[arg-type]
    return registry, ToolRegistry([own[name] for name in definition.tools if name not in given])


def _surroundings(
    agent: str, workspace: Path, own_home: Path, store: Path | DSN, restricted: bool, own: ToolRegistry
) -> Surroundings:
    if workspace.exists() and not workspace.is_dir():
        raise DefinitionError(f"agent {agent}: workspace: {workspace} is not a folder")
    protected = [own_home.resolve()]
    if isinstance(store, Path):
        real = store.resolve()
        protected += [real, *(real.with_name(real.name + suffix) for suffix in ("-wal", "-shm", "-commits"))]
    return Surroundings(
        agent=agent,
        workspace=Path(os.path.abspath(workspace)),
        real_workspace=workspace.resolve(),
        home=own_home,
        protected=tuple(protected),
        frozen=(Path(__file__).resolve().parents[1], Path(sys.prefix).resolve()),
        restricted=restricted,
        own=own,
    )


async def _nothing_found(owner: str, query: str, count: int) -> list[Found]:
    """An executor has no past conversations."""
    return []
