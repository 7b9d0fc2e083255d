"""`cron`: scheduled messages from the agent to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ..errors import EverloopError, StoreError
from ..threads import in_thread
from .base import Plan, Tool, ToolError
from .context import current_call

if TYPE_CHECKING:
    from ..bus import Deliver
    from ..cron.jobs import Job
    from ..cron.service import CronService

MIN_INTERVAL = 60  # seconds: each firing starts a turn, which costs tokens
MAX_SHOWN_MESSAGE = 200  # characters in the list of jobs

PARAMETERS = {
    "type": "object",
    "properties": {
        "action": {"type": "string", "enum": ["add", "list", "remove"]},
        "message": {
            "type": "string",
            "description": "add: what you are told when the time comes; it must make sense by itself.",
            "maxLength": 4000,
        },
        "at": {
            "type": "string",
            "description": 'add, once: a time like 2031-05-02T18:00, "tomorrow 9:00" or "in 20 minutes".',
        },
        "every": {"type": "string", "description": "add, again and again: a span of time like 10m, 1h30m or 2 days."},
        "cron": {
            "type": "string",
            "description": "add, by the calendar: minute, hour, day of month, month, day of week, like 0 8 * * 1-5.",
        },
        "tz": {
            "type": "string",
            "description": "add with at or cron: the IANA time zone, like Europe/Vienna; by default this machine's.",
        },
        "deliver": {
            "type": "string",
            "enum": ["answer", "text"],
            "description": "add: text sends the message itself, as a reminder to the person, without asking you.",
        },
        "id": {"type": "string", "description": "remove: the job's id, as list shows it."},
    },
    "required": ["action"],
}


class HasSchedule(Protocol):
    """The agent. Its service is made when it is first used, because it takes longer to import than this tool."""

    @property
    def cron_service(self) -> CronService: ...


class CronTool(Tool):
    """Adds jobs to the chat of the turn; lists and removes the jobs of its owner."""

    name = "cron"
    description = (
        "Schedule a message to yourself: when its time comes it begins a turn in this chat, and your answer is sent "
        "here. Give exactly one of at, every and cron; for a plain reminder also deliver=text. list shows what is "
        "scheduled, remove ends it."
    )
    parameters = PARAMETERS
    replay = "safe"  # the job's id derives from the call, so that a repeated call adds no second job
    parallel = False

    def __init__(self, agent: HasSchedule) -> None:
        self._agent = agent

    def plan(self, arguments: dict[str, Any]) -> Plan:
        if arguments["action"] != "add":
            return Plan()
        when = [f"{name} {arguments[name]}" for name in ("at", "every", "cron", "tz") if arguments.get(name)]
        # It acts later, without a person watching: after something untrusted was read, a person is asked.
        shown = ", ".join(when).replace("at in ", "in ", 1)  # such as "at in 20 minutes"
        return Plan(shown=f"schedule, {shown}:\n{arguments.get('message', '')}", steers="what is scheduled")

    async def execute(
        self,
        action: str,
        message: str = "",
        at: str = "",
        every: str = "",
        cron: str = "",
        tz: str = "",
        id: str = "",
        deliver: Deliver = "answer",
    ) -> str:
        try:
            match action:
                case "add":
                    return await self._add(message, {"at": at, "every": every, "cron": cron, "tz": tz}, deliver)
                case "list":
                    return await self._list()
                case _:
                    return await self._remove(id)
        except StoreError:
            raise
        except EverloopError as error:
            raise ToolError(f"{error}.") from None

    async def _add(self, message: str, when: dict[str, Any], deliver: Deliver) -> str:
        call = current_call()
        if call.scheduled and not call.may_schedule:
            raise ToolError(
                "This turn was started by scheduled work, which may not schedule more.",
                "Say in your answer what should be scheduled, and a person can ask for it.",
            )
        job = await self._agent.cron_service.add(
            message,
            **when,
            channel=call.channel,
            chat_id=call.chat_id,
            session=call.session,
            owner=call.owner,
            key=call.idempotency_key,
            by=call.sender,
            shortest=MIN_INTERVAL,
            deliver=deliver,
        )
        return await in_thread(lambda: f"Added job {job.id}: {job.words}. It comes first on {job.next_words}.")

    async def _list(self) -> str:
        jobs = await self._agent.cron_service.list(current_call().owner)
        return await in_thread(_listed, jobs) if jobs else "Nothing is scheduled."

    async def _remove(self, id: str) -> str:
        if not await self._agent.cron_service.remove(id, current_call().owner):
            raise ToolError(f'There is no job "{id[:60]}": cron(action="list") shows the ids.')
        return f"Removed job {id}."


def _listed(jobs: list[Job]) -> str:
    lines = []
    for job in jobs:
        message = " ".join(job.message.split())
        if len(message) > MAX_SHOWN_MESSAGE:
            message = f"{message[: MAX_SHOWN_MESSAGE - 1]}…"
        lines.append(f"{job.id}: {job.words}; next on {job.next_words}; to {job.session_key}: {message}")
    return "\n".join(lines)
