"""Shaping for small models: which call can come next, and with which arguments. No model runs here."""

from __future__ import annotations

import time
from typing import Any

import pytest

from everloop.messages import assistant_message, tool_message, user_message

from .test_small import completed_call, is_talk, may_be_call, may_be_words, offered, prepare, request_for, with_system


def call_line(request: dict[str, Any], tool: str) -> str:
    """Return the rule of the grammar for calls of a tool."""
    return next(line for line in request["grammar"].splitlines() if f'"\\"{tool}\\""' in line)


def numbered(text: str) -> str:
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(text.splitlines(), 1))


@pytest.mark.parametrize(
    "request_",
    [
        "in pond.ini change the depth from 3 to 4",
        "The depth in pond.ini is 4, not 3. Update it.",
        "the depth in pond.ini should be 4",
        "Ersetze in pond.ini 3 durch 4",
    ],
)
def test_a_file_is_read_before_it_is_changed_and_changed_once_it_was_read(request_: str) -> None:
    assert "edit_file" not in offered(request_for(request_))
    assert "write_file" not in offered(request_for(request_))
    after = request_for(request_, *completed_call("read_file", numbered("fish = pike\ndepth = 3"), path="pond.ini"))
    assert offered(after) == {"edit_file"}
    assert not may_be_words(after)


@pytest.mark.parametrize("request_", ["what should I fix according to pond.ini?", "which depth is set in pond.ini?"])
def test_a_question_about_a_file_never_forces_a_change(request_: str) -> None:
    assert may_be_words(request_for(request_, *completed_call("read_file", numbered("depth = 3"), path="pond.ini")))


def test_a_phrase_in_several_places_is_replaced_everywhere_by_words_of_the_request() -> None:
    line = call_line(request_for("change every pike to eel in fish.csv"), "edit_file")
    assert '"\\"pike\\""' in line
    assert '\\"replace_all\\": " "true"' in line
    assert line.count("new_text") == 1
    assert '\\"new_text\\": " ("' in line
    assert '\\"new_text\\": " string' in call_line(request_for("shout every pike in fish.csv"), "edit_file")
    assert '"\\"to\\""' not in line
    assert "filled" not in line
    after = request_for(
        "change every pike to eel in fish.csv",
        *completed_call("read_file", numbered("pike 3\ncarp 2"), path="fish.csv"),
    )
    assert '"\\"pike\\""' in call_line(after, "edit_file")
    assert '"\\"eel\\""' not in call_line(after, "edit_file").partition("new_text")[0]


def test_after_a_failed_edit_and_a_read_another_edit_follows() -> None:
    error = '{"status":"error","message":"old_text does not stand in pond.ini."}'
    wrong = assistant_message(None, [("c0", "edit_file", {"path": "pond.ini", "old_text": "a", "new_text": "b"})])
    look = completed_call("read_file", numbered("depth = 3"), path="pond.ini")
    request = request_for("change the depth in pond.ini to 4", wrong, tool_message("c0", "edit_file", error), *look)
    assert not may_be_words(request)
    assert "edit_file" in offered(request)


def test_a_replaced_line_keeps_its_indent_key_and_comma() -> None:
    result = numbered('{\n  "depth": 3,\n  "fish": 9\n}')
    line = call_line(
        request_for("set the depth to 4 in pond.json", *completed_call("read_file", result, path="pond.json")),
        "edit_file",
    )
    assert r'"\"  \\\"depth\\\": " rest ",\""' in line


def test_an_edit_can_replace_a_line_far_down_in_a_long_file() -> None:
    result = numbered("\n".join(f"key{number} = {number}" for number in range(900)))
    line = call_line(
        request_for("set key733 to 5 in pond.ini", *completed_call("read_file", result, path="pond.ini")), "edit_file"
    )
    assert '\\"key733 = 733\\"' in line


def test_a_line_found_by_grep_can_be_edited() -> None:
    found = completed_call("grep", "pond/deep.ini:3:depth = 60", pattern="depth")
    line = call_line(request_for("find out where the depth is set and change it to 80", *found), "edit_file")
    assert '\\"depth = 60\\"' in line
    assert '\\"pond/deep.ini\\"' in line


def test_a_new_file_gets_the_name_in_the_request() -> None:
    assert '", \\"path\\": " ("\\"a.txt\\"")' in call_line(request_for("create a.txt containing abc"), "write_file")
    inside = call_line(request_for("make a folder nets with a file one.md in it, text: red"), "write_file")
    assert '"\\"nets/one.md\\""' in inside
    read_it = completed_call("read_file", numbered("pike 9"), path="fish.csv")
    line = call_line(
        request_for("look up the pike in fish.csv and write the number to pike.txt", *read_it), "write_file"
    )
    assert "fish.csv" not in line


