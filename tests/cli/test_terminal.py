"""The chat's screen: the real program in a pseudo-terminal, rendered by a terminal emulator."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from everloop.store.sqlite import SQLiteStore
from everloop.testing import call
from everloop.testing.openai_server import Reply
from tests.support.commands import ESCAPES, everloop, terminal, until

WIDTHS = [40, 80, 120]
ANSWER = """\
# Prime numbers
A number is **prime** if it has *exactly two* divisors, neither of which needs to be explained here at length.

```python
def is_prime(n: int) -> bool:
    # trial division
    return n > 1
```

- it stops at the square root of the number, because every larger divisor has a partner
- it is quick

1. first
2. second

| number | prime | explanation |
|---|---|---|
| 7 | yes | nothing divides seven |
| 8 | no | antidisestablishmentarianism |

> quoted words, which go on for so long that they have to be wrapped at the edge of any terminal window there is

The <b>end</b>.
"""
WORDS = re.findall(r"[A-Za-z]{3,}", re.sub(r"```python|\|---.*", "", ANSWER))


# ------------------------------------------------------------------------------------------------ Markdown


@pytest.mark.parametrize("columns", WIDTHS)
async def test_markdown_is_rendered_and_no_word_is_broken(server, columns):
    server.reply(ANSWER)
    async with terminal(server=server, columns=columns, rows=120) as screen:
        await screen.ready()
        screen.type("explain\r")
        lines = await screen.shows("tokens read")
        text = "\n".join(lines)
        for raw in ("**prime**", "```", "|---|", "# Prime", "*exactly"):
            assert raw not in text
        assert "<b>end</b>" in text
        assert screen.look_of("Prime numbers").bold
        assert screen.look_of("prime if").bold
        assert screen.look_of("def is_prime").fg != "default"
        assert screen.look_of("• it stops").bold
        assert screen.look_of("▌ quoted").fg != "default"
        assert all(len(line) <= columns for line in lines)
        shown = set(re.findall(r"[A-Za-z]{3,}", text))
        assert [word for word in WORDS if word not in shown] == []
        assert ("number: 7" in text) == (columns == 40)  # a table that does not fit becomes a list of records
        assert text.count("Prime numbers") == 1  # nothing drawn while it streamed is left behind


async def test_markdown_is_rendered_while_it_streams(held):
    held.hold(Reply("## Title\n\n**bold** words\n\n```python\nimport os\nimport sys\n"), after_chunks=6)
    async with terminal(server=held) as screen:
        await screen.ready()
        screen.type("go\r")
        await screen.shows("bold words")
        assert "**" not in "\n".join(screen.lines)
        assert screen.look_of("Title").bold
        held.go.set()
        await screen.shows("tokens read")
        text = "\n".join(screen.lines)
        assert text.count("Title") == text.count("import os") == text.count("import sys") == 1


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
async def test_an_answer_is_shown_as_written_if_colours_are_disabled(server, setting):
    server.reply("# Title\n\n**bold** and `code`")
    async with terminal(server=server, **setting) as screen:
        await screen.ready()
        screen.type("go\r")
        place = await screen.sees("**bold** and `code`")
        await screen.sees("tokens read", after=place)
    assert "# Title" in screen.text


async def test_the_prompt_stays_visible_while_lines_scroll_by(server):
    server.reply("\n\n".join(f"Paragraph number {number}." for number in range(20)), token_delay=0.002)
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("go\r")
        await screen.shows("tokens read")
    # A frame that was being drawn when the terminal was closed is incomplete.
    updates = re.findall(r"\x1b\[\?2026h(.*?)\x1b\[\?2026l", screen.raw, re.DOTALL)
    assert len(updates) > 2
    assert all(
        ">" in ESCAPES.sub("", update) for update in updates
    )  # each frame is drawn at once, with the prompt below


@pytest.mark.parametrize(("colour", "heading"), [("ffff/ffff/ffff", "blue"), ("1e1e/1e1e/2e2e", "brightcyan")])
async def test_colours_match_the_terminals_background(server, colour, heading):
    server.reply("## Title\n\nText")
    async with terminal(server=server, PROMPT_TOOLKIT_NO_CPR="") as screen:
        await screen.ready()
        await until(lambda: "\x1b]11;?" in screen.raw)
        assert screen.raw.index("\x1b]11;?") > screen.raw.index(">")  # the prompt comes first
        screen.type(f"\x1b]11;rgb:{colour}\x1b\\go\r")
        async with asyncio.timeout(20):
            while "tokens read" not in screen.text:
                screen.answer_positions()
                await asyncio.sleep(0.01)
        assert "> go" in screen.lines
        assert screen.look_of("Title").fg == heading
        assert screen.raw.count("\x1b]11;?") == 1


# ------------------------------------------------------------------------------------------------ tool calls


@pytest.mark.parametrize("columns", WIDTHS)
async def test_a_tool_card_is_shown_once_and_in_full_on_request(server, home, columns):
    (home / "workspace").mkdir(parents=True)
    (home / "workspace" / "list.txt").write_text("milk\neggs\nbread\n")
    server.calls(call("write_file", path="list.txt", content="milk\nbutter\nbread\n"))
    server.calls(
        call("read_file", path="list.txt"), call("edit_file", path="list.txt", old_text="milk", new_text="oat")
    )
    server.calls(call("exec", command="seq 101 120"))
    server.calls(call("exec", command="echo wrong; exit 3"))
    server.reply("Done.")
    async with terminal(server=server, columns=columns, rows=200) as screen:
        await screen.ready()
        screen.type("go\r")
        lines = await screen.shows("tokens read")
        text = "\n".join(lines)
        assert "  │ -eggs\n  │ +butter\n" in text
        assert "✓ write list.txt" in text
        assert "  │ -milk\n  │ +oat\n" in text
        assert text.count("  │ 101") == text.count("  │ 106") == 1
        assert "107" not in text
        assert "14 more lines" in text
        assert text.count("wrong") == 2  # in the command and in its output
        assert "exit status 3" in " ".join(text.split())
        assert screen.look_of("✗ $ echo wrong").fg == "red"
        assert screen.look_of("+butter").fg == "green"
        assert screen.look_of("-eggs").fg == "red"
        screen.type("/show 4\r")
        await screen.shows("  120")
        screen.type("\x0f")
        assert "  result:" in (await screen.shows("command: echo wrong"))


async def test_a_running_call_is_one_line_with_elapsed_time_and_latest_output(server):
    server.calls(call("exec", command="echo started; sleep 30"))
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("go\r")
        lines = await screen.shows("│ started")
        running = [line for line in lines if "$ echo started; sleep 30" in line]
        assert len(running) == 1
        assert re.search(r"\d\.\d s$", running[0])
        screen.type("\x03")
        await screen.shows("Stopped.")
        assert screen.look_of("✗ $ echo").fg == "red"


async def test_an_unknown_command_is_refused_with_a_suggestion_and_a_path_is_a_message(server):
    server.reply("A path.")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("/hepl\r")
        await screen.shows("did you mean /help?")
        screen.type("/frobnicate the thing\r")
        await screen.shows("There is no command /frobnicate:")
        assert server.requests == []
        screen.type("/usr/bin\r")
        await screen.shows("A path.")
        screen.type("/help\r")
        await screen.shows("/show")
        assert "Ctrl-O" in "\n".join(screen.lines)


# ------------------------------------------------------------------------------------------------ questions


@pytest.mark.parametrize("columns", WIDTHS)
async def test_a_question_shows_a_diff_first_and_free_text_is_returned_as_a_note(server, home, columns):
    (home / "workspace").mkdir(parents=True)
    (home / "workspace" / "plan.txt").write_text("beans\npeas\n")
    (home / "config.toml").write_text('[[policy]]\ntool = "*"\ndo = "ask"\nwhy = "writing is dear"\n')
    server.calls(call("edit_file", path="plan.txt", old_text="beans", new_text="corn"))
    server.reply("Then not.")
    server.calls(call("exec", command="touch made"))
    server.reply("Made.")
    server.calls(call("exec", command="touch more"))
    server.reply("No more.")
    async with terminal(server=server, columns=columns, rows=80) as screen:
        await screen.ready()
        screen.type("go\r")
        lines = await screen.shows("tells me why.")
        assert "Any other sentence means no, and tells me why." in " ".join(" ".join(lines).split())
        assert "-beans" in lines
        assert "+corn" in lines
        assert screen.look_of("-beans").fg == "red"
        assert screen.look_of("+corn").fg == "green"
        screen.type("rather keep the beans\r")
        await screen.shows("Then not.")
        assert (home / "workspace" / "plan.txt").read_text() == "beans\npeas\n"
        assert "rather keep the beans" in str(server.requests[-1].body)
        assert not (home / "workspace" / "made").exists()
        screen.type("again\r")
        await screen.shows("touch made")
        await until(lambda: screen.text.count("Answer y") >= 2)
        screen.type("y\r")
        await screen.shows("Made.")
        assert (home / "workspace" / "made").exists()
        screen.type("and more\r")
        await until(lambda: screen.text.count("Answer y") >= 3)
        screen.type("n\r")
        lines = await screen.shows("No more.")
        assert re.search(r"touch more .* s\s+denied\s+#3", " ".join(lines))  # its reason is below


# ------------------------------------------------------------------------------------------------ input


@pytest.mark.parametrize("columns", WIDTHS)
async def test_multiline_input_works_with_alt_enter_ctrl_j_a_backslash_and_paste(server, columns):
    server.reply("Thanks.")
    async with terminal(server=server, columns=columns) as screen:
        await screen.ready()
        screen.type("one\x1b\rtwo\nthree\\\rfour\x1b[200~\nfive\nsix\x1b[201~")
        await screen.shows("six")
        assert server.requests == []
        screen.type("\r")
        lines = await screen.shows("Thanks.")
        assert lines[lines.index("> one") :][:6] == ["> one", "  two", "  three", "  four", "  five", "  six"]
    assert "one\\ntwo\\nthree\\nfour\\nfive\\nsix" in str(server.requests[0].body["messages"])


async def test_history_persists_and_is_searched_with_ctrl_r(server, home):
    for said in ("the first question", "another thing"):
        server.reply(f"Answer to {said}.")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("the first question\r")
        await screen.shows("Answer to the first question.")
        screen.type("another thing\r")
        await screen.shows("Answer to another thing.")
        screen.type("exit\r")
        assert await screen.ends() == 0
    assert (home / "chat_history").stat().st_mode & 0o777 == 0o600
    server.reply("Once more.")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("\x1b[A")
        await screen.shows("> another thing")
        screen.type("\x15\x12first")
        await screen.shows("I-search backward: first")
        await screen.shows("> the first question")
        screen.type("\r\r")
        await screen.shows("Once more.")
        screen.type("quit\r")
        assert await screen.ends() == 0
    assert server.requests[-1].body["messages"][-1]["content"] == "the first question"


@pytest.mark.parametrize("columns", WIDTHS)
async def test_tab_completes_commands_and_files_and_a_mentioned_file_is_attached(server, home, columns):
    notes = home / "workspace" / "deep" / "notes.md"
    notes.parent.mkdir(parents=True)
    notes.write_text("hello")
    server.reply("Read.")
    async with terminal(server=server, columns=columns) as screen:
        await screen.ready()
        screen.type("/sta\t")
        await screen.shows("> /status")
        screen.type("\r")
        await screen.shows("model: scripted")
        screen.type("look at @dnot\t")
        await screen.shows("> look at @deep/notes.md")
        screen.type("\r\r")
        await screen.shows("Read.")
    assert "[attachment: deep/notes.md]" in str(server.requests[0].body["messages"])


async def test_a_command_after_an_exclamation_mark_runs_in_the_sandbox_and_the_agent_sees_its_output(server, home):
    server.reply("I saw it.")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("!echo $((6 * 7)); cat ~/.everloop/chat_history\r")
        await screen.shows("│ 42")
        await screen.shows("No such file")  # it cannot reach the runtime's own files
        screen.type("what was it?\r")
        await screen.shows("I saw it.")
        screen.type("!sleep 60\r")
        await screen.shows("> !sleep 60")
        screen.type("\x03")
        await screen.shows("Stopped.")
    said = str(server.requests[0].body["messages"])
    assert "I ran this command myself" in said
    assert "42" in said


# ------------------------------------------------------------------------------------------------ the session


@pytest.mark.parametrize("columns", WIDTHS)
async def test_the_status_line_describes_the_session_and_commands_give_details(server, home, columns):
    server.reply("Paris.")
    async with terminal(server=server, columns=columns, rows=80, EVERLOOP_MODEL="gpt-4.1-mini") as screen:
        await screen.ready()
        screen.type("capital of France?\r")
        await screen.shows("tokens read")
        await until(lambda: "% context" in screen.lines[-1])
        line = screen.lines[-1]
        assert len(line) < columns
        assert "gpt-4.1-mini" in line
        if columns == 120:
            assert re.fullmatch(
                r"~/.everloop/workspace · capital of France\? · gpt-4.1-mini · \d+% context"
                r" · \S+ in, 1 out · \$0.00\d\d · queue",
                line,
            )
        assert "· $0.00" in "\n".join(screen.lines[:-1]).replace("\n", " ")
        screen.type("/cost\r")
        text = " ".join(" ".join(await screen.shows("them")).split())
        assert re.search(r"gpt-4.1-mini: [\d,]+ tokens read, 1 written · \$0.00", text)
        screen.type("/context\r")
        await screen.shows("The conversation has about")
        screen.type("/rename Geography\r")
        await screen.shows("“Geography”.")
        screen.type("\x04")
        assert await screen.ends() == 0
    listed = await everloop("sessions", server=server)
    assert "Geography" in listed.out


async def test_pair_admits_a_user_of_a_chat_network(server, home):
    home.mkdir()
    (home / "config.toml").write_text('[channels.telegram]\ntoken = "1:x"\npairing = true\n')
    store = SQLiteStore(home / "everloop.db")
    pending = f'{{"code":"K7PXW2QD","sender":"9","chat":"9","name":"Nina","at":{time.time()}}}'
    await store.set_channel_state("telegram", "code:K7PXW2QD", pending)
    async with terminal(server=server, columns=100) as screen:
        await screen.ready()
        screen.type("/pair WRONG123\r")
        await screen.shows("no valid code is WRONG123")
        screen.type("/pair K7PXW2QD\r")
        await screen.shows("Paired Nina (telegram:9).")
        screen.type("\x04")
        assert await screen.ends() == 0
    assert "peer:9" in await store.channel_state("telegram")
    await store.close()


async def test_a_price_in_the_settings_overrides_the_shipped_one(server, home):
    home.mkdir()
    (home / "config.toml").write_text('[[price]]\nmodel = "gpt-*"\ninput = 1000000.0\n')
    server.reply("Hi.")
    async with terminal(server=server, columns=120, EVERLOOP_MODEL="gpt-4.1-mini") as screen:
        await screen.ready()
        screen.type("hello\r")
        lines = await screen.shows("tokens read")
        summary = next(line for line in lines if "tokens read" in line)
        read = summary.partition(" tokens")[0].rpartition(" ")[2].replace(",", "")
        assert f"${read}.00" in summary


async def test_the_chat_can_switch_models_and_sessions(server):
    for answer in ("One.", "Two.", "Three."):
        server.reply(answer)
    await everloop("run", "--session", "cli:plants", "water the beans", server=server)
    async with terminal(server=server, rows=80) as screen:
        await screen.ready()
        screen.type("/model other-model\rhello\r")  # text typed ahead goes to the next prompt
        async with asyncio.timeout(30):
            while "Now with other-model" not in screen.text:
                assert screen.takes_keys  # Enter remains Enter whenever it is typed
                await asyncio.sleep(0.001)
        await screen.shows("Two.")
        assert server.requests[-1].body["model"] == "other-model"
        screen.type("/sessions\r")
        await screen.shows(" water the beans  1 turn")
        await screen.shows("> /resume")
        screen.type("beans\r")
        await screen.shows("Continues “water the beans” (1 turn")
        screen.type("and now?\r")
        await screen.shows("Three.")
    assert "water the beans" in str(server.requests[-1].body["messages"])


async def test_changes_of_the_last_turn_are_shown_and_undone_but_later_user_edits_are_kept(server, home):
    workspace = home / "workspace"
    workspace.mkdir(parents=True)
    (workspace / "kept.txt").write_text("old\n")
    (workspace / "mine.txt").write_text("mine\n")
    (workspace / "gone.txt").write_text("gone\n")
    server.calls(call("write_file", path="kept.txt", content="new\n"))
    server.calls(call("write_file", path="mine.txt", content="theirs\n"))
    server.calls(call("exec", command="rm gone.txt; mkdir d; echo made > d/made.txt"))
    server.reply("Changed.")
    server.reply("I see.")
    async with terminal(server=server, rows=80) as screen:
        await screen.ready()
        screen.type("/undo\r")
        await screen.shows("nothing to undo")
        screen.type("go\r")
        await screen.shows("Changed.")
        await until(lambda: "% context" in screen.lines[-1])
        screen.type("/diff\r")
        await screen.shows("  -gone")
        assert "  +made" in screen.lines
        (workspace / "mine.txt").write_text("mine again\n")
        screen.type("/undo\r")
        await screen.shows("not undone: mine.txt: it has changed since")
        await screen.shows("↶ restored gone.txt")
        assert "↶ removed d/made.txt" in screen.lines
        assert (workspace / "kept.txt").read_text() == "old\n"
        assert (workspace / "gone.txt").read_text() == "gone\n"
        assert (workspace / "mine.txt").read_text() == "mine again\n"
        assert not (workspace / "d" / "made.txt").exists()
        screen.type("well?\r")
        await screen.shows("I see.")
    assert "I undid your last changes to these files: d/made.txt, gone.txt, kept.txt" in str(server.requests[-1].body)


async def test_the_last_turn_of_an_earlier_process_is_undone(server, home):
    workspace = home / "workspace"
    workspace.mkdir(parents=True)
    (workspace / "plan.txt").write_text("old\n")
    server.calls(call("write_file", path="plan.txt", content="new\n"))
    server.reply("Changed.")
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("go\r")
        await screen.shows("Changed.")
        screen.type("/diff\r")  # waits until the changes are known
        await screen.shows("  -old")
        await until(lambda: list((home / "undo").glob("*")))
        screen.process.kill()
        await screen.process.wait()
    async with terminal(server=server) as screen:
        await screen.ready()
        screen.type("/undo\r")
        await screen.shows("↶ restored plan.txt")
        assert (workspace / "plan.txt").read_text() == "old\n"
        screen.type("/undo\r")
        await screen.shows("nothing to undo")
    assert list((home / "undo").glob("*")) == []


async def test_an_export_contains_the_conversation_and_no_secret(server, tmp_path):
    server.reply("Your key is sk-abcdefghijklmnopqrstuvwx and pass-word-1234.")
    target = tmp_path / "out.md"
    async with terminal(server=server, MY_API_TOKEN="pass-word-1234") as screen:
        await screen.ready()
        screen.type("hello\r")
        await screen.shows("tokens read")
        screen.type(f"/export md {target}\r")
        await screen.shows("Written to")
    text = target.read_text()
    assert "## You\n\nhello" in text
    assert "sk-abc" not in text
    assert "pass-word" not in text
    assert text.count("[secret]") == 2


@pytest.mark.parametrize("columns", WIDTHS)
async def test_the_chat_announces_its_folder_and_the_session_it_continues(server, tmp_path, columns):
    server.reply("Paris.")
    server.hang(30)
    async with terminal(server=server, columns=columns) as screen:
        text = " ".join(" ".join(await screen.ready()).split())
        assert "your home workspace. `everloop .` works in the current folder" in text
        screen.type("capital of France?\r")
        await screen.shows("Paris.")
        await screen.shows("tokens read")
        screen.type("and of Spain?\r")
        await until(lambda: len(server.requests) == 2)
        screen.process.kill()
        await screen.process.wait()
    server.reply("Madrid.")
    async with terminal(server=server, columns=columns) as screen:
        text = " ".join(" ".join(await screen.shows("Madrid.")).split())
        assert "Continues “capital of France?” (2 turns, just now)" in text
        assert "Continuing an interrupted turn: “and of Spain?”" in text
    async with terminal(str(tmp_path), server=server, columns=columns) as screen:
        text = " ".join(" ".join(await screen.ready()).split())
        assert "home workspace" not in text
        assert "Continues" not in text


async def test_ctrl_c_stops_a_server_in_a_terminal_that_a_killed_chat_has_left_in_raw_mode(server):
    async with terminal("serve", "--port", "0", server=server, raw=True) as screen:
        await screen.sees("serving on")
        screen.type("\x03")
        assert await screen.ends() == 130


async def test_a_chat_in_a_terminal_that_was_left_in_raw_mode_leaves_it_usable(server):
    async with terminal(server=server, raw=True) as screen:
        await screen.ready()
        screen.type("/exit\r")
        assert await screen.ends() == 0
        assert not screen.takes_keys
