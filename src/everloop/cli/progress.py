"""How far a download is: a bar that moves on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import time
from collections import deque
from typing import TextIO

from ..providers.local.progress import Progress
from ..providers.local.weights import megabytes

_WINDOW = 5.0  # seconds that the rate is taken over
_SECONDS = 15.0  # between two lines where there is no terminal
_WIDTH = 20


class Bar:
    """Shows what a pull reports, on one stream."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name = name
        self._stream = stream
        self._moves = stream.isatty()
        self._seen: deque[tuple[float, int]] = deque()
        self._shown: tuple[str, str, str] = ("", "", "")
        self._at = 0.0
        self._drawn = False

    def show(self, now: Progress) -> None:
        what = (now.stage, now.source, now.holder)
        if what != self._shown:
            self._seen.clear()
        self._seen.append((time.monotonic(), now.done))
        while self._seen[-1][0] - self._seen[0][0] > _WINDOW:
            self._seen.popleft()
        if self._moves:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[K{self._line(now)[: columns - 1]}")
            self._stream.flush()
            self._drawn = True
        elif what != self._shown or time.monotonic() - self._at >= _SECONDS:
            self._at = time.monotonic()
            print(f"everloop: {self._line(now)}", file=self._stream, flush=True)
        self._shown = what

    def close(self) -> None:
        """Leave the last line where it is."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = False

    def _line(self, now: Progress) -> str:
        share = now.done / now.total if now.total else 1.0
        amount = f"{megabytes(now.done)} of {megabytes(now.total)}"
        if now.stage == "wait":
            return f"{self._name}: the process {now.holder} is pulling it, {amount}; waiting"
        if now.stage == "check":
            return f"{self._name}: checking, {amount}"
        parts = [f"{self._name}:", f"{share:4.0%}", amount, *self._rate(now), f"from {now.source}"]
        if self._moves:
            full = round(share * _WIDTH)
            parts.insert(1, f"[{'#' * full}{'.' * (_WIDTH - full)}]")
        return " ".join(parts)

    def _rate(self, now: Progress) -> list[str]:
        (start, before), (end, after) = self._seen[0], self._seen[-1]
        if end - start < 0.5 or after <= before:
            return []
        rate = (after - before) / (end - start)
        left = round((now.total - now.done) / rate)
        return [f"{rate / 1e6:.1f} MB/s", f"{left // 60}:{left % 60:02} left"] if now.done < now.total else []
