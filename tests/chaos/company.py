"""Real workers and servers on one PostgreSQL, each behind its own proxy, and what can be done to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ..crash.company import LEASE
from ..crash.forge import Child, Forge
from ..crash.scene import KILLED
from ..crash.witness import set_up
from ..store.postgres.proxy import Proxy, proxied
from ..store.postgres.server import Server, name_of, own_server

START_SECONDS = END_SECONDS = ROBBED_SECONDS = 30.0
REFUSED = "was taken over by another worker"
READY = re.compile(r"everloop: (?:serving on (?P<url>\S+)|(?:worker|channel) \d+ is ready)")


class Member:
    """A worker, a server or the channel's sender: a process that is ended and restarted."""

    def __init__(self, company: Company, kind: str, number: int, dsn: str, proxy: Proxy) -> None:
        self.kind = kind
        self.name = f"{kind}-{number}"
        self.proxy = proxy
        self.url = ""
        self.pid = 0
        self.frozen = False
        self._company = company
        self._dsn = dsn
        self._starts = 0
        self._said = Path()
        self._wait: Callable[[], Awaitable[int]] | None = None

    async def start(self) -> None:
        """Start it, and wait until it reports that it is ready."""
        self._starts += 1
        self._said = self._company.folder / "said" / f"{self.name}.{self._starts}"
        await self._start_child()
        self.url = (await self._ready())["url"] or ""

    async def _start_child(self) -> None:
        company = self._company
        options: dict[str, Any] = {"folder": str(company.folder), "dsn": self._dsn, "said": str(self._said)}
        if self.kind == "channel":
            options["lease"] = company.lease
        else:
            arguments = ["worker"] if self.kind == "worker" else ["serve", "--port", "0"]
            options |= {"arguments": arguments, "plant": company.plant, "settings": company.settings}
        child: Child = company.forge.start("channel" if self.kind == "channel" else "command", **options)
        self.pid, self._wait = await asyncio.wrap_future(child.pid), child.wait

    async def _ready(self) -> re.Match[str]:
        give_up = time.monotonic() + START_SECONDS
        while (found := READY.search(self.said)) is None:
            assert time.monotonic() < give_up, f"{self.name} did not start: {self.said}"
            await asyncio.sleep(0.03)
        return found

    @property
    def said(self) -> str:
        return self._said.read_text(errors="replace") if self._said.exists() else ""

    async def end(self, number: int) -> int:
        """End it with a signal; return its exit status."""
        self.url = ""
        self._company.ended[self.pid] = time.time()
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            raise AssertionError(f"{self.name} has ended by itself: {self.said}") from None
        try:
            return await self._ended()
        except TimeoutError:
            os.kill(self.pid, signal.SIGUSR1)
            await asyncio.sleep(1.0)
            raise AssertionError(f"{self.name} did not end: {self.said}") from None

    async def kill(self) -> None:
        """Kill it, whatever its state."""
        if self._wait is not None:
            if self.pid not in self._company.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            await self._ended()

    async def _ended(self) -> int:
        assert self._wait is not None
        return await asyncio.wait_for(self._wait(), END_SECONDS)

    async def again(self, number: int) -> None:
        """End it with a signal and start it again."""
        status = await self.end(number)
        assert status == (KILLED if number == signal.SIGKILL else 0), f"{self.name} ended with {status}: {self.said}"
        await self.start()

    async def freeze(self, seconds: float) -> None:
        """Pause it for a while."""
        with self.stopped():
            await asyncio.sleep(seconds)

    async def freeze_until_robbed(self) -> None:
        """Pause it until it holds no session: another worker has seen that its lease expired."""
        with self.stopped():
            give_up = time.monotonic() + ROBBED_SECONDS
            while self.pid in await self._company.holders():
                assert time.monotonic() < give_up, f"nobody took what {self.name} held"
                await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It is alive, but cannot do anything, not even renew its lease."""
        self.frozen = True
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self.frozen = False


class Company:
    """All processes that share a store."""

    def __init__(self, forge: Forge, folder: Path, server: Server, dsn: str, plant: str, lease: float) -> None:
        self.forge = forge
        self.folder = folder
        self.server = server
        self.dsn = dsn
        self.plant = plant
        self.lease = lease
        self.settings: dict[str, str] = {}
        self.members: list[Member] = []
        self.ended: dict[int, float] = {}  # when processes were told to end, or killed
        self.outages: list[tuple[float, float]] = []

    async def start(self) -> None:
        await asyncio.gather(*(one.start() for one in self.members))

    def of(self, *kinds: str) -> list[Member]:
        """Return those of a kind that are not frozen."""
        return [one for one in self.members if one.kind in kinds and not one.frozen]

    def urls(self) -> list[str]:
        """Return the servers that clients know; one may be frozen, which a client cannot see."""
        return [one.url for one in self.members if one.url]

    async def restart_postgres(self, mode: str, away: float = 0.0) -> None:
        """Stop it, and start it again after so many seconds."""
        began = time.time()
        await asyncio.to_thread(self.server.stop, mode)
        await asyncio.sleep(away)
        await asyncio.to_thread(self.server.start)
        self.outages.append((began, time.time()))

    def said(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted((self.folder / "said").iterdir()))

    async def scalar(self, sql: str) -> int:
        return int((await self._rows(sql))[0][0])

    async def _rows(self, sql: str) -> list[Any]:
        database = name_of(self.dsn)
        return await asyncio.to_thread(self.server.sql, sql, database=database)

    async def holders(self) -> set[int]:
        """Return the processes that hold a session now."""
        sql = "SELECT split_part(worker, '.', 3)::int FROM session WHERE worker IS NOT NULL"
        return {row[0] for row in await self._rows(sql)}

    async def rest(self, seconds: float) -> bool:
        """Wait until everything is answered and sent, and no session is held."""
        busy = (
            "SELECT (SELECT count(*) FROM inbox WHERE state <> 'done')"
            " + (SELECT count(*) FROM outbox WHERE sent_at IS NULL)"
            " + (SELECT count(*) FROM session WHERE worker IS NOT NULL)"
        )
        give_up = time.monotonic() + seconds
        while await self.scalar(busy):
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(0.1)
        return True

    async def close(self) -> None:
        """Tell them to end; check that they do so cleanly."""
        told = self.of("worker", "server")
        ends = await asyncio.gather(*(one.end(signal.SIGTERM) for one in told))
        await asyncio.gather(*(one.end(signal.SIGKILL) for one in self.of("channel")))
        wrong = [f"{one.name}: {status}: {one.said}" for one, status in zip(told, ends, strict=True) if status]
        assert not wrong, wrong


def _configure(company: Company, url: str, settings: str) -> None:
    home = company.folder / "shared"
    (home / "workspace").mkdir(parents=True)
    (company.folder / "said").mkdir()
    text = f"[worker]\nlease_seconds = {company.lease}\n[server]\ndrain_seconds = 5.0\n{settings}"
    (home / "config.toml").write_text(text)
    company.settings = {
        "EVERLOOP_HOME": str(home),
        "EVERLOOP_BASE_URL": url,
        "EVERLOOP_MODEL": "planned",
    }


@contextlib.asynccontextmanager
async def company(
    forge: Forge,
    folder: Path,
    url: str,
    *,
    workers: int,
    servers: int,
    on: Server | None = None,
    plant: str = "",
    settings: str = "",
    lease: float = LEASE,
) -> AsyncIterator[Company]:
    """Start workers, servers and two senders; the model is at `url`.

    Without `on` they get their own PostgreSQL, which can be restarted; `settings` are further lines of their config.
    """
    async with contextlib.AsyncExitStack() as stack:
        server = on or stack.enter_context(own_server())
        dsn = stack.enter_context(server.database())
        set_up(dsn, lease)
        made = Company(forge, folder, server, dsn, plant, lease)
        _configure(made, url, settings)
        for kind, count in (("worker", workers), ("server", servers), ("channel", 2)):
            for number in range(1, count + 1):
                place = stack.enter_context(tempfile.TemporaryDirectory(prefix="everloop-"))
                proxy, through = await stack.enter_async_context(proxied(dsn, Path(place)))
                made.members.append(Member(made, kind, number, through, proxy))
        try:
            yield made
        finally:
            await asyncio.gather(*(one.kill() for one in made.members))
            await asyncio.sleep(0)  # in which their transports are closed
