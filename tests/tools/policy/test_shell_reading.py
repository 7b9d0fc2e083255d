"""Parsing a shell command line: what is found in it is what bash would run."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from everloop.tools.policy.shell_line import TEXT, WORDS
from everloop.tools.policy.shell_syntax import read

from ...support.cases import each


def found(command: str) -> list[str]:
    """Return the simple commands in no order; fail on a line that cannot be parsed."""
    line = read(command)
    assert not line.opaque, line.opaque
    return sorted(" ".join(part.words) for part in line.commands if not part.wrapper)


EVERYDAY = {
    "ls -la": ["ls -la"],
    "cd src && git status --short | head -20": ["cd src", "git status --short", "head -20"],
    "python -m pytest -q 2>&1 | tail -5; echo done": ["echo done", "python -m pytest -q", "tail -5"],
    "cat > notes.md <<'EOF'\n# It's `markdown` with $(stuff)\nEOF\nls": ["cat", "ls"],
    "cat <<EOF > a && cat a\nhello $USER\nEOF": ["cat", "cat a"],
    "cat <<A; cat <<B\na\nA\nb\nB\nls": ["cat", "cat", "ls"],
    "for f in *.py; do wc -l \"$f\"; done": [f"wc -l {TEXT}"],
    "while IFS= read -r line; do echo \"$line\"; done < input.txt": [f"echo {TEXT}", "read -r line", ""],
    "if [ -f a.txt ]; then rm a.txt; else echo none; fi": ["[ -f a.txt ]", "echo none", "rm a.txt"],
    "[[ $x == a* && -n $y ]] && echo yes": ["echo yes"],
    "[[ $name =~ ^(a|b)+$ ]] || exit 1": ["exit 1"],
    "i=0; while ((i < 3)); do i=$((i + 1)); done": [],
    "n=5; [[ $n -gt 3 ]] && echo more": ["echo more"],
    "git commit -m \"$(cat <<'EOF'\nIt's a message\nEOF\n)\"": ["cat", f"git commit -m {TEXT}"],
    "find . -name '*.pyc' -exec rm {} \\;": ["find . -name *.pyc -exec rm {} ;", f"rm {TEXT}"],
    "grep -rl foo . | xargs -r sed -i 's/foo/bar/g'": [
        "grep -rl foo .", f"sed -i s/foo/bar/g {WORDS}", "xargs -r sed -i s/foo/bar/g",
    ],
    "timeout 60 env DEBUG=1 nice -n 5 make -j2": ["make -j2"],
    "bash -c 'set -euo pipefail; ls | wc -l'": ["ls", "set -euo pipefail", "wc -l"],
    "echo \"cost: $5 and $ signs\"": [f"echo cost: {TEXT} and $ signs"],
    "echo 'it'\\''s'": ["echo it's"],
    "A=1 B=\"$C\" make": ["make"],
    "PYTHONPATH=src python x.py": ["python x.py"],
    "case \"$1\" in -h|--help) usage;; *) main \"$@\";; esac": [f"main {WORDS}", "usage"],
    "f() { local x=1; echo \"$x\"; }; f a": [f"echo {TEXT}", "f a", "local x=1"],
    "diff <(sort a) <(sort b)": [f"diff {TEXT} {TEXT}", "sort a", "sort b"],
    "echo {1..3} a{b,c} HEAD@{1} {}": [f"echo {TEXT} a{TEXT} HEAD@{{1}} {{}}"],
    "ls *.py 'a*' \"b?\"": [f"ls {TEXT} a* b?"],
    "tar czf - . | ( cd /tmp && tar xzf - )": ["cd /tmp", "tar czf - .", "tar xzf -"],
    "trap 'rm -f tmp' EXIT": ["rm -f tmp"],
    "sleep 1 & wait $!": ["sleep 1", f"wait {WORDS}"],
    "curl -s https://example.com/?a=1\\&b=2 | jq '.x[] | .y'": ["curl -s https://example.com/?a=1&b=2", "jq .x[] | .y"],
    "echo a # comment ; rm b": ["echo a"],
    "echo ${x:-none} ${#x} ${x%.txt} ${x//a/b} ${a[0]} \"${a[@]}\"": [f"echo {' '.join([WORDS] * 6)}"],
    "command -v git >/dev/null && exec git log": ["command -v git", "git log"],
    "python - <<'EOF'\nprint('$(x)')\nEOF": ["python -"],
    "cat <<-E\n\ta\n\tE\nls": ["cat", "ls"],
    "cat <<E\na\\\nE\nrm\nE\nls": ["cat", "ls"],
    "": [],
    "# only a comment": [],
}  # fmt: skip


@each(("command", "expected"), EVERYDAY.items())
def test_everyday_command_lines_are_parsed(command, expected):
    if "?a=1" in command:  # an unquoted question mark is a pattern
        expected = [f"curl -s https://example.com/{TEXT}", expected[1]]
    assert found(command) == sorted(expected)


@each(
    "command",
    [
        "$X", "ls; ${X}", "eval \"$X\"", "a 'b", 'a "b', "a $(b", "a `b", "(a", "{ a", "if a; then b", "a ${b",
        "cat <<E\na", "a\0b", "a\rb", "ls\u00a0-l", "ls\u3000-l", "ls\x0b-l", "rm !(a)", "source x", ". x",
        "alias a=b", "ssh host ls", "bash", "sudo -s", "echo x | sh", "PATH=. ls", "LD_PRELOAD=x ls", "export IFS=x",
        "hash -p a b", "enable -f a b", "coproc a", "> a time b", "$\\\nenv", "timeout $T ls",
        "echo $(cat <<A)\na\nA", "a ) b", "fi", "done", "case a in b",
        "a;;b", "function", "[[ a", "((a", "env $X ls", "timeout --bogus 5 ls", "parallel ls", "su -c ls", "set -k",
        "shopt -s extglob", "a \\",
    ],
)  # fmt: skip
def test_unknowable_parts_are_marked_as_opaque(command):
    assert read(command).opaque


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10_000, "$(" * 10_000, "${a:-" * 10_000, "`" * 20_001, "{ " * 10_000, "! " * 50_000, "env " * 40_000,
        '"$(' * 5_000,
        "a;" * 90_000, "'\"" * 50_000, "<<A " * 5_000, "f() " * 40_000, "if a; then " * 15_000, "a" * 1_000_000,
        "cat <<A\n" + "a\\\n" * 60_000, "echo $((" + "(1+" * 20_000, "bash -c " * 1_000 + "a", "eval " * 10_000,
        "echo $((" + "$((" * 5_000, "a[" * 50_000, "[[ " + "( " * 50_000, "case a in " + "a) b;; " * 20_000,
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_huge_or_deeply_nested_line_is_parsed_quickly(text):
    start = time.process_time()
    read(text)
    assert time.process_time() - start < 2


def test_a_long_here_document_is_parsed(tmp_path):
    body = "a line with 'quotes' and $(things)\n" * 500
    assert found(f"cat > a.txt <<'END'\n{body}END\nls") == ["cat", "ls"]


def test_redirections_name_their_files():
    line = read("sort < a > b 2>> c >&2 2>&- &> d")
    assert [(target.path, target.writes) for target in line.commands[0].targets] == [
        ("a", False), ("b", True), ("c", True), ("d", True),
    ]  # fmt: skip
    assert read("cd x; ls > y").moves
    assert read("cat < [/../.en?").commands[0].targets[0].path == f"[/../.en{TEXT}"  # no bracket is closed


def test_a_shells_script_is_parsed_whatever_its_input():
    assert "bash - script" in found("bash - script <<< ls")
    assert "bash -- script" in found("bash -- script <<E\nls\nE")
    assert found("bash -s - script <<< ls") == ["ls"]


@pytest.mark.parametrize("options", ["--exec=rm", "--exec-batch=rm", "-xrm", "-Hx rm", "-HIX rm"])
def test_a_command_run_by_fd_is_found(options):
    assert read(f"fd . {options}").opaque
    assert not read("fd -H -e jsx -ejsx x").opaque


# ---------------------------------------------------------------------------------------------- against bash itself

PROGRAM = "canary"


def spelled(word: str) -> st.SearchStrategy[str]:
    """Ways to quote a word that bash reads as that word."""

    def letter(character: str) -> st.SearchStrategy[str]:
        code = ord(character)
        forms = [character, f"'{character}'", f'"{character}"', f"\\{character}", f"$'\\x{code:x}'", f"$'\\{code:o}'"]
        forms += [f"$'\\u{code:04x}'", f"''{character}", f'{character}""', f"\\\n{character}", f'"\\\n{character}"']
        return st.sampled_from(forms)

    return st.tuples(*map(letter, word)).map("".join)


WRAPS = [
    "{}", "true && {}", "false || {}", "true; {}", "true\n{}", "{} & wait", "echo a | {}", "( {} )", "{{ {}; }}",
    "! {}", "time {}", "x=$({})", "echo `{}`", 'echo "$({})"', "echo ${{x:-$({})}}", 'echo "${{x:-$({})}}"',
    "cat <({})", "echo > $({})", "if {}; then :; fi", "if false; then :; else {}; fi", "for i in 1; do {}; done",
    "while {}; do break; done", "case a in a) {};; esac", "case $({}) in a) ;; esac", "f() {{ {}; }}; f",
    "function g {{ {}; }}; g", "[[ -n $({}) ]]", "a=(1 $({}))", "cat <<E\n$({})\nE", "cat <<'E'\n$x\nE\n{}",
    "cat <<E | cat; {}\na\nE", "echo 'a' # b\n{}", "env A=1 {}", "command {}", "timeout 5 {}", "nice {}", "exec {}",
    "echo a | xargs {}", "find . -maxdepth 0 -exec {} \\;", "echo \\# a; {}", "echo \"#\"; {}", "echo $#; {}",
    "echo a#b; {}", "echo '\\'; {}", 'echo "\\""; {}', "> out {}", "A=1 {}",
]  # fmt: skip
QUOTING = ["eval {}", "bash -c {}", "sh -c {}", "bash -ec {}", "trap {} EXIT", "bash <<< {}", "env bash -c {}"]


@st.composite
def lines(draw: st.DrawFn) -> str:
    """Command lines that mention the program, most of which run it."""
    line = draw(spelled(PROGRAM))
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.integers(0, 4)) == 0:
            line = draw(st.sampled_from(QUOTING)).format(shlex.quote(line))
        else:
            line = draw(st.sampled_from(WRAPS)).format(line)
    return line


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    program = tmp_path / PROGRAM
    program.write_text(f'#!/bin/sh\n: > "{tmp_path}/sang"\n')
    program.chmod(0o755)
    return tmp_path


def sings(command: str, workspace: Path) -> bool:
    sang = workspace / "sang"
    sang.unlink(missing_ok=True)
    environment = {"PATH": f"{workspace}:{os.environ['PATH']}"}
    options = {"cwd": workspace, "env": environment, "capture_output": True, "timeout": 20}
    subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    return sang.exists()


def sees(command: str) -> bool:
    line = read(command)
    return bool(line.opaque) or any(part.words[:1] == (PROGRAM,) for part in line.commands)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines())
def test_every_program_that_bash_runs_is_found(workspace, line):
    assert sees(line) or not sings(line, workspace)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spelled(PROGRAM))
def test_a_word_is_read_as_bash_reads_it_however_it_is_quoted(workspace, spelling):
    printed = subprocess.run(["bash", "-c", f"printf %s {spelling}"], capture_output=True, timeout=20).stdout.decode()
    assert printed == PROGRAM
    assert found(f"printf %s {spelling}") == [f"printf %s {PROGRAM}"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from([*"'\"\\`$(){};&|<>#!\n \t=[]*", "canary", "canary ", "a", "<<a", "$(", "${", "((", "[["]),
        max_size=14,
    )
)
@example(["<<a", "\n", "canary ", "\n", "a", "\n", "canary"])
def test_any_text_that_runs_the_program_is_recognised(workspace, pieces):
    line = "".join(pieces)
    assert sees(line) or not sings(line, workspace)


@pytest.mark.parametrize("number", range(30))
def test_the_words_of_a_line_are_those_that_bash_passes(number):
    """Compare with the words that bash itself produces for lines without unknown parts."""
    texts = [
        "a b",
        "a'b",
        'a"b',
        "a\\b",
        "$x",
        "`x`",
        "a;b",
        "#a",
        "~",
        "*",
        "{a,b}",
        "a\nb",
        "é",
        "",
        "!x",
        "(",
        "a=b",
        "-",
        "\t",
    ]
    words = [texts[(number * 7 + step * 3) % len(texts)] for step in range(4)]
    command = "printf '%s\\n' " + " ".join(shlex.quote(word) for word in words)
    out = subprocess.run(["bash", "-c", command], capture_output=True, timeout=20).stdout.decode()
    line = read(command)
    assert not line.opaque
    assert "".join(f"{word}\n" for word in line.commands[0].words[2:]) == out
