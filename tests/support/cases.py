"""Tables of small cases, one test per table: a check that takes microseconds does not need a test per row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from _pytest.outcomes import Failed as _Failed


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test function with every case, and fail with all failures; used like `parametrize`."""
    wanted = (names,) if isinstance(names, str) else names
    rows = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert rows

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**fixtures: Any) -> None:
            failed: list[str] = []
            for row in rows:
                try:
                    function(**fixtures, **dict(zip(wanted, row, strict=True)))
                except (Exception, _Failed) as error:
                    failed.append(f"{row!r:.300}\n{type(error).__name__}: {error}")
            assert not failed, f"{len(failed)} of {len(rows)} cases failed:\n\n" + "\n\n".join(failed)

        given = inspect.signature(function)
        left = [one for one in given.parameters.values() if one.name not in wanted]
        run.__signature__ = given.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorated
