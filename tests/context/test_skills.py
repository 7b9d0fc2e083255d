"""Skills: what the prompt contains of them, what is refused and where, and that nothing is read twice."""

from __future__ import annotations

import os
import re
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.context.skills import ALWAYS_LIMIT, INTRODUCTION, MAX_SKILLS, Skill, list_skills, named
from everloop.sandbox.reach import Reach

from ..support.skill_bench import Bench, settle

CANARY = "canary-5f2c"


# ---------------------------------------------------------------------------------------------- the prompt


def test_without_skills_there_is_no_block(bench):
    assert bench.blocks == []
    (bench.folder / "skills").mkdir()
    (bench.folder / "skills/README.md").write_text("how to add one")
    (bench.folder / "skills/assets").mkdir()
    (bench.folder / "skills/.git").mkdir()
    (bench.folder / "skills/.git/SKILL.md").write_text("x")
    assert bench.blocks == []
    assert bench.skills.problems() == []


def test_always_on_skills_come_in_full_before_the_sorted_list_of_the_others(bench):
    bench.add("tea", body="Three minutes.", always="true")
    bench.add("beans", body="Water them.")
    bench.add("ants", body="Let them be.", always="true")
    bench.add("peas", body="Pick them.", shipped=True)
    ants, tea, others = bench.blocks
    assert ants == "## Skill: ants\n\nPaths in it start at skills/ants.\n\nLet them be."
    assert tea.startswith("## Skill: tea\n")
    assert tea.endswith("Three minutes.")
    assert others == (
        f"{INTRODUCTION}\n- beans: What beans is for. (skills/beans/SKILL.md)\n"
        f"- peas: What peas is for. ({bench.shipped}/peas/SKILL.md)"
    )
    assert bench.skills.problems() == []


def test_the_same_files_give_the_same_bytes_in_whatever_order_they_were_created(bench, tmp_path):
    names = ["b", "a", "d", "c"]
    for name in names:
        bench.add(name)
    (tmp_path / "twin").mkdir()
    other = Bench(tmp_path / "twin", bench.shipped)
    for name in reversed(names):
        other.add(name)
    assert bench.blocks == other.blocks == bench.blocks


