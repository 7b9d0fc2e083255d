"""Session actors: one per session with work.

Takes the session's messages, starts its turns, and answers the waiters.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from .. import events
from ..actions import Park, next_action
from ..bus import INSIDE, InboundMessage, Kind, StopRequest
from ..commands import command_of, with_how_to_answer
from ..engine import Turn
from ..errors import EverloopError, OwnerMoved, StaleLease, StoreError
from ..log import Reason, TurnEnded, UserSaid, Written
from ..store.base import Busy, Claim, Incoming, Store, Waiting
from ..store.peers import WORK

log = logging.getLogger(__name__)

ABANDONED = "Abandoned: the server stopped before the answer, and its client is gone."
REPLACED = "(replaced by a newer message)"
SAID_INSTEAD = "The person wrote something else instead of allowing it."
STOP_SECONDS = 10.0  # how long to wait for another process to stop a turn
WAITS = "I am still waiting for your answer: y, n or a (always). Your message is kept and handled right after that."

StopTarget = str | int | None  # the turn to stop, by its id or by the inbox row that opens it; None for any


class PendingStop(msgspec.Struct, frozen=True):
    """A stop that arrived before its turn existed."""

    reason: Reason
    text: str
    target: StopTarget = None


class Stopped(EverloopError):
    """The loop was stopped before there was an answer; the turn resumes at the next start."""

    def __init__(self) -> None:
        super().__init__("the loop was stopped; the turn is kept and continues at the next start")


class HandedOff(EverloopError):
    """The turn is entirely on disk and handed off to another process."""


# ---------------------------------------------------------------------------------------------- who waits for answers


class Submission(msgspec.Struct):
    """A message on its way to a turn, and the waiter for its answer."""

    message: InboundMessage
    kind: Kind
    answer: asyncio.Future[str]
    show: events.Show | None = None  # receives the turn's events, if the turn starts here for this message
    on_elsewhere: Callable[[int], None] | None = None  # called with the inbox row if the turn does not start here now
    withdrawn: str | None = None  # why its turn must end as soon as it starts: its client has disconnected

    @property
    def place(self) -> tuple[str, str]:
        """Return the owner and key of its session."""
        return self.message.owner, self.message.session_key

    def follow_elsewhere(self, row: int) -> None:
        """Switch the waiter to the turn of this inbox row, which runs or ran elsewhere, and show nothing more.

        A waiter that has left follows nothing: it would never unsubscribe.
        """
        on_elsewhere, self.on_elsewhere = self.on_elsewhere, None
        if on_elsewhere is not None:
            self.show = None
            if not self.answer.done():
                on_elsewhere(row)


class Waiters:
    """Submissions whose answers are awaited in this process, by inbox row and by session."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[int, list[Submission]] = {}
        self._sessions: dict[tuple[str, str], set[int]] = {}

    def add(self, row: int, submission: Submission) -> None:
        self._rows.setdefault(row, []).append(submission)
        self._sessions.setdefault(submission.place, set()).add(row)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[Submission]:
        return (submission for submissions in self._rows.values() for submission in submissions)

    def of(self, rows: Iterable[int]) -> list[Submission]:
        """Return the submissions that wait for the answers to these rows."""
        return [submission for row in rows for submission in self._rows.get(row, ())]

    def take(self, row: int) -> list[Submission]:
        """Remove and return the submissions that wait for the answer to this row."""
        submissions = self._rows.pop(row, [])
        for submission in submissions:
            rows = self._sessions.get(submission.place, set())
            rows.discard(row)
            if not rows:
                self._sessions.pop(submission.place, None)
        return submissions

    def in_session(self, owner: str, key: str) -> list[tuple[int, Submission]]:
        """Return the awaited rows of a session."""
        rows = sorted(self._sessions.get((owner, key), ()))
        return [(row, submission) for row in rows for submission in self._rows[row]]

    def outside(self, sessions: Container[tuple[str, str]]) -> list[int]:
        """Return the awaited rows that belong to none of these sessions."""
        return [row for place, rows in self._sessions.items() if place not in sessions for row in rows]

    async def settle(self, row: int) -> None:
        """Deliver the answer, or the question, of a turn that ran elsewhere or earlier to its waiters."""
        found = await self._store.incoming(row)
        text: str | None = "" if found.done else None
        if found.first_seq is not None and (logged := await self._store.read_turn(found.session, found.first_seq)):
            entries = [one.entry for one in logged]
            if isinstance(last := entries[-1], TurnEnded):
                text = last.text
            elif isinstance(action := next_action(entries), Park):
                text = with_how_to_answer(action.question)
        if text is not None:
            answer(self.take(row), text)

    def fail_all(self, error: Exception) -> None:
        fail(self, error)
        self._rows.clear()
        self._sessions.clear()


