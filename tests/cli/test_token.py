"""`everloop token`: the real command, and what it writes to the store."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of

from ..support.commands import Done, everloop


def database() -> Path:
    return Path(os.environ["EVERLOOP_HOME"]) / "everloop.db"


async def token(*arguments: str) -> Done:
    return await everloop("token", *arguments)


async def added(*arguments: str) -> str:
    done = await token("add", *arguments)
    assert (done.status, len(done.lines)) == (0, 1), done.err
    return done.lines[0]


async def owner_of(secret: str) -> str | None:
    store = SQLiteStore(database())
    found = await store.token(hash_of(secret))
    await store.close()
    return None if found is None else found.owner


def is_one_error(done: Done) -> None:
    assert (done.status, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("everloop: ")


async def test_a_token_is_printed_once_and_authenticates_its_owner():
    secret = await added("anna")
    assert re.fullmatch(r"ev_[A-Za-z0-9_-]{43}", secret)
    assert await owner_of(secret) == "anna"
    assert secret not in (await token("list")).out + (await token("list", "--json")).out
    assert await owner_of(await added("laptop", "--owner", "anna")) == "anna"
    assert await owner_of(await added("here", "--owner", "me")) == "me"


async def test_the_list_shows_owner_and_time_and_never_the_token_or_its_hash():
    secrets = [await added("anna"), await added("laptop", "--owner", "anna")]
    await token("revoke", "anna")
    listed = await token("list")
    assert len(listed.lines) == 3
    assert all(part in listed.lines[2] for part in ("laptop", "anna"))
    as_json = (await token("list", "--json")).lines
    assert '"name": "anna"' in as_json[0]
    assert '"revoked_at": null' not in as_json[0]
    assert '"revoked_at": null' in as_json[1]
    for secret in secrets:
        for said in (listed.out, *as_json):
            assert secret not in said
            assert hash_of(secret) not in said


async def test_permissions_are_granted_by_a_flag_and_listed():
    asked = {"plain": (), "short": ("--admin",), "long": ("--rights", "use, admin"), "only": ("--rights", "admin")}
    for name, flags in asked.items():
        await added(name, *flags)
    lines = (await token("list", "--json")).lines
    assert [json.loads(line)["rights"] for line in lines] == [["use"], ["admin", "use"], ["admin", "use"], ["admin"]]
    shown = (await token("list")).lines
    assert [line.split()[2] for line in shown] == ["rights", "use", "admin,use", "admin,use", "admin"]
    assert (await token("create", "another", "--admin")).status == 0


async def test_a_flag_sets_whose_tools_are_used_and_the_list_shows_it():
    for name, flags in {"plain": (), "editor": ("--agent", "client"), "desk": ("--agent", "own")}.items():
        await added(name, *flags)
    assert [json.loads(line)["agent"] for line in (await token("list", "--json")).lines] == ["", "client", "own"]
    assert [line.split()[3] for line in (await token("list")).lines] == ["agent", "-", "client", "own"]
    is_one_error(await token("add", "wrong", "--agent", "both"))


async def test_the_first_token_prints_a_notice_that_every_client_now_needs_one():
    said = [(await token("add", name)).err for name in ("anna", "berta")]
    assert ["every request needs a token" in err for err in said] == [True, False]


async def test_a_revoked_token_is_refused_and_the_others_still_work():
    first, second, third = await added("anna"), await added("two", "--owner", "anna"), await added("berta")
    assert (await token("revoke", "anna")).status == 0
    assert [await owner_of(one) for one in (first, second, third)] == [None, "anna", "berta"]
    again = await added("anna")
    assert [await owner_of(one) for one in (first, again)] == [None, "anna"]


async def test_a_token_can_be_revoked_by_an_id_prefix():
    first, second = await added("anna"), await added("berta")
    ids = re.findall(r'"id": "([0-9a-f]+)"', (await token("list", "--json")).out)
    assert (await token("revoke", ids[1][:6])).status == 0
    assert [await owner_of(one) for one in (first, second)] == ["anna", None]


async def test_a_name_wins_over_an_id_and_a_too_short_id_prefix_matches_nothing():
    first = await added("anna")
    (id,) = re.findall(r'"id": "([0-9a-f]+)"', (await token("list", "--json")).out)
    is_one_error(await token("revoke", id[:3]))
    named = await added(id[:6], "--owner", "berta")
    assert (await token("revoke", id[:6])).status == 0
    assert [await owner_of(one) for one in (first, named)] == ["anna", None]


async def test_a_taken_name_is_refused_in_one_line_and_creates_no_token():
    secret = await added("anna")
    is_one_error(await token("add", "anna", "--owner", "berta"))
    assert len((await token("list", "--json")).lines) == 1
    assert await owner_of(secret) == "anna"


@pytest.mark.parametrize(
    "arguments",
    [
        ("add", "Anna"),  # cannot be an owner
        ("add", "a" * 33),
        ("add", "a b", "--owner", "anna"),
        ("add", "anna", "--owner", "../me"),
        ("add", "anna", "--owner", ""),
        ("add", "anna", "--rights", "root"),
        ("add", "anna", "--rights", ""),
        ("add", "anna", "--rights", "use", "--admin"),
        ("add", "\x1b[31m", "--owner", "anna"),
        ("add",),
        ("revoke", "nobody"),
        ("revoke", ""),
        ("list", "x"),
        ("forget", "anna"),
        (),
    ],
)
async def test_an_invalid_request_is_refused_in_one_line_and_creates_no_token(arguments):
    is_one_error(await token(*arguments))
    listed = await token("list")
    assert (listed.status, listed.out) == (0, "")


async def test_revoking_twice_or_by_the_token_itself_is_an_error_that_does_not_show_it():
    secret = await added("anna")
    pasted = await token("revoke", secret)
    is_one_error(pasted)
    assert secret[:20] not in pasted.err
    assert await owner_of(secret) == "anna"
    await token("revoke", "anna")
    is_one_error(await token("revoke", "anna"))


async def test_listing_tokens_creates_no_store():
    assert (await token("list")).status == 0
    is_one_error(await token("revoke", "anna"))
    assert not database().exists()
