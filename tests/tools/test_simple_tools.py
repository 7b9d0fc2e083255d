"""The results that a small model sees, and the results that report a failure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from everloop.log import error_content
from everloop.tools.simple_tools import is_failure, short_result, simplify_call, to_command


@pytest.mark.parametrize(
    "result",
    [
        error_content("there is no ada.txt", "use list_dir"),
        "error: there is no ada.txt",
        "not run: the person who was asked said no.",
        "grep: no such file\n[exit status 2]",
        "[exit status 137, SIGKILL]\n[it may have exceeded the memory limit of 512 MB]",
    ],
)
def test_a_result_says_that_its_call_failed(result: str):
    assert is_failure(result)


@pytest.mark.parametrize(
    "result",
    [
        "",
        "no errors",
        "started\nerror: retried\nok",
        '{"events":[]}\n{"status":"error"}',
        "[exit status 1]\nand then ok",
    ],
)
def test_errors_mentioned_in_a_file_or_output_are_not_failures(result: str):
    assert not is_failure(result)


def test_an_error_is_shown_without_advice_and_similar_names():
    result = error_content("there is no ada.txt. Similar names: a.txt, b.txt", "use list_dir")
    assert short_result("read_file", result, 100) == "error: there is no ada.txt."


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("text", ["milk", "-n", "-e", "-ne", "- milk", r"a\tb\\c", 'it\'s "so"', "$HOME `id` !x", "*"])
def test_append_adds_exactly_its_text_in_any_shell(tmp_path: Path, shell: str, text: str):
    command = to_command("append", {"path": "a.txt", "text": text})
    subprocess.run([shell, "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "a.txt").read_text() == f"{text}\n"
    assert simplify_call("exec", {"command": command}) == ("append", {"path": "a.txt", "text": text})


@pytest.mark.parametrize("name", ["-rf", "-n.txt", "--help"])
def test_a_path_that_begins_with_a_dash_is_not_an_option(folder: Path, name: str):
    def run(tool: str, **arguments: str) -> str:
        command = to_command(tool, arguments)
        return subprocess.run(["bash", "-c", command], cwd=folder, check=True, capture_output=True, text=True).stdout

    (folder / name).write_text("one\ntwo\n")
    assert run("count_lines", path=name).strip() == "2"
    run("remove_line", path=name, text="one")
    run("copy", path=name, to="-copy")
    run("move", path=name, to="-moved")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"-copy": "two\n", "-moved": "two\n"}
    run("delete", path="-copy")
    assert [path.name for path in folder.iterdir()] == ["-moved"]