def answer(submissions: Iterable[Submission], text: str) -> None:
    """Deliver the answer to the waiters."""
    for submission in submissions:
        if not submission.answer.done():
            submission.answer.set_result(text)


def fail(submissions: Iterable[Submission], error: Exception) -> None:
    """Deliver an error to the waiters."""
    if not isinstance(error, Stopped):
        log.error("%s", error)
    for submission in submissions:
        if not submission.answer.done():
            submission.answer.set_exception(error)


# ---------------------------------------------------------------------------------------------- the worker's sessions


class Host(Protocol):
    """What a worker's sessions need from their agent."""

    @property
    def worker(self) -> str:
        """The worker id under which sessions are leased."""
        ...

    async def run_claim(self, claim: Claim, session: Session) -> str:
        """Run a claimed turn to its end and return the answer; set `session.again` if the session has more to do."""
        ...

    def system_prompt(self) -> str:
        """Return the system prompt. Called in a thread."""
        ...

    def on_held(self, worker: str, awaited: bool) -> None:
        """Another worker holds a session that was wanted here; answers from it may be awaited here."""
        ...

    def on_handoff(self, session: int | None) -> None:
        """A session, or an unknown one, has work for other processes."""
        ...

    def on_unclaimed_answer(self, row: int) -> None:
        """An inbox row was answered that nothing here awaits."""
        ...

    def on_message_behind_question(self, message: InboundMessage) -> None:
        """A message must wait until a person answers the question of a parked turn."""
        ...


class Worker(msgspec.Struct):
    """State shared by the sessions of one worker."""

    store: Store
    host: Host
    waiters: Waiters
    busy: str  # what to do with a message that arrives during a turn: queue, steer or interrupt
    runs: bool  # turns run here; otherwise everything is handed over to other processes
    kick: Callable[[str, str], None]  # check the inbox of a session
    retry: Callable[[str, str], None]  # check again after a failure, with a delay
    only_awaited: bool = False  # start no turn, except a sub-agent's, that nothing here waits for

    def leaves(self, owner: str, key: str) -> bool:
        """Return whether what is in the inbox of a session is left to other processes."""
        is_subagent = key.partition(":")[0] in INSIDE
        return self.only_awaited and not is_subagent and not self.waiters.in_session(owner, key)

    async def hand_over(self, submission: Submission) -> None:
        """Put a message into the inbox for a turn that another process runs."""
        message = submission.message
        # such a request is of no use once this process is gone
        if message.request is not None and not message.request.kept:
            message = replace(message, request=msgspec.structs.replace(message.request, via=self.host.worker))
        try:
            row = await self.store.accept(message, submission.kind)
        except Exception as error:  # whatever the error, the waiter must be told
            fail([submission], error)
            return
        self.waiters.add(row.id, submission)
        submission.follow_elsewhere(row.id)
        if row.done:
            await self.waiters.settle(row.id)
        else:
            self.host.on_handoff(row.session)

    async def stop_elsewhere(
        self, owner: str, key: str, target: StopTarget = None, *, wait: bool = False, chat_told: bool = False
    ) -> None:
        """Ask the process that runs the session's turn to stop it, if it is the target.

        With `wait`, wait a while for the reply.
        """
        # Not through the session's own channel, where it would count as one of its messages.
        stop = InboundMessage("system", "agent", key, "/stop", owner=owner, session=key, reply=False)
        stop.cause = StopRequest(target, chat_told)
        stop.id = f"stop:{key}:{secrets.token_hex(4)}"
        row = await self.store.accept(stop, "urgent")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if wait:
            self.waiters.add(row.id, Submission(stop, "urgent", answer))
        await self.store.wake(WORK, [row.session])
        if wait:
            await asyncio.wait([answer], timeout=STOP_SECONDS)
        answer.cancel()

    async def release(self, release: Awaitable[None]) -> None:
        try:
            await release
        except StoreError as error:  # the lease ends with this process
            log.warning("%s", error)