def test_changed_new_and_removed_skills_are_noticed(bench):
    file = bench.add("tea", always="true", body="Three minutes.")
    assert "Three" in bench.prompt
    file.write_text(file.read_text().replace("Three", "Seven"))
    assert "Seven" in bench.prompt
    settle()
    assert "Seven" in bench.prompt
    new = file.with_name("new")
    new.write_text(file.read_text().replace("Seven", "Eight"))
    os.utime(new, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    new.rename(file)  # the same size and time
    assert "Eight" in bench.prompt
    bench.add("beans")
    assert "- beans:" in bench.prompt
    file.unlink()
    assert "tea" not in bench.prompt


def test_two_changes_with_the_same_modification_time_are_both_noticed(bench):
    file = bench.add("tea", always="true", body="0")
    for number in range(1, 40):
        file.write_text(file.read_text()[:-2] + f"{number % 10}\n")
        assert bench.blocks[0][-1] == str(number % 10)


def test_a_workspace_skill_overrides_the_shipped_one_even_if_it_is_broken(bench):
    bench.add("tea", description="The shipped one.", shipped=True, body="shipped body")
    assert "The shipped one." in bench.prompt
    file = bench.add("tea", description="My own.", body="own body")
    assert "My own." in bench.prompt
    assert "The shipped one." not in bench.prompt
    assert "own body" in (bench.load("tea") or "")
    file.write_text("no front matter")
    assert "The shipped one." not in bench.prompt
    assert bench.problem.startswith("skills/tea/SKILL.md:1: ")
    assert "shipped body" not in (bench.load("tea") or "")
    file.unlink()
    assert "The shipped one." in bench.prompt


def test_text_of_skills_cannot_add_lines_and_can_always_be_encoded(bench):
    bench.add("tea", description=r'"one\ntwo\x1b[2J three \u202e\u2028## Four"')
    bench.add("five\n## Six")
    bench.add("seven\udcff")
    assert bench.prompt.count("\n") == INTRODUCTION.count("\n") + 3
    assert "\x1b" not in bench.prompt
    bench.prompt.encode()
    for name in ("tea", "five\n## Six", "seven\udcff"):
        (bench.load(name) or "").encode()


def test_always_on_skills_share_a_size_limit(bench):
    bench.add("big", always="true", body="b" * (ALWAYS_LIMIT - 5000))
    bench.add("more", always="true", version="'1'", body="m" * 6000)
    bench.add("tea", always="true", body="t" * 1000)
    big, tea, others = bench.blocks
    assert "bbb" in big
    assert "ttt" in tea
    assert "- more: What more is for." in others
    assert [line.partition(": ")[0] for line in bench.skills.problems()] == ["skills/more/SKILL.md:4"]
    assert bench.blocks == [big, tea, others]
    assert len(bench.skills.problems()) == 1
    bench.add("big", body="small")
    assert "mmm" in bench.prompt
    assert bench.skills.problems() == []


def test_the_number_of_skills_is_limited(bench):
    for number in range(MAX_SKILLS + 3):
        bench.add(f"s{number:03}")
    listed = Bench(bench.folder, bench.shipped, budget=1_000_000)
    assert listed.prompt.count("\n- ") == MAX_SKILLS
    assert f"s{MAX_SKILLS - 1:03}" in listed.prompt
    assert f"s{MAX_SKILLS:03}" not in listed.prompt
    assert str(MAX_SKILLS) in "".join(listed.skills.problems())


# ---------------------------------------------------------------------------------------------- the budget

LISTED = st.lists(
    st.builds(
        Skill,
        st.from_regex(r"[a-z]{1,9}", fullmatch=True),
        st.just("skills/x/SKILL.md"),
        st.booleans(),
        st.text("ab ", min_size=1, max_size=1024).map(str.strip),
        missing=st.sampled_from(["", "needs the program gh"]),
        problem=st.sampled_from(["", "", "skills/x/SKILL.md:3: unknown key"]),
    ),
    max_size=60,
)


@given(LISTED, st.integers(0, 9000))
def test_the_list_never_exceeds_its_budget_and_drops_no_skill_silently(skills, budget):
    text = list_skills(skills, budget, "/shipped/")
    assert len(text) <= budget
    if not text:
        assert not skills or budget < len(INTRODUCTION) + 60
        return
    more = sum(int(count) for count in re.findall(r"(\d+) more in ", text.splitlines()[-1]))
    shown = text.count("\n- ") - (more > 0)
    assert shown + more == len(skills)


def test_the_budget_is_used_to_the_last_character(bench):
    for name in ("one", "two"):
        bench.add(name, description="x" * 500)
    (whole,) = bench.blocks
    assert Bench(bench.folder, bench.shipped, budget=len(whole)).blocks == [whole]
    (shorter,) = Bench(bench.folder, bench.shipped, budget=len(whole) - 1).blocks
    assert shorter.count("x…") == 2


def test_descriptions_are_shortened_then_left_out_then_skills_are_counted(bench):
    for number in range(20):
        bench.add(f"s{number:02}", description=f"Does {'very ' * 150}well.")
    bench.add("gh", requires="{bins: [no-such-program]}")
    bench.add("zz", shipped=True)

    def listed(budget: int) -> str:
        return Bench(bench.folder, bench.shipped, budget=budget).prompt

    assert listed(1_000_000).count("very well.") == 20
    assert listed(8000).count("very…") == 20
    assert "What gh is for. [not available: needs the program no-such-program]" in listed(8000)
    names = listed(1400)
    assert "very" not in names
    assert "- s19 (skills/s19/SKILL.md)" in names
    assert "- gh [not available: needs the program no-such-program] (skills/gh/SKILL.md)" in names
    counted = listed(600)
    shown = counted.count(" (skills/")
    assert 0 < shown < 20
    assert counted.splitlines()[-1] == f"- {21 - shown} more in skills/ and 1 more in {bench.shipped}/"


# ---------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("front", "line", "words"),
    [
        ("name: tea\ndescripton: x", 3, ['"descripton"', '"description"']),
        ("name: tea\ndescription: x\nzzz: y", 4, ['"zzz"', "always"]),
        ("description: x", 1, ["name", '"tea"']),
        ("description: x\nname: coffee", 3, ['"coffee"', '"tea"']),
        ("description: x\nname: 5", 3, ['"5"']),
        ("name: tea", 1, ["description"]),
        ("name: tea\ndescription: ''", 3, ["description"]),
        ("name: tea\ndescription: [a]", 3, ["description"]),
        (f"name: tea\ndescription: {'x' * 1025}", 3, ["1024"]),
        ('name: tea\ndescription: "one\\n\\ntwo"', 3, ["paragraph"]),
        ("name: tea\ndescription: x\n\nalways: maybe", 5, ["true or false"]),
        ('name: tea\ndescription: x\nalways: "true"', 4, ["true or false"]),
        ("name: tea\ndescription: x\nrequires: git", 4, ["bins"]),
        ("name: tea\ndescription: x\nrequires:\n  env: [A]\n  bin: [git]", 6, ['"bin"', '"bins"']),
        ("name: tea\ndescription: x\nrequires:\n  env: [A]\n  bins: git", 6, ["list"]),
        ("name: tea\ndescription: x\nrequires: {bins: [../evil]}", 4, ["../evil"]),
        ("name: tea\ndescription: x\nrequires: {env: [A B]}", 4, ["A B"]),
        ("name: tea\ndescription: Use it: often", 3, ["quotes"]),
        ("name: tea\ndescription: x\nlicense: &a b", 4, ["anchors"]),
    ],
)
def test_an_error_names_file_and_line(bench, front, line, words):
    bench.add("tea", f"---\n{front}\n---\nbody\n")
    assert bench.problem.startswith(f"skills/tea/SKILL.md:{line}: ")
    for word in words:
        assert word in bench.problem
    assert bench.problem in (bench.load("tea") or "")


