"""The store of the previous release, frozen in a file: to run next to this one on one database.

It is the package's own code, as it was: the PostgreSQL store, the choice of a turn's next step, and what these import,
without the tools and the commands. A release makes it anew, from the commit of the release before it:

python -m tests.store.postgres.previous COMMIT

Run by its own path, in a process that has the old code in its path, this file is a worker of that release.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

FIXTURE = Path(__file__).parents[1] / "fixtures" / "store-of-the-release-before.tar.xz"
ENTRY = "everloop.store.postgres.store, everloop.actions"
STALL = "stall"  # a message whose turn begins and never ends
LEASE = 3.0  # seconds


def unpack(folder: Path) -> None:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(folder, filter="data")


def freeze(commit: str) -> None:
    """Write the fixture: all modules that importing the store of that commit loads."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = subprocess.run(["git", "archive", commit, "src/everloop"], check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            archive.extractall(folder, filter="data")
        source = folder / "src"
        loaded = f"import sys; sys.path.insert(0, {str(source)!r}); import {ENTRY}; " + (
            "print(*sorted(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'everloop'), sep='\\n')"
        )
        found = subprocess.run(
            [sys.executable, "-c", loaded], check=True, capture_output=True, text=True, cwd="/"
        ).stdout
        with tarfile.open(FIXTURE, "w:xz", preset=9) as archive:
            for path in found.split():
                info = archive.gettarinfo(path, str(Path(path).relative_to(source)))
                info.uid = info.gid = info.mtime = 0
                info.uname = info.gname = ""
                with open(path, "rb") as file:
                    archive.addfile(info, file)


async def work(dsn: str) -> None:
    """Take turns as a worker does, with a model that answers `old:` and the message; print each that has ended."""
    from everloop.bus import OutboundMessage
    from everloop.errors import StoreError
    from everloop.log import ModelAnswered, TurnEnded
    from everloop.store.base import Busy
    from everloop.store.peers import ENDED, new_worker
    from everloop.store.postgres.schema import MIGRATIONS
    from everloop.store.postgres.store import PostgresStore

    store, worker, woken = PostgresStore(dsn, lease_seconds=LEASE), new_worker(), asyncio.Event()
    peer = store.peer(worker, lambda notice: woken.set(), takes_work=True)
    await peer.join()
    print(f"ready {len(MIGRATIONS)}", flush=True)
    while True:
        woken.clear()
        for owner, key in await store.ready(worker):
            try:
                claim = await store.begin(owner, key, worker)
            except (Busy, StoreError):  # another worker has it
                continue
            if claim is None:
                continue
            said = str(claim.message.content)
            await store.append(claim, [ModelAnswered(f"old:{said}")], flush=False)
            if said == STALL:
                print("stalls", flush=True)
                continue
            answers = [OutboundMessage("test", key, f"old:{said}")] if claim.message.reply else []
            await store.finish(claim, [TurnEnded("answer", f"old:{said}")], answers)
            await store.wake(ENDED, claim.inbox)
            print(f"ended {said}", flush=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), 0.5)


if __name__ == "__main__":
    if "://" in sys.argv[1]:
        asyncio.run(work(sys.argv[1]))
    else:
        freeze(sys.argv[1])
