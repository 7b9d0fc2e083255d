"""Patterns on partly unknown texts, compared with trying out what the unknown parts could be."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.tools.policy.policy import Fit, fits, fits_command, fits_past_options
from everloop.tools.policy.shell_line import TEXT, WORDS

FILLINGS = ["", "a", "b", " ", "ab", "ba", "a b", "b a", "aa", "bb", "a b a", "b b", "ab ab"]


def possible(text: str) -> list[str]:
    """Some of the texts that it may become."""
    texts = [text]
    for mark, space in ((TEXT, ""), (WORDS, " ")):
        while mark in texts[0]:
            texts = [
                each.replace(mark, f"{space}{filling}" if filling else "", 1) for each in texts for filling in FILLINGS
            ]
    return texts


@given(
    st.text("ab *?", max_size=5),
    st.text(f"ab {TEXT}{WORDS}", max_size=5).filter(lambda t: t.count(TEXT) + t.count(WORDS) < 3),
)
def test_a_certain_match_always_matches_and_a_mismatch_never_does(pattern, text):
    fit = fits(pattern, text)
    found = {fnmatchcase(each, pattern) for each in possible(text)}
    assert fit is not Fit.YES or found == {True}
    assert fit is not Fit.NO or found == {False}


@pytest.mark.parametrize(
    ("pattern", "text", "fit"),
    [
        ("rm", "rm", Fit.YES), ("rm", "rm x", Fit.YES), ("rm", "rmx", Fit.NO), ("rm", f"rm{WORDS}", Fit.YES),
        ("git push", f"git{WORDS}", Fit.MAYBE), ("git push", f"git {TEXT}", Fit.MAYBE),
        ("git push", f"git commit{WORDS}", Fit.NO), ("git *", f"git {TEXT}", Fit.YES),
        ("git *", f"git{WORDS}", Fit.MAYBE), ("git*", f"git{WORDS}", Fit.YES),
        ("rm -[rf]*", f"rm -{TEXT}", Fit.MAYBE), ("rm -[rf]*", f"rm -r{TEXT}", Fit.YES),
        ("rm -[!rf]*", "rm -r", Fit.NO),
    ],
)  # fmt: skip
def test_a_command_matches_certainly_possibly_or_not(pattern, text, fit):
    assert fits_command(pattern, text) is fit


@pytest.mark.parametrize(
    ("pattern", "command", "fit"),
    [
        ("git push", "git push origin", Fit.YES),
        ("git push", "git -C folder push", Fit.YES),
        ("git push", "git -c a.b=c --no-pager push --force", Fit.YES),
        ("git push", "git --git-dir=x push", Fit.YES),
        ("git push", "git commit -m push", Fit.NO),
        ("git push", "git -C folder commit push", Fit.NO),
        ("git push", "git", Fit.NO),
        ("git push", f"git -C {TEXT} push", Fit.MAYBE),
        ("git push", f"git {TEXT}", Fit.MAYBE),
        ("git push", "gti push", Fit.NO),
        ("docker compose down", "docker --host x compose -f y down", Fit.YES),
        ("rm", "rm -rf x", Fit.YES),
        ("git p*", "git -C x push", Fit.NO),
    ],
)
def test_options_before_a_subcommand_are_ignored(pattern, command, fit):
    assert fits_past_options(pattern, command.split(" ")) is fit