class TurnState(msgspec.Struct):
    """What a session knows of its running or starting turn."""

    turn: Turn | None = None  # once it is assembled
    rows: Sequence[int] = ()  # inbox rows that opened it
    message: str | None = None  # id of the message that opened it
    server: str = ""  # the worker that holds the connection of its client; if that dies, the turn ends
    watchers: list[events.Show] = []
    steering: list[tuple[int, UserSaid]] = []  # inbox rows that it takes in at its next round
    taken: set[int] = set()  # inbox rows that it has taken in
    pending_stop: PendingStop | None = None
    chat_told: bool = False  # it sends nothing, because the reply to the command that stopped it appears in its chat


class Session:
    """A session that this process works on: its incoming messages, and its running turn."""

    def __init__(self, owner: str, key: str, worker: Worker) -> None:
        self.owner = owner
        self.key = key
        self.fresh: deque[Submission] = deque()  # submitted, not on disk yet
        self.current: Submission | None = None  # currently being written to disk
        self.behind: dict[int, Kind] = {}  # inbox rows that wait for the running turn to end
        self.state = TurnState()
        self.system: Written[str] | None = None  # the system prompt of the turn that is being started
        self.command: asyncio.Future[Any] | None = None  # a running command that can be stopped
        self.running = False
        self.changes = 0  # transitions of `running`: what was read from the inbox before one may be stale after it
        self.leaving = False  # another process is to resume the turn
        self.again = False  # there may be more in the inbox
        self.task: asyncio.Task[None] | None = None
        self._worker = worker
        self._store = worker.store
        self._host = worker.host
        self._waiters = worker.waiters

    @property
    def worker(self) -> str:
        """The worker id under which the session is leased."""
        return self._host.worker

    # ------------------------------------------------------------------------------------------ the turn that runs

    def stop(self, reason: Reason, text: str, target: StopTarget = None) -> None:
        """Stop the running or starting turn, if it is the target."""
        if self.state.turn is not None:
            if target in (None, self.state.turn.id, *self.state.rows):
                self.state.turn.stop(reason, text)
        elif self.command is not None:
            self.command.cancel()
        else:
            self.state.pending_stop = PendingStop(reason, text, target)

    def leave(self) -> None:
        """Hand off the running or starting turn at its next step."""
        self.leaving = True
        if self.state.turn is not None:
            self.state.turn.leave()

    def start_turn(self, turn: Turn) -> None:
        """Set the running turn, and apply stops and handoffs requested before it existed."""
        self.state.turn = turn
        if (stop := self.state.pending_stop) is not None:
            turn.stop(stop.reason, stop.text)
        if self.leaving:
            turn.leave()

    def steered(self) -> tuple[list[int], list[UserSaid]]:
        """Take the messages for the running turn: their inbox rows and entries."""
        steering, self.state.steering = self.state.steering, []
        rows = [row for row, _ in steering]
        self.state.taken.update(rows)
        return rows, [said for _, said in steering]

    def _begin(self) -> None:
        self.running = True
        self.changes += 1

    def _end(self) -> None:
        """End the turn; messages that arrived too late for it wait for the next one."""
        self.behind.update((row, "message") for row, _ in self.state.steering)
        self.running, self.state = False, TurnState()
        self.changes += 1

    # ------------------------------------------------------------------------------------------ the actor

    async def run(self) -> None:
        """Run the session's turns one after another until its inbox is empty."""
        try:
            while await self._run_next():
                pass
        except Exception as error:  # a bug of ours: the waiters must be told
            log.exception("session %s failed", self.key)
            waiting = self._waiters.in_session(self.owner, self.key)
            for row, _ in waiting:
                self._waiters.take(row)
            current = [self.current] if self.current else []
            fail([*current, *self.fresh, *(submission for _, submission in waiting)], error)

    async def _run_next(self) -> bool:
        """Run the next turn, if there is one. Return False if the session has nothing more to do here."""
        if not self._worker.runs:
            while self.fresh:
                self.current = self.fresh.popleft()
                await self._worker.hand_over(self.current)
            return False
        submission = self.current = self.fresh.popleft() if self.fresh else None
        self.again = False
        if submission is None and self._worker.leaves(self.owner, self.key):
            return False
        # read while the turn is being started: one wake-up serves both
        self.system = self._store.aside(self._host.system_prompt)
        try:
            claim = await self._claim(submission)
        except Busy as busy:
            await self._wait_for_holder(busy, submission)
            return bool(self.fresh) or self.again  # it may have been released since
        except Waiting as waiting:
            if submission is not None and waiting.accepted is not None:
                await self._wait_behind_question(submission, waiting.accepted)
            if self.state.pending_stop is not None and await self._store.decide(self.owner, self.key, None) is not None:
                self.again = True  # the turn to stop is the parked one
            return bool(self.fresh) or self.again  # the answer to the question may have just arrived
        except Exception as error:  # whatever the error, the waiter must be told
            fail([submission] if submission else [], error)
            # other messages may wait in the inbox
            if isinstance(error, StoreError) and not isinstance(error, OwnerMoved):
                self._worker.retry(self.owner, self.key)
            return bool(self.fresh)
        if claim is None:
            if submission is not None:  # its id is known: it was answered before
                row = await self._store.accept(submission.message, submission.kind)
                self._waiters.add(row.id, submission)
                submission.follow_elsewhere(row.id)
                await self._waiters.settle(row.id)
            return bool(self.fresh) or self.again
        self._begin()
        try:
            while self.fresh:
                self.current = self.fresh.popleft()
                await self.take(self.current)
            return await self._run_claim(claim)
        finally:
            self._end()

    async def _claim(self, submission: Submission | None) -> Claim | None:
        if submission is None:
            return await self._store.begin(self.owner, self.key, self._host.worker)
        message, kind = submission.message, submission.kind
        claim = await self._store.begin(self.owner, self.key, self._host.worker, message, kind)
        if claim is not None and claim.accepted is not None:
            self._waiters.add(claim.accepted, submission)
            if claim.resumed and claim.accepted in claim.inbox:  # the same message again: its turn was interrupted
                submission.follow_elsewhere(claim.accepted)
        return claim

    async def _wait_for_holder(self, busy: Busy, submission: Submission | None) -> None:
        """Wait for the worker that holds the session: it gives the answers."""
        if submission is not None and busy.accepted is not None:
            self._waiters.add(busy.accepted, submission)
        awaited = self._waiters.in_session(self.owner, self.key)
        for row, waiter in awaited:
            waiter.follow_elsewhere(row)
        self._host.on_held(busy.worker, bool(awaited))
        stop, self.state.pending_stop = self.state.pending_stop, None
        chat_told, self.state.chat_told = self.state.chat_told, False
        if stop is not None and stop.reason == "cancelled":
            try:
                await self._worker.stop_elsewhere(self.owner, self.key, stop.target, chat_told=chat_told)
            except StoreError as error:  # the turn continues there
                log.warning("%s", error)

    async def _wait_behind_question(self, submission: Submission, row: int) -> None:
        """Handle a message, already on disk, for a session whose turn waits for a person's decision.

        It is queued and the person is reminded; or it counts as a denial and is passed to the turn; or it ends the
        turn, as a command does.
        """
        busy = self._worker.busy
        ends = submission.kind == "command" and command_of(submission.message.content) == "new"
        if not ends and (busy == "queue" or submission.kind == "command"):
            answer([submission], WAITS)
            self._host.on_message_behind_question(submission.message)
            return
        self._waiters.add(row, submission)
        self.again = True
        if busy == "steer" and submission.kind == "message":
            await self._store.decide(self.owner, self.key, False, submission.message.sender_id, SAID_INSTEAD)
            self._place(Incoming(row, 0, submission.message, submission.kind))
        elif await self._store.decide(self.owner, self.key, None) is not None:
            self.state.pending_stop = PendingStop("replaced", REPLACED)

    async def _run_claim(self, claim: Claim) -> bool:
        waiting = self._waiters.of(claim.inbox)
        self.state.watchers += [submission.show for submission in waiting if submission.show is not None]
        for row in claim.inbox:
            self.behind.pop(row, None)
        self.state.message, self.state.rows = claim.message.id, claim.inbox
        stop = self.state.pending_stop
        if stop is not None and stop.target not in (None, claim.turn, *claim.inbox):  # the turn to stop has ended
            self.state.pending_stop, self.state.chat_told = None, False
        if self._worker.busy == "interrupt" and "message" in self.behind.values():
            self.stop("replaced", REPLACED)
        if waiting and (why := waiting[0].withdrawn) and all(submission.withdrawn for submission in waiting):
            self.stop("cancelled", why)
        try:
            text = await self._host.run_claim(claim, self)
        except (StaleLease, HandedOff) as error:  # the worker that now has it answers
            for row, submission in self._waiters.in_session(self.owner, self.key):
                submission.follow_elsewhere(row)
            if isinstance(error, HandedOff):
                await self._worker.release(self._store.release(claim))
                self._host.on_handoff(claim.session)
                return bool(self.fresh)
            log.warning("%s", error)
            return bool(self.fresh) or self.again  # the worker that took over may not know about later messages
        except StoreError as error:
            fail([submission for row in claim.inbox for submission in self._waiters.take(row)], error)
            await self._worker.release(self._store.release(claim))
            self._worker.retry(self.owner, self.key)
            return bool(self.fresh)
        # A client may ask several servers for the answer to its message.
        repeated = claim.message.request is not None and claim.message.request.kept
        for row in claim.inbox:
            submissions = self._waiters.take(row)
            if (repeated or not submissions) and not claim.message.reply:
                self._host.on_unclaimed_answer(row)
            answer(submissions, text)
        if self.again and not self.fresh and self._worker.leaves(self.owner, self.key):
            self._host.on_handoff(claim.session)
        return bool(self.fresh) or self.again

    # ------------------------------------------------------------------------------------------ messages meanwhile

    async def take(self, submission: Submission) -> None:
        """Take a message while a turn runs: write it to disk, then queue, steer or interrupt."""
        try:
            row = await self._store.accept(submission.message, submission.kind)
        except Exception as error:  # whatever it is, the waiter has to be told
            fail([submission], error)
            return
        known = row.turn is not None or row.id in self._waiters  # the same message again
        self._waiters.add(row.id, submission)
        if known or row.done:
            submission.follow_elsewhere(row.id)
        self.again = True
        if row.done:
            await self._waiters.settle(row.id)
        elif not self.running:  # the turn ended meanwhile
            self.behind[row.id] = submission.kind
            self._worker.kick(self.owner, self.key)
        elif not known:
            self._place(row)

    async def take_from_inbox(self) -> None:
        """Take messages that another process put into the inbox while a turn runs here."""
        changes, rows = -1, []
        # another turn may have taken messages that were read before it started
        while self.running and changes != self.changes:
            changes = self.changes
            rows = await self._store.waiting(self.owner, self.key)
        for row in rows:
            if self.running and row.id not in self._waiters:
                self._place(row)

    def _place(self, row: Incoming) -> None:
        """Decide what a message does to the running turn: steer it, replace it, or wait behind it."""
        if row.id in self.behind or row.id in self.state.taken or any(row.id == id for id, _ in self.state.steering):
            return  # already decided, while the inbox was being read again
        plain = row.kind == "message" and row.message.plain and row.message.request is None
        busy = row.message.busy or self._worker.busy
        if busy == "steer" and plain and not self.behind:
            self.state.steering.append((row.id, row.message.said()))
            return
        self.behind[row.id] = row.kind
        if busy == "interrupt" and row.kind == "message":
            self.stop("replaced", REPLACED)
