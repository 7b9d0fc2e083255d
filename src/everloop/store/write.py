"""A write under way, as something to await."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


class Write(asyncio.Future[T]):
    """A future that cannot be cancelled: a task that is being cancelled hears of it when the write is done.

    So what is on disk and what its writer knows never differ.
    """

    def cancel(self, msg: object = None) -> bool:
        return False

    def settle(self, result: T | None, exception: BaseException | None) -> None:
        if exception is not None:
            self.set_exception(exception)
            self.exception()  # a write that nobody waits for any more may fail unheard
        else:
            self.set_result(result)  # type: ignore[arg-type]
