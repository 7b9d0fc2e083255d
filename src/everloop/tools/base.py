"""Tools: a subclass of `Tool`, or a function decorated with `@tool`, whose parameters are read from its signature."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, overload

from ..threads import in_thread

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
    """The result of a tool if it is more than a text."""

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
    steers: str = ""  # what it changes that steers later sessions, such as "the memory"


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


# ---------------------------------------------------------------------------------------- parameters of a function


Schema = dict[str, Any]
Convert = Callable[[Any], Any] | None  # None: the JSON value needs no conversion

_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS = (list, tuple, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection, abc.MutableSequence, abc.Set)
_DICTS = (dict, abc.Mapping, abc.MutableMapping)
_ARGUMENTS = re.compile(r"(args|arguments|parameters|params):\s*")
_SECTION = re.compile(r"(args|arguments|parameters|params|returns?|yields?|raises):\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


class UnsupportedHint(TypeError):
    """A type hint without a JSON schema; the message says what to use instead."""


def parameters_of(
    function: Callable[..., Any], local: dict[str, Any]
) -> tuple[Schema, dict[str, Callable[[Any], Any]]]:
    """Return the JSON schema of a function's parameters, and the conversions its arguments need.

    `local` are the names at the place of the decorator, for hints written as text.
    """
    _, documented = split_docstring(inspect.getdoc(function) or "")
    schema: Schema = {"type": "object", "properties": {}}
    required: list[str] = []
    conversions: dict[str, Callable[[Any], Any]] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            schema["additionalProperties"] = True
            continue
        try:
            hint = _hint_of(function, parameter, local)
            described, convert = _describe_parameter(hint, parameter.default)
        except UnsupportedHint as error:
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(f"@tool {name}(): parameter {parameter.name!r} {error}") from None
        if parameter.name in documented:
            described.setdefault("description", documented[parameter.name])
        schema["properties"][parameter.name] = described
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        if convert is not None:
            conversions[parameter.name] = convert
    if required:
        schema["required"] = required
    schema.setdefault("additionalProperties", False)
    return schema, conversions


def _hint_of(function: Callable[..., Any], parameter: inspect.Parameter, local: dict[str, Any]) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
        raise UnsupportedHint("cannot be passed by name: make it an ordinary parameter")
    if parameter.annotation is parameter.empty:
        if parameter.name in ("self", "cls"):
            raise UnsupportedHint("belongs to a method: decorate a function, or write a subclass of Tool")
        raise UnsupportedHint("has no type hint: add one, such as `: str`")
    holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(holder, scope, local, include_extras=True)[parameter.name]
    except Exception as error:
        raise UnsupportedHint(f"has the hint {parameter.annotation!r}, which cannot be read: {error}") from None


def _describe_parameter(hint: Any, default: Any) -> tuple[Schema, Convert]:
    """Like `describe`, without null for an optional parameter whose default is None: there null means "not given"."""
    if default is None:
        while get_origin(hint) is typing.Annotated and not _texts(hint):
            hint = get_args(hint)[0]
        rest = [part for part in get_args(hint) if part is not type(None)] if _is_union(hint) else []
        if rest and len(rest) < len(get_args(hint)):
            hint = Union[tuple(rest)]  # noqa: UP007
    schema, convert = describe(hint)
    if default is not inspect.Parameter.empty and default is not None and isinstance(default, str | int | float):
        schema["default"] = default.value if isinstance(default, enum.Enum) else default
    return schema, convert


def describe(hint: Any, outer: tuple[Any, ...] = ()) -> tuple[Schema, Convert]:
    """Return the JSON schema of a type hint and the conversion from JSON; raises UnsupportedHint if there is none.

    `outer` are the classes whose fields lead here.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        schema, convert = describe(parts[0], outer)
        return ({**schema, "description": " ".join(_texts(hint))} if _texts(hint) else schema), convert
    if origin in (typing.Required, typing.NotRequired):
        return describe(parts[0], outer)
    if hint in (Any, object):
        return {}, None
    if isinstance(hint, abc.Hashable) and hint in _SCALARS:
        return {"type": _SCALARS[hint]}, None
    if origin is Literal:
        return _choices(list(parts)), None
    if _is_union(hint):
        return _describe_union(parts, outer)
    if (origin or hint) in _LISTS:
        return _describe_list(origin or hint, parts, outer)
    if (origin or hint) in _DICTS:
        return _describe_dict(parts, outer)
    if isinstance(hint, type):
        return _describe_class(hint, outer)
    raise UnsupportedHint(f"has the hint {hint!r}, which has no JSON form: use str, int, float, bool, list, dict, …")


def _describe_class(hint: type, outer: tuple[Any, ...]) -> tuple[Schema, Convert]:
    if issubclass(hint, enum.Enum):
        by_value = all(isinstance(member.value, str | int | float) for member in hint)
        options = {member.value if by_value else member.name: member for member in hint}
        return _choices(list(options)), options.__getitem__
    if hint is Path:
        return {"type": "string"}, Path
    fields = _fields(hint)
    if fields is None:
        raise UnsupportedHint(f"has the hint {hint.__name__}, which has no JSON form: use a dataclass, dict or str")
    if hint in outer:
        raise UnsupportedHint(f"has the hint {hint.__name__}, which contains itself: use dict instead")
    schema: Schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    conversions: dict[str, tuple[str, Convert]] = {}
    for name, wire_name, field_hint, required in fields:
        schema["properties"][wire_name], convert = describe(field_hint, (*outer, hint))
        conversions[wire_name] = name, convert
        if required:
            schema["required"].append(wire_name)

    def build(value: dict[str, Any]) -> Any:
        pairs = ((*conversions[key], item) for key, item in value.items())
        return hint(**{name: convert(item) if convert else item for name, convert, item in pairs})

    return schema, build


def _fields(cls: type) -> list[tuple[str, str, Any, bool]] | None:
    """Return (name, name in JSON, hint, required) of each field of a dataclass, TypedDict or msgspec.Struct."""
    if not (dataclasses.is_dataclass(cls) or typing.is_typeddict(cls) or hasattr(cls, "__struct_fields__")):
        return None
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise UnsupportedHint(f"has the hint {cls.__name__}, whose fields cannot be read: {error}") from None
    if dataclasses.is_dataclass(cls):
        empty = dataclasses.MISSING
        return [
            (field.name, field.name, hints[field.name], field.default is empty and field.default_factory is empty)
            for field in dataclasses.fields(cls)
            if field.init
        ]
    if typing.is_typeddict(cls):
        needed: frozenset[str] = vars(cls)["__required_keys__"]
        return [
            (name, name, hint, get_origin(hint) is not typing.NotRequired and name in needed)
            for name, hint in hints.items()
        ]
    import msgspec  # loaded already if the hint is a Struct

    return [(f.name, f.encode_name, hints[f.name], f.required) for f in msgspec.structs.fields(cls)]


def _describe_list(kind: Any, parts: tuple[Any, ...], outer: tuple[Any, ...]) -> tuple[Schema, Convert]:
    if kind is tuple and parts and (len(parts) != 2 or parts[1] is not Ellipsis):
        raise UnsupportedHint("has a hint for a tuple of fixed length: use list[…] or a dataclass")
    item, convert = describe(parts[0], outer) if parts else ({}, None)
    make = kind if kind in (tuple, set, frozenset) else set if kind is abc.Set else None
    schema = {"type": "array", "items": item}
    if convert is not None:
        return schema, lambda value: (make or list)(map(convert, value))
    return schema, make


def _describe_dict(parts: tuple[Any, ...], outer: tuple[Any, ...]) -> tuple[Schema, Convert]:
    if not parts:
        return {"type": "object"}, None
    if parts[0] not in (str, Any):
        raise UnsupportedHint("has a hint for a dict whose keys are not str: JSON only knows those")
    item, convert = describe(parts[1], outer)
    schema = {"type": "object", "additionalProperties": item or True}
    if convert is None:
        return schema, None
    return schema, lambda value: {key: convert(entry) for key, entry in value.items()}


def _describe_union(parts: tuple[Any, ...], outer: tuple[Any, ...]) -> tuple[Schema, Convert]:
    described = [describe(part, outer) for part in parts]
    schemas = [schema for schema, _ in described]
    if all(convert is None for _, convert in described):
        return {"anyOf": schemas}, None
    from .schema import InvalidArguments, compile_schema

    branches = [(compile_schema(schema), convert) for schema, convert in described]

    def choose(value: Any) -> Any:
        for check, convert in branches:
            try:
                if check(value) is value:
                    return convert(value) if convert else value
            except InvalidArguments:
                continue
        return value

    return {"anyOf": schemas}, choose


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _choices(options: list[Any]) -> Schema:
    kinds = {_SCALARS.get(type(option)) for option in options}
    if None in kinds:
        raise UnsupportedHint("allows a value that has no JSON form: use str, int, float or bool")
    return {"enum": options} if len(kinds) > 1 else {"type": kinds.pop(), "enum": options}


def _texts(hint: Any) -> list[str]:
    return [text for text in get_args(hint)[1:] if isinstance(text, str)]


def split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description of the function and of each parameter under "Args:"."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, name, indent = "", "", 0
    for line in text.expandtabs().splitlines():
        stripped = line.strip()
        depth = len(line) - len(line.lstrip())
        if depth == 0 and stripped:
            section = stripped.lower() if _SECTION.fullmatch(stripped) else ""
        if not section:
            description.append(line)
        elif _ARGUMENTS.fullmatch(section) and stripped and depth:
            indent = indent or depth
            if depth <= indent and (found := _ARGUMENT.match(stripped)):
                name, arguments[found[1]] = found[1], found[2].strip()
            elif name:
                arguments[name] = f"{arguments[name]} {stripped}".strip()
    return "\n".join(description).strip(), arguments
