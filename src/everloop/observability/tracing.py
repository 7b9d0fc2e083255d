"""OpenTelemetry: every turn that has ended becomes a trace, built from its log.

Tracing costs a turn nothing: at its end only the position of its entries is queued. A background task reads them,
converts them to spans and sends them; while the collector is unavailable, they stay in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError, StoreError
from ..store.base import Claim, Store
from ..threads import in_thread

if TYPE_CHECKING:
    from .spans import Exporter

log = logging.getLogger(__name__)

MAX_QUEUED = 1000  # turns; beyond that the oldest are not exported
BATCH = 20  # turns per request
RETRY_SECONDS = (1.0, 60.0)  # the first and the longest delay
CLOSING_SECONDS = 1.0
EXTRA = "opentelemetry.exporter.otlp.proto.http"
MISSING = "telemetry needs an extra: pip install 'everloop[otel]', or remove endpoint under [telemetry]"


class _Turn(NamedTuple):
    """The position of a turn's entries in the log; `root` is the root turn of a sub-agent."""

    key: str
    id: str
    session: int
    first_seq: int
    root: str


class Tracer:
    """Sends the traces of turns to an OTLP/HTTP endpoint; messages are included only with `content`."""

    def __init__(
        self, store: Store, endpoint: str, *, content: bool = False, provider: str = "", model: str = ""
    ) -> None:
        if not _installed():
            raise ConfigError(MISSING)
        self._store = store
        self._endpoint = traces_url(endpoint)
        self._content = content
        self._provider = provider
        self._model = model
        self._waiting: deque[_Turn] = deque(maxlen=MAX_QUEUED)
        self._exporter: Exporter | None = None
        self._task: asyncio.Task[None] | None = None
        self._more, self._closing = asyncio.Event(), asyncio.Event()
        self._away = False  # the collector did not accept the last export

    def ended(self, claim: Claim) -> None:
        """Queue a turn that has ended and whose end is on disk. Costs next to nothing."""
        root = task.root if (task := claim.message.task) is not None else ""
        self._waiting.append(_Turn(claim.key, claim.turn, claim.session, claim.first_seq, root))
        self._more.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Send what is queued, if the collector accepts it at once. The tracer can be used again afterwards."""
        task, self._task = self._task, None
        if task is not None:
            self._closing.set()
            self._more.set()
            _, late = await asyncio.wait([task], timeout=seconds)
            if late:
                self._gone()
            task.cancel()
            await asyncio.wait([task])
        self._more, self._closing = asyncio.Event(), asyncio.Event()
        if self._exporter is not None:
            exporter, self._exporter = self._exporter, None
            await in_thread(exporter.close)

    async def _work(self) -> None:
        pause = RETRY_SECONDS[0]
        while self._waiting or not self._closing.is_set():
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                if await self._send_some():
                    pause = RETRY_SECONDS[0]
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)
                    return
                pause = min(2 * pause, RETRY_SECONDS[1])

    async def _send_some(self) -> bool:
        """Send the oldest turns. Return False if they must be sent again."""
        turns = list(self._waiting)[:BATCH]
        try:
            read = [(turn, await self._store.read_turn(turn.session, turn.first_seq)) for turn in turns]
            if self._exporter is None:
                self._exporter = await in_thread(self._open)
            taken = await in_thread(self._exporter.send, [(one.key, one.id, one.root, logged) for one, logged in read])
        except StoreError as error:
            log.warning("%s", error)
            return False
        except Exception:  # a bug here or in the exporter: retrying would not help
            log.exception("could not export turns")
            taken = True
        if not taken:
            self._gone()
            return False
        self._away = False
        for turn in turns:
            if self._waiting and self._waiting[0] is turn:  # the queue may have dropped it in the meantime
                self._waiting.popleft()
        return True

    def _open(self) -> Exporter:
        from .spans import Exporter

        return Exporter(self._endpoint, content=self._content, provider=self._provider, model=self._model)

    def _gone(self) -> None:
        if not self._away:
            log.warning(
                "%s does not accept traces; turns continue, and their traces are sent once it does", self._endpoint
            )
        self._away = True


def traces_url(endpoint: str) -> str:
    """Return the URL for traces: an endpoint without a path is the root of a collector."""
    from urllib.parse import urlsplit

    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f'[telemetry] endpoint must be an address like http://127.0.0.1:4318, not "{endpoint}"')
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def _installed() -> bool:
    try:
        return importlib.util.find_spec(EXTRA) is not None and importlib.util.find_spec("opentelemetry.sdk") is not None
    except ModuleNotFoundError:
        return False
