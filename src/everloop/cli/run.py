"""`everloop run`: one goal, one answer; with `--agent`, the inputs and the result of an agent's definition."""

from __future__ import annotations

import argparse
import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import EverloopError
from ..text import one_line, printable
from .common import at_terminal, chat_of, checked_key, hush, is_local, load_config, open_workspace, session_key
from .main import INTERRUPTED
from .output import as_json

if TYPE_CHECKING:
    from .. import events
    from ..config import Config
    from ..goals.activities import Activity
    from ..goals.definitions import AgentDefinition
    from ..goals.executor import OutputObject
    from ..runtime.agent import TurnResult


PATIENCE = 2.0  # seconds until it reports that it waits for standard input


def command(options: argparse.Namespace) -> int:
    if options.agent is not None:
        return run_agent(options)
    if len(options.goal) > 1:
        raise EverloopError('the goal is one argument: write it in quotes, like everloop run "list the files here"')
    goal = read_goal(*options.goal)
    config = load_config(options)
    if is_local(config):
        from .setup import with_model

        config = with_model(config)
    config = open_workspace(config, options, person=at_terminal(sys.stderr))
    hush()
    import asyncio

    key = session_key(options, asyncio.run(chosen_session(config, options)) or f"run:{os.urandom(6).hex()}")
    output = "json" if options.json else options.output
    started = time.monotonic()
    on_event = _print_event if output == "jsonl" else None
    result, interrupted = asyncio.run(run(config, goal, key, options.verbose or sys.stderr.isatty(), on_event))
    reason = _reason(goal, result)
    if output != "text":
        outcome = _outcome(key, result, reason, time.monotonic() - started)
        print(as_json({"event": "result", **outcome} if output == "jsonl" else outcome))
    elif reason == "answer":
        print(printable(result.text) if sys.stdout.isatty() else result.text)
    if reason != "answer":
        print(f"everloop: {one_line(result.error or result.text, 500)}", file=sys.stderr)
    return INTERRUPTED if interrupted else 0 if reason == "answer" else 1


def read_goal(goal: str = "-") -> str:
    """Return the goal as given, followed by piped input; without a goal, or for "-", only the input."""
    if goal == "-":
        goal = _piped() if _is_piped() or sys.stdin is None or not sys.stdin.isatty() else ""
    elif goal.strip() and _is_piped() and (piped := _piped()).strip():
        goal = f"{goal}\n\n{piped}"
    if any("\ud800" <= character <= "\udfff" for character in goal):
        raise EverloopError("the goal is not UTF-8 text: write it in UTF-8")
    if not goal.strip():
        raise EverloopError('the goal is empty: say what to do, like everloop run "list the files here"')
    return goal


def _is_piped() -> bool:
    """Return whether standard input is a pipe or a file, and not a terminal, a device or nothing."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _piped() -> str:
    """Return all of standard input."""
    if sys.stdin is None:
        return ""
    if _is_piped() and not select.select([0], [], [], PATIENCE)[0]:
        print("everloop: waiting for the end of standard input; pass </dev/null for none", file=sys.stderr, flush=True)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise EverloopError(f"the goal on standard input is not UTF-8 text (byte {error.start})") from None


async def chosen_session(config: Config, options: argparse.Namespace) -> str:
    """Return the session that --continue or --resume names; "" without them."""
    if not options.latest and options.resume is None:
        return ""
    if hasattr(options, "session"):
        raise EverloopError("give either --session, --continue or --resume")
    from .common import OWNER, reading
    from .sessions import find_session

    if options.resume is not None:
        return (await find_session(config, options.resume))[0].info.key
    async with reading(config) as store:
        latest = await store.sessions(OWNER, 1)
    if not latest:
        raise EverloopError("there is no session to continue yet")
    return latest[0].key


def _print_event(event: events.Event) -> None:
    """Print an event as a line of JSON: its kind, and its fields."""
    from dataclasses import asdict

    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()
    print(as_json({"event": kind, **asdict(event)}), flush=True)


async def run(
    config: Config, goal: str, key: str, watched: bool, on_event: Callable[[events.Event], None] | None = None
) -> tuple[TurnResult, bool]:
    """Work on the goal until it ends; return its result, and whether Ctrl-C ended it. `on_event` gets every event."""
    import asyncio

    from .. import events
    from .common import CtrlC, make_agent, show_messages
    from .output import Output, Renderer

    view = Renderer(Output(sys.stderr), text=False, summary=False) if watched else None
    own = ""  # the turn of the goal

    def watch(event: events.Event) -> None:
        if isinstance(event, events.TurnStarted):
            nonlocal own
            own = event.turn
            if ctrl_c.pressed:
                ctrl_c.stop()
        if view is not None:
            view(event)
        if on_event is not None:
            on_event(event)

    def report_earlier(event: events.Event) -> None:
        # Another `everloop run` may have started the goal's turn before it ended; that turn continues here.
        if isinstance(event, events.TurnStarted) and event.resumed and event.turn != own:
            notice = "everloop: finishing another turn of this session first"
            print(notice, file=sys.stderr)

    async with make_agent(config) as agent:
        agent.subagents.wait_for_all()  # the process ends with the answer
        agent.dispatcher.run_only_awaited()
        agent.watch(key, report_earlier)
        messages = asyncio.create_task(show_messages(agent.bus, Output(sys.stderr)))
        answer = asyncio.create_task(agent.ask(goal, key, *chat_of(key), on_event=watch))
        ctrl_c = CtrlC(agent, key, answer.cancel)
        try:
            return await answer, ctrl_c.pressed
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            messages.cancel()


def _reason(goal: str, result: TurnResult) -> str:
    """Return why the run ended. A known command was answered; a mistyped one was not."""
    from ..commands import command_of

    if result.reason == "command":
        return "answer" if command_of(goal) else "error"
    return result.reason


def _outcome(key: str, result: TurnResult, reason: str, seconds: float) -> dict[str, Any]:
    return {
        "result": result.text,
        "reason": reason,
        "turn": result.turn,
        "session": key,
        "rounds": result.rounds,
        "usage": result.usage,
        "seconds": round(seconds, 3),
    }


# ---------------------------------------------------------------------------------------------- run --agent


def run_agent(options: argparse.Namespace) -> int:
    from .setup import with_model

    given = read_inputs(options.goal)
    session: str | None = getattr(options, "session", None)
    if session is not None:
        checked_key(session, "--session")
    config = open_workspace(with_model(load_config(options)), options, person=at_terminal(sys.stderr))
    definition = find_agent(config, options.agent)
    inputs = check(definition, given)
    hush()
    import asyncio

    watched = options.verbose or sys.stderr.isatty()
    output, interrupted = asyncio.run(_run_definition(config, definition, inputs, session, watched))
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
    """Parse inputs written as KEY=VALUE."""
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


async def _run_definition(
    config: Config, definition: AgentDefinition, inputs: dict[str, Any], session: str | None, watched: bool
) -> tuple[OutputObject, bool]:
    """Run the agent to its end; return its output, and whether Ctrl-C ended it."""
    import asyncio
    import logging
    import signal

    from .. import events
    from ..goals.activities import ThoughtChunk, ToolEnded, ToolStarted
    from ..goals.executor import AgentExecutor
    from ..providers.factory import make_provider
    from .output import Output, Renderer

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
            """Stop the run; the second time, leave immediately."""
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
