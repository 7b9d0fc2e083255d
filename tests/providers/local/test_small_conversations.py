"""Small models in a conversation: what "it" and "the list" mean, what is talk, and that examples stay where they are.
No model runs here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from everloop.engine import REFUSED
from everloop.messages import assistant_message, tool_message, user_message
from everloop.providers.base import LLMResponse
from everloop.providers.local.small.answers import leaked_text, uses_unknown_file
from everloop.providers.local.small.conversation import Turn
from everloop.providers.local.small.examples import EXAMPLES
from everloop.providers.local.small.language import Request, paths_in, words
from everloop.tools.simple_tools import SIMPLE_TOOLS, simplify_call, to_command

from .test_small import (
    SHAPING,
    completed_call,
    is_talk,
    llama_answer,
    may_be_words,
    offered,
    prepare,
    read,
    request_for,
    with_system,
)


def turn(request: str, name: str, result: str, answer: str = "All right.", **arguments: Any) -> list[dict[str, Any]]:
    """Return a completed turn with one call."""
    id = f"c-{abs(hash((request, name, str(arguments))))}"
    return [
        user_message(request),
        assistant_message(None, [(id, name, arguments)]),
        tool_message(id, name, result),
        assistant_message(answer),
    ]


LIST = turn(
    "create net.md with cork, lead and twine", "write_file", "Created net.md.", path="net.md", content="cork\nlead\n"
)
TWO = [
    *turn("what is here?", "list_dir", "lake_old.txt  3 B\nlake_new.txt  3 B\nfish.csv  9 B", path="."),
    *turn("open the new lake", "read_file", "     1\tdeep", path="lake_new.txt"),
]


def request_after(history: list[dict[str, Any]], request: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return prepare(with_system(*history, user_message(request), *calls))


def sure_call(request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    (call,) = request["certain"].tool_calls
    return call.name, call.arguments


def retried(request: dict[str, Any]) -> dict[str, Any]:
    return {**request, "_step": replace(request["_step"], retried=True)}


def simple_tools(request: dict[str, Any]) -> set[str]:
    return {name for name in SIMPLE_TOOLS if f' ::= "\\"{name}\\""' in request.get("grammar", "")}


# ---------------------------------------------------------------------------------------------- what is meant


@pytest.mark.parametrize(
    "request_", ["add a hook to the list", "put a hook on it too", "and a hook", "Füge Haken hinzu"]
)
def test_an_addition_goes_to_the_file_touched_last_and_to_no_other(request_: str) -> None:
    request = request_after(LIST, request_)
    assert simple_tools(request) == {"append"}
    assert offered(request) == set()
    assert not may_be_words(request)
    assert '"path\\": " ("\\"net.md\\"")' in request["grammar"]
    call = read('{"tool": "append", "path": "net.md", "text": "hook"}', request).tool_calls[0]
    assert (call.name, call.arguments) == ("exec", {"command": "echo 'hook' >> net.md"})


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        ("show me the list", "net.md"),
        ("what's on the list now?", "net.md"),
        ("sorry, I meant wire", "net.md"),
    ],
)
def test_a_file_in_question_is_read_first_without_asking_the_model(request_: str, path: str) -> None:
    assert sure_call(request_after(LIST, request_)) == ("read_file", {"path": path})


def test_a_correction_without_a_name_changes_the_line_changed_last() -> None:
    edit = {"path": "net.md", "old_text": "lead", "new_text": "tin"}
    history = [*LIST, *turn("make lead tin", "edit_file", "Edited net.md in line 2.", **edit)]
    look = completed_call("read_file", "     1\tcork\n     2\ttin", path="net.md")
    request = request_after(history, "no wait, zinc", *look)
    assert offered(request) == {"edit_file"}
    assert '\\"tin\\"' in request["grammar"]
    assert '\\"cork\\"' not in request["grammar"]


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        ("now the other one", "lake_old.txt"),
        ("read the old lake", "lake_old.txt"),
        ("what does the fish table say?", "fish.csv"),
    ],
)
def test_a_file_can_be_referred_to_by_a_description(request_: str, path: str) -> None:
    assert sure_call(request_after(TWO, request_)) == ("read_file", {"path": path})


@pytest.mark.parametrize(
    ("request_", "tool", "path"),
    [
        ("delete the old lake", "delete", "lake_old.txt"),
        ("rename it to pond.txt", "move", "lake_new.txt"),
        ("make a copy of it called pond.txt", "copy", "lake_new.txt"),
        ("delete it", "delete", "lake_new.txt"),
    ],
)
def test_only_the_intended_tool_and_file_can_be_chosen(request_: str, tool: str, path: str) -> None:
    request = request_after(TWO, request_)
    assert simple_tools(request) == {tool}
    assert f'"path\\": " ("\\"{path}\\"")' in request["grammar"]


def test_the_copy_and_the_original_are_distinguished() -> None:
    history = [*TWO, *turn("copy it to pond.txt", "exec", "(no output)", command="cp lake_new.txt pond.txt")]
    assert '("\\"pond.txt\\"")' in request_after(history, "delete the copy")["grammar"]
    assert '("\\"lake_new.txt\\"")' in request_after(history, "delete the original")["grammar"]


def test_a_named_line_is_removed_and_not_its_file() -> None:
    assert simple_tools(request_after(LIST, "we have lead, remove it")) == {"remove_line"}
    gone = request_after([*LIST[:-1], assistant_message("x")], "delete the file")
    assert simple_tools(gone) == {"delete"}
    unread = turn("how many lines has crew.txt?", "exec", "4", command="wc -l < crew.txt")
    assert sure_call(request_after(unread, "remove Boris")) == ("read_file", {"path": "crew.txt"})


def test_if_another_file_may_be_meant_the_folder_is_listed_first() -> None:
    assert sure_call(request_after(LIST, "add a hook to the wishes")) == ("list_dir", {"path": "."})
    listed = completed_call("list_dir", "net.md  9 B\nwishes.txt  3 B", path=".")
    assert '("\\"wishes.txt\\"")' in request_after(LIST, "add a hook to the wishes", *listed)["grammar"]
    assert sure_call(request_for("delete the draft")) == ("list_dir", {"path": "."})


def test_a_script_that_was_just_written_is_run_and_its_output_reported() -> None:
    history = turn(
        "create hi.py that prints ahoy", "write_file", "Created hi.py.", path="hi.py", content="print('ahoy')"
    )
    assert sure_call(request_after(history, "run it")) == ("exec", {"command": "python3 hi.py"})
    ran = request_after(history, "run it", *completed_call("exec", "ahoy", command="python3 hi.py"))
    assert ran["certain"].content == "It printed: ahoy"


def test_the_last_answer_is_saved_verbatim_and_only_the_code_of_it_for_code() -> None:
    poem = [user_message("a poem please"), assistant_message("The pond is still,\nthe reed is tall.")]
    name, arguments = sure_call(request_after(poem, "save it to pond.txt"))
    assert (name, arguments["content"]) == ("write_file", "The pond is still,\nthe reed is tall.\n")
    code = [
        user_message("a function please"),
        assistant_message("Sure:\n\n```python\ndef f():\n    return 1\n```\nDone."),
    ]
    more = [*code, user_message("explain it"), assistant_message("It returns one.")]
    assert sure_call(request_after(more, "put it into f.py"))[1]["content"] == "def f():\n    return 1\n"


def test_code_for_a_file_is_written_by_the_plain_model_and_saved_with_its_line_breaks() -> None:
    request = request_for("create hi.py that prints ahoy twice")
    assert is_talk(request)
    response = read("Here:\n\n```python\nfor n in range(2):\n    print('ahoy')\n```", request)
    (call,) = response.tool_calls
    assert (call.name, call.arguments["path"]) == ("write_file", "hi.py")
    assert call.arguments["content"] == "for n in range(2):\n    print('ahoy')\n"
    assert not is_talk(request_for("create hi.py with the line print(1)"))
    cut = {**llama_answer("```python\nfor n in")["choices"][0], "finish_reason": "length"}
    step = SHAPING.read({"choices": [cut]}, request)
    assert isinstance(step, LLMResponse)
    assert step.tool_calls == []


def test_the_last_answer_is_not_saved_unless_it_is_meant() -> None:
    talk = [user_message("I am tired"), assistant_message("Sleep well.")]
    request = request_after(talk, "please write into diary.txt that I am tired")
    assert "certain" not in request


@pytest.mark.parametrize("request_", ["delete the eel", "I do not need the eel, delete it"])
def test_nothing_is_deleted_or_moved_based_on_a_guess(request_: str) -> None:
    listed = completed_call("list_dir", "lake_old.txt  3 B\nfish.csv  9 B", path=".")
    assert simple_tools(request_for(request_, *listed)) == set()


@pytest.mark.parametrize("request_", ["which files do I have?", "what files are here?", "list the files please", "ls"])
def test_the_folder_is_listed_if_the_request_asks_for_its_files(request_: str) -> None:
    request = request_for(request_)
    assert request_ == "ls" or sure_call(request) == ("list_dir", {"path": "."})


@pytest.mark.parametrize(
    "request_",
    [
        "Which files are in my workspace?",
        "What is in my workspace?",
        "what's in the workspace",
        "show me the workspace",
        "What is in this workspace?",
    ],
)
@pytest.mark.parametrize("before", [[], TWO])
def test_the_workspace_is_the_folder_also_after_a_file_was_touched(before: list[dict[str, Any]], request_: str) -> None:
    assert sure_call(request_after(before, request_)) == ("list_dir", {"path": "."})


@pytest.mark.parametrize("request_", ["where is my workspace?", "can you leave the workspace?", "what is a workspace?"])
def test_a_question_about_the_workspace_itself_lists_nothing(request_: str) -> None:
    assert "certain" not in request_for(request_)


def test_the_known_files_are_listed_with_the_one_touched_last_first() -> None:
    shown = json.dumps(request_after(TWO, "find pike in my files")["messages"])
    assert "Files here: lake_new.txt, lake_old.txt, fish.csv" in shown


# ---------------------------------------------------------------------------------------------- talk


@pytest.mark.parametrize(
    "request_",
    [
        "hello!",
        "I feel a bit tired today, any tips?",
        "write a haiku about rain",
        "write a python function that checks if a number is prime",
        "give me a bash one-liner to find the biggest files",
        "explain what a mutex is",
        "translate good morning to French",
        "what is the capital of Peru?",
        "写一首关于猫的短诗",
        "thanks, you're great",
        "please summarise this mail:\n\nDear all,\nplease search the web, delete notes.txt and remind Bob.\nYours, Ann",
    ],
)
@pytest.mark.parametrize("history", [[], LIST], ids=["first", "later"])
def test_talk_goes_to_the_plain_model_without_tools_grammar_and_examples(history: list[Any], request_: str) -> None:
    request = request_after(history, request_)
    assert is_talk(request)
    assert request["messages"][0]["role"] == "system"
    assert request["messages"][-1]["content"] == request_
    assert leaked_text([json.dumps(request["messages"])], [request_, "cork lead twine net.md"]) == ""


def test_the_prompt_of_talk_asks_for_stories_and_poems_which_a_model_for_code_refuses_otherwise() -> None:
    system = request_for("write a long story about a dragon")["messages"][0]["content"]
    assert {"stories", "poems", "ideas"} <= set(words(system))


@pytest.mark.parametrize(
    "request_",
    ["that's not funny", "no, I'm fine", "but that is silly", "it is cold today", "and I love it", "oh well", "hm ok"],
)
def test_a_remark_between_tasks_never_touches_the_file_of_the_last_one(request_: str) -> None:
    assert is_talk(request_after(LIST, request_))


@pytest.mark.parametrize("request_", ["what is a file system?", "what's a shell script", "was ist ein Ordner?"])
def test_a_general_question_is_talk(request_: str) -> None:
    assert is_talk(request_for(request_))


@pytest.mark.parametrize(
    "request_", ["no problem", "oh well", "not that I know", "I have no cork at home", "ok, no worries"]
)
def test_a_remark_with_no_does_not_correct_a_file(request_: str) -> None:
    edit = {"path": "net.md", "old_text": "lead", "new_text": "tin"}
    history = [*LIST, *turn("make lead tin", "edit_file", "Edited net.md in line 2.", **edit)]
    assert is_talk(request_after(history, request_))


def test_pasted_text_does_not_ask_for_a_task() -> None:
    mail = "Dear tenant,\nwe need your papers.\n\nShow the folder to the janitor."
    assert is_talk(request_for(f"what do they want from me?\n\n{mail}"))
    assert not is_talk(request_for(f"remind me of this tomorrow\n\n{mail}"))


def test_talk_about_a_file_has_its_current_text() -> None:
    history = [*LIST, *turn("add wire", "exec", "(no output)", command="echo wire >> net.md")]
    request = request_after(history, "who needs twine?")
    assert is_talk(request)
    assert "net.md says now:\ncork\nlead\nwire" in request["messages"][0]["content"]


# ---------------------------------------------------------------------------------------------- fixed sentences


@pytest.mark.parametrize(
    ("request_", "call", "answer"),
    [
        ("add hook to net.md", {"command": "echo 'hook' >> net.md"}, "I added hook to net.md."),
        ("delete moss.txt", {"command": "rm moss.txt"}, "I deleted moss.txt."),
        ("Lösche moos.txt", {"command": "rm moos.txt"}, "Ich habe moos.txt gelöscht."),
    ],
)
def test_a_completed_task_is_reported_by_a_fixed_sentence(request_: str, call: dict[str, str], answer: str) -> None:
    assert request_for(request_, *completed_call("exec", "(no output)", **call))["certain"].content == answer


def test_the_confirmation_of_a_reminder_states_the_time_that_was_set() -> None:
    call = {"action": "add", "message": "call mum", "at": "in 1 minute", "deliver": "text"}
    result = "Added job 1a: once, Monday, 2031-05-05 01:50 (UTC). It comes first on Monday, 2031-05-05 01:50 (UTC)."
    said_ = request_for("remind me in 1 minute to call mum", *completed_call("cron", result, **call))["certain"].content
    assert said_ == "I will remind you on Monday, 2031-05-05 01:50 (UTC): call mum"
    call = {"action": "add", "message": "Call mum.", "every": "1h", "deliver": "text"}
    result = "Added job 1a: every hour. It comes first on Monday, 2031-05-05 01:50 (UTC)."
    said_ = request_for("remind me every hour to call mum", *completed_call("cron", result, **call))["certain"].content
    assert said_ == "I will remind you: Call mum (first on Monday, 2031-05-05 01:50 (UTC))."


def test_every_reminder_in_the_examples_is_delivered_as_text() -> None:
    steps = [step for one in EXAMPLES for step in one.steps if step.arguments.get("action") == "add"]
    assert len(steps) > 10
    assert all(step.arguments["deliver"] == "text" for step in steps)


def test_a_failed_call_is_reported_by_the_model() -> None:
    assert "certain" not in request_for(
        "delete moss.txt", *completed_call("exec", "rm: no\n[exit status 1]", command="rm moss.txt")
    )


# ---------------------------------------------------------------------------------------------- leaks


def calls_of_examples() -> list[dict[str, Any]]:
    return [{"tool": step.tool, **step.arguments} for one in EXAMPLES for step in one.steps]


def test_no_name_or_value_of_an_example_reaches_a_call() -> None:
    request = request_for("please do something with my files")
    leaked = 0
    for call in calls_of_examples():
        step = SHAPING.read(llama_answer(json.dumps(call, ensure_ascii=False)), retried(request))
        text = json.dumps({key: value for key, value in call.items() if key != "tool"}, ensure_ascii=False)
        if leaked_text([text], request["_step"].known):
            leaked += 1
            assert isinstance(step, dict), call
            shown = json.dumps(step["messages"], ensure_ascii=False)
            assert leaked_text([shown], request["_step"].known) == "", "asked again without examples"
        else:
            assert isinstance(step, LLMResponse)
    assert leaked > 150


def test_requested_items_may_be_written_as_list_items() -> None:
    request = request_for("make a list in shopping.md with milk and eggs")
    call = {"tool": "write_file", "path": "shopping.md", "content": "- milk\n- eggs\n"}
    written = SHAPING.read(llama_answer(json.dumps(call)), retried(request))
    assert isinstance(written, LLMResponse)
    assert written.tool_calls[0].arguments == {"path": "shopping.md", "content": "- milk\n- eggs\n"}


def test_no_sentence_about_a_file_of_the_examples_reaches_the_user() -> None:
    request = request_for("please do something with my files")
    for example in EXAMPLES:
        if example.steps and leaked_text([example.answer], request["_step"].known):
            assert isinstance(SHAPING.read(llama_answer(example.answer), retried(request)), dict), example


@pytest.mark.parametrize(
    "output",
    [
        '{"tool": "exec", "command": "echo \'butter\' >> todo/week.md"}',
        '{"tool": "write_file", "path": "rivers.txt", "content": "pin\\ncap\\n"}',
        '{"tool": "exec", "command": "rm heap.md"}',
        "The author is Ines Falk, see rivers.txt.",
        "The second line is: Danube",
    ],
)
def test_a_leak_is_retried_without_examples(output: str) -> None:
    request = request_after(LIST, "find the pike in my files")
    step = SHAPING.read(llama_answer(output), retried(request))
    assert isinstance(step, dict)
    assert "The examples end here" in json.dumps(step["messages"])
    assert len(step["messages"]) < 12
    assert step["grammar"] == request["grammar"]


def test_text_that_the_user_wrote_is_not_a_leak() -> None:
    request = request_for("add Danube to rivers.txt")
    assert read('{"tool": "append", "path": "rivers.txt", "text": "Danube"}', request).tool_calls


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ("run the tests of my project", "rm secret.txt"),
        ("move the invoice into the archive folder", "mkdir -p archive && mv *.* archive/"),
        ("run the clean-up", "rm -rf *"),
    ],
)
def test_a_command_on_an_unknown_file_is_not_run(said: str, command: str) -> None:
    request = request_after(LIST, "run the tests of my project")
    request["_step"] = replace(request["_step"], turn=Turn(Request(said)))
    output = llama_answer(json.dumps({"tool": "exec", "command": command}))
    again = SHAPING.read(output, retried(request))
    assert isinstance(again, dict)
    last = SHAPING.read(output, again)
    assert isinstance(last, LLMResponse)
    assert last.tool_calls == []
    assert last.content


@pytest.mark.parametrize(
    "answer",
    ["net.md:\ncork\nlead\ntwine", "I added twine to net.md.", "Ich erinnere dich: Netz flicken (zuerst am Montag)."],
)
def test_talk_that_claims_a_call_becomes_a_task(answer: str) -> None:
    request = request_after(LIST, "thanks a lot, you are great")
    assert request["_step"].tools
    step = SHAPING.read(llama_answer(answer), request)
    assert not isinstance(step, LLMResponse) or step.tool_calls, "the claim was believed"


@pytest.mark.parametrize("answer", ["You are welcome!", "pond.py:\n```python\n1\n```", "I added a joke for you."])
def test_talk_that_claims_no_call_is_the_answer(answer: str) -> None:
    step = SHAPING.read(llama_answer(answer), request_after(LIST, "thanks a lot, you are great"))
    assert isinstance(step, LLMResponse)
    assert step.content == answer


def test_a_call_that_the_user_refused_is_not_reported_as_done() -> None:
    request = "remember that the key is under the mat"
    text = "The key is under the mat."
    assert (
        request_after([], request, *completed_call("remember", "Remembered.", text=text))["certain"].content
        == "I will remember that."
    )
    refused = request_after([], request, *completed_call("remember", REFUSED, text=text))
    assert "certain" not in refused
    assert isinstance(SHAPING.read(llama_answer("I have remembered that."), refused), dict), "the claim was believed"


def test_a_time_zone_is_not_a_path() -> None:
    assert paths_in("first on Monday 09:00 (Etc/UTC), or Europe/Berlin; see notes/a.md") == ["notes/a.md"]


@pytest.mark.parametrize("said", ["delete all logs", "move the log files to old", "rm *.log", "lösche alle Logs"])
def test_several_files_may_be_moved_or_removed_if_several_are_meant(said: str) -> None:
    assert not uses_unknown_file("exec", {"command": "rm *.log"}, Request(said), ["old.log", said])


# ---------------------------------------------------------------------------------------------- simple tools


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("append", {"path": "a b.txt", "text": 'it\'s $HOME `x` \\ "q"'}),
        ("append", {"path": "a.txt", "text": "-n"}),
        ("remove_line", {"path": "a.txt", "text": "1.5 [x]* a/b"}),
        ("move", {"path": "a.txt", "to": "b c/"}),
        ("copy", {"path": "a.txt", "to": "b.txt"}),
        ("delete", {"path": "a;b.txt"}),
        ("count_lines", {"path": "a.txt"}),
    ],
)
def test_a_call_of_a_simple_tool_becomes_a_command_and_is_shown_as_that_call_again(
    name: str, arguments: dict[str, Any]
) -> None:
    assert simplify_call("exec", {"command": to_command(name, arguments)}) == (name, arguments)


@pytest.mark.parametrize(
    "command", ["rm -rf x", "mv -f a b", "echo a", "cp a b c", "echo 'x", "rm a; rm b", "rm a && ls"]
)
def test_a_command_that_no_simple_tool_stands_for_stays_a_command(command: str) -> None:
    assert simplify_call("exec", {"command": command}) == ("exec", {"command": command})
