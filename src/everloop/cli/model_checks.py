"""`everloop doctor --model`: ten small questions to the model of the settings, and which of them it passes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import Config
from ..errors import EverloopError
from ..messages import Conversation, assistant_message, tool_message, user_message
from ..providers.base import LLMProvider, LLMResponse, ProviderError, StreamingProvider, ToolCallRequest
from ..text import one_line
from .doctor import Check

SECONDS = 120.0  # per question
CODE = "pear-71"  # the model can only know it from a result
LINES = 'one\n\t"two" \\ three\n'


def _tool(name: str, text: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


ADD = _tool("add", "Add two whole numbers.", a="integer", b="integer")
LOOK_UP = _tool("look_up", "Look something up.", what="string")
WRITE = _tool("write_file", "Write a text file.", path="string", content="string")
# A line with marks of thoughts or calls that were not recognised.
MARKUP = re.compile(r"</?think|<tool_call|<\|[a-z_]+\|>|<｜|\[TOOL_CALLS\]|\[/?THINK\]")


@dataclass(slots=True)
class Asked:
    """An answer as the provider returned it, and as parsed: with the calls in its text."""

    raw: LLMResponse
    read: LLMResponse
    parts: int = 0  # pieces that it was streamed in

    @property
    def calls(self) -> list[ToolCallRequest]:
        return self.read.tool_calls

    @property
    def text(self) -> str:
        return (self.read.content or "").strip()

    def shape(self) -> str:
        """Return how its calls were written."""
        if self.raw.tool_calls:
            return "native"
        from ..providers.text_calls.dialects import OPENINGS

        written = self.raw.content or ""
        mark = next((one for one in OPENINGS if one in written), "plain JSON or Python")
        return f"in its text: {mark}"


@dataclass(slots=True)
class Examination:
    """Asks one model, and records what it observes."""

    provider: LLMProvider
    texts: list[str] = field(default_factory=list)

    async def run(self) -> AsyncIterator[Check]:
        """Yield the ten checks, each as soon as it is known. Without an answer to the first one there are no others."""
        try:
            first = await self._ask("Count from one to ten, in words.")
        except (ProviderError, EverloopError, TimeoutError) as error:
            yield Check(
                "answers", False, one_line(str(error) or "no answer in time", 300), "check the address and model"
            )
            return
        yield Check("answers", bool(first.text), one_line(first.text, 60) or "nothing", "try another model")
        yield Check("streams", first.parts > 1, f"in {first.parts} parts", "the whole answer arrives at its end")
        counted = first.raw.usage.get("prompt_tokens", 0) > 0
        yield Check("counts tokens", counted, "yes" if counted else "no", "costs and windows are estimated")
        async for check in self._calls():
            yield check
        yield await self._guarded("reads results", self._result())
        yield await self._guarded("two calls", self._two_calls())
        yield await self._guarded("no needless call", self._no_call())
        yield await self._guarded("exact text", self._exact())
        left = next((text for text in self.texts if MARKUP.search(text)), "")
        yield Check(
            "clean answers",
            not left,
            one_line(left, 60) if left else "no marks in them",
            "report it: docs/text-calls.md",
        )

    async def _ask(self, text: str | Conversation, tools: Sequence[dict[str, Any]] | None = None) -> Asked:
        from ..runtime.model_call import read_text_calls

        conversation = text if isinstance(text, Conversation) else Conversation([user_message(text)])
        given = list(tools) if tools else None
        parts, whole = 0, None
        async with asyncio.timeout(SECONDS):
            if isinstance(self.provider, StreamingProvider):
                async for item in self.provider.stream(conversation, tools=given):
                    if isinstance(item, LLMResponse):
                        whole = item
                    else:
                        parts += bool(item.text or item.reasoning)
            whole = whole or await self.provider.chat(conversation, tools=given)
        asked = Asked(whole, await read_text_calls(whole, conversation, given), parts)
        self.texts.append(asked.text)
        return asked

    async def _guarded(self, name: str, checking: Any) -> Check:
        try:
            check: Check = await checking
            return check
        except (ProviderError, EverloopError, TimeoutError) as error:
            return Check(name, False, one_line(str(error) or "no answer in time", 200), "try another model")

    async def _calls(self) -> AsyncIterator[Check]:
        hint = "it cannot work with tools: try another model, or another chat template of your server"
        try:
            asked = await self._ask("What is 20517 + 48311? Use the tool add.", [ADD])
        except (ProviderError, EverloopError, TimeoutError) as error:
            yield Check("calls a tool", False, one_line(str(error) or "no answer in time", 200), hint)
            yield Check("right arguments", False, "no call was made", hint)
            return
        made = [call for call in asked.calls if call.name == "add"]
        said = asked.shape() if made else f"it said: {one_line(asked.text, 60)}"
        yield Check("calls a tool", bool(made), said, hint)
        fitting = bool(made) and made[0].error is None and sorted(made[0].arguments.values(), key=str) == [20517, 48311]
        found = str(made[0].error or made[0].arguments) if made else "no call was made"
        yield Check("right arguments", fitting, one_line(found, 100), hint)

    async def _result(self) -> Check:
        conversation = Conversation(
            [
                user_message("What is the code of the front door?"),
                assistant_message(None, [("call_1", "look_up", {"what": "front door"})]),
                tool_message("call_1", "look_up", f"The code of the front door is {CODE}."),
            ]
        )
        asked = await self._ask(conversation, [LOOK_UP])
        found = one_line(asked.text, 80) or ("it called again" if asked.calls else "nothing")
        return Check("reads results", CODE in asked.text, found, "it does not use a tool's result")

    async def _two_calls(self) -> Check:
        asked = await self._ask("Use the tool add twice, at once: for 1 + 2 and for 3 + 4.", [ADD])
        made = len([call for call in asked.calls if call.name == "add"])
        return Check("two calls", made == 2, f"{made} in one answer", "it works step by step, which takes longer")

    async def _no_call(self) -> Check:
        asked = await self._ask("Say hello. Do not use a tool.", [ADD, WRITE])
        fine = not asked.calls and bool(asked.text)
        found = f"it called {asked.calls[0].name}" if asked.calls else one_line(asked.text, 60) or "nothing"
        return Check("no needless call", fine, found, "it calls tools without being asked")

    async def _exact(self) -> Check:
        asked = await self._ask(
            "Write the file a.txt with the tool write_file. Its content is exactly what stands between the lines BEGIN "
            f"and END, with its last line break:\nBEGIN\n{LINES}END",
            [WRITE],
        )
        given = next((call.arguments.get("content") for call in asked.calls if call.name == "write_file"), None)
        found = (
            "to the last character" if given == LINES else repr(given)[:80] if given is not None else "no call was made"
        )
        return Check("exact text", given == LINES, found, "files that it writes may differ in details")


NEEDED = ("answers", "calls a tool", "right arguments", "reads results")  # without these it is no agent


async def examine(config: Config) -> AsyncIterator[Check]:
    """Return the checks of the model that the settings name."""
    from ..providers.factory import make_provider

    provider = make_provider(config)
    try:
        async for check in Examination(provider).run():
            yield check
    finally:
        await provider.close()
