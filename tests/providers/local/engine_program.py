"""A program that runs the engine and prints its output, to be killed: its arguments are the weights and what to do."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from everloop.providers.base import ProviderError
from everloop.providers.local.engine import Engine, Settings


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def main(weights: Path, window: int) -> None:
    engine = Engine(Settings(weights, window=window, slots=1, threads=1))
    starting = asyncio.create_task(engine.start())
    while not starting.done():
        await asyncio.sleep(0.01)
    try:
        await starting
    except ProviderError as error:
        say(error=str(error), retryable=error.retryable)
        return
    say(pid=engine.pid)
    request = {"prompt": "One, two, three, four,", "max_tokens": 1000, "ignore_eos": True}
    await engine.complete(request, lambda delta: say(delta=delta))
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
