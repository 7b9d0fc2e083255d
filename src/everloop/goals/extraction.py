"""The messages of a goal's phases, and parsing its result from an answer. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..tools.schema import InvalidArguments, validate
from .definitions import AgentDefinition
from .templates import as_text, fill

GRACE_SECONDS, MIN_GRACE_SECONDS = 60.0, 6.0
RETRIES = 3  # after an invalid result
MAX_ANSWER = 2_000_000  # maximum length of an answer that is searched for JSON
MAX_STARTS = 2_000  # positions in it where JSON may start

RULES = """\
Nobody is there to answer questions: decide for yourself, and say later what you assumed. Work with your tools until \
the task is done. When it is, answer without calling a tool; you will then be asked for the result.
When a call fails, its result tells you why: find the cause, then try something else."""

_FENCE = re.compile(r"```[\w-]*[ \t]*\n(.*?)```", re.DOTALL)
_START = re.compile(r"[{\[]")


def system_prompt(definition: AgentDefinition, inputs: Mapping[str, Any], surroundings: str) -> str:
    """Return the prompt for the whole run; `surroundings` are facts such as the workspace and the date."""
    return f"{fill(definition.system_prompt, inputs)}\n\n---\n\n{RULES}\n\n{surroundings}".strip()


def work_message(definition: AgentDefinition, inputs: Mapping[str, Any]) -> str:
    """Return the first message: the definition's query, or its inputs if it has none."""
    if definition.query.strip():
        return fill(definition.query, inputs)
    given = [f"{name}: {as_text(value)}" for name, value in inputs.items()]
    return "\n".join(["Begin. Your inputs are:", *given]) if given else "Begin."


def extraction_message(definition: AgentDefinition, inputs: Mapping[str, Any] | None = None) -> str:
    """Return the message that asks for the result of finished work."""
    opening = "Your work is done. Give its result now, as your answer to this message; you have no tools any more."
    return "\n\n".join([opening, *_wanted(definition, inputs or {})])


def grace_message(definition: AgentDefinition, reason: str, inputs: Mapping[str, Any] | None = None) -> str:
    """Return the message of the grace turn, after a limit (`max_turns` or `timeout`)."""
    limit = "You have used all your turns" if reason == "max_turns" else "Your time is up"
    opening = (
        f"{limit}, and the work cannot continue: you have no tools any more. Give the best result that you can from "
        "what you know by now, as your answer to this message, and say in it what is missing. Answer at once."
    )
    return "\n\n".join([opening, *_wanted(definition, inputs or {})])


def grace_seconds(limit: float) -> float:
    """Return the time limit of the grace turn: a tenth of the work's limit, within bounds."""
    return min(GRACE_SECONDS, max(MIN_GRACE_SECONDS, limit / 10))


def retry_message(problem: str) -> str:
    """Return the message that sends an invalid result back to the model."""
    return f"That is not a valid result: {problem}\nGive the whole result once more, corrected, and nothing else."


def _wanted(definition: AgentDefinition, inputs: Mapping[str, Any]) -> Iterator[str]:
    if definition.output_description:
        yield f"The result must be:\n{fill(definition.output_description, inputs)}"
    if definition.output_schema is not None:
        schema = json.dumps(definition.output_schema, ensure_ascii=False, indent=2)
        yield f"Answer with one JSON value that fits this JSON schema, and with nothing else:\n```json\n{schema}\n```"
    elif not definition.output_description:
        yield "Its reader sees nothing else of this conversation, so it must be complete."


# ---------------------------------------------------------------------------------------------- reading


def read_output(definition: AgentDefinition, text: str) -> tuple[Any, str]:
    """Return (result, problem) of an answer; the problem is "" if the result is valid.

    With a schema, the result is the first JSON value in the answer that fits it.
    """
    if not text.strip():
        return None, "the answer is empty."
    if definition.output_schema is None:
        return text.strip(), ""
    problem, longest = "it has no JSON in it. Answer with one JSON value that fits the schema.", -1
    for length, value in _values(text):
        try:
            return validate(definition.output_schema, value), ""
        except InvalidArguments as error:
            if length > longest:  # most likely the intended one
                problem, longest = f"it does not fit the schema: {error}", length
    if definition.output_schema.get("type") == "string":
        try:
            return validate(definition.output_schema, text.strip()), ""
        except InvalidArguments as error:
            return None, f"it does not fit the schema: {error}"
    return None, problem


def _values(text: str) -> Iterator[tuple[int, Any]]:
    """Yield (length, value) of the JSON in an answer: the whole answer, or each value found in its text."""
    decoder = json.JSONDecoder(strict=False, parse_constant=_no_constant)
    whole = text.strip()
    if len(whole) > MAX_ANSWER:
        return
    if (read := _decode(decoder, whole, 0)) is not None and read[1] == len(whole):
        yield len(whole), read[0]
        return
    at = 0
    for _ in range(MAX_STARTS):
        start = _START.search(whole, at)
        if start is None:
            break
        read = _decode(decoder, whole, start.start())
        at = read[1] if read is not None else start.end()
        if read is not None:
            yield at - start.start(), read[0]
    for fenced in _FENCE.findall(whole):  # a number or a string
        if (read := _decode(decoder, fenced.strip(), 0)) is not None and read[1] == len(fenced.strip()):
            yield len(fenced), read[0]


def _decode(decoder: json.JSONDecoder, text: str, at: int) -> tuple[Any, int] | None:
    try:
        return decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