def test_only_named_files_are_places_to_search_and_not_any_word() -> None:
    assert "Petra" not in call_line(request_for("where do I mention Petra?"), "grep")
    only = call_line(request_for("is Petra in crew.txt?"), "grep")
    assert only.count('\\"pattern\\"') == only.count('\\"path\\"') == 1
    assert '\\"crew.txt\\"' in only
    assert '"\\"nets\\""' in call_line(request_for("search for Petra in the nets folder"), "grep")


def test_files_are_not_listed_as_folders_and_their_names_are_not_patterns() -> None:
    assert "moss.txt" not in call_line(request_for("is there a moss.txt here?"), "list_dir")
    assert "glob" in call_line(request_for("find all python files"), "find_files")
    assert "$" in next(line for line in request_for("ls")["grammar"].splitlines() if line.startswith("glob"))


def test_lines_of_a_file_are_counted_by_a_command() -> None:
    assert not offered(request_for("how many names are in crew.txt?")) & {"list_dir", "grep", "write_file"}
    assert "exec" in offered(request_for("how many names are in crew.txt?"))


@pytest.mark.parametrize("request_", ["how many moons has Mars?", "I am tired today", "any idea what I could cook?"])
def test_a_request_without_a_task_allows_no_changes(request_: str) -> None:
    request = request_for(request_)
    assert may_be_words(request)
    assert not offered(request) & {"exec", "write_file", "edit_file", "cron", "remember"}


def test_a_calculation_is_answered_in_words() -> None:
    assert not may_be_call(request_for("how many planets are in the solar system?"))
    assert not may_be_call(request_for("Wie viele Tage hat ein Jahr?"))
    for text in ("how many files are in nets?", "how many things are in nets?", "how many nets do I have here?"):
        assert may_be_call(request_for(text))


def test_something_told_earlier_is_searched_only_in_the_past() -> None:
    assert offered(request_for("what was the name of my landlord again? I told you last week")) == {"memory_search"}
    assert "read_file" in offered(request_for("show me again what is in moss.txt"))


def test_a_question_about_the_person_is_answered_from_the_conversation_or_the_memory() -> None:
    earlier = [user_message("remember that my cat is called Miso"), assistant_message("I will remember that.")]
    request = prepare(with_system(*earlier, user_message("what is my cat called?")))
    assert is_talk(request)
    assert [one["role"] for one in request["messages"]] == ["system", "user", "assistant", "user"]
    assert "Miso" in request["messages"][1]["content"]
    assert "herons" in request["messages"][0]["content"]
    assert not may_be_call(request_for("which birds do I like? herons?"))  # the memory knows of herons
    assert may_be_call(request_for("what is my cat called? I told you once"))


def test_an_english_request_has_no_examples_in_other_languages_and_a_german_one_has_german_ones() -> None:
    for text in (
        "copy ship.md to boat.md",
        "add the line Main to rivers.txt",
    ):
        shown = request_for(text)["messages"][request_for(text)["stable"] :]
        assert not [one for one in shown[2:-1] if {"ist", "die", "der", "el", "la", "le"} & {*one["content"].split()}]
    german = request_for("Wie alt ist Ida laut der Datei moos.txt?")
    shown = german["messages"][german["stable"] : -3]
    assert any("Datei" in one["content"] for one in shown)


@pytest.mark.parametrize(
    ("request_", "line", "parts"),
    [
        ("Rosie was renamed Ruby, please fix that in herd.txt", "Rosie", ('"\\"" (', '"Ruby"')),
        ("the fee for York is 275, not 250. correct herd.txt", "York,17 May,250", ('"\\"York,17 May," (', '"275"')),
        (
            "Update herd.txt: the door is 4 m wide, not 3",
            "The door is 3 m wide.",
            ('"\\"The door is " (', '" m wide.\\""'),
        ),
        ("write Bonn instead of Ulm in herd.txt", 'town = "Ulm"', ('"\\"town = \\\\\\"" (', '"Bonn"')),
        ("herd.txt에서 Elbe를 Oder로 바꿔줘", "Elbe", ('"\\"" (', '"Oder"')),
        ("把 herd.txt 里的 Elbe改成Oder", "Elbe", ('"\\"" (', '"Oder"')),
    ],
)
def test_only_the_replaced_words_of_a_line_are_free(request_: str, line: str, parts: tuple[str, str]) -> None:
    look = completed_call("read_file", numbered(f"other\n{line}\nlast"), path="herd.txt")
    rule = call_line(request_for(request_, *look), "edit_file")
    assert all(part in rule for part in parts)
    assert "rest" not in rule
    assert "other" not in rule


def test_a_line_whose_old_words_were_not_named_is_rewritten() -> None:
    look = completed_call("read_file", numbered("<title>Home</title>\nlast"), path="page.html")
    assert "rest" in call_line(request_for("make the title of page.html Welcome", *look), "edit_file")
    look = completed_call("read_file", numbered("<p>\n  title page\n</p>"), path="page.html")
    assert r'"\"  " rest' in call_line(request_for("make the title of page.html Welcome", *look), "edit_file")
    look = completed_call("read_file", numbered("did you see teh fish"), path="a.md")
    assert "rest" in call_line(request_for("correct the spelling of 'teh' in a.md", *look), "edit_file")


