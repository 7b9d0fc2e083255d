"""The file tools, called as a model calls them."""

from __future__ import annotations

import asyncio
import os
import stat
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.tools.files import documents, files, find, images, paths
from tests.support.desk import Desk
from tests.test_docs import DOCS, PROGRAM, Reader

# --- read_file -----------------------------------------------------------------------------------------------------


async def test_lines_are_numbered(desk, folder):
    (folder / "a.txt").write_bytes(b"one\r\ntwo\n\nfour")
    assert await desk("read_file", path="a.txt") == "     1\tone\n     2\ttwo\n     3\t\n     4\tfour"


async def test_a_page_says_where_it_is_and_how_to_continue(desk, folder):
    (folder / "a.txt").write_text("".join(f"line {n}\n" for n in range(1, 11)))
    page = await desk("read_file", path="a.txt", offset=3, limit="2")
    assert page == "     3\tline 3\n     4\tline 4\n[lines 3 to 4 of 10; continue with offset=5]"
    assert (await desk("read_file", path="a.txt", offset=9)).endswith("[lines 9 to 10 of 10]")
    assert "has only 10 lines" in await desk.fails("read_file", path="a.txt", offset=11)
    assert "at least 1" in await desk.fails("read_file", path="a.txt", offset=0)


async def test_a_long_file_can_be_read_page_by_page_without_a_gap(desk, folder):
    lines = [f"{n} {'x' * (n % 300)}" for n in range(1, 3001)]
    (folder / "long.txt").write_text("\n".join(lines))
    seen: list[str] = []
    while len(seen) < len(lines):
        page = await desk("read_file", path="long.txt", offset=len(seen) + 1)
        assert len(page) < 70_000
        seen += [line.split("\t", 1)[1] for line in page.split("\n") if "\t" in line]
    assert seen == lines


@given(text=st.text(st.sampled_from("ab\t é\r\n\x0b\x85\u2028"), max_size=60), limit=st.integers(1, 7))
async def test_the_pages_together_are_the_file(text, limit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "a.txt").write_bytes(text.encode())
    desk = Desk(folder)
    lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    seen: list[str] = []
    while len(seen) < len(lines):
        page = await desk("read_file", path="a.txt", offset=len(seen) + 1, limit=limit)
        shown = [line for line in page.split("\n") if not line.startswith("[lines ")]
        assert [int(line[:6]) for line in shown] == list(range(len(seen) + 1, len(seen) + len(shown) + 1))
        seen += [line[7:] for line in shown]
    assert seen == lines


async def test_a_very_long_line_is_truncated(desk, folder):
    (folder / "wide.txt").write_text("é" * 50_000 + "\nnext\n")
    text = await desk("read_file", path="wide.txt")
    assert len(text) < 3000
    assert "the line has 100001 bytes" in text
    assert text.endswith("     2\tnext")


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", "(empty file)"),
        (b"\n", "     1\t"),
        (b"\xef\xbb\xbfbom", "     1\tbom"),
        ("héllo\nyou".encode("utf-16"), "     1\théllo\n     2\tyou"),
        (b"caf\xe9", "     1\tcaf\ufffd"),
    ],
)
async def test_texts_of_all_kinds_are_read(desk, folder, data, shown):
    (folder / "a.txt").write_bytes(data)
    assert await desk("read_file", path="a.txt") == shown


async def test_a_file_that_is_not_text_is_refused_at_once(desk, folder):
    (folder / "a.bin").write_bytes(b"\x7fELF\0\0")
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    with (folder / "huge").open("wb") as file:
        file.truncate(paths.MAX_FILE_BYTES + 1)
    async with asyncio.timeout(20):
        assert "binary" in await desk.fails("read_file", path="a.bin")
        assert "use list_dir" in await desk.fails("read_file", path="sub")
        assert "only regular files" in await desk.fails("read_file", path="pipe")
        assert "too large" in await desk.fails("read_file", path="huge")
        assert "only regular files" in await Desk(folder, restricted=False).fails("read_file", path="/dev/zero")


async def test_a_file_that_grows_while_it_is_read_is_read_up_to_the_limit(desk, folder, monkeypatch):
    (folder / "a.txt").write_bytes(b"line\n" * 20)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 50)  # as if the rest had been written after its size was read
    assert (await desk("read_file", path="a.txt", limit=3)).endswith("[lines 1 to 3 of 10; continue with offset=4]")


async def test_a_missing_file_is_answered_with_similar_names(desk, folder):
    (folder / "README.md").touch()
    (folder / "docs").mkdir()
    assert "Similar names: README.md." in await desk.fails("read_file", path="readme.txt")
    message = await desk.fails("read_file", path="doc/x.md")
    assert "Neither does the folder doc. Similar names: docs." in message
    assert "Use list_dir" in await desk.fails("read_file", path="zzzz")


