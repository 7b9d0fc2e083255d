"""`everloop run --agent NAME KEY=VALUE …`: run an agent's definition and print its result."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ..errors import EverloopError
from ..text import one_line, printable
from .common import check_model, checked_key, hush, is_trusted, load_config, prepare_workspace
from .folder import enter
from .main import INTERRUPTED
from .output import as_json
from .setup import with_model

if TYPE_CHECKING:
    from ..config import Config
    from ..goals.activities import Activity
    from ..goals.definitions import AgentDefinition
    from ..goals.executor import OutputObject


def command(options: argparse.Namespace) -> int:
    given = read_inputs(options.goal)
    session: str | None = getattr(options, "session", None)
    if session is not None:
        checked_key(session, "--session")
    config = with_model(load_config(options))
    check_model(config)
    prepare_workspace(config.workspace)
    person = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    config = enter(config, person=person, trust=is_trusted(options))
    definition = find_agent(config, options.agent)
    inputs = check(definition, given)
    hush()
    import asyncio

    watched = options.verbose or sys.stderr.isatty()
    output, interrupted = asyncio.run(run(config, definition, inputs, session, watched))
    reached = output.terminate_reason == "goal"
    if options.json or options.output != "text":
        print(as_json(_facts(options.agent, output)))
    elif output.result is not None:
        text = output.result if isinstance(output.result, str) else as_json(output.result)
        print(printable(text) if sys.stdout.isatty() else text)
    if not reached:
        best = "; the result is the best effort, not the goal" if output.recovered else ""
        print(f"everloop: {options.agent}: {one_line(output.error or '', 500)}{best}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0 if reached else 1


def read_inputs(words: list[str]) -> dict[str, str]:
    """Read inputs that are written as KEY=VALUE."""
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise EverloopError(f'inputs are written as KEY=VALUE, not "{one_line(word, 60)}"')
        if key in given:
            raise EverloopError(f'the input "{one_line(key, 60)}" is given twice')
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise EverloopError(f'the input "{printable(one_line(key, 60))}" is not UTF-8 text: write it in UTF-8')
        given[key] = value
    return given


def find_agent(config: Config, name: str) -> AgentDefinition:
    """Return the agent of this name, of the workspace or shipped."""
    from ..goals.files import read_definitions
    from ..sandbox.reach import Reach

    return read_definitions(Reach(config.workspace.absolute()), trusted=config.trusted).get(name)


def check(definition: AgentDefinition, given: dict[str, str]) -> dict[str, Any]:
    """Return the inputs with the types that the definition declares."""
    from ..goals.templates import check_inputs, check_names

    check_names(definition.name, definition.inputs, given)
    return check_inputs(definition.name, definition.inputs, given, definition.prompts)


async def run(
    config: Config, definition: AgentDefinition, inputs: dict[str, Any], session: str | None, watched: bool
) -> tuple[OutputObject, bool]:
    """Run the agent to its end: its output, and whether Ctrl-C ended it."""
    import asyncio
    import logging
    import signal

    from .. import events
    from ..goals.activities import ThoughtChunk, ToolEnded, ToolStarted
    from ..goals.executor import AgentExecutor
    from ..providers.factory import make_provider
    from .output import Output
    from .render import Renderer

    view = Renderer(Output(sys.stderr), text=False, summary=False)

    def show(activity: Activity) -> None:
        match activity:
            case ToolStarted() | ToolEnded():
                view(activity)
            case ThoughtChunk(text=text):
                view(events.Reasoning(text))

    class Resumed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(f"everloop: {record.getMessage()}", file=sys.stderr)

    executor_log = logging.getLogger("everloop.goals.executor")
    executor_log.setLevel(logging.INFO)
    executor_log.addHandler(Resumed())
    stop = asyncio.Event()
    provider = make_provider(config)
    try:
        executor = await AgentExecutor.create(
            definition,
            provider=provider,
            workspace=config.workspace,
            on_activity=show if watched else None,
            config=config,
            restrict_to_workspace=config.restrict_to_workspace,
            session=session,
        )
        running = asyncio.create_task(executor.run(inputs, stop))

        def press() -> None:
            """Stop the run; a second time, leave at once."""
            if stop.is_set():
                running.cancel()
            stop.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, press)
        return await running, stop.is_set()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        await provider.close()


def _facts(agent: str, output: OutputObject) -> dict[str, Any]:
    return {
        "result": output.result,
        "reason": output.terminate_reason,
        "error": output.error,
        "recovered": output.recovered,
        "agent": agent,
        "session": output.session,
        "rounds": output.turns,
        "usage": output.usage,
        "seconds": round(output.duration, 3),
    }