def test_lines_that_begin_alike_can_all_be_edited() -> None:
    look = completed_call("read_file", numbered("pike one\npike two\npike three"), path="fish.txt")
    line = call_line(request_for("set pike to 5 in fish.txt", *look), "edit_file")
    assert all(f'\\"pike {number}\\"' in line for number in ("one", "two", "three"))


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        ("every monday at 20:00 remind me of the bins", '"0" " " "20" " " "*" " " "*" " " "1"'),
        ("Erinnere mich jeden Freitag um 9 an den Müll", 'field " " field " " "*" " " "*" " " "5"'),
        ("Erinnere mich jeden Tag um 21 Uhr an den Müll", '"0" " " "21" " " field " " field " " field'),
        ("every day at 7:15 remind me to swim", '"15" " " "7" " " field " " field " " field'),
        ("each evening at 8:30 remind me to swim", '"30" " " "20" " " field " " field " " field'),
        ("every day at 12 am remind me to sleep", '"0" " " "0" " " field " " field " " field'),
    ],
)
def test_a_named_weekday_and_time_are_the_ones_that_are_set(request_: str, fields: str) -> None:
    assert fields in call_line(request_for(request_), "cron")


@pytest.mark.parametrize(
    "request_", ["every 2 hours remind me to swim", "remind me daily at 9:00 and at 17:30 to swim"]
)
def test_without_exactly_one_named_time_any_can_be_set(request_: str) -> None:
    assert '"cron\\": " filled' in call_line(request_for(request_), "cron")


def test_adding_to_a_file_never_replaces_it() -> None:
    for text in (
        "add Hazel to herd.txt",
        "write Hazel under the others in herd.txt",
        "put Hazel at the end of herd.txt",
    ):
        assert "write_file" not in offered(request_for(text))
        assert "exec" in offered(request_for(text))


def test_after_a_file_was_read_the_folder_is_not_listed() -> None:
    look = completed_call("read_file", numbered("green"), path="moss.txt")
    assert "list_dir" not in offered(request_for("cat moss.txt", *look))


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        ("Erstelle eine Datei müll.txt mit dem Text hallo", "müll.txt"),
        ("create app.test.json containing {}", "app.test.json"),
        ("song.txt파일을 만들고 hi 라고 적어줘", "song.txt"),
        ("create .env containing A=1", ".env"),
    ],
)
def test_names_may_have_letters_of_any_language_and_several_extensions(request_: str, path: str) -> None:
    assert f'", \\"path\\": " ("\\"{path}\\"")' in call_line(request_for(request_), "write_file")


def test_a_name_without_clear_boundaries_is_left_to_the_model() -> None:
    assert '\\"path\\": " filled' in call_line(request_for("创建文件笔记.txt,内容是 hello"), "write_file")


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        ("change x to y in a.txt", "a" * 16_000),
        ("change x to y in a.txt", "1." * 8_000),
        ("set word733 to 5 in a.txt", numbered("\n".join(f"word{number} = 1" for number in range(2_000)))),
        (
            "replace " + " ".join(f"word{number}" for number in range(2_000)) + " in a.txt with x",
            numbered("word1\n" * 900),
        ),
        ("x" * 50_000, "x"),
    ],
)
def test_any_text_is_shaped_quickly(request_: str, result: str) -> None:
    began = time.process_time()
    request_for(request_, *completed_call("read_file", result, path="a.txt"))
    assert time.process_time() - began < 2


def test_a_reminder_has_a_time_that_the_scheduler_can_read() -> None:
    grammar = request_for("remind me in a minute to call mum")["grammar"]
    at = grammar.partition('\\"at\\": " ')[2]
    assert at.startswith('"\\"" ("in " [1-9]')
    assert '("today " | "tomorrow ") [0-9]' in at  # a time alone came out for "in 1 minute": 1:00
    assert "filled" not in at.partition("tomorrow")[0]


def test_a_reminder_that_failed_is_retried_and_not_confirmed() -> None:
    add = completed_call("cron", '{"status": "error", "message": "no time"}', action="add", message="mum", at="soon")
    assert not may_be_words(prepare(with_system(user_message("remind me in a minute to call mum"), *add)))


def test_a_daily_reminder_cannot_be_set_as_a_single_one() -> None:
    line = call_line(request_for("remind me every day at 7:30 to take my pills"), "cron")
    assert '\\"cron\\": ' in line
    assert '\\"at\\": ' not in line
    assert '\\"every\\": ' in call_line(request_for("remind me every 30 minutes to stretch"), "cron")
