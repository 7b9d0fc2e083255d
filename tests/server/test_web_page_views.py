"""The views of the page beside the chat, in a real browser with a real server behind it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from everloop.channels.access import Pairings
from everloop.channels.runner import STATUS, Status, lease_of
from everloop.config import Price, Rule
from everloop.messages import encode_json
from everloop.store.tokens import hash_of, new_token

from .browser import Tab, chromium, link, tab
from .feeds import PageClient
from .serving import Serving, call, serving
from .test_page_channels import ADAS, MINE, bury, code_in
from .test_page_files import PIXEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
PRICES = (Price(model="scripted", input=10.0, output=20.0, cached=1.0),)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


async def talked(server: Serving, one: Tab) -> None:
    """A turn with a tool call."""
    server.fake.calls(call("exec", id="e", command="sleep 0.2; echo 'watered <b>roses</b>'"), delay=0.2)
    server.fake.reply("The roses are watered.", tokens=["The roses ", "are ", "watered."], token_delay=0.1)
    await one.say("Water the roses")
    await expect(one.log.get_by_text("The roses are watered.")).to_be_visible()
    await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()


async def test_the_timeline_shows_steps_and_the_original_request(browser: Browser, tmp_path: Path):
    async with serving(tmp_path, prices=PRICES) as server, tab(browser, await link(server)) as one:
        await talked(server, one)
        assert not [address for address in one.requests if address.endswith("/web/timeline.js")]  # on demand
        await one.page.locator("header").get_by_role("link", name="Timeline").click()
        steps = one.page.get_by_role("list", name="Steps").get_by_role("listitem")
        await expect(steps).to_have_count(5)
        await expect(steps.locator(".kind")).to_have_text(["Message", "Model", "Tool", "Model", "End"])
        await expect(one.page.get_by_text("Idle, cut out")).to_be_visible()
        await steps.nth(2).get_by_role("button").click()
        await expect(steps.nth(2)).to_contain_text("watered")
        await expect(steps.nth(2)).to_contain_text("echo 'watered <b>roses</b>'")
        await one.shoot("steps")
        await steps.nth(1).get_by_role("button").click()
        await expect(steps.nth(1)).to_contain_text("First token")
        await expect(steps.nth(1)).to_contain_text("$0.")
        await steps.nth(1).get_by_role("button", name="Show the request").click()
        await steps.nth(1).locator("summary", has_text="Water the roses").click()
        await expect(steps.nth(1).locator("details[open] pre")).to_have_text("Water the roses")
        await steps.nth(1).get_by_role("button", name="JSON").click()
        sent = steps.nth(1).locator("figure > pre")
        await expect(sent).to_contain_text("Water the roses")
        shown = json.loads(await sent.inner_text())
        assert (shown["messages"], shown["model"]) == (server.seen(0), "scripted")
        assert shown["tools"] == json.loads(server.fake.requests[0].raw)["tools"]
        await expect(steps.nth(1).get_by_text("The request as it was sent")).to_be_visible()
        await one.check("timeline")
        await one.page.get_by_role("link", name="Back to the chat").click()
        await expect(one.log.get_by_text("The roses are watered.")).to_be_visible()
        assert one.errors == []
        assert not re.search(r"#link", one.page.url)


async def test_a_turn_is_replayed_step_by_step_and_compared_with_another(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await talked(server, one)
        server.fake.reply("Nothing else.")
        await one.say("What else?")
        await expect(one.log.get_by_text("Nothing else.")).to_be_visible()
        await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()
        await one.page.locator("header").get_by_role("link", name="Timeline").click()
        steps = one.page.get_by_role("list", name="Steps").first.get_by_role("listitem")
        await expect(steps).to_have_count(3)
        await one.page.locator("select").first.select_option(index=1)
        await expect(steps).to_have_count(5)
        replay = one.page.get_by_label("Replay")
        await replay.fill("1")
        await expect(steps.locator(".kind")).to_have_text(["Message"])
        await replay.press("ArrowRight")
        await replay.press("ArrowRight")
        await expect(steps.locator(".kind")).to_have_text(["Message", "Model", "Tool"])
        await expect(steps.nth(2)).to_contain_text("watered")  # what is replayed is open
        await expect(one.page.get_by_text("step 3 of 5")).to_be_visible()
        await one.check("replay")
        await one.page.get_by_label("Compare with").select_option(index=1)
        other = one.page.get_by_label("The other turn").get_by_role("list", name="Steps").get_by_role("listitem")
        await expect(other).to_have_count(3)
        await replay.first.fill("5")
        await expect(steps).to_have_count(5)
        await one.check("compared")
        await steps.nth(1).get_by_role("button").first.click()
        server.fake.reply("Done otherwise.")
        await steps.nth(0).get_by_role("button").first.click()
        await steps.nth(0).get_by_role("button", name="Fork from here").click()
        await expect(one.log.get_by_text("Done otherwise.")).to_be_visible()
        assert one.errors == []


async def test_a_turns_changes_are_shown_as_a_diff_and_undone(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        workspace = server.owners.config.workspace
        (workspace / "beds.md").write_text("- roses\n- weeds\n")
        (workspace / "kept.md").write_text("old\n")
        server.fake.calls(
            call("edit_file", id="a", path="beds.md", old_text="- weeds", new_text="- <b>sage</b>"),
            call("exec", id="b", command="echo made > made.md; echo new > kept.md"),
        )
        server.fake.reply("Planted.")
        await one.say("Plant sage")
        await expect(one.log.get_by_text("Planted.")).to_be_visible()
        await expect(one.page.get_by_role("button", name="Stop")).to_be_hidden()
        await one.page.get_by_role("link", name="Changes").click()
        shown = one.page.locator("#main")
        undo = one.page.get_by_role("button", name="Undo these changes")
        await expect(shown.locator(".minus", has_text="- weeds")).to_be_visible()
        await expect(shown.locator(".plus", has_text="- <b>sage</b>")).to_be_visible()
        await expect(shown.get_by_text("The file is new.")).to_be_visible()
        await one.check("changes")
        (workspace / "kept.md").write_text("by hand\n")
        await undo.click()
        await expect(shown.get_by_text("Restored: beds.md, made.md")).to_be_visible()
        await expect(shown.get_by_text("kept.md: it has changed since")).to_be_visible()
        assert (workspace / "beds.md").read_text() == "- roses\n- weeds\n"
        assert (workspace / "kept.md").read_text() == "by hand\n"
        assert not (workspace / "made.md").exists()
        await expect(shown.get_by_text("No turn of this session")).to_be_visible()
        assert one.errors == []


async def test_the_history_of_the_memory_is_read_from_the_log(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        path = "memory/MEMORY.md"
        server.fake.calls(call("write_file", id="a", path=path, content="Roses like sun.\n"))
        server.fake.calls(call("edit_file", id="b", path=path, old_text="sun", new_text="<b>shade</b>"))
        server.fake.reply("Noted.")
        await one.say("Remember the roses")
        await expect(one.log.get_by_text("Noted.")).to_be_visible()
        await one.go("#/memory")
        changes = one.page.get_by_role("list", name="Changes").get_by_role("listitem")
        await expect(changes).to_have_count(2)
        await expect(changes.first.locator(".plus", has_text="<b>shade</b>")).to_be_visible()  # the latest is above
        await expect(changes.nth(1).locator(".plus", has_text="Roses like sun.")).to_be_visible()
        await one.check("memory-history")
        await changes.first.get_by_role("link", name="Remember the roses").click()
        await expect(one.log.get_by_text("Noted.")).to_be_visible()
        assert one.errors == []


async def test_every_view_is_reached_by_the_keyboard_and_named_in_the_title(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await expect(one.page.get_by_label("Message", exact=True)).to_be_focused()
        heads = {"jobs": "Scheduled jobs", "agents": "Sub-agents", "memory": "Memory and skills", "files": "Files",
                 "channels": "Channels", "usage": "Usage", "log": "Requests", "server": "Server"}  # fmt: skip
        for name, head in heads.items():
            await one.page.keyboard.press("Control+k")
            palette = one.page.get_by_role("combobox", name="Go to a session or a view")
            await expect(palette).to_be_focused()
            await palette.press_sequentially(name)
            await expect(one.page.get_by_role("option", name=name)).to_be_visible()
            if name == "usage":
                await one.check("palette-views")
            await palette.press("Enter")
            await expect(one.page.get_by_role("heading", name=head, level=1)).to_be_visible()
            await expect(one.page.locator(".view")).to_be_visible()
            await expect(one.page.get_by_role("link", name=name).first).to_have_attribute("aria-current", "page")
        await one.page.keyboard.press("Control+k")
        await expect(one.page.get_by_role("combobox", name="Go to a session or a view")).to_be_focused()
        await one.page.keyboard.press("Enter")
        await expect(one.page.get_by_text("What shall we do?")).to_be_visible()
        assert one.errors == []


async def test_jobs_are_paused_resumed_run_and_removed(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await one.go("#/jobs")
        await expect(one.page.get_by_text("Nothing is scheduled.")).to_be_visible()
        service = (await server.owners.agent("me")).cron_service
        await service.add("Water the beans", every="1h", channel="web", chat_id="web:g", session="web:g")
        job = one.page.get_by_role("list", name="Jobs").get_by_role("listitem")
        await expect(job).to_contain_text("Water the beans")
        await job.get_by_role("button", name="Pause").click()
        await expect(job.get_by_text("when it is resumed")).to_be_visible()
        assert (await service.list())[0].paused
        await job.get_by_role("button", name="Resume").click()
        await expect(job.get_by_text("when it is resumed")).to_be_hidden()
        server.fake.reply("The beans are wet.")
        await job.get_by_role("button", name="Run now").click()
        await expect(job).to_contain_text("The beans are wet.")
        await one.check("jobs")
        one.page.once("dialog", lambda dialog: dialog.accept())
        await job.get_by_role("button", name="Remove").click()
        await expect(one.page.get_by_text("Nothing is scheduled.")).to_be_visible()
        assert await service.list() == []
        assert one.errors == []


async def test_a_scheduled_message_is_not_shown_as_the_persons_words(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        service = (await server.owners.agent("me")).cron_service
        job = await service.add(
            "Water the beans", every="1h", deliver="text", channel="web", chat_id="g", session="web:g"
        )
        await service.run(job.id)
        await one.go("#/s/web%3Ag")
        await expect(one.log.get_by_text("Reminder: Water the beans")).to_be_visible()
        await expect(one.log.get_by_text("Scheduled: Water the beans")).to_be_visible()
        await expect(one.log.get_by_text("Nobody is there to answer")).to_be_hidden()
        await expect(one.log.get_by_label("You", exact=True)).to_have_count(0)
        assert re.match(r"\w", (await one.log.locator(".from-agent .meta").inner_text()).strip())
        await one.check("scheduled")
        assert one.errors == []


async def test_on_a_phone_a_time_in_the_log_takes_two_lines(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        server.fake.reply("twelve")
        await server.ask("How many beans are there in the north bed, and how many peas?", {"X-Session": "beans"})
        await one.page.set_viewport_size({"width": 390, "height": 800})
        await one.go("#/log")
        time = one.page.get_by_role("row").nth(1).locator(".time")
        await expect(time).to_be_visible()
        lines = await time.evaluate(
            "cell => { const text = document.createRange(); text.selectNodeContents(cell);"
            " return new Set([...text.getClientRects()].map(one => one.top)).size; }"
        )
        assert lines == 2


async def test_the_log_lists_requests_wherever_they_came_from_and_leads_to_their_timelines(
    browser: Browser, tmp_path: Path
):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await one.go("#/log")
        await expect(one.page.get_by_text("Nothing was asked yet.")).to_be_visible()
        await one.check("log-empty")
        server.fake.reply("twelve")
        server.fake.fail(400, "no beans")
        await server.ask("How many beans?", {"X-Session": "beans"})
        await server.fails("And how many peas?")
        rows = one.page.get_by_role("table", name="Requests").get_by_role("row")
        await expect(rows).to_have_count(3)
        await expect(rows.nth(1)).to_contain_text("And how many peas?")
        await expect(rows.nth(1).locator(".is-bad")).to_have_text("error")
        await expect(rows.nth(2)).to_contain_text("answer")
        await one.check("log")
        await rows.nth(2).get_by_role("link", name="How many beans?").first.click()
        await expect(one.page.get_by_role("list", name="Steps").get_by_role("listitem")).to_have_count(3)
        assert one.errors == [], one.errors


async def test_sub_agents_are_shown_in_a_tree_and_can_be_read(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        server.fake.calls(call("spawn", task="Count the beans in both beds"))
        for _ in range(3):
            server.fake.reply("There are 12 beans.")
        await one.say("Count them")
        await expect(one.log.get_by_label("Agent", exact=True).first).to_be_visible()
        await one.page.get_by_role("link", name="Agents").click()
        tree = one.page.get_by_role("list", name="Sub-agents")
        await expect(tree.get_by_text("done")).to_be_visible()
        await expect(tree.locator("li li")).to_contain_text("Count the beans in both beds")
        await one.check("agents")
        await tree.get_by_role("link", name="Count the beans").click()
        await expect(one.log.get_by_text("There are 12 beans.").first).to_be_visible()
        assert one.errors == []


async def test_memory_is_edited_and_a_change_that_is_not_allowed_is_refused(browser: Browser, tmp_path: Path):
    rules = (Rule(do="ask", tool="write_file", path="skills/**", why="skills are dear"),)
    async with serving(tmp_path, policy=rules) as server, tab(browser, await link(server)) as one:
        workspace = server.owners.config.workspace
        skill = workspace / "skills" / "tea" / "SKILL.md"
        skill.parent.mkdir(parents=True)
        skill.write_text("---\nname: tea\ndescription: How tea is made.\n---\nBoil water.\n")
        await one.page.get_by_role("link", name="Memory").click()
        editor = one.page.locator("#editor")
        await expect(editor).to_have_value("")
        await editor.fill("- The beans want water.\n")
        await one.page.get_by_role("button", name="Save").click()
        await expect(one.page.get_by_text("Saved.")).to_be_visible()
        assert (workspace / "memory" / "MEMORY.md").read_text() == "- The beans want water.\n"
        await one.check("memory")
        await one.page.get_by_role("link", name="tea").click()
        await expect(editor).to_have_value(re.compile("Boil water"))
        await editor.fill("Boil milk.")
        await one.page.get_by_role("button", name="Save").click()
        await expect(one.page.get_by_role("alert")).to_contain_text("skills are dear")
        assert "Boil water" in skill.read_text()
        await one.page.get_by_role("link", name="git", exact=False).first.click()
        await expect(one.page.get_by_role("button", name="Save")).to_be_hidden()


async def test_files_are_browsed_viewed_and_downloaded(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        workspace = server.owners.config.workspace
        (workspace / "beds" / "long name").mkdir(parents=True)
        (workspace / "beds" / "rose.png").write_bytes(PIXEL)
        (workspace / "beds" / "a#b?.html").write_text("<script>window.hacked = 1</script>\n")
        (tmp_path / "secret.txt").write_text("canary-7d1f")
        (workspace / "beds" / "out").symlink_to(tmp_path / "secret.txt")
        await one.page.get_by_role("link", name="Files").click()
        await one.page.get_by_role("link", name="beds/").click()
        await expect(one.page.get_by_role("link", name="long name/")).to_be_visible()
        await one.check("files")
        await one.page.get_by_role("link", name="a#b?.html").click()
        await expect(one.page.locator("pre.shown")).to_have_text("<script>window.hacked = 1</script>\n")
        async with one.page.expect_download() as started:
            await one.page.get_by_role("button", name="Download").click()
        path = await (await started.value).path()
        assert path.read_text() == "<script>window.hacked = 1</script>\n"
        await one.page.get_by_role("link", name="beds").click()
        await one.page.get_by_role("link", name="rose.png").click()
        await expect(one.page.locator("canvas[data-drawn]")).to_be_visible()
        await one.page.get_by_role("link", name="beds").click()
        await one.page.get_by_role("link", name="out").click()
        await expect(one.page.get_by_role("alert")).to_contain_text("outside the workspace")
        assert "canary" not in await one.page.content()
        assert await one.page.evaluate("window.hacked") is None


async def test_usage_is_drawn_by_day_and_listed_by_model_and_session(browser: Browser, tmp_path: Path):
    async with serving(tmp_path, prices=PRICES) as server, tab(browser, await link(server)) as one:
        await talked(server, one)
        await one.page.get_by_role("link", name="Usage").click()
        await expect(one.page.get_by_role("img", name=re.compile(r"Cost by day. Most on .*: \$0\."))).to_be_visible()
        await expect(one.page.get_by_role("row", name=re.compile("scripted 2"))).to_be_visible()
        await expect(one.page.get_by_role("row", name=re.compile("Water the roses 2"))).to_be_visible()
        await expect(one.page.locator(".chart rect")).to_have_count(30)
        await one.check("usage")
        await one.page.get_by_label("Since").select_option("7")
        await expect(one.page.locator(".chart rect")).to_have_count(7)
        assert one.errors == []


async def test_channels_show_their_state_pair_people_and_send_again(browser: Browser, tmp_path: Path):
    async with serving(tmp_path, channels=(MINE, ADAS)) as server, tab(browser, await link(server)) as one:
        store = server.store
        await code_in(store, "telegram")
        for channel, error in (("telegram", ""), ("slack", "HTTP 401: <b>invalid_auth</b>")):
            await store.set_channel_state(channel, STATUS, encode_json(Status(time.time(), error)).decode())
        assert await store.hold(lease_of("telegram"), server.owners.worker)
        dead = [await bury(store, "slack", "ada", text) for text in ("The beans are wet.", "<i>The fence stands.</i>")]
        await one.page.get_by_role("link", name="Channels").click()
        telegram, slack = (one.page.get_by_role("list", name="Channels").locator("> li").nth(at) for at in (0, 1))
        await expect(one.page.get_by_text("This server sends none")).to_be_visible()
        await expect(one.page.get_by_role("button", name="Turn on")).to_be_hidden()
        await expect(telegram.get_by_text("connected")).to_be_visible()
        await expect(slack.get_by_text("not working")).to_be_visible()
        await expect(slack.get_by_text("HTTP 401: <b>invalid_auth</b>")).to_be_visible()
        await expect(slack.get_by_text("<i>The fence stands.</i>")).to_be_visible()
        await one.check("channels")
        await telegram.get_by_role("button", name="Pair, code K7PXW2QD, Nina").click()
        await expect(telegram.get_by_text("Waiting to be paired")).to_be_hidden()
        assert set(await Pairings(store, "telegram").peers()) == {"9"}
        await one.page.get_by_label("Pairing code").fill("NONE2345")
        await one.page.get_by_role("button", name="Pair", exact=True).click()
        await expect(one.page.get_by_role("alert")).to_contain_text("no valid code")
        await slack.get_by_role("button", name=f"Send again: message {dead[0]}").click()
        await expect(slack.get_by_text("The beans are wet.")).to_be_hidden()
        assert [one.id for one in await store.dead_letters()] == [dead[1]]
        async with tab(browser, server.url) as other:  # who owns none of them
            await server.client("eve")
            token = new_token()
            await store.add_token("eve-page", "eve", hash_of(token))
            await other.page.get_by_label("Token").fill(token)
            await other.page.get_by_role("button", name="Log in").click()
            await other.page.get_by_role("link", name="Channels").click()
            await expect(other.page.get_by_text("No chat network is connected yet.")).to_be_visible()
            assert "telegram" not in await other.page.content()
        assert [error for error in one.errors if "400 (Bad Request)" not in error] == []  # of the wrong code


async def test_the_operator_sees_health_and_workers_and_creates_and_revokes_tokens(browser: Browser, tmp_path: Path):
    async with serving(tmp_path) as server, tab(browser, await link(server)) as one:
        await one.page.get_by_role("link", name="Server").click()
        await expect(one.page.get_by_role("row", name=re.compile("^store"))).to_be_visible()
        await expect(one.page.get_by_role("table", name="Workers").get_by_text("alive").first).to_be_visible()
        await one.page.get_by_label("Name").fill("garden")
        await one.page.get_by_role("button", name="Make a token").click()
        secret = await one.page.locator(".secret").inner_text()
        assert secret.startswith("ev_")
        row = one.page.get_by_role("row", name=re.compile("^garden garden use"))
        await expect(row).to_be_visible()
        await one.check("server")
        gardener = PageClient(server.url, server.http, secret)
        assert (await gardener.api("GET", "sessions"))[0] == 200
        async with tab(browser, server.url) as other:  # who only uses the agent
            await other.page.get_by_label("Token").fill(secret)
            await other.page.get_by_role("button", name="Log in").click()
            await other.page.get_by_role("link", name="Server").click()
            await expect(other.page.get_by_text("Only an operator sees this")).to_be_visible()
        one.page.once("dialog", lambda dialog: dialog.accept())
        await row.get_by_role("button", name="Revoke garden").click()
        await expect(one.page.get_by_text("revoked", exact=True)).to_be_visible()
        assert (await gardener.api("GET", "sessions"))[0] == 401
        assert one.errors == []
