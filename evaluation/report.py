"""Tables of results, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from .cases import CATEGORIES
from .results import Label
from .runner import Outcome


def by_category(outcomes: Iterable[Outcome]) -> str:
    """One run, a line for each category."""
    everything = list(outcomes)
    found = {name: [outcome for outcome in everything if outcome.category == name] for name in CATEGORIES}
    rows = [[category, *_figures(some)] for category, some in found.items() if some]
    return table(["category", *HEADS], [*rows, ["all", *_figures(everything)]])


def by_model(results: Iterable[tuple[Label, Outcome]]) -> str:
    """Several runs, a line for each: the table of docs/evaluation.md. A case that was run again counts once."""
    runs: dict[Label, dict[str, Outcome]] = {}
    for label, outcome in results:
        runs.setdefault(label, {})[outcome.case] = outcome
    order = sorted(runs, key=lambda label: (label.model, label.settings, label.set != "heldout"))
    rows = [
        [label.model, ", ".join(label.settings), label.set, *_figures(list(runs[label].values()))] for label in order
    ]
    return table(["model", "settings", "set", *HEADS], rows)


HEADS = ["cases", "right tool and arguments", "end to end", "seconds a case", "tokens read", "tokens written"]


def _figures(outcomes: Sequence[Outcome]) -> list[str]:
    if not outcomes:
        return ["0", *["–"] * (len(HEADS) - 1)]
    count = len(outcomes)
    right, end = sum(outcome.right for outcome in outcomes), sum(outcome.end for outcome in outcomes)
    read = sum(outcome.usage.get("prompt_tokens", 0) for outcome in outcomes)
    written = sum(outcome.usage.get("completion_tokens", 0) for outcome in outcomes)
    seconds = median(outcome.seconds for outcome in outcomes)
    return [str(count), share(right, count), share(end, count), f"{seconds:.1f}", f"{read:,}", f"{written:,}"]


def share(some: int, count: int) -> str:
    return f"{100 * some / count:.0f} % ({some})" if count else "–"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
