"""AgentDefinition: the prompts, inputs, tools, limits, model options and result of an agent with a goal."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from ..context.frontmatter import FrontMatter, FrontMatterError, read_front_matter
from ..errors import EverloopError
from ..text import clean
from ..tools.schema.values import KINDS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_DESCRIPTION = 1024
MAX_TURNS = 1_000
MAX_MINUTES = 24 * 60.0
REASONING = ("none", "minimal", "low", "medium", "high")
MAX_DEPTH = 30  # levels of a schema
# Keywords allowed at the top of the schema of inputs. Anything else there is a misplaced input.
AT_THE_TOP = frozenset({
    "$comment", "$defs", "$id", "$ref", "$schema", "additionalProperties", "allOf", "anyOf", "default", "definitions",
    "dependencies", "dependentRequired", "dependentSchemas", "description", "else", "examples", "if", "maxProperties",
    "minProperties", "not", "oneOf", "patternProperties", "properties", "propertyNames", "required", "then", "title",
    "type", "unevaluatedProperties",
})  # fmt: skip

Problem = tuple[tuple[str, ...], str]  # (path of keys, what is wrong)


class DefinitionError(EverloopError, ValueError):
    """An invalid or unusable definition: what is wrong with it, and where."""

    def __init__(self, message: str, path: tuple[str, ...] = (), problem: str = "") -> None:
        super().__init__(message)
        self.path = path  # the keys that lead to the mistake
        self.problem = problem or message  # the message without the agent's name


@dataclass(frozen=True)
class AgentDefinition:
    """One kind of agent. `${input}` in its prompts is replaced by the value of a declared input.

    `inputs` and `output_schema` are JSON schemas; `tools` lists all the agent's tools. `initial_messages` precede the
    query, each with a `role` (user or assistant) and a `content`. `reasoning` is the reasoning effort of the model.
    """

    name: str
    description: str
    system_prompt: str
    query: str = ""  # the task; without one, the agent is given its inputs
    inputs: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    tools: list[str] = field(default_factory=list)
    max_turns: int = 30
    max_time_minutes: float = 10
    output_description: str | None = None
    output_schema: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: str | None = None  # one of REASONING
    initial_messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path, problem in _problems(self):
            problem = f"{'.'.join(path)}: {problem}"
            raise DefinitionError(f"agent {_shown_name(self.name)}: {problem}", path, problem)
        object.__setattr__(self, "tools", list(self.tools))
        for mutable in ("inputs", "output_schema", "initial_messages"):
            object.__setattr__(self, mutable, copy.deepcopy(getattr(self, mutable)))

    @classmethod
    def from_markdown(cls, text: str, where: str = "agent") -> AgentDefinition:
        """Read a Markdown text: front matter with the fields, and the system prompt below it.

        `where` is its path, for errors like "agents/x.md:3: …".
        """
        try:
            read = read_front_matter(text)
            _check_keys(read)
        except FrontMatterError as error:
            raise DefinitionError(f"{where}:{error.line}: {' '.join(error.message.split())}") from None
        try:
            return cls(**read.values, system_prompt=clean(read.body).strip())
        except DefinitionError as error:
            raise DefinitionError(f"{where}:{read.line(*error.path)}: {error.problem}", error.path) from None

    @property
    def prompts(self) -> list[str]:
        """The texts that contain input placeholders."""
        initial = [said["content"] for said in self.initial_messages]
        return [self.system_prompt, self.query, self.output_description or "", *initial]

    @property
    def options(self) -> dict[str, Any]:
        """The options of its model calls, by the names that providers have for them."""
        options = {"temperature": self.temperature, "top_p": self.top_p, "reasoning_effort": self.reasoning}
        return {name: value for name, value in options.items() if value is not None}


_KEYS = tuple(item.name for item in fields(AgentDefinition) if item.name != "system_prompt")


def _check_keys(read: FrontMatter) -> None:
    for key in read.values:
        if key == "system_prompt":
            raise FrontMatterError(read.line(key), "system_prompt is the text below the front matter: write it there")
        if key not in _KEYS:
            close = get_close_matches(key, _KEYS, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(_KEYS)}"
            raise FrontMatterError(read.line(key), f'unknown key "{key[:60]}" ({hint})')
    for key in ("name", "description"):
        if key not in read.values:
            raise FrontMatterError(1, f"{key} is missing")
    if not read.body.strip():
        raise FrontMatterError(1, "there is no text below the front matter: it is the system prompt")


def _shown_name(name: Any) -> str:
    return name if isinstance(name, str) and NAME.fullmatch(name) else repr(name)[:80]


def _problems(definition: Any) -> Iterator[Problem]:
    """Yield what is wrong, field by field."""
    if not isinstance(definition.name, str) or NAME.fullmatch(definition.name) is None:
        yield ("name",), "must be 1 to 64 letters, digits, _ or -"
    for key in ("description", "system_prompt"):
        text = getattr(definition, key)
        if not isinstance(text, str) or not text.strip():
            yield (key,), f"must be a string, not {_kind(text)}"
    if len(definition.description) > MAX_DESCRIPTION:
        yield ("description",), f"must be at most {MAX_DESCRIPTION} characters, not {len(definition.description)}"
    if not isinstance(definition.query, str):
        yield ("query",), f"must be a string, not {_kind(definition.query)}"
    for key in ("model", "output_description"):
        text = getattr(definition, key)
        if text is not None and not (isinstance(text, str) and text.strip()):
            yield (key,), f"must be a string, not {_kind(text)}: leave it out if there is none"
    yield from (((("inputs", *path)), problem) for path, problem in input_problems(definition.inputs))
    if definition.output_schema is not None:
        found = schema_problems(definition.output_schema)
        if not isinstance(definition.output_schema, dict):
            found = iter([((), "must be a JSON schema, a mapping")])
        yield from (((("output_schema", *path)), problem) for path, problem in found)
    yield from _tool_problems(definition.tools)
    yield from _limit_problems(definition)
    yield from _option_problems(definition)
    yield from _message_problems(definition.initial_messages)


def _tool_problems(tools: Any) -> Iterator[Problem]:
    if not isinstance(tools, list | tuple):
        yield ("tools",), f"must be a list of names, not {_kind(tools)}"
        return
    for place, name in enumerate(tools):
        if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
            yield ("tools",), f"{name!r:.80} is not the name of a tool"
        elif name in tools[:place]:
            yield ("tools",), f"{name} is listed twice"


def _limit_problems(definition: Any) -> Iterator[Problem]:
    turns = definition.max_turns
    if type(turns) is not int or not 1 <= turns <= MAX_TURNS:
        yield ("max_turns",), f"must be a whole number from 1 to {MAX_TURNS}, not {turns!r:.60}"
    minutes = definition.max_time_minutes
    if isinstance(minutes, bool) or not isinstance(minutes, int | float):
        yield ("max_time_minutes",), f"must be a number of minutes, not {_kind(minutes)}"
    elif not (math.isfinite(minutes) and 0 < minutes <= MAX_MINUTES):
        yield ("max_time_minutes",), f"must be above 0 and at most {MAX_MINUTES:g}, not {minutes!r:.60}"


def _option_problems(definition: Any) -> Iterator[Problem]:
    for key, most in (("temperature", 2), ("top_p", 1)):
        number = getattr(definition, key)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= most:
            yield (key,), f"must be a number from 0 to {most}, not {number!r:.60}"
    if definition.reasoning is not None and definition.reasoning not in REASONING:
        yield ("reasoning",), f"must be one of {', '.join(REASONING)}, not {definition.reasoning!r:.60}"


def _message_problems(messages: Any) -> Iterator[Problem]:
    path = ("initial_messages",)
    if not isinstance(messages, list | tuple):
        yield path, f"must be a list of messages, not {_kind(messages)}"
        return
    before = ""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            yield path, f"message {number} must have a role and a content, and nothing else"
            return
        role, content = message["role"], message["content"]
        if role not in ("user", "assistant"):
            yield path, f"the role of message {number} must be user or assistant, not {role!r:.60}"
        elif not isinstance(content, str) or not content.strip():
            yield path, f"the content of message {number} must be a string, not {_kind(content)}"
        elif role == "assistant" and before != "user":  # chat templates reject it
            yield path, f"message {number} is the assistant's: a message of the user must precede it"
        before = role


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return "an empty one" if not value.strip() else "a string"
    return type(value).__name__


# ---------------------------------------------------------------------------------------------- its JSON schemas


def schema_problems(schema: Any, path: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Yield what is wrong with a schema. Unknown keywords are ignored, as JSON Schema prescribes."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield path, "must be a JSON schema, a mapping"
        return
    if len(path) > MAX_DEPTH:
        yield path, f"is nested more than {MAX_DEPTH} levels deep"
        return
    yield from _keyword_problems(schema, path)
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(parts := schema.get(keyword), dict):
            for name, part in parts.items():
                yield from schema_problems(part, (*path, keyword, str(name)))
    for keyword in ("items", "additionalProperties", "not"):
        if keyword in schema and not isinstance(schema[keyword], list):
            yield from schema_problems(schema[keyword], (*path, keyword))
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in schema[keyword] if isinstance(schema.get(keyword), list) else ():
            yield from schema_problems(part, (*path, keyword))


def _keyword_problems(schema: dict[str, Any], path: tuple[str, ...]) -> Iterator[Problem]:
    if "type" in schema:
        declared = schema["type"]
        for kind in declared if isinstance(declared, list) else [declared]:
            if not isinstance(kind, str) or kind not in KINDS:
                close = get_close_matches(str(kind), KINDS, n=1, cutoff=0.5)
                hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(KINDS)}"
                yield (*path, "type"), f'"{str(kind)[:60]}" is not a type ({hint})'
    for keyword, kind, words in (
        ("properties", dict, "a mapping of names to schemas"),
        ("required", list, "a list of names"),
        ("enum", list, "a list of values"),
        ("allOf", list, "a list of schemas"),
        ("anyOf", list, "a list of schemas"),
        ("oneOf", list, "a list of schemas"),
    ):
        if keyword in schema and not isinstance(schema[keyword], kind):
            yield (*path, keyword), f"must be {words}"
    required = schema.get("required")
    if isinstance(required, list) and not all(isinstance(name, str) for name in required):
        yield (*path, "required"), "must be a list of names"


def input_problems(schema: Any) -> Iterator[Problem]:
    """Yield what is wrong with the schema of an agent's inputs, which must describe an object."""
    if not isinstance(schema, dict):
        yield (), "must be a JSON schema of type object, a mapping"
        return
    if schema.get("type", "object") != "object":
        yield ("type",), 'must be "object": inputs have names'
        return
    for key in schema:
        if key not in AT_THE_TOP:
            yield (str(key),), f'unknown key "{str(key)[:60]}" (inputs belong under properties)'
            return
    yield from schema_problems(schema)
    properties = schema.get("properties")
    declared = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in declared:
            yield ("required",), f'"{name[:60]}" is required but not declared under properties'
