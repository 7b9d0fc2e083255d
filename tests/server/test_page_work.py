"""Scheduled jobs and sub-agents over the page's API."""

from __future__ import annotations

import asyncio
from typing import Any

from everloop.bus import EXECUTOR, InboundMessage, SubagentTask

from .feeds import PageClient, is_over, page_client
from .serving import Serving, call


async def added(server: Serving, owner: str = "ada", **when: Any) -> str:
    service = (await server.owners.agent(owner)).cron_service
    job = await service.add(
        "Water the beans", **(when or {"every": "1h"}), channel="web", chat_id="web:1", session="web:1", owner=owner
    )
    return job.id


async def jobs(client: PageClient) -> list[dict[str, Any]]:
    status, body = await client.api("GET", "jobs")
    assert status == 200
    return list(body["jobs"])


async def act(client: PageClient, id: str, action: str) -> int:
    return (await client.api("POST", f"jobs/{id}", {"action": action}))[0]


async def test_a_job_is_paused_resumed_run_and_removed(server: Serving, ada: PageClient):
    id = await added(server)
    (job,) = await jobs(ada)
    assert (job["id"], job["message"], job["paused"], job["last"]) == (id, "Water the beans", False, None)
    assert job["next_runs"][1] - job["next_runs"][0] == 3600
    assert len(job["next_runs"]) == 3
    assert await act(ada, id, "pause") == 200
    assert (await jobs(ada))[0]["paused"] is True
    assert (await jobs(ada))[0]["next_runs"] == []
    assert await act(ada, id, "resume") == 200
    assert len((await jobs(ada))[0]["next_runs"]) == 3
    server.fake.reply("The beans are wet.")
    feed = await ada.feed("web:1")
    assert await act(ada, id, "run") == 200
    await feed.read(is_over)
    feed.close()
    last = (await jobs(ada))[0]["last"]
    assert (last["reason"], last["text"]) == ("answer", "The beans are wet.")
    assert await act(ada, id, "remove") == 200
    assert await jobs(ada) == []
    assert await act(ada, id, "run") == 404
    assert await act(ada, id, "dance") == 400


async def test_a_job_belongs_to_its_owner(server: Serving, ada: PageClient):
    id = await added(server)
    eve = await page_client(server, "eve")
    assert await jobs(eve) == []
    for action in ("pause", "run", "remove"):
        assert await act(eve, id, action) == 404
    assert [one["id"] for one in await jobs(ada)] == [id]
    assert server.fake.requests == []


async def test_sub_agents_are_shown_with_the_sessions_that_started_them(server: Serving, ada: PageClient):
    server.fake.calls(call("spawn", task="Count the beans"))
    server.fake.reply("started")
    server.fake.reply("There are 12 beans.")
    server.fake.reply("reported")
    feed = await ada.feed("web:1")
    await ada.say("web:1", "count them")
    await feed.read(is_over)
    feed.close()
    async with asyncio.timeout(30):
        while True:
            status, body = await ada.api("GET", "agents")
            assert status == 200
            if body["agents"] and body["agents"][0]["state"] == "idle":
                break
            await asyncio.sleep(0.02)
    (agent,) = body["agents"]
    assert (agent["parent"], agent["label"], agent["task"]) == ("web:1", "Count the beans", "Count the beans")
    assert agent["key"].startswith("sub:")
    eve = await page_client(server, "eve")
    assert (await eve.api("GET", "agents"))[1] == {"agents": []}


async def test_a_definitions_run_is_shown_with_its_goal(server: Serving, ada: PageClient):
    task = SubagentTask(id="r1", label="count", root="r1", report=False, definition={"name": "count"})
    run = InboundMessage(
        EXECUTOR, "user", "count", "Count the beans", id="spawn:r1", owner="ada", session="executor:count/r1",
        reply=False, attended=False, cause=task,
    )  # fmt: skip
    await server.store.accept(run)
    (found,) = (await ada.api("GET", "agents"))[1]["agents"]
    told = {name: found[name] for name in ("key", "parent", "label", "task", "state", "definition")}
    assert told == {
        "key": "executor:count/r1",
        "parent": "",
        "label": "count",
        "task": "Count the beans",
        "state": "waiting",
        "definition": "count",
    }