# --- write_file ----------------------------------------------------------------------------------------------------


async def test_a_file_is_written_with_its_folders(desk, folder):
    assert await desk("write_file", path="a/b/c.txt", content="é\nb") == "Created a/b/c.txt (2 lines, 4 B)."
    assert (folder / "a/b/c.txt").read_text() == "é\nb"
    assert (await desk("write_file", path="a/b/c.txt", content="")).startswith("Replaced")
    assert (folder / "a/b/c.txt").read_text() == ""
    assert os.listdir(folder / "a/b") == ["c.txt"]


async def test_the_mode_of_a_replaced_file_is_kept(desk, folder):
    script = folder / "run.sh"
    script.write_text("old")
    script.chmod(0o750)
    await desk("write_file", path="run.sh", content="new")
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    await desk("write_file", path="plain.txt", content="new")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((folder / "plain.txt").stat().st_mode) == 0o666 & ~umask


async def test_a_replaced_file_loses_its_setuid_bit(desk, folder):
    (folder / "run").write_text("old")
    (folder / "run").chmod(0o6755)
    await desk("write_file", path="run", content="new")
    assert stat.S_IMODE((folder / "run").stat().st_mode) == 0o755


async def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(desk, folder, monkeypatch):
    (folder / "a.txt").write_text("old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert "No space left" in await desk.fails("write_file", path="a.txt", content="new")
    assert os.listdir(folder) == ["a.txt"]
    assert (folder / "a.txt").read_text() == "old"


async def test_a_write_follows_a_link_instead_of_replacing_it(desk, folder):
    (folder / "real.txt").write_text("old")
    (folder / "link.txt").symlink_to("real.txt")
    await desk("write_file", path="link.txt", content="new")
    assert (folder / "link.txt").is_symlink()
    assert (folder / "real.txt").read_text() == "new"


async def test_only_regular_files_are_replaced(desk, folder):
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    assert "only regular files" in await desk.fails("write_file", path="pipe", content="x")
    assert "is a folder" in await desk.fails("write_file", path="sub", content="x")
    assert "is a folder" in await desk.fails("write_file", path="new/", content="x")
    (folder / "file").touch()
    assert "not a folder" in await desk.fails("write_file", path="file/below", content="x")


async def test_unencodable_text_is_written_readably(desk, folder):
    await desk("write_file", path="a.txt", content="a\ud800b")
    assert (folder / "a.txt").read_text() == "a?b"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
async def test_a_replaced_file_keeps_its_byte_order_mark_and_line_endings(desk, folder, mark):
    (folder / "a.txt").write_bytes(mark + b"one\r\ntwo\r\n")
    await desk("write_file", path="a.txt", content="1\n2\r\n3")
    assert (folder / "a.txt").read_bytes() == mark + b"1\r\n2\r\n3"
    (folder / "b.txt").write_bytes(mark + b"one\ntwo\r\nthree\n")
    await desk("write_file", path="b.txt", content="1\n2\n")
    assert (folder / "b.txt").read_bytes() == mark + b"1\n2\n"


async def test_a_replaced_file_keeps_its_encoding_if_it_is_text(desk, folder):
    (folder / "a.txt").write_bytes("é\r\nß\r\n".encode("utf-16"))
    await desk("write_file", path="a.txt", content="ü\n")
    assert (folder / "a.txt").read_bytes() == "ü\r\n".encode("utf-16")
    (folder / "b.bin").write_bytes(b"\0\r\n\r\n")
    await desk("write_file", path="b.bin", content="x\n")
    assert (folder / "b.bin").read_bytes() == b"x\n"


async def test_the_owner_is_kept_where_the_system_allows_it(desk, folder):
    (folder / "a.txt").write_text("old")
    if os.geteuid() == 0:
        os.chown(folder / "a.txt", 12345, 23456)
    before = (folder / "a.txt").stat()
    await desk("write_file", path="a.txt", content="new")
    after = (folder / "a.txt").stat()
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


async def test_a_file_system_without_unnamed_files_gets_a_temporary_file(desk, folder, monkeypatch):
    (folder / "a.txt").write_text("old")
    monkeypatch.delattr(os, "O_TMPFILE")
    await desk("write_file", path="a.txt", content="new")
    assert (folder / "a.txt").read_text() == "new"
    assert os.listdir(folder) == ["a.txt"]


async def test_a_dangling_link_is_not_followed_for_writing(desk, folder):
    (folder / "a").symlink_to("b")
    assert "dangling link" in await desk.fails("write_file", path="a", content="x")
    assert "dangling link" in await desk.fails("write_file", path="a/c", content="x")
    assert os.listdir(folder) == ["a"]


# --- list_dir ------------------------------------------------------------------------------------------------------


async def test_folders_come_first_and_files_have_sizes(desk, folder):
    (folder / "zoo").mkdir()
    (folder / "Beta").write_bytes(b"x" * 2048)
    (folder / "alpha").write_bytes(b"x" * 10)
    (folder / "broken").symlink_to("nowhere")
    (folder / "way").symlink_to("zoo")
    os.mkfifo(folder / "pipe")
    assert await desk("list_dir") == "zoo/\nalpha  10 B\nBeta  2.0 KB\nbroken  (link)\npipe  (special)\nway  (link)"
    assert await desk("list_dir", path="zoo") == "(empty folder)"


async def test_a_huge_folder_is_listed_in_part(desk, folder, monkeypatch):
    monkeypatch.setattr(files, "MAX_ENTRIES", 5)
    for index in range(60):
        (folder / f"f{index:03}").touch()
    listing = await desk("list_dir")
    assert listing.count("\n") == 5
    assert listing.endswith("[5 of more than 50 entries shown]")


async def test_an_invalid_folder_is_explained(desk, folder):
    (folder / "a.txt").touch()
    assert "not a folder" in await desk.fails("list_dir", path="a.txt")
    assert "does not exist" in await desk.fails("list_dir", path="none")


# --- reach ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["../secret.txt", "/etc/passwd", "sub/../../secret.txt", "~/x", "out/secret.txt", "out"]
)
async def test_a_restricted_call_reaches_nothing_outside_the_workspace(desk, folder, path):
    (folder.parent / "secret.txt").write_text("secret")
    (folder.parent / "workspace2").mkdir()
    (folder / "out").symlink_to(folder.parent)
    for name, more in (("read_file", {}), ("write_file", {"content": "x"}), ("list_dir", {})):
        assert "outside the workspace" in await desk.fails(name, path=path, **more)
    assert "outside the workspace" in await desk.fails("list_dir", path="../workspace2")
    assert (folder.parent / "secret.txt").read_text() == "secret"


