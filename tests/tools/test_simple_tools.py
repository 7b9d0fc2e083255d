"""What a small model is shown of a result, and which results say that a call failed."""

from __future__ import annotations

import pytest

from everloop.log import error_content
from everloop.tools.simple_tools import is_failure, short_result


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