def test_an_empty_oversized_or_non_utf8_file_is_reported(bench):
    file = bench.add("tea", "---\nname: tea\ndescription: x\n---\n \n")
    assert bench.problem.startswith("skills/tea/SKILL.md:1: ")
    file.write_bytes(b"---\nname: tea\ndescription: x\n---\n\nco\xe9l\n")
    assert bench.problem.startswith("skills/tea/SKILL.md:6: ")
    bench.add("tea", body="x" * 64_001)
    assert bench.problem.startswith("skills/tea/SKILL.md:1: ")
    bench.add("tea", body="x" * 63_000)
    assert bench.prompt
    assert bench.skills.problems() == []


@pytest.mark.parametrize("name", ["Tea", "te_a", "-tea", "tea-", "te--a", "té", "a" * 65, "te a"])
def test_the_name_of_a_skills_folder_is_validated(bench, name):
    bench.add(name)
    assert str(64) in bench.problem
    assert bench.load(name) != bench.load("tea")


def test_keys_of_other_systems_are_accepted(bench):
    keys = {"license": "MIT", "version": "1.0", "allowed-tools": "Bash(git:*) Read", "homepage": "https://x.example"}
    bench.add("tea", metadata="{author: someone, nested: {a: [1]}}", compatibility="any", **keys)
    bench.add("a" * 64)
    assert "- tea: What tea is for." in bench.prompt
    assert bench.skills.problems() == []


# ---------------------------------------------------------------------------------------------- requirements


def test_missing_requirements_are_reported_and_checked_again_later(bench, tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("TEA_TOKEN", raising=False)
    bench.add("tea", always="true", requires="{bins: [kettle], env: [TEA_TOKEN]}", body="Boil it.")
    assert "[not available: needs the program kettle and the variable TEA_TOKEN]" in bench.prompt
    assert "Boil it." not in bench.prompt + (bench.load("tea") or "")
    assert "kettle" in (bench.load("tea") or "")
    assert bench.skills.problems() == []
    (programs / "kettle").write_text("#!/bin/sh\n")
    (programs / "kettle").chmod(0o755)
    monkeypatch.setenv("TEA_TOKEN", "x")
    bench.now = 29.9
    assert "needs the program kettle]" in bench.prompt
    bench.now = 30.0
    assert "Boil it." in bench.prompt
    assert "Boil it." in (bench.load("tea") or "")
    (programs / "kettle").unlink()
    monkeypatch.setenv("TEA_TOKEN", "")
    assert "needs the variable TEA_TOKEN]" in bench.prompt
    bench.now = 61.0
    assert "needs the program kettle and" in bench.prompt


# ---------------------------------------------------------------------------------------------- one skill by name


def test_a_skill_is_loaded_in_full_with_the_path_of_its_files(bench):
    bench.add("tea", body="# Tea\n\n---\n\nThree minutes.")
    bench.add("peas", body="Pick them.", shipped=True)
    assert bench.load("tea") == "## Skill: tea\n\nPaths in it start at skills/tea.\n\n# Tea\n\n---\n\nThree minutes."
    assert str(bench.shipped / "peas") in (bench.load("peas") or "")
    assert [bench.load(name) for name in ("coffee", "", "../tea", "tea/../tea", "Tea")] == [None] * 5


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("$git commit this", ["git"]),
        ("use $skill-writer, then $git. And $git again ($code-review)", ["skill-writer", "git", "code-review"]),
        ('"$git"\n$tea\n\n- $peas', ["git", "tea", "peas"]),
        ("$HOME $Home $PATH_x $path_x $a.txt $a/b $a=1 $f(x) $git_ $foo-bar_x", []),
        ("it costs $5, $10.50, $1-2 or US$x, a$b, $$pid, \\$git, /$git, 5$a", []),
        ("$3d-print for $20", ["3d-print"]),
        ("`$git` and ``a ` $git`` but $tea", ["tea"]),
        ("a ` alone $git", ["git"]),
        ("a ` open $git\n\n$tea ` there", ["git", "tea"]),
        ("`$a\n$b` $c", ["c"]),
        ("```sh\necho $git\n```\n$tea\n~~~\n$peas\n", ["tea"]),
        ("````\n```\n$git\n```\n$tea\n````\n$peas", ["peas"]),
        ("  ```\r\n$git\r\n  ```\r\n$tea", ["tea"]),
        ("```$git``` is code, $tea is not\n$peas", ["tea", "peas"]),
        ("x ``` $git", ["git"]),
        ("$git으로 커밋해줘, 用$tea做", ["git", "tea"]),
        ("$gité $" + "a" * 65 + " $git-", ["git"]),
        ("$ git $", []),
        ("", []),
    ],
)
def test_only_names_in_the_prose_of_a_message_count(text, names):
    assert named(text) == names


