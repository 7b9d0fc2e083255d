"""Memory: the items of the file that is part of every prompt, and the search over past conversations."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop import AgentLoop, MessageBus
from everloop.bus import InboundMessage
from everloop.log import CallEnded, ModelAnswered, Noted, TurnEnded
from everloop.store.base import Found
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from everloop.tools import memory
from everloop.tools.base import ToolError
from everloop.tools.context import current
from everloop.tools.memory import added, memory_tools, replaced
from everloop.tools.registry import ToolRegistry

from ..support.desk import Desk

TODAY = "2026-11-15"


@pytest.fixture(autouse=True)
def _day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the same date throughout, so that no test fails at midnight."""
    monkeypatch.setattr(memory, "_today", lambda: TODAY)


async def nothing(owner: str, query: str, limit: int) -> list[Found]:
    return []


@pytest.fixture
def desk(folder: Path) -> Desk:
    """The memory tools with a workspace."""
    desk = Desk(folder)
    desk.registry = ToolRegistry([*memory_tools(nothing, 2_000), *desk.registry], timeout=30)
    return desk


@pytest.fixture
def file(folder: Path) -> Path:
    return folder / "memory" / "MEMORY.md"


def points(file: Path) -> list[str]:
    return re.findall(r"^- \d{4}-\d\d-\d\d: (.*)$", file.read_text(), re.M)


# ---------------------------------------------------------------------------------------------- remember


@pytest.mark.parametrize("restricted", [True, False])
async def test_an_item_is_added_with_its_date_and_the_file_is_created(desk, file, restricted):
    desk = desk.with_context(restricted=restricted)
    await desk("remember", text="Ann likes tea.")
    await desk("remember", text="The cat is called Mo.")
    assert file.read_text() == f"- {TODAY}: Ann likes tea.\n- {TODAY}: The cat is called Mo.\n"
    assert os.listdir(file.parent) == ["MEMORY.md"]


async def test_a_multiline_text_becomes_one_item(desk, file):
    await desk("remember", text="- one\n\n---\r\n# two\u2028three\x85\tfour \ud800")
    assert file.read_text() == f"- {TODAY}: one --- # two three four ?\n"


async def test_a_duplicate_is_not_added_whatever_its_date(desk, file):
    file.parent.mkdir()
    file.write_text("# Mine\n\n* tea\n  - 2020-01-02: coffee\nmilk\n")
    before = file.read_text()
    for text in ("tea", " coffee ", "- tea", "milk"):
        await desk("remember", text=text)
    assert file.read_text() == before
    for _ in range(2):
        await desk("remember", text="te")
    assert file.read_text() == f"{before}- {TODAY}: te\n"


async def test_an_item_replaces_another(desk, file):
    file.parent.mkdir()
    file.write_text("# Mine\n\n- 2020-01-02: Ann likes tea.\n- 2020-01-03: Bo has 2 dogs\n  - x\n")
    for _ in range(2):  # and again, as after a crash
        await desk("remember", text="Ann likes\nmilk.", instead_of="Ann likes tea.")
        await desk("remember", text="3 dogs", instead_of="2 dogs")
        await desk("remember", text="xx", instead_of="x")
        await desk("remember", text="Mine, too", instead_of="Mine")
    assert file.read_text() == (
        f"# Mine, too\n\n- {TODAY}: Ann likes milk.\n- 2020-01-03: Bo has 3 dogs\n  - {TODAY}: xx\n"
    )


@pytest.mark.parametrize("old", ["b", "2020-01-01: b", "- 2020-01-01: b", "\n- 2020-01-01: b\n", "- 2020-01-01: b\r\n"])
async def test_an_item_is_removed_with_its_line(desk, file, old):
    file.parent.mkdir()
    for end in ("- 2020-01-01: c\n", ""):
        file.write_text(f"- 2020-01-01: a\n- 2020-01-01: b\n{end}")
        await desk("remember", text="", instead_of=old)
        assert file.read_text() == f"- 2020-01-01: a\n{end}"


async def test_several_items_become_one_and_a_part_of_one_is_removed(desk, file):
    file.parent.mkdir()
    file.write_text("- a\n- b and c\n- d\n")
    await desk("remember", text="a, b", instead_of="- a\n- b and c")
    assert file.read_text() == f"- {TODAY}: a, b\n- d\n"
    await desk("remember", text="", instead_of=", b")
    assert file.read_text() == f"- {TODAY}: a\n- d\n"


def _written(file: Path) -> tuple[int, int, int]:
    """Return the file's inode, size and modification time, which reading does not change."""
    info = file.stat()
    return info.st_ino, info.st_size, info.st_mtime_ns