async def test_an_unrestricted_call_reaches_everything(folder):
    desk = Desk(folder, restricted=False)
    (folder.parent / "other.txt").write_text("there")
    assert await desk("read_file", path="../other.txt") == "     1\tthere"
    assert await desk("read_file", path=str(folder.parent / "other.txt")) == "     1\tthere"


async def test_absolute_paths_inside_the_workspace_are_accepted(desk, folder):
    (folder / "a.txt").write_text("x")
    assert await desk("read_file", path=str(folder / "a.txt")) == "     1\tx"
    assert await desk("list_dir", path=str(folder)) == "a.txt  1 B"


@pytest.mark.parametrize("path", ["", " ", "a\0b", "x" * 5000, "\ud800"])
async def test_an_invalid_path_is_an_error_not_a_crash(desk, path):
    assert await desk.fails("read_file", path=path)


def test_the_flags_match_what_the_tools_do():
    flags = {tool.name: (tool.replay, tool.parallel) for tool in files.file_tools()}
    assert flags == {
        "read_file": ("safe", True),
        "write_file": ("safe", False),
        "edit_file": ("never", False),
        "list_dir": ("safe", True),
        "find_files": ("safe", True),
        "grep": ("safe", True),
    }


# --- the page about files ------------------------------------------------------------------------------------------


async def test_the_program_in_the_files_docs_prints_what_they_show(tmp_path):
    found = PROGRAM.findall((DOCS / "files.md").read_text())
    assert len(found) == 1
    for program, expected in found:
        folder = tmp_path / "garden"
        folder.mkdir()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", program,
            cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
        Reader().check(expected, out.decode())
        assert (folder / "beds/north.txt").read_text() == "beans: 7 litres\npeas: 3 litres\n"


def test_the_limits_in_the_files_docs_match_the_code():
    page = (DOCS / "files.md").read_text()
    for row in (
        f"| a file that is read or searched | {paths.MAX_FILE_BYTES >> 20} MB |",
        f"| {files.MAX_LINES:,} lines, {files.MAX_OUTPUT:,} characters; a line is cut at {files.MAX_LINE:,} char",
        f"| a file that is edited | {files.MAX_EDIT_BYTES >> 20} MB |",
        f"| an image | {paths.size(images.MAX_IMAGE_BYTES)} of",
        f"| {documents.SECONDS:g} seconds, {documents.MEGABYTES} MB of memory, {documents.MAX_TEXT_BYTES >> 20} MB of",
        f"| `list_dir`, `find_files` | {files.MAX_ENTRIES:,} names |",
        f"| {find.MAX_MATCHES} lines of at most {find.MAX_LINE} characters, {find.MAX_OUTPUT:,} characters |",
        f"| a search | {find.SECONDS:g} seconds;",
    ):
        assert row in page, f"docs/files.md must contain: {row}"
    assert files.MAX_ENTRIES == find.MAX_FOUND
    assert [name for name in find.SKIPPED[:6] if f"`{name}`" not in page] == []
