"""Starts the actors of sessions that have work: in order within a session, in parallel across sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from .. import events
from ..bus import EXECUTOR, InboundMessage, Kind
from ..errors import StoreError
from ..goals.phases import CHANNEL as SUBAGENTS
from ..log import Reason
from ..store.base import Claim, SessionInfo, Store
from .session import ABANDONED, Host, Session, Stopped, StopTarget, Submission, Waiters, Worker, fail

log = logging.getLogger(__name__)

RETRY_SECONDS = 15.0  # delay before a turn is retried that the store refused to write


class Dispatcher:
    """Routes each message to its session, and runs one task per session with work to do.

    Without `runs`, submitted messages are left to other processes.
    """

    def __init__(
        self,
        store: Store,
        host: Host,
        *,
        busy: str = "queue",
        at_once: int = 1000,
        owner: str | None = None,
        runs: bool = True,
    ) -> None:
        self._store = store
        self._host = host
        self._owner = owner  # the owner whose sessions are taken up; None for all
        self._waiters = Waiters(store)
        self._worker = Worker(store, host, self._waiters, busy, runs, self.kick, self._retry_later)
        self._slots = asyncio.Semaphore(at_once)
        self._sessions: dict[tuple[str, str], Session] = {}
        self._taking: dict[asyncio.Future[None], Submission] = {}  # in-flight writes of messages behind a running turn
        self._later: set[asyncio.TimerHandle] = set()
        self._settling: set[asyncio.Task[None]] = set()  # tasks of sessions that have no more work here
        self._stopping = False

    @property
    def worker(self) -> str:
        """The worker id under which sessions are leased."""
        return self._host.worker

    @property
    def runs(self) -> bool:
        """Return whether turns run in this process."""
        return self._worker.runs

    # ------------------------------------------------------------------------------------------ taking work

    async def submit(
        self,
        message: InboundMessage,
        kind: Kind = "message",
        show: events.Show | None = None,
        on_elsewhere: Callable[[int], None] | None = None,
    ) -> asyncio.Future[str]:
        """Submit a message. The returned future resolves to its turn's answer, wherever the turn runs.

        The message of an idle session is written together with the start of its turn; behind a running turn, the
        message is on disk when this returns. `show` receives the events of the turn if it starts here for this message.
        Otherwise, because another process has the session or the message is already known, `on_elsewhere` is called
        with its inbox row and `show` receives nothing.
        """
        submission = Submission(message, kind, asyncio.get_running_loop().create_future(), show, on_elsewhere)
        if not self._worker.runs:
            await self._worker.hand_over(submission)
            return submission.answer
        session = self.session(message.owner, message.session_key)
        if session is not None and session.running and not session.fresh:  # earlier messages go to disk first
            taking = asyncio.ensure_future(session.take(submission))
            self._taking[taking] = submission
            taking.add_done_callback(self._taking.pop)
            try:
                await asyncio.shield(taking)  # once it is on disk, a session must know about it
            except asyncio.CancelledError:
                submission.answer.cancel()
                raise
        else:
            session = session or self._start(message.owner, message.session_key)
            session.fresh.append(submission)
        return submission.answer

    def follow(self, row: int, message: InboundMessage, show: events.Show | None = None) -> asyncio.Future[str]:
        """Resume the turn that this inbox row opened; the returned future resolves to its answer."""
        submission = Submission(message, "message", asyncio.get_running_loop().create_future(), show)
        self._waiters.add(row, submission)
        self.kick(message.owner, message.session_key)
        return submission.answer

    def kick(self, owner: str, key: str) -> None:
        """Check this session's inbox, which may have something in it."""
        if not self._worker.runs:
            self._host.on_handoff(None)
        elif (session := self.session(owner, key)) is not None:
            session.again = True
        else:
            self._start(owner, key)

    async def scan(self) -> None:
        """Take up all pending work in the store: new messages, and turns that a dead worker left behind."""
        await self.take_up(await self._store.ready(self.worker, self._owner))
        await self.settle(await self._store.over(self.awaited_elsewhere()))

    async def take_up(self, sessions: Sequence[tuple[str, str]]) -> None:
        """Take up the inboxes of these sessions."""
        for owner, key in sessions:
            if key.startswith(f"{EXECUTOR}:"):  # only its own program has the tools and steps of a run, and resumes it
                continue
            session = self.session(owner, key)
            if session is not None and session.running:
                await session.take_from_inbox()
            self.kick(owner, key)

    def is_awaited(self, claim: Claim) -> bool:
        """Return whether a waiter in this process awaits the turn's answer."""
        return bool(self._waiters.of(claim.inbox))

    def awaited_elsewhere(self) -> list[int]:
        """Return the inbox rows that are awaited here and answered by other processes."""
        return self._waiters.outside(self._sessions)

    async def settle(self, rows: Iterable[int]) -> None:
        """Deliver the answers of these completed inbox rows to their local waiters."""
        for row in rows:
            await self._waiters.settle(row)

    def session(self, owner: str, key: str) -> Session | None:
        """Return the session, if this process works on it."""
        return self._sessions.get((owner, key))

    def is_running(self, owner: str, key: str) -> bool:
        """Return whether a turn of the session is running here."""
        session = self.session(owner, key)
        return session is not None and session.running

    def stop_turn(
        self,
        owner: str,
        key: str,
        reason: Reason,
        text: str,
        target: StopTarget = None,
        *,
        chat_told: bool = False,
    ) -> bool:
        """Stop the session's running or starting turn if it is the target.

        Return False if this process does not have the session.

        With `chat_told`, the turn sends nothing to its chat: the reply to the command that stopped it appears there.
        """
        session = self.session(owner, key)
        if session is None:
            return False
        session.stop(reason, text, target)
        session.state.chat_told |= chat_told
        return True

    async def runs_elsewhere(self, info: SessionInfo | None) -> bool:
        """Return whether another process runs the session's turn, and must therefore stop it."""
        if info is None or info.open_turn is None:
            return False
        if not self.runs:
            return True
        return info.worker is not None and info.worker != self.worker and await self._store.is_alive(info.worker)

    async def stop_elsewhere(
        self, owner: str, key: str, target: StopTarget = None, *, wait: bool = False, chat_told: bool = False
    ) -> None:
        """Ask the process that runs the session's turn to stop it, if it is the target.

        With `wait`, wait a while for the reply.
        """
        await self._worker.stop_elsewhere(owner, key, target, wait=wait, chat_told=chat_told)

    def withdraw(self, owner: str, key: str, message: str, text: str) -> None:
        """Stop the turn of this message and no other, now or when it starts, unless its answer is still awaited."""
        session = self.session(owner, key)
        coming = [*session.fresh, *([session.current] if session.current else [])] if session is not None else []
        submissions = [
            submission
            for submission in chain(coming, self._taking.values(), self._waiters)
            if submission.message.id == message and submission.message.owner == owner
        ]
        if any(not submission.answer.done() for submission in submissions):  # the client has requested it again
            return
        for submission in submissions:
            submission.withdrawn = text
        if session is not None and session.state.message == message:
            session.stop("cancelled", text)

    async def stop_abandoned(self) -> None:
        """Stop the turns whose clients were connected to a server that has died."""
        for session in [session for session in self._sessions.values() if session.state.server]:
            if not await self._store.is_alive(session.state.server):
                session.stop("abandoned", ABANDONED)

    # ------------------------------------------------------------------------------------------ shutting down

    def drain(self) -> None:
        """Hand off turns that have no local waiter after their current step.

        Sub-agents are exempt, because turns that stay may be waiting for them.
        """
        for session in self._sessions.values():
            awaited = session.fresh or self._waiters.in_session(session.owner, session.key)
            coming = session.current is not None and not session.current.answer.done()
            if not awaited and not coming and not session.key.startswith(f"{SUBAGENTS}:"):
                session.leave()

    def run_only_awaited(self) -> None:
        """Start no turn that nothing here waits for: the process ends with its answer, and would interrupt it.

        Sub-agents are exempt.
        """
        self._worker.only_awaited = True

    async def leave(self, seconds: float) -> None:
        """Start no more turns, and hand off each running one after its current step.

        A turn whose step takes longer than `seconds` runs until `stop`. Messages that arrive meanwhile are left to
        other processes too.
        """
        self._worker.runs = False
        for session in self._sessions.values():
            session.leave()
        if tasks := [session.task for session in self._sessions.values() if session.task is not None]:
            await asyncio.wait(tasks, timeout=seconds)

    async def stop(self) -> None:
        """Cancel everything that runs. Open turns and submitted messages stay on disk for the next start."""
        self._stopping = True
        for handle in self._later:
            handle.cancel()
        self._later.clear()
        sessions = list(self._sessions.values())
        tasks = [*(session.task for session in sessions if session.task is not None), *self._settling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sessions.clear()  # a task that had not started could not remove its session
        for submission in [submission for session in sessions for submission in session.fresh]:
            await self._keep(submission)
        await asyncio.gather(*self._taking, return_exceptions=True)
        if tasks:
            await self._worker.release(self._store.release_all(self.worker, self._owner))
        fail([session.current for session in sessions if session.current is not None], Stopped())
        self._waiters.fail_all(Stopped())
        self._stopping = False

    # ------------------------------------------------------------------------------------------ one session

    def _start(self, owner: str, key: str) -> Session:
        session = self._sessions[owner, key] = Session(owner, key, self._worker)
        session.task = asyncio.create_task(self._run(session), name=f"session {key}")
        return session

    async def _run(self, session: Session) -> None:
        place = (session.owner, session.key)
        try:
            async with self._slots:
                await session.run()
        finally:
            self._sessions.pop(place, None)
        # Other processes may have given answers while the session was active here.
        rows = [row for row, _ in self._waiters.in_session(*place)]
        if not rows or session.task is None:
            return
        self._settling.add(session.task)
        try:
            await self.settle(rows)
        except StoreError as error:  # the next wake-up retries
            log.warning("%s", error)
        finally:
            self._settling.discard(session.task)

    async def _keep(self, submission: Submission) -> None:
        """Store a message that no turn was started for; the next start takes it up.

        A sessionless API request is not stored: its client is told of the failure, and the answer would be of no use.
        """
        request = submission.message.request
        if request is not None and not request.kept:
            fail([submission], Stopped())
            return
        try:
            await self._store.accept(submission.message, submission.kind)
            fail([submission], Stopped())
        except Exception as error:  # whatever the error, the waiter must be told
            fail([submission], error)

    def _retry_later(self, owner: str, key: str) -> None:
        if self._stopping:
            return

        def again() -> None:
            self._later.discard(handle)
            self.kick(owner, key)

        handle = asyncio.get_running_loop().call_later(RETRY_SECONDS, again)
        self._later.add(handle)
