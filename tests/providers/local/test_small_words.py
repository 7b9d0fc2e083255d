"""Shaping for small models: what the words of a request allow and rule out, also if typed in a hurry. No model runs."""

from __future__ import annotations

import pytest

from everloop.providers.local.small.conversation import without_clock

from .test_small import completed_call, may_be_words, offered, read, request_for
from .test_small_calls import call_line, numbered

CHANGING = {"exec", "write_file", "edit_file", "cron", "remember"}
SETTINGS = "[wifi]\nname = reed\nchannel = 6\n\n[door]\nlength = 4\n"


@pytest.mark.parametrize(
    "request_",
    [
        "whats the channel set in pond.ini",
        "wheres the length kept, pond.ini?",
        "what is in changes.md?",
        "who wrote rename/create.txt?",
    ],
)
def test_a_question_leads_to_no_change_even_if_its_words_or_file_names_suggest_one(request_: str) -> None:
    assert "write_file" not in offered(request_for(request_))
    after = request_for(request_, *completed_call("read_file", numbered(SETTINGS), path="pond.ini"))
    assert may_be_words(after)
    assert not offered(after) & CHANGING


@pytest.mark.parametrize(
    "request_",
    [
        "what is the channel in pond.ini? write it to channel.txt",
        "which channel does pond.ini have, and save it as channel.txt",
        "could you copy the channel of pond.ini to channel.txt?",
    ],
)
def test_a_question_followed_by_a_command_may_lead_to_a_change(request_: str) -> None:
    after = request_for(request_, *completed_call("read_file", numbered(SETTINGS), path="pond.ini"))
    assert "write_file" in offered(after)


def test_a_polite_command_after_a_statement_is_not_a_question() -> None:
    request = "it is channel 9 and not 6, can you correct pond.ini?"
    after = request_for(request, *completed_call("read_file", numbered(SETTINGS), path="pond.ini"))
    assert not may_be_words(after)
    assert offered(after) == {"edit_file"}


@pytest.mark.parametrize(
    "request_",
    [
        "make sum.py printing 2+3, then execute it",
        "write sum.py which adds 2 and 3 and run it",
        "create sum.py; start it",
    ],
)
def test_a_script_that_was_requested_to_run_is_run_once_it_is_written(request_: str) -> None:
    after = request_for(
        request_, *completed_call("write_file", "Created sum.py.", path="sum.py", content="print(2 + 3)\n")
    )
    assert not may_be_words(after)
    assert offered(after) == {"exec"}


@pytest.mark.parametrize(
    "request_", ["write go.sh that starts and stops the pump", "start go.sh with the line pump on"]
)
def test_a_script_that_mentions_running_is_not_run(request_: str) -> None:
    after = request_for(request_, *completed_call("write_file", "Created go.sh.", path="go.sh", content="pump on\n"))
    assert may_be_words(after)


def test_a_setting_is_changed_in_the_line_with_its_key() -> None:
    request = "the wifi channel should be 11 in pond.ini"
    line = call_line(
        request_for(request, *completed_call("read_file", numbered(SETTINGS), path="pond.ini")), "edit_file"
    )
    assert "channel = 6" in line
    assert "[wifi]" not in line


def test_a_number_does_not_match_inside_a_longer_one() -> None:
    request = "in heat.py use 273.15 instead of 273"
    text = "def kelvin(celsius):\n    return celsius + 273\n"
    line = call_line(request_for(request, *completed_call("read_file", numbered(text), path="heat.py")), "edit_file")
    assert '"273.15"' in line
    assert '"use' not in line


def test_a_new_file_may_go_into_a_folder_named_after_a_preposition() -> None:
    line = call_line(request_for("in reeds make a file nest.txt that says: two eggs"), "write_file")
    assert "reeds/nest.txt" in line
    assert '\\"nest.txt' in line


@pytest.mark.parametrize(
    "request_",
    ["ping me in 5 min about the tea", "nudge me every hour to stand up", "let me know at noon that lunch is ready"],
)
def test_a_request_to_be_notified_at_a_time_gets_a_job(request_: str) -> None:
    assert "cron" in offered(request_for(request_))


@pytest.mark.parametrize(
    "request_",
    [
        "what colour did we settle on the other day",
        "which hotel was it? we talked about it",
        "the restaurant that we agreed on last week, what was it called?",
    ],
)
def test_a_reference_to_an_earlier_conversation_searches_the_past(request_: str) -> None:
    assert offered(request_for(request_)) == {"memory_search"}
    assert not may_be_words(request_for(request_))


def test_a_request_to_delete_a_reminder_is_not_about_a_file() -> None:
    assert "cron" in offered(request_for("delete the reminder about the boat"))


@pytest.mark.parametrize("request_", ["what is a linked list", "write a haiku about spring", "I love this weather"])
def test_a_request_that_needs_no_file_can_be_answered_in_words(request_: str) -> None:
    assert may_be_words(request_for(request_))


def test_an_overview_of_the_files_requires_listing_them() -> None:
    request = request_for("Give me an overview of the files I have.")
    assert not may_be_words(request)
    assert "list_dir" in offered(request)


@pytest.mark.parametrize(
    ("request_", "command"),
    [
        ("see.md soll ab jetzt teich.md heißen", "mv see.md teich.md"),
        ("make a backup of see.md", "cp see.md see.md.bak"),
        ("which words has see.md", "cat see.md"),
        ("move see.md and pond.md into reeds", "mv *.md reeds/"),
        ("all words of see.md in one line", "tr < *.md > words.md"),
    ],
)
def test_a_command_with_known_or_freely_chosen_names_is_accepted(request_: str, command: str) -> None:
    assert read(f'{{"tool": "exec", "command": "{command}"}}', request_for(request_)).tool_calls[0].name == "exec"


def test_a_german_request_without_german_nouns_has_german_examples() -> None:
    shown = " ".join(message["content"] for message in request_for("see.md soll ab jetzt teich.md heißen")["messages"])
    assert "Benenne" in shown


def test_a_long_request_is_classified_by_its_ends_and_shown_whole() -> None:
    pasted = "a page of somebody else's, which is not what was asked for. " * 2_000
    request = f"what is in pond.ini? {pasted} write it to lake.txt"
    shaped = request_for(request)
    assert len(shaped["_step"].turn.request) < 5_000
    assert "read_file" in offered(shaped)
    assert pasted in shaped["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ls\n\n[It is now Sunday.]", "ls"),
        ("ls\n\n[It is now Sunday.]\n", "ls"),
        ("ls [It is now one] \n[It is now two]", "ls [It is now one] "),
        ("[It is now Sunday.] ls", None),
        ("ls [It is now Sunday.] ]", None),
        ("ls [It is now ", None),
        ("ls", None),
    ],
)
def test_only_the_time_after_a_request_is_removed(text: str, words: str | None) -> None:
    assert without_clock(text) == (text if words is None else words)


def test_a_call_whose_path_is_not_text_is_handled() -> None:
    after = request_for(
        "what is in pond.ini? write it to lake.txt", *completed_call("read_file", "1\tname = reed", path=["pond.ini"])
    )
    assert "write_file" in offered(after)
