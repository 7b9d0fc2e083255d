"""Recordings of a local model: what it wrote for each prompt, so that the code around it runs without its weights."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from everloop.errors import EverloopError
from everloop.providers.base import ProviderError
from everloop.providers.local.engine import Engine, Settings
from everloop.providers.local.process import OnDelta
from everloop.threads import in_thread

# What differs from one run to the next: the folder, days and times of day, and the ids of jobs.
_VARIES = (
    re.compile(r"(?<=Workspace: )\S+"),
    re.compile(r"\w+day, \d{4}-\d\d-\d\d(?: \d\d:\d\d)?"),
    re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?\S*)?"),
    re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8}\b"),
)
_ASKED = 60  # characters of what was asked, for the reader of a recording


def key_of(request: dict[str, Any]) -> str:
    """The hash of a prompt and its grammar, without what differs from one run to the next."""
    facts = {name: request.get(name) for name in ("messages", "prompt", "tools", "grammar", "response_format")}
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    for pattern in _VARIES:
        text = pattern.sub("…", text)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]


class Recording:
    """The answers of one model by the hash of the prompt, kept in a file with one line for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.used: set[str] = set()
        self._answers: dict[str, dict[str, str]] = {}
        if path.exists():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                try:
                    entry = json.loads(line)
                    self._answers[entry["key"]] = {"text": entry["text"], "reason": entry["reason"]}
                except (ValueError, KeyError, TypeError):
                    raise EverloopError(f"{path.name}: line {number} is no entry of a recording") from None

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._answers)

    def answer(self, key: str) -> dict[str, str] | None:
        self.used.add(key)
        return self._answers.get(key)

    def add(self, key: str, asked: str, answer: dict[str, str]) -> None:
        self.used.add(key)
        self._answers[key] = answer
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "asked": asked[-_ASKED:], **answer}, ensure_ascii=False) + "\n")


class RecordedEngine(Engine):
    """Answers from a recording. What it does not have is asked of `model` and added; without one, it is an error."""

    def __init__(self, recording: Recording, model: Engine | None = None) -> None:
        super().__init__(model.settings if model is not None else Settings(Path("recorded")))
        self.recording = recording
        self.asked = 0  # requests that the recording did not have
        self._model = model

    async def complete(
        self, request: dict[str, Any], on_delta: OnDelta | None = None, *, session: str = ""
    ) -> dict[str, Any]:
        key = key_of(request)
        known = self.recording.answer(key)
        if known is None:
            self.asked += 1
            words = _words(request)
            if self._model is None:
                raise ProviderError(
                    f"{self.recording.path.name} has no answer for {words[-_ASKED:]!r}: the prompt has changed since; "
                    "`make record` asks the model again"
                )
            answer = await self._model.complete(request, on_delta, session=session)
            choice = answer["choices"][0]
            text, reason = str(choice["message"].get("content") or ""), str(choice.get("finish_reason") or "stop")
            await in_thread(self.recording.add, key, words, {"text": text, "reason": reason})
            return answer
        if on_delta is not None and known["text"]:
            on_delta({"content": known["text"]})
        message = {"role": "assistant", "content": known["text"]}
        return {"choices": [{"index": 0, "message": message, "finish_reason": known["reason"]}], "usage": {}}

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()


def _words(request: dict[str, Any]) -> str:
    messages = request.get("messages") or [{}]
    return str(messages[-1].get("content", ""))
