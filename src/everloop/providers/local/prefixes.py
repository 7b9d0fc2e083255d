"""The stable prefixes of prompts: the model reads each once; its state is saved to disk for the next start."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .llama import Llama, LlamaError
from .states import States

MIN_CHARACTERS = 1_000  # of a prefix that is worth a file
MAX_WARM = 4  # prefixes that the model is assumed to still have in memory


class Prefixes:
    """Ensures that the model has read the stable prefix of a request, restored from disk if possible."""

    def __init__(self, llama: Llama, states: States | None) -> None:
        self._llama = llama
        self._states = states
        self._lock = threading.Lock()  # of two requests with the same prefix, the second waits until it is read
        self._warm: OrderedDict[str, None] = OrderedDict()
        self._loaded: dict[int, str] = {}  # slot: the prefix last loaded into it
        self._texts: OrderedDict[bytes, str] = OrderedDict()

    def prepare(self, request: dict[str, Any], stable: int, alone: bool, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Prepare a request, and return what was done for the answer's timings.

        `stable` is the number of messages, or characters, in the prefix; `alone`: no other request occupies a slot.
        """
        if self._states is None or stable <= 0:
            return {}
        # If the template does not reveal where the prefix ends, or the disk is full, the prompt is read like any other.
        with suppress(LlamaError, OSError, ValueError, KeyError, TypeError):
            text = self._text(request, stable)
            if len(text) < MIN_CHARACTERS:
                return {}
            name = self._states.name(text)
            if alone and name in self._warm:
                return {}
            with self._lock:
                return {} if stopped() else self._prepare(self._states, name, text, stopped)
        return {}

    def _prepare(self, states: States, name: str, text: str, stopped: Callable[[], bool]) -> dict[str, Any]:
        idle = self._llama.idle_slots()
        warm = name in self._warm
        if warm and (not idle or any(self._loaded.get(slot) == name for slot in idle)):
            return {}
        done = self._restored(states, name, idle)
        if not done and not warm:
            done = self._read(states, name, text, stopped)
        if done:
            self._warm[name] = None
            if len(self._warm) > MAX_WARM:
                self._warm.popitem(last=False)
        return done

    def _restored(self, states: States, name: str, idle: list[int]) -> dict[str, Any]:
        if not idle or not states.is_intact(name):
            return {}
        try:
            tokens = self._llama.restore(idle[0], name)
            self._loaded[idle[0]] = name
            return {"prefix_restored": tokens}
        except LlamaError:
            states.remove(name)
            return {}

    def _read(self, states: States, name: str, text: str, stopped: Callable[[], bool]) -> dict[str, Any]:
        if (found := self._llama.read_prompt(text, stopped)) is None:
            return {}
        slot, tokens = found
        self._loaded[slot] = name
        temporary = f".{os.getpid()}-{name}"
        try:
            self._llama.save(slot, temporary)
            states.add(temporary, name)
        except (LlamaError, OSError):  # a partial state would take space on a full disk
            states.remove(temporary)
            states.remove(name)
        return {"prefix_read": tokens}

    def _text(self, request: dict[str, Any], stable: int) -> str:
        """Return the rendered prefix: the common prefix of two conversations that differ after it."""
        if "messages" not in request:
            prompt = request.get("prompt")
            return prompt[:stable] if isinstance(prompt, str) else ""
        messages, tools = request["messages"][:stable], request.get("tools")
        key = json.dumps([messages, tools]).encode()
        if (known := self._texts.get(key)) is not None:
            return known
        one, two = (self._llama.render([*messages, {"role": "user", "content": word}], tools) for word in ("a", "b"))
        text = self._texts[key] = _common(one, two)
        if len(self._texts) > MAX_WARM:
            self._texts.popitem(last=False)
        return text


def _common(one: str, two: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return one[:length]
