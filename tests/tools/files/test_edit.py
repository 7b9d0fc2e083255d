"""edit_file: what is matched, what is changed, and how an error helps with the next attempt."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import threading
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everloop.tools.base import ToolError
from everloop.tools.files import files, paths
from everloop.tools.files.edit import replace_text


def edited(text: str, old: str, new: str, everywhere: bool = False) -> str:
    return replace_text(text, old, new, everywhere).text


def refused(text: str, old: str, new: str, everywhere: bool = False) -> str:
    with pytest.raises(ToolError) as caught:
        replace_text(text, old, new, everywhere)
    return str(caught.value)


# --- the tiers -----------------------------------------------------------------------------------------------------


def test_an_exact_text_is_replaced_in_its_only_place():
    assert edited("one two three", "two", "2") == "one 2 three"
    assert edited("a\nb\nc\n", "b\n", "") == "a\nc\n"
    result = replace_text("a\nb\nc", "c", "d")
    assert (result.lines, result.ignored) == ([3], "")


def test_an_exact_match_wins_over_similar_ones():
    assert edited("a  \nx\na\n", "x\na\n", "y\n") == "a  \ny\n"
    assert edited("  a\na b\n", "a b", "c") == "  a\nc\n"
    assert edited('“a”\n"a"\n', '"a"', "b") == "“a”\nb\n"


def test_trailing_spaces_are_ignored_and_kept_on_unchanged_lines():
    assert edited("a  \nb\t\nc\n", "a\nb\n", "a\nB\n") == "a  \nB\nc\n"
    assert edited("a\nb\nc\n", "a  \nb ", "x") == "x\nc\n"
    assert edited("a \nb", "a\nb\n", "c") == "c"
    assert replace_text("a \nb", "a\nb", "c").ignored == "spaces at the ends of lines"


def test_a_line_with_only_the_same_prefix_does_not_match():
    assert "is not in the file" in refused("xa \nb\n", "a\nb", "c")
    assert "is not in the file" in refused("a \nbx\n", "a\nb", "c")


def test_indentation_is_ignored_and_applied_to_the_new_lines():
    text = "class A:\n    def f(self):\n        return 1\n"
    assert edited(text, "def f(self):\n    return 1\n", "def f(self):\n    # why\n    return 2\n") == (
        "class A:\n    def f(self):\n        # why\n        return 2\n"
    )
    assert edited(text, "def f(self):\n    return 1", "def g():\n    if x:\n        pass\n\n    return 1") == (
        "class A:\n    def g():\n        if x:\n            pass\n\n        return 1\n"
    )


def test_excess_indentation_is_removed_from_the_new_lines():
    assert edited("if a:\n    b\n", "  if a:\n      b\n", "  if a:\n      c\n      d\n") == "if a:\n    c\n    d\n"
    assert edited("a\nb\n", "    a\n    b\n", "    a\n        c\n") == "a\n    c\n"


def test_tabs_instead_of_spaces_are_converted_as_the_old_lines_show():
    text = "if a:\n\tif b:\n\t\tc\n"
    assert edited(text, "    if b:\n        c", "    if b:\n        d") == "if a:\n\tif b:\n\t\td\n"
    assert "is not in the file" in refused(text, "    if b:\n        c", "    if b:\n            d")


def test_inconsistent_indentation_is_refused():
    assert "is not in the file" in refused("a\n  b\n", "  a\nb\n", "  c\nd\n")
    assert "is not in the file" in refused("def f():\n    x\n", "def f():\nx", "def f():\ny")


def test_lookalike_characters_are_ignored_and_kept_on_unchanged_lines():
    text = "He said “no” – it’s over.\n"
    assert edited(text, 'He said "no" - it\'s over.', 'He said "no" - it\'s fine.') == "He said “no” – it’s fine.\n"
    assert edited("a\u00a0b\n", "a b", "a c") == "a\u00a0c\n"
    assert edited('"x"', "“x”", "“y”") == '"y"'
    assert replace_text(text, '"no"', '"yes"').ignored.startswith("look-alikes")


def test_similar_text_is_never_changed():
    for old in ("retrun 1", "return  1", "Return 1", "return 1;"):
        refused("return 1\n", old, "return 2")


@pytest.mark.parametrize("text", ["x\nx\n", "x \nx\n", "  x\n\tx\n", "’x\n‘x\n", "aaa"])
def test_each_tier_must_find_exactly_one_place(text):
    old = {"x\nx\n": "x", "x \nx\n": "x  ", "  x\n\tx\n": "   x", "’x\n‘x\n": "'x", "aaa": "aa"}[text]
    assert "more than once" in refused(text, old, old.replace("x", "y").replace("aa", "b"))


def test_all_places_are_replaced_on_request():
    assert edited("x a x b x", "x", "y", True) == "y a y b y"
    assert edited("aaaa", "aa", "b", True) == "bb"
    assert edited("a \nb\na \nb\nb\n", "a\nb\n", "c\n", True) == "c\nc\nb\n"
    assert edited("a \na \n", "a\n", "b\n", True) == "b\nb\n"
    assert edited("  a\n    a\nb\n", "a", "c", True) == "  c\n    c\nb\n"
    assert replace_text("x\nx\n", "x", "y", True).lines == [1, 2]


def test_replacing_in_many_places_is_quick():
    start = time.process_time()
    assert edited("a\n" * 300_000, "a", "b", True) == "b\n" * 300_000
    assert "more than once" in refused("a" * 4_000_000, "a" * 2_000_000, "b")
    assert "is not in the file" in refused("a\n" * 500_000, "a\n" * 1_000 + "b\n", "c")
    assert time.process_time() - start < 15


@pytest.mark.parametrize(("old", "new"), [("", "x"), ("a", "a"), ("a\r\nb", "a\nb")])
def test_an_edit_that_changes_nothing_is_refused(old, new):
    refused("a\nb", old, new)


# --- properties ----------------------------------------------------------------------------------------------------

LINES = st.text(st.sampled_from('ab \t\n“"'), max_size=30)


@given(before=LINES, old=LINES.filter(bool), after=LINES, new=LINES)
def test_an_exact_match_is_an_exact_replacement(before, old, after, new):
    text = before + old + after
    assume(old != new)
    first = text.find(old)
    if text.find(old, first + 1) < 0:
        assert edited(text, old, new) == before + new + after
    else:
        assert "more than once" in refused(text, old, new)
    assert edited(text, old, new, everywhere=True) == text.replace(old, new)


def in_common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(text=LINES, old=LINES.filter(bool), new=LINES)
def test_nothing_outside_the_match_changes(text, old, new):
    assume(old != new)
    try:
        result = replace_text(text, old, new)
    except ToolError:
        assert old not in text or text.find(old, text.find(old) + 1) >= 0
        return
    common = in_common(text, result.text)
    tail = in_common(text[common:][::-1], result.text[common:][::-1])
    changed = text[common : len(text) - tail]
    assert changed.count("\n") <= old.count("\n") + 1
    assert text[:common].count("\n") + 1 >= result.lines[0]


@given(text=st.text(st.sampled_from("ab\n"), max_size=30), old=st.text(st.sampled_from("ab\n"), min_size=1, max_size=4))
def test_windows_line_endings_are_ignored_and_kept(text, old):
    new = "x\ny"
    windows = text.replace("\n", "\r\n")
    try:
        plain = replace_text(text, old, new).text
    except ToolError:
        return
    assert replace_text(windows, old, new, newline="\r\n").text == plain.replace("\n", "\r\n")
    assert replace_text(windows, old.replace("\n", "\r\n"), new, newline="\r\n").text == plain.replace("\n", "\r\n")


def test_mixed_line_endings_around_the_match_are_kept():
    assert replace_text("a\r\nb\nc\r\nd\n", "b\nc", "B\nC", newline="\n").text == "a\r\nB\nC\r\nd\n"
    assert replace_text("a\r\nb\nc\r\nd\r\n", "b\nc", "B\nC", newline="\r\n").text == "a\r\nB\r\nC\r\nd\r\n"


# --- errors that help ----------------------------------------------------------------------------------------------


def test_the_closest_text_is_shown_with_its_line_numbers():
    text = "".join(f"line {number}\n" for number in range(1, 9)) + "def compute(a, b):\n    return a + b\n"
    message = refused(text, "def compute(a, c):\n    return a + c\n", "x")
    assert "lines 9 to 10" in message
    assert "     9\tdef compute(a, b):\n    10\t    return a + b" in message
    assert "Nothing in it is similar" in refused(text, "completely different", "x")
    assert "Nothing in it is similar" in refused("", "x", "y")


def test_an_ambiguous_match_lists_the_places():
    assert "at lines 1, 3." in refused("x\ny\nx\n", "x", "z")
    message = refused("x\n" * 1000, "x", "z")
    assert "at lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …" in message


# --- the tool ------------------------------------------------------------------------------------------------------


async def test_an_edited_file_keeps_its_mode_byte_order_mark_endings_and_odd_bytes(desk, folder):
    place = folder / "a.txt"
    place.write_bytes(b"\xef\xbb\xbfcaf\xe9\r\none\r\ntwo\r\n")
    place.chmod(0o750)
    assert await desk("edit_file", path="a.txt", old_text="one\ntwo", new_text="1\n2") == "Edited a.txt in line 2."
    assert place.read_bytes() == b"\xef\xbb\xbfcaf\xe9\r\n1\r\n2\r\n"
    assert stat.S_IMODE(place.stat().st_mode) == 0o750
    assert os.listdir(folder) == ["a.txt"]


async def test_utf_16_files_stay_utf_16_when_edited(desk, folder):
    (folder / "a.txt").write_bytes("é\r\nß\r\n".encode("utf-16"))
    await desk("edit_file", path="a.txt", old_text="ß", new_text="ss\nx")
    assert (folder / "a.txt").read_bytes() == "é\r\nss\r\nx\r\n".encode("utf-16")
    (folder / "b.txt").write_bytes(b"\xff\xfea")
    assert "UTF-16" in await desk.fails("edit_file", path="b.txt", old_text="a", new_text="b")


async def test_the_result_says_what_was_ignored_and_where(desk, folder):
    (folder / "a.txt").write_text("    one\n    two\n")
    said = await desk("edit_file", path="a.txt", old_text="one\ntwo\n", new_text="one\nthree\n")
    assert said == "Edited a.txt in line 1. The old text was found when ignoring indentation."
    (folder / "b.txt").write_text("x\n" * 30)
    said = await desk("edit_file", path="b.txt", old_text="x", new_text="y", replace_all=True)
    assert said.startswith("Edited b.txt in 30 places, lines 1, 2, 3")
    assert said.endswith("20, ….")


async def test_a_file_that_changed_since_it_was_read_is_not_edited(desk, folder):
    place = folder / "a.txt"
    for how in ("read_file", "write_file", "edit_file"):
        place.write_text("one\n")
        if how == "read_file":
            await desk("read_file", path="a.txt")
        elif how == "write_file":
            await desk("write_file", path="a.txt", content="one\n")
        else:
            await desk("read_file", path="a.txt")
            await desk("edit_file", path="a.txt", old_text="one", new_text="one more")
        place.write_text("one two\n")
        assert "has changed" in await desk.fails("edit_file", path="a.txt", old_text="one", new_text="1")
        assert place.read_text() == "one two\n"
        await desk("read_file", path="a.txt")
        await desk("edit_file", path="a.txt", old_text="one", new_text="1")
        assert place.read_text() == "1 two\n"


async def test_a_file_that_changes_between_read_and_write_is_not_edited(desk, folder):
    place = folder / "a.txt"
    place.write_text("one\n")

    def change(real: str, writing: bool) -> None:  # called while the write is being prepared
        if writing:
            place.write_text("one two\n")

    message = await desk.with_context(guard=change).fails("edit_file", path="a.txt", old_text="one", new_text="1")
    assert "meanwhile" in message
    assert place.read_text() == "one two\n"


@pytest.mark.parametrize("first", ["edit_file", "write_file"])
async def test_two_sessions_that_write_at_once_lose_no_edit(desk, folder, monkeypatch, first):
    place = folder / "a.txt"
    place.write_text("one\ntwo\n")
    begun, second_done, original = threading.Event(), threading.Event(), paths.replace

    def slowly(target, data):
        if not begun.is_set():
            begun.set()
            second_done.wait(1)  # not forever: the second may have to wait for this one
        return original(target, data)

    monkeypatch.setattr(files, "replace", slowly)
    wanted = {"old_text": "one", "new_text": "1"} if first == "edit_file" else {"content": "1\ntwo\n"}
    writing = asyncio.create_task(desk(first, path="a.txt", **wanted))
    await asyncio.to_thread(begun.wait, 20)
    other = await desk.with_context(session="other").run("edit_file", path="a.txt", old_text="two", new_text="2")
    second_done.set()
    await writing
    assert place.read_text() == ("1\n2\n" if other.status == "ok" else "1\ntwo\n")


async def test_a_folder_lock_held_for_long_blocks_no_write(desk, folder, monkeypatch):
    monkeypatch.setattr(paths, "LOCK_SECONDS", 0.05)
    (folder / "a.txt").write_text("one\n")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        await desk("edit_file", path="a.txt", old_text="one", new_text="1")
        await desk("write_file", path="b.txt", content="two\n")
    finally:
        os.close(descriptor)
    assert (folder / "a.txt").read_text() == "1\n"


async def test_reads_of_another_session_do_not_matter(desk, folder):
    place = folder / "a.txt"
    place.write_text("one\n")
    await desk("read_file", path="a.txt")
    place.write_text("one two\n")
    other = desk.with_context(session="other")
    await other("edit_file", path="a.txt", old_text="one", new_text="1")
    assert "has changed" in await desk.fails("edit_file", path="a.txt", old_text="two", new_text="2")


async def test_a_file_is_identified_by_its_real_path(desk, folder):
    (folder / "a.txt").write_text("one\n")
    (folder / "link").symlink_to("a.txt")
    await desk("read_file", path="link")
    (folder / "a.txt").write_text("one two\n")
    assert "has changed" in await desk.fails("edit_file", path="a.txt", old_text="one", new_text="1")
    await desk("read_file", path="a.txt")
    await desk("edit_file", path="link", old_text="one", new_text="1")
    assert (folder / "link").is_symlink()
    assert (folder / "a.txt").read_text() == "1 two\n"


async def test_the_number_of_remembered_files_is_limited(desk, folder, monkeypatch):
    monkeypatch.setattr(files, "MAX_REMEMBERED", 2)
    for name in "abc":
        (folder / name).write_text("one")
        await desk("read_file", path=name)
        (folder / name).write_text("one two")
    await desk("edit_file", path="a", old_text="one", new_text="1")
    assert "has changed" in await desk.fails("edit_file", path="c", old_text="one", new_text="1")


async def test_files_that_cannot_be_edited_are_refused_and_nothing_is_created(desk, folder, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "bin").write_bytes(b"\0a")
    (folder / "big").write_text("a" * 20)
    os.mkfifo(folder / "pipe")
    monkeypatch.setattr(files, "MAX_EDIT_BYTES", 10)
    for path in ("none", "new/none", "sub", "bin", "big", "pipe"):
        await desk.fails("edit_file", path=path, old_text="a", new_text="b")
    assert sorted(os.listdir(folder)) == ["big", "bin", "pipe", "sub"]
    assert (folder / "bin").read_bytes() == b"\0a"