async def test_missing_or_ambiguous_text_is_not_replaced(desk, file):
    file.parent.mkdir()
    file.write_text("- tea one\n- tea two\n- aaa\n")
    before = _written(file)
    assert "more than once" in await desk.fails("remember", text="milk", instead_of="tea")
    for text, old in (
        ("milk", "tea"),
        ("", "tea"),
        ("milk", "coffee"),
        ("", "coffee"),
        ("b", "aa"),
        ("milk", "Tea one"),
    ):
        await desk.fails("remember", text=text, instead_of=old)
    for text in ("", " \n"):
        await desk.fails("remember", text=text)
        await desk.fails("remember", text=text, instead_of="")
    assert _written(file) == before


async def test_the_file_keeps_its_mode_byte_order_mark_endings_and_odd_bytes(desk, file):
    file.parent.mkdir()
    file.write_bytes(b"\xef\xbb\xbf# caf\xe9\r\n\r\n- one\r\n- two\n- three")
    file.chmod(0o640)
    await desk("remember", text="four")
    await desk("remember", text="1", instead_of="one")
    await desk("remember", text="", instead_of="two")
    day = TODAY.encode()
    assert file.read_bytes() == b"\xef\xbb\xbf# caf\xe9\r\n\r\n- %b: 1\r\n- three\r\n- %b: four\r\n" % (day, day)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(file.parent) == ["MEMORY.md"]
    file.write_bytes("- é\r\n".encode("utf-16"))
    await desk("remember", text="ß")
    assert file.read_bytes() == f"- é\r\n- {TODAY}: ß\r\n".encode("utf-16")


async def test_a_full_file_accepts_no_additions_but_can_be_shortened(desk, file):
    file.parent.mkdir()
    file.write_text("- " + "x" * 1_900 + "\n- tea\n")
    await desk("remember", text="y" * 50)
    before = file.read_text()
    assert f"{len(before)} of at most 2000" in await desk.fails("remember", text="z" * 50)
    await desk.fails("remember", text="z" * 50, instead_of="tea")
    assert file.read_text() == before
    file.write_text("- " + "x" * 3_000 + "\n- 2020-01-01: tea and milk\n")
    await desk.fails("remember", text="tea, coffee, milk and water", instead_of="tea and milk")
    await desk("remember", text="t", instead_of="tea and milk")
    await desk("remember", text="", instead_of="x" * 3_000)
    await desk("remember", text="room")
    assert file.read_text() == f"- {TODAY}: t\n- {TODAY}: room\n"


async def test_a_file_that_is_not_text_is_left_alone(desk, file, folder, monkeypatch):
    file.mkdir(parents=True)
    await desk.fails("remember", text="x")
    file.rmdir()
    os.mkfifo(file)
    await desk.fails("remember", text="x")
    file.unlink()
    for data in (b"\0x", b"\xff\xfex"):
        file.write_bytes(data)
        await desk.fails("remember", text="x")
        assert file.read_bytes() == data
    file.write_text("- long\n")
    monkeypatch.setattr(memory, "MAX_BYTES", 5)
    await desk.fails("remember", text="x")
    assert file.read_text() == "- long\n"
    file.chmod(0o400)
    monkeypatch.setattr(memory, "MAX_BYTES", 50)
    if os.geteuid():
        await desk.fails("remember", text="x")
    file.unlink()
    file.parent.rmdir()
    (folder / "memory").write_text("a file")
    await desk.fails("remember", text="x")
    assert (folder / "memory").read_text() == "a file"


async def test_a_link_is_followed_inside_the_workspace_and_not_outside(desk, folder, tmp_path):
    secret = tmp_path / "outside.md"
    secret.write_text("mine\n")
    (folder / "memory").mkdir()
    (folder / "memory" / "MEMORY.md").symlink_to(secret)
    await desk.fails("remember", text="x")
    await desk.fails("remember", text="x", instead_of="mine")
    (folder / "memory" / "MEMORY.md").unlink()
    (folder / "memory").rmdir()
    (tmp_path / "outside").mkdir()
    (folder / "memory").symlink_to(tmp_path / "outside")
    await desk.fails("remember", text="x")
    assert secret.read_text() == "mine\n"
    assert os.listdir(tmp_path / "outside") == []
    (folder / "memory").unlink()
    (folder / "notes").mkdir()
    (folder / "memory").symlink_to("notes")
    await desk("remember", text="x")
    assert points(folder / "notes" / "MEMORY.md") == ["x"]


