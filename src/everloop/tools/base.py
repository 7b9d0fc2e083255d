"""Tools: a subclass of `Tool`, or a function decorated with `@tool`."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from ..threads import in_thread
from .schema.hints import parameters_of, split_docstring

Replay = Literal["safe", "never"]
P = ParamSpec("P")
R = TypeVar("R")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


FOR_A_PERSON = "Tell the user what is needed: only a person can change that."


class ToolError(Exception):
    """A failure that the tool explains to the model: what is wrong and what to do instead."""

    def __init__(
        self, message: str, advice: str = "", *, untrusted: bool = False, contents: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.advice = advice  # in place of the usual one, to find the cause and try again
        self.untrusted = untrusted  # it quotes what came from outside
        self.contents = contents  # as those of an `Output`


@dataclass(slots=True, frozen=True)
class Output:
    """A tool's result, where it is more than a text."""

    text: str
    untrusted: bool = False  # the text comes from outside: it is data, never instructions
    images: tuple[str, ...] = ()  # data URLs, shown to the model after the results of the round
    failed: bool = False  # an error result; `text` says what went wrong
    contents: tuple[str, ...] = ()  # SHA-256 of each file content that it shows; "" for text of unknown origin


@dataclass(slots=True, frozen=True)
class Plan:
    """What a call would do, as far as that is known before it runs. The policy judges the call by its plan."""

    shown: str = ""  # exactly what would run, shown to the person who is asked; "": the tool's name and arguments
    paths: tuple[str, ...] = ()  # absolute and normalized; symbolic links are not followed
    writes: bool = False  # the call writes to `paths`
    command: str | None = None  # a shell command line
    network: bool = False  # asks for network access, beyond what the sandbox grants
    sends: bool = False  # could carry data off this machine
    url: str | None = None  # the address that is fetched
    unconfined: bool = False  # a command outside of any sandbox
    failure: Exception | None = None  # why no plan could be made; then nothing else here is known
    steers: str = ""  # what it changes that later sessions are steered by, such as "the memory"


class Tool:
    """One capability of the agent. A subclass needs `name`, `description`, `parameters` and `execute`.

    Each may be a class attribute or a property. `execute` gives text or an `Output`; other results are turned into
    text.
    """

    read_only: bool = False  # a call changes nothing anywhere, so it may run again and nothing is flushed before it
    replay: Replay = "never"  # "safe": a call interrupted by a crash may run again with the same id
    parallel: bool = True  # may run at the same time as other calls of its round
    timeout: float | None = None  # seconds; None: the registry's default; inf: no limit
    untrusted: bool = False  # all its results come from outside
    sends: bool = False  # a call could carry data off this machine
    described_outside: bool = False  # its description and schema are text from outside

    if TYPE_CHECKING:  # subclasses may override a property by an attribute, but not an attribute by a property

        @property
        def name(self) -> str: ...
        @property
        def description(self) -> str: ...
        @property
        def parameters(self) -> dict[str, Any]: ...

    else:
        name = ""
        description = ""
        parameters = {"type": "object", "properties": {}}

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call. Arguments are passed by name, validated against `parameters`."""
        raise NotImplementedError(f"{type(self).__name__} has no execute()")

    def plan(self, arguments: dict[str, Any]) -> Plan:
        """Return what a call with these validated arguments would do.

        Must be quick and do no I/O; `current_call()` is set.
        """
        return Plan(sends=self.sends)

    async def end_turn(self, turn: str) -> None:
        """Release what is held for a turn that has ended."""

    async def close(self) -> None:
        """Release all resources: the agent is shutting down."""


class FunctionTool(Tool, Generic[P, R]):
    """A tool made from a function; calling it calls the undecorated function.

    A function that is not async runs in a thread. A thread cannot be killed: after a timeout or a cancelled turn it
    runs to its end, and its result is discarded.
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def __init__(self, function: Callable[P, R], local: dict[str, Any], **options: Any) -> None:
        called = getattr(function, "__name__", type(function).__name__)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"@tool {called}(): a generator cannot be a tool: return the whole result")
        functools.update_wrapper(self, function)
        self.function = function
        self.parameters, self._conversions = parameters_of(function, local)
        self.name = check_name(options.pop("name", None) or called)
        documented, _ = split_docstring(inspect.getdoc(function) or "")
        self.description = options.pop("description", None) or documented or self.name.replace("_", " ")
        self._is_async = inspect.iscoroutinefunction(function)
        for option, value in options.items():
            setattr(self, option, value)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    async def execute(self, /, **kwargs: Any) -> Any:
        for name, convert in self._conversions.items():
            if name in kwargs:
                kwargs[name] = convert(kwargs[name])
        function: Callable[..., Any] = self.function
        if self._is_async:
            return await function(**kwargs)
        result = await in_thread(function, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    read_only: bool = False,
    replay: Replay = "never",
    parallel: bool = True,
    timeout: float | None = None,
    untrusted: bool = False,
    sends: bool = False,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    read_only: bool = False,
    replay: Replay = "never",
    parallel: bool = True,
    timeout: float | None = None,
    untrusted: bool = False,
    sends: bool = False,
) -> Any:
    """Make a tool from a function with type hints and a docstring.

    Raises a TypeError that names the function and the parameter if a type hint has no JSON schema.
    """
    local = dict(sys._getframe(1).f_locals)
    options = {"name": name, "description": description, "replay": replay, "parallel": parallel, "timeout": timeout}
    options |= {"read_only": read_only, "untrusted": untrusted, "sends": sends}

    def make(function: Callable[..., Any]) -> FunctionTool[..., Any]:
        return FunctionTool(function, local, **options)

    return make if function is None else make(function)


def check_name(name: Any) -> str:
    """Return the name of a tool; raises a ValueError if model APIs would not accept it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a tool's name must be 1 to 64 letters, digits, _ or -, not {name!r}: rename the tool")
    return name
