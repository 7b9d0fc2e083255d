"""Hypothesis strategies for session logs: turns with rounds, steering, pictures, questions and crashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from everloop.log import (
    Call,
    CallEnded,
    CallsAsked,
    CallsBegun,
    CallsDecided,
    Entry,
    Logged,
    ModelAnswered,
    Noted,
    TurnEnded,
    UserSaid,
)

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
texts = st.sampled_from(["hi", "do it", "東京の天気は？", "x" * 700, "y " * 3000])
contents: st.SearchStrategy[Any] = st.one_of(texts, texts.map(lambda text: [PICTURE, {"type": "text", "text": text}]))
results = st.tuples(
    st.sampled_from(["ok", "r" * 2_500, "line\n" * 4_000, "漢" * 3_000]),
    st.sampled_from(["ok", "ok", "error", "denied", "interrupted"]),
    st.booleans(),  # untrusted
    st.booleans(),  # with a picture
)


@st.composite
def turns(draw: Any, turn: str) -> list[Entry]:
    """One complete turn, with its results in any order."""
    entries: list[Entry] = [UserSaid(draw(contents), now=draw(st.sampled_from(["", "Monday, 2026-11-16 08:00"])))]
    for number in range(draw(st.integers(0, 3))):
        calls = tuple(Call(f"{turn}_{number}_{n}", "exec") for n in range(draw(st.integers(1, 3))))
        entries.append(ModelAnswered(draw(st.sampled_from([None, "let me see"])), calls))
        ids = tuple(call.id for call in calls)
        if draw(st.booleans()):
            entries += [CallsAsked(ids, "May I?"), CallsDecided(ids, True)]
        entries.append(CallsBegun(ids))
        for call in draw(st.permutations(calls)):
            content, status, untrusted, picture = draw(results)
            images = ("data:image/png;base64,aGk=",) if picture else ()
            entries.append(CallEnded(call.id, "exec", content, status, untrusted=untrusted, images=images))
        entries += [UserSaid("and this") for _ in range(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        return [*entries, ModelAnswered(draw(texts)), TurnEnded("answer")]
    return [*entries, TurnEnded(draw(st.sampled_from(["max_rounds", "cancelled", "error"])), "I stopped.")]


@st.composite
def sessions(draw: Any) -> list[Logged]:
    """A complete session, perhaps with messages that the Python API added between the turns."""
    logged: list[Logged] = []
    for number in range(draw(st.integers(1, 7))):
        turn = f"t{number}"
        if draw(st.integers(0, 4)) == 0:
            noted = [Noted({"role": "user", "content": "noted"}), Noted({"role": "assistant", "content": "so noted"})]
            logged += _placed(noted, None, len(logged))
        logged += _placed(draw(turns(turn)), turn, len(logged))
    return logged


def _placed(entries: Sequence[Entry], turn: str | None, after: int) -> list[Logged]:
    return [Logged(after + n, turn, 1_700_000_000.0 + 60 * (after + n), entry) for n, entry in enumerate(entries, 1)]


def cut_off(logged: Sequence[Logged], at: int) -> list[Logged]:
    """The session as a crash leaves it after a number of entries, and after its interrupted calls are reported."""
    kept = list(logged[:at])
    if not kept or kept[-1].turn is None or isinstance(kept[-1].entry, TurnEnded):
        return kept
    asked = [call for one in kept if isinstance(one.entry, ModelAnswered) for call in one.entry.calls]
    over = {one.entry.id for one in kept if isinstance(one.entry, CallEnded)}
    reports = [CallEnded(call.id, call.name, "interrupted", "interrupted") for call in asked if call.id not in over]
    return kept + _placed(reports, kept[-1].turn, kept[-1].seq)