async def test_the_guard_of_the_policy_is_asked_about_the_real_file(desk, folder, file):
    file.parent.mkdir()
    (folder / "private.md").write_text("mine\n")
    file.symlink_to("../private.md")
    seen = []

    def guard(real: str, writing: bool) -> None:
        seen.append((real, writing))
        if writing:
            raise ToolError("no")

    await desk.with_context(guard=guard).fails("remember", text="x")
    assert (str(folder / "private.md"), True) in seen
    assert (folder / "private.md").read_text() == "mine\n"


async def test_a_file_changed_meanwhile_by_another_process_is_not_overwritten(desk, file):
    file.parent.mkdir()
    file.write_text("- one\n")

    def change(real: str, writing: bool) -> None:  # called while the write is being prepared
        if writing:
            file.write_text("- one\n- two\n")

    await desk.with_context(guard=change).fails("remember", text="three")
    assert file.read_text() == "- one\n- two\n"


async def test_waiting_for_a_folder_lock_times_out(desk, file, monkeypatch):
    monkeypatch.setattr(memory, "LOCK_SECONDS", 0.1)
    file.parent.mkdir()
    held = os.open(file.parent, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    async with asyncio.timeout(30):
        await desk.fails("remember", text="x")
    assert not file.exists()
    os.close(held)
    await desk("remember", text="x")
    assert points(file) == ["x"]


PROGRAM = """
import asyncio, sys
from pathlib import Path
from everloop.log import Call
from everloop.tools.context import CallContext
from everloop.tools.memory import RememberTool
from everloop.tools.registry import ToolRegistry

async def main(folder, name):
    registry = ToolRegistry([RememberTool()], timeout=50)
    context = CallContext("me", "s", "t", "c", "cli", "d", Path(folder), True, "k", lambda text: None)
    for n in range(15):
        texts = [f"{name}-{n}-{part}" for part in "ab"]
        calls = [Call("c", "remember", {"text": text}) for text in texts]
        results = await asyncio.gather(*(registry.run(call, context) for call in calls))
        assert [one.status for one in results] == ["ok", "ok"], results
        old = {"text": texts[0] + "!", "instead_of": texts[0]}
        result = await registry.run(Call("c", "remember", old), context)
        assert result.status == "ok", result

asyncio.run(main(*sys.argv[1:]))
"""


async def test_concurrent_processes_that_remember_lose_nothing(folder, file):
    names = ["ann", "bo", "cy", "di"]
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, str(folder), name, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for name in names
    ]
    for process in processes:
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
    wanted = [f"{name}-{n}-{part}" for name in names for n in range(15) for part in ("a!", "b")]
    assert sorted(points(file)) == sorted(wanted)
    assert os.listdir(file.parent) == ["MEMORY.md"]


def test_a_call_declares_the_file_and_text_it_would_write(desk, folder):
    tool = desk.registry.get("remember")
    assert tool is not None
    token = current.set(desk.context)
    plan = tool.plan({"text": "one\ntwo", "instead_of": "three"})
    current.reset(token)
    assert (plan.paths, plan.writes, plan.sends) == ((str(folder / "memory" / "MEMORY.md"),), True, False)
    assert "one two" in plan.shown
    assert "three" in plan.shown


LINES = st.lists(st.text(st.sampled_from("ab- :*\t2é"), max_size=8), max_size=5).map("\n".join)
WORD = st.text(st.sampled_from("ab-: é"), min_size=1, max_size=6).map(str.strip).filter(bool)


@given(content=LINES, text=WORD)
def test_adding_changes_no_existing_item_and_is_idempotent(content, text):
    after = added(content, text)
    assert after.startswith(content)
    assert added(after, text) == after


@given(content=LINES, old=WORD, text=WORD | st.just(""))
def test_replacing_is_idempotent(content, old, text):
    try:
        after = replaced(content, old, text)
    except ToolError:
        return
    assert text in after
    assert after != content or old in text or old not in content
    try:
        assert replaced(after, old, text) == after
    except ToolError:
        assert not text  # removed text is no longer there to remove
    assert after.count("\n") <= content.count("\n")


@pytest.mark.parametrize(
    ("content", "old", "text"), [("- aabb", "ab", "a"), ("- aabb", "ab", ""), ("xabyabx", "abyab", "ab")]
)
def test_a_replacement_that_is_not_idempotent_is_refused(content, old, text):
    try:
        after = replaced(content, old, text)
    except ToolError:
        return
    assert replaced(after, old, text) == after


# ---------------------------------------------------------------------------------------------- memory_search


@pytest.fixture
async def store(tmp_path) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(tmp_path / "store.db")
    yield store
    await store.close()


@pytest.fixture
def library(folder: Path, store: SQLiteStore) -> Desk:
    """The memory tools with a store."""
    desk = Desk(folder)
    desk.registry = ToolRegistry(memory_tools(store.search, 2_000), timeout=30)
    return desk


