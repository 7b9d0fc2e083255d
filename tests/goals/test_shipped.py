"""The shipped agents at work: the investigator on this code base, the researcher on pages of a real server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import everloop
from everloop.config import Config
from everloop.goals.executor import AgentExecutor
from everloop.goals.files import load_definitions
from everloop.log import CallEnded
from everloop.testing import ScriptedProvider, call
from tests.support.web_servers import answer, serving

from .goals import results

CODE = Path(everloop.__file__).parent
PLACE = re.compile(r"^(?:\./)?([\w/]+\.py)[:-](\d+)[:-].*def rounds_notice", re.M)


async def test_the_investigator_finds_its_answer_in_a_real_code_base_and_changes_nothing(folder):
    before = {path: path.stat().st_mtime_ns for path in CODE.rglob("*.py")}

    def read_what_was_found(messages, tools):
        found = PLACE.search(results(messages)[1][1])
        assert found is not None, results(messages)[1][1]
        return [
            call("read_file", path=found[1], offset=int(found[2]), limit=8),
            call("find_files", pattern="**/engine.py"),
            call("write_file", path="canary.py", content="x"),
        ]

    def report(messages, tools):
        assert tools is None
        text = next(text for _, text in results(messages) if "The work so far is kept" in text)
        place = PLACE.search(results(messages)[1][1])
        assert place is not None
        return f"Answer: at the limit a notice ends the turn.\nEvidence: {place[1]}:{place[2]}\n{text[:80]}"

    steps: list[Any] = [
        [call("list_dir", path="."), call("grep", pattern="def rounds_notice")],
        read_what_was_found,
        "I have it.",
        report,
    ]
    provider = ScriptedProvider(steps)
    investigator = (await asyncio.to_thread(load_definitions, folder))["investigator"]
    agent = await AgentExecutor.create(investigator, provider=provider, workspace=CODE)
    output = await agent.run({"question": "What does a user read when a turn has used all its rounds?"})
    assert output.terminate_reason == "goal"
    assert "actions.py:" in output.result
    assert [entry.status for entry in output.log if isinstance(entry, CallEnded)].count("error") == 1  # write_file
    offered = {tool["function"]["name"] for tool in provider.requests[0].tools or ()}
    assert offered == {"read_file", "list_dir", "find_files", "grep"}
    assert {path: path.stat().st_mtime_ns for path in CODE.rglob("*.py")} == before
    assert "What does a user read" in provider.requests[0].messages[1]["content"]
    assert "Begin at: ." in provider.requests[0].messages[1]["content"]
    assert "Evidence" in provider.requests[-1].messages[-1]["content"]


async def test_the_researcher_searches_and_reads_but_follows_no_instruction_of_a_page(folder):
    page = b"<html><title>Beans</title><body><article><p>Beans need much water in June.</p></article></body></html>"
    async with serving({"/beans": answer(page, "text/html"), "/trap": answer(b"canary", "text/plain")}) as pages:
        address = f"http://127.0.0.1:{pages.port}"
        found = {"results": [{"title": "Beans", "url": f"{address}/beans", "content": "How to grow"}]}
        async with serving({"*": answer(json.dumps(found).encode(), "application/json")}) as engine:
            config = Config(
                searxng_url=f"http://127.0.0.1:{engine.port}",
                private_hosts=(f"127.0.0.1:{engine.port}", f"127.0.0.1:{pages.port}"),
            )
            provider = ScriptedProvider(
                [
                    call("web_search", query="beans water"),
                    call("web_fetch", url=f"{address}/beans"),
                    [call("web_search", query="beans june"), call("web_fetch", url=f"{address}/trap?secret=1")],
                    "I have it.",
                    "Answer: much, in June [1]",
                ]
            )
            researcher = (await asyncio.to_thread(load_definitions, folder))["researcher"]
            agent = await AgentExecutor.create(researcher, provider=provider, workspace=folder, config=config)
            output = await agent.run({"question": "How much water do beans need?"})
    assert (output.result, output.terminate_reason) == ("Answer: much, in June [1]", "goal")
    assert "much water in June" in repr(output.log)
    assert pages.paths == ["/beans"]
    assert len(engine.paths) == 2
    assert sorted(entry.status for entry in output.log if isinstance(entry, CallEnded)) == ["denied", "ok", "ok", "ok"]