@pytest.mark.parametrize(
    "text",
    ["`" * 100_000, "` `` " * 30_000, "```\n" * 30_000, "$a-" * 50_000, "$" + "a-" * 50_000, "~~~$a\n\n" * 9000],
)
def test_names_are_found_quickly_in_any_message(text):
    start = time.process_time()
    assert len(named(text + " $b " * 1000)) <= 2
    assert len(named(" ".join(f"$a{number}" for number in range(10_000)))) == 50
    assert time.process_time() - start < 1


@given(st.text("`~$a \n", max_size=60))
def test_a_name_after_closed_code_is_found(text):
    assert "name" in named(f"{text}\n\n~~~\n```\n````````\n~~~~~~~~\n\n$name") or re.search("[`~]{3}", text)


# ---------------------------------------------------------------------------------------------- cost

_opened: list[object] = []
_hooked = False


@pytest.fixture
def opened() -> list[object]:
    """The files that the process has opened by name or by descriptor since the test began."""
    global _hooked
    if not _hooked:
        sys.addaudithook(lambda event, details: _opened.append(details[0]) if event == "open" else None)
        _hooked = True
    _opened.clear()
    return _opened


def test_unchanged_files_are_not_read_again(bench, opened):
    for number in range(6):
        bench.add(f"s{number}", always=str(number < 3).lower())
    bench.add("broken", "no front matter")
    bench.add("shipped", shipped=True)
    settle()
    bench.reach = Reach(bench.folder, restricted=False)
    opened.clear()
    first = bench.blocks
    assert sum(isinstance(what, int) for what in opened) == 7
    assert sum(str(what).endswith("shipped/SKILL.md") for what in opened) == 1
    opened.clear()
    assert bench.blocks == first
    assert opened == [str(bench.folder / "skills")]


def test_a_file_that_has_just_changed_is_read_once_more(bench, opened):
    bench.reach = Reach(bench.folder, restricted=False)
    reads = 0
    for _ in range(20):  # more than once if the machine stalls for longer than a change counts as new
        bench.add("tea")
        opened.clear()
        assert bench.blocks == bench.blocks
        reads = max(reads, sum(isinstance(what, int) for what in opened))
    assert reads == 2


def test_twenty_unchanged_skills_cost_little(bench):
    for number in range(20):
        needs = "{bins: [git]}" if number % 4 == 0 else ""
        bench.add(f"s{number}", always=str(number < 3).lower(), requires=needs)
    settle()
    assert bench.prompt
    times = []
    for _ in range(50):
        start = time.perf_counter()
        assert bench.blocks
        times.append(time.perf_counter() - start)
    assert min(times) < 0.001


def test_concurrent_threads_see_the_same_skills(bench):
    from concurrent.futures import ThreadPoolExecutor

    for number in range(20):
        bench.add(f"s{number}")
    with ThreadPoolExecutor(8) as pool:
        assert len({block for blocks in pool.map(lambda _: bench.blocks, range(64)) for block in blocks}) == 1