async def keep(store: SQLiteStore, *texts: str, key: str = "test:1", owner: str = "me", role: str = "user") -> None:
    await store.note(owner, key, [Noted({"role": role, "content": text}) for text in texts])


async def test_matches_are_listed_with_session_time_and_speaker(library, store):
    await keep(store, "I keep the beans in the blue box.")
    await keep(store, "The beans are boiled.", key="mail:ann", role="assistant")
    lines = (await library("memory_search", query="beans box")).splitlines()
    minute = time.strftime("%Y-%m-%dT%H:%M")
    assert len(lines) == 2
    assert re.fullmatch(r"1\. [\dT:-]{16}, test:1, user: I keep the beans in the blue box\.", lines[0])
    assert re.fullmatch(r"2\. [\dT:-]{16}, mail:ann, assistant: The beans are boiled\.", lines[1])
    assert lines[0][3:19] <= minute


async def test_nothing_found_says_what_to_try(library, store):
    await keep(store, "beans")
    for query in ("peas", "", '"*'):
        said = await library.run("memory_search", query=query)
        assert (said.status, said.untrusted) == ("ok", False)
        assert "words" in said.content


async def test_the_number_of_results_is_limited_as_requested(library, store):
    await keep(store, *(f"beans {n}" for n in range(60)))
    for count, wanted in ((None, 8), (1, 1), (0, 1), (-5, 1), (3, 3), (1_000, 20)):
        arguments = {} if count is None else {"count": count}
        assert len((await library("memory_search", query="beans", **arguments)).splitlines()) == wanted


async def test_the_current_question_is_not_among_the_results(library, store):
    message = InboundMessage("test", "user", "1", "what about beans").addressed()
    claim = await store.begin("me", "test:1", "worker", message)
    assert claim is not None
    await store.append(claim, [ModelAnswered("I look for beans " * 5) for _ in range(40)])
    running = library.with_context(turn=claim.turn)
    assert "Nothing found" in await running("memory_search", query="beans")
    await keep(store, "beans of old", key="test:2")
    assert (await running("memory_search", query="beans")).count("beans") == 1
    await store.finish(claim, [TurnEnded("answer")])
    assert len((await library("memory_search", query="beans")).splitlines()) == 8


async def test_a_result_that_contains_untrusted_text_is_untrusted(library, store):
    page = CallEnded("a", "web_fetch", "page", untrusted=True)
    await store.note("me", "test:1", [ModelAnswered("peas peas"), page, ModelAnswered("beans")])
    assert (await library.run("memory_search", query="beans")).untrusted
    assert not (await library.run("memory_search", query="peas")).untrusted
    assert (await library.run("memory_search", query="peas beans")).untrusted
    await keep(store, "beans and peas", key="test:2")
    assert not (await library.run("memory_search", query="peas beans", count=1)).untrusted


async def test_each_owner_searches_only_their_own_messages(library, store):
    await keep(store, "shared canary-mine")
    await keep(store, "shared canary-yours", owner="you")
    assert "canary-yours" not in await library("memory_search", query="shared canary yours")
    yours = await library.with_context(owner="you")("memory_search", query="shared canary mine")
    assert ("canary-mine" in yours, "canary-yours" in yours) == (False, True)


async def test_the_agent_finds_messages_from_before_a_restart_and_before_new(tmp_path, folder):
    async def turns(steps: list[Any], *said: str) -> list[Any]:
        model = ScriptedProvider(steps)
        async with AgentLoop(MessageBus(), model, folder, store=tmp_path / "s.db") as agent:
            for one in memory_tools(agent.store.search, 2_000):
                agent.tools.register(one)
            for each in said:
                await agent.process_direct(each)
        return [message["content"] for message in model.requests[-1].messages if message["role"] == "tool"]

    await turns(["Noted.", "ok"], "my locker has the number 5381", "/new", "hi")
    asked = call("memory_search", query="number of the locker")
    (result,) = await turns([asked, "5381"], "what is the number of my locker?")
    assert "5381" in result
    assert "what is" not in result
    results = await turns([call("memory_search", query="locker", count=20), "x"], "again")
    assert len(results[-1].splitlines()) == 2  # the first message, and the question of the second turn


async def test_the_descriptions_fit_the_limits_of_model_apis(desk):
    definitions = {one["function"]["name"]: one["function"] for one in desk.registry.get_definitions()}
    assert set(definitions["memory_search"]["parameters"]["properties"]) == {"query", "count"}
    assert definitions["remember"]["parameters"]["required"] == ["text"]
    assert json.dumps(definitions)
