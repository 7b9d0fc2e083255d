"""`everloop doctor`: what is in use and what is missing, tested with the real command."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sqlite3
from asyncio.subprocess import PIPE
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage, OutboundMessage
from everloop.cli.doctor import work_in
from everloop.providers.local.catalogue import CATALOGUE, DEFAULT, LARGER
from everloop.sandbox.confinement import Confinement
from everloop.sandbox.launch import choose_backend, prepare
from everloop.store.peers import new_worker, retire
from everloop.store.sqlite import SQLiteStore
from everloop.testing.openai_server import FakeOpenAI

from ..providers.local.servers import CARD
from ..providers.local.test_engine_memory import FACTS, gguf
from ..support.commands import COMMAND, Done, environment, everloop, finished, start
from ..test_docs import DOCS

SECRET = "canary-77d0b3"
ENDPOINT: dict[str, Any] = {"EVERLOOP_PROVIDER": "openai", "EVERLOOP_API_KEY": SECRET}


def checks(done: Done) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in done.json["checks"]}


async def doctor(server: FakeOpenAI | None = None, /, *, plain: bool = False, **settings: str) -> Done:
    env = {name: value for name, value in {**environment(server), **settings}.items() if value}
    return await finished(await start("doctor", *([] if plain else ["--json"]), env=env))


async def test_all_checks_pass_with_an_endpoint_that_answers():
    async with FakeOpenAI() as server:
        done = await doctor(server, plain=True, **ENDPOINT)
    assert done.status == 0
    *checks, completion = done.lines
    assert {"provider", "model", "workspace", "sandbox", "store"} <= {line.split()[1] for line in checks}
    assert all(line.startswith("✓ ") for line in checks)
    assert "everloop completion " in completion
    assert server.requests == []


async def test_no_error_shows_a_secret():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and is not listening
        port = taken.getsockname()[1]
        for address in (f"http://me:{SECRET}@127.0.0.1:{port}/v1?key={SECRET}", f"http://127.0.0.1:{port}/{SECRET}/v1"):
            for plain in (True, False):
                settings = {"EVERLOOP_BASE_URL": address, "OPENAI_API_KEY": SECRET, **ENDPOINT}
                done = await doctor(plain=plain, **settings)
                assert done.status == 1
                assert SECRET not in done.out + done.err


async def test_an_endpoint_that_does_not_answer_is_missing():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = await doctor(EVERLOOP_BASE_URL=f"http://127.0.0.1:{taken.getsockname()[1]}/v1", **ENDPOINT)
    assert done.status == 1
    assert not checks(done)["provider"]["ok"]
    assert checks(done)["provider"]["fix"]


async def test_a_proxy_does_not_hide_a_dead_endpoint_on_this_machine():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        here = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        proxy: dict[str, Any] = {"HTTPS_PROXY": "http://proxy.invalid:3128", "http_proxy": "http://proxy.invalid:3128"}
        done = await doctor(EVERLOOP_BASE_URL=here, **proxy, **ENDPOINT)
        assert not checks(done)["provider"]["ok"]
        done = await doctor(EVERLOOP_BASE_URL="https://api.example.com/v1", **proxy, **ENDPOINT)
        assert "proxy" in checks(done)["provider"]["found"]


async def test_a_provider_without_its_key_is_missing_and_says_what_to_set():
    done = await doctor(EVERLOOP_PROVIDER="openai")
    assert done.status == 1
    assert "EVERLOOP_API_KEY" in checks(done)["provider"]["fix"]


async def test_without_settings_the_local_model_is_used_and_one_command_installs_it():
    done = await doctor(EVERLOOP_MODEL="")
    assert done.status == 1
    model = checks(done)["model"]
    assert not model["ok"]
    assert model["fix"] in {f"everloop model pull {name}" for name in (DEFAULT, LARGER)}
    assert checks(done)["provider"]["found"].startswith("local")


async def test_an_invalid_local_model_is_reported_in_one_line(tmp_path):
    (tmp_path / "mine.gguf").write_bytes(b"GGUF" + bytes(100))
    done = await doctor(EVERLOOP_PROVIDER="local", EVERLOOP_MODEL=str(tmp_path / "mine.gguf"))
    assert done.status == 1
    assert not checks(done)["model"]["ok"]
    assert len(done.lines) == 1


async def test_weights_with_a_wrong_checksum_count_as_missing(tmp_path):
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF" + bytes(CARD.size))
    assert hashlib.sha256(wrong.read_bytes()).hexdigest() != CARD.sha256
    done = await doctor(EVERLOOP_MODEL="", EVERLOOP_WEIGHTS=str(wrong))
    assert not checks(done)["model"]["ok"]
    assert str(wrong) in checks(done)["model"]["found"]
    assert checks(done)["model"]["fix"] == f"everloop model pull {DEFAULT}"


async def test_truncated_weights_are_damaged_and_not_missing(tmp_path):
    missing = checks(await doctor(EVERLOOP_MODEL=""))["model"]["found"]
    cut = tmp_path / CATALOGUE[DEFAULT].file
    cut.write_bytes(b"GGUF" + bytes(1000))
    found = checks(await doctor(EVERLOOP_MODEL="", EVERLOOP_MODELS=str(tmp_path)))["model"]
    assert str(cut) in found["found"]
    assert str(cut) not in missing
    assert found["fix"] == f"everloop model pull {DEFAULT}"
    for arguments in (("run", "hello"), ("model", "path", DEFAULT)):
        done = await everloop(*arguments, EVERLOOP_MODEL="", EVERLOOP_MODELS=str(tmp_path))
        assert (done.status, done.out) == (2, "")
        assert len(done.err.splitlines()) == 1
        assert str(cut) in done.err
        assert f"`everloop model pull {DEFAULT}`" in done.err


async def test_a_workspace_that_is_a_file_is_missing(tmp_path):
    (tmp_path / "file").write_text("")
    done = await doctor(EVERLOOP_WORKSPACE=str(tmp_path / "file"), **ENDPOINT)
    assert not checks(done)["workspace"]["ok"]


async def test_a_workspace_and_a_store_that_cannot_be_created_are_missing(tmp_path):
    (tmp_path / "file").write_text("")
    work, store = str(tmp_path / "file/work"), str(tmp_path / "file/everloop.db")
    done = await doctor(EVERLOOP_WORKSPACE=work, EVERLOOP_STORE=store, **ENDPOINT)
    for name, place in (("workspace", work), ("store", store)):
        assert not checks(done)[name]["ok"]
        assert place in checks(done)[name]["found"]
        assert f"EVERLOOP_{name.upper()}" in checks(done)[name]["fix"]


@pytest.mark.parametrize("name", ["workspace", "store", "models", "weights"])
async def test_a_path_that_cannot_even_be_examined_is_one_line_among_the_others(tmp_path, name):
    setting = f"EVERLOOP_{name.upper()}"
    settings: dict[str, Any] = {
        "EVERLOOP_MODEL": "",
        setting: str(tmp_path / ("n" * 300)),
    }  # too long for any file name
    done = await doctor(**settings)
    wrong = checks(done)[name if name in ("workspace", "store") else "model"]
    assert not wrong["ok"]
    assert "n" * 300 in wrong["found"]
    assert setting in wrong["fix"]
    assert {"provider", "model", "workspace", "sandbox", "store"} <= set(checks(done))


async def test_the_memory_of_a_local_model_is_counted_for_all_configured_conversations(tmp_path):
    mine = gguf(tmp_path / "mine.gguf", **FACTS)
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir(parents=True)
    settings: dict[str, Any] = {"EVERLOOP_PROVIDER": "local", "EVERLOOP_MODEL": str(mine)}
    assert checks(await doctor(**settings))["model"]["ok"]
    (home / "config.toml").write_text("[local]\nslots = 1000000\n")
    found = checks(await doctor(**settings))["model"]
    assert not found["ok"]
    assert "too little memory" in found["fix"]


async def test_a_disabled_sandbox_is_reported():
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir(parents=True)
    (home / "config.toml").write_text('[sandbox]\nmode = "off"\n')
    assert "off" in checks(await doctor(**ENDPOINT))["sandbox"]["found"]


async def test_a_sandbox_that_does_not_work_here_is_missing(tmp_path):
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir(parents=True)
    (home / "config.toml").write_text('[sandbox]\nmode = "bubblewrap"\n')
    done = await doctor(PATH=str(tmp_path), **ENDPOINT)
    if checks(done)["sandbox"]["ok"]:  # found where the path does not lead
        assert "bubblewrap" in checks(done)["sandbox"]["found"]
    else:
        assert checks(done)["sandbox"]["fix"] == "apt install bubblewrap"


async def _store_with(*messages: InboundMessage) -> Path:
    path = Path(os.environ["EVERLOOP_HOME"]) / "everloop.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    store = SQLiteStore(path)
    await store.workers()  # opens the store
    for message in messages:
        await store.accept(message)
    await store.close()
    return path


async def test_messages_without_a_worker_are_stuck_and_the_remedy_is_a_worker():
    await _store_with(
        InboundMessage("cli", "me", "one", SECRET),
        InboundMessage("cli", "me", "one", SECRET),
        InboundMessage("cli", "me", "two", SECRET),
    )
    async with FakeOpenAI() as server:
        done = await doctor(server, **ENDPOINT)
    found = checks(done)
    assert done.status == 1
    assert found["queue"]["found"].startswith("3 messages wait")
    assert "cli:one" in found["sessions"]["found"]
    assert found["sessions"]["fix"] == "everloop worker"
    assert [(one["owner"], one["key"]) for one in done.json["work"]["stuck"]] == [("me", "cli:one"), ("me", "cli:two")]
    assert SECRET not in done.out


async def test_a_store_without_work_passes():
    path = await _store_with()
    async with FakeOpenAI() as server:
        done = await doctor(server, **ENDPOINT)
    assert done.status == 0
    assert checks(done)["store"]["found"] == str(path)
    assert checks(done)["sessions"]["found"] == "0, none stuck"


async def test_a_live_worker_is_counted():
    await _store_with()
    async with FakeOpenAI() as server:
        settings = {**os.environ, **ENDPOINT, "EVERLOOP_MODEL": "scripted", "EVERLOOP_BASE_URL": server.base_url}
        worker = await start("worker", env=settings)
        try:
            await asyncio.wait_for(worker.stderr.readline(), 30)
            for _ in range(30):  # it reports that it is ready just before it registers in the store
                done = await doctor(server, **ENDPOINT)
                if checks(done)["workers"]["found"].startswith("1 at work"):
                    break
        finally:
            worker.terminate()
            await finished(worker)
    assert checks(done)["workers"]["found"].startswith("1 at work")
    assert {worker["process"] for worker in done.json["work"]["workers"]} == {worker.pid}


async def test_leases_are_shown_with_the_process_that_holds_them():
    path = await _store_with()
    async with FakeOpenAI() as server:
        store, me = SQLiteStore(path), new_worker()
        try:
            await store.begin("me", "cli:mine", me, InboundMessage("cli", "me", "mine", SECRET).addressed())
            await store.begin("ann", "cli:hers", me, InboundMessage("cli", "me", "hers", "hi", owner="ann").addressed())
            done = await doctor(server, **ENDPOINT)
            plain = await doctor(server, plain=True, **ENDPOINT)
        finally:
            retire(me)
            await store.close()
    assert done.status == 0
    shown = checks(done)["leases"]["found"]
    assert shown.startswith("2 held")
    assert f"cli:mine by process {os.getpid()}" in shown
    assert "cli:hers of ann" in shown
    assert done.json["work"]["held"] == 2
    assert "cli:mine" in next(line for line in plain.lines if line.split()[1] == "leases")
    assert SECRET not in done.out + plain.out


async def test_a_message_that_waits_briefly_beside_a_live_worker_is_not_stuck_and_one_that_keeps_waiting_is():
    path = await _store_with(InboundMessage("cli", "me", "one", "hi"))
    store, me = SQLiteStore(path), new_worker()
    async with FakeOpenAI() as server:
        try:
            await store.join(me, "/nowhere")  # it is alive, and takes no work
            done = await doctor(server, **ENDPOINT)
            assert done.status == 0
            assert checks(done)["sessions"]["found"] == "1, none stuck"
            with closing(sqlite3.connect(path, isolation_level=None)) as database:
                database.execute("UPDATE inbox SET at = at - 3600")
                database.execute("UPDATE session SET updated_at = updated_at - 3600")
            done = await doctor(server, **ENDPOINT)
        finally:
            retire(me)
            await store.close()
    assert done.status == 1
    assert "cli:one for 60 min" in checks(done)["sessions"]["found"]
    assert checks(done)["sessions"]["fix"] == "everloop worker"
    assert "the oldest for 60 min" in checks(done)["queue"]["found"]


async def test_work_taken_between_two_checks_is_not_stuck(monkeypatch):
    path = await _store_with(InboundMessage("cli", "me", "one", "hi"))
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE inbox SET at = at - 3600")
        database.execute("UPDATE session SET updated_at = updated_at - 3600")
    store, me = SQLiteStore(path), new_worker()
    look, found = store.overview, list[int]()

    async def overview() -> Any:
        work = await look()
        found.append(work.stuck)
        if len(found) == 1:  # between the first check and the second one
            await store.begin("me", "cli:one", me)
        return work

    monkeypatch.setattr(store, "overview", overview)
    try:
        await store.join(me, "/nowhere")
        assert (await work_in(store)).stuck == 0
        assert found == [1, 0]
    finally:
        retire(me)
        await store.close()


async def test_a_store_that_is_not_a_database_is_missing_and_left_as_it_is():
    path = await _store_with()
    path.write_bytes(b"not a database at all" * 500)
    before = path.read_bytes()
    done = await doctor(**ENDPOINT)
    assert done.status == 1
    assert not checks(done)["store"]["ok"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("page", ["commands.md", "local-model.md"])
def test_the_docs_mention_it(page):
    assert "everloop doctor" in (DOCS / page).read_text()


async def test_json_output_is_one_object():
    done = await doctor(**ENDPOINT, EVERLOOP_BASE_URL="http://127.0.0.1:9/v1")
    assert json.loads(done.out)["ok"] is False
    assert done.err == ""


# ------------------------------------------------------------------------------------------------ limits of commands


@pytest.mark.parametrize(
    ("controllers", "said"),
    [
        ("cpu memory pids", "memory_mb is enforced by the kernel for a command as a whole (control group)"),
        ("", "memory_mb is enforced by summing up a command's processes several times a second (no cgroup v2 here)"),
    ],
)
async def test_it_reports_how_the_memory_limit_of_commands_is_enforced(tmp_path, controllers, said):
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    point = next(mount[1] for mount in mounts if mount[2] == "cgroup2")
    (tmp_path / "cgroup.subtree_control").write_text(controllers)
    machine = ["bwrap", "--dev-bind", "/", "/", "--tmpfs", "/sys/fs/cgroup", "--bind", str(tmp_path), point]
    process = await asyncio.create_subprocess_exec(
        *machine, *COMMAND, "doctor", "--json", env=environment(), stdout=PIPE, stderr=PIPE, stdin=PIPE
    )
    assert said in checks(await finished(process))["sandbox"]["found"]


async def test_the_reported_memory_limit_is_the_one_that_applies_to_a_command(tmp_path):
    backend = await asyncio.to_thread(choose_backend, "auto")
    world = Confinement(str(tmp_path))
    launch = await asyncio.to_thread(prepare, backend, world, str(tmp_path), "true", outer={"PATH": os.defpath})
    summed = launch.memory is not None
    await asyncio.to_thread(launch.close)
    await asyncio.to_thread(launch.clean_up)
    assert ("summing up" in checks(await doctor())["sandbox"]["found"]) is summed


# ------------------------------------------------------------------------------------------------ damaged rows


@pytest.mark.parametrize(("table", "fate"), [("inbox", "answered"), ("outbox", "sent")])
async def test_a_row_that_was_set_aside_is_a_problem_until_it_is_repaired(tmp_path, table, fate):
    store = SQLiteStore(tmp_path / "store.db")
    row = await store.accept(InboundMessage("cli", "user", "direct", "hi").addressed())
    await store.answer(row, [OutboundMessage("cli", "direct", "hello")])
    damaged = "UPDATE inbox SET damaged = 'torn'" if table == "inbox" else "UPDATE outbox SET damaged = 'torn'"
    await store.writer.submit(lambda db: db.execute(damaged).rowcount)
    await store.close()
    found = checks(await doctor(EVERLOOP_STORE=str(tmp_path / "store.db")))[table]
    assert (found["ok"], found["found"]) == (False, f"1 row cannot be decoded and will not be {fate}")
    assert f"FROM {table} WHERE damaged IS NOT NULL" in found["fix"]
