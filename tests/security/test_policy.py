"""Bypasses of a command rule: each really runs the forbidden program, and none is allowed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from everloop.config import Rule
from everloop.tools.base import Plan
from everloop.tools.context import CallContext
from everloop.tools.policy.policy import Policy

# Each line makes bash run the program `canary` from PATH (or ./canary), whatever stands around it.
ROWS = {
    "plain": "canary",
    "by path": "./canary",
    "by another path": "../workspace/./canary",
    "second of a list": "true; canary",
    "after and": "true && canary",
    "after or": "false || canary",
    "in the background": "canary & wait",
    "in a pipeline": "echo a | canary",
    "after a newline": "true\ncanary",
    "after a comment": "true # canary\ncanary # true",
    "comment that is none": "echo a#b; canary",
    "over the end of a line": "can\\\nary",
    "assignment over the end of a line": "PA\\\nTH=.:$PATH canary",
    "quoted": "'canary'",
    "double-quoted": '"canary"',
    "partly quoted": "c'a'n\"a\"ry",
    "escaped": "c\\anary",
    "empty quotes": "can''ary",
    "ANSI-C hex": "$'\\x63anary'",
    "ANSI-C octal": "$'\\143anary'",
    "ANSI-C unicode": "$'\\u0063anary'",
    "ANSI-C with an escaped quote": "echo $'\\'' ; canary #'",
    "translated": '$"canary"',
    "variable": "X=canary; $X",
    "part in a variable": "X=nary; ca$X",
    "empty variable first": "$NONE canary",
    "empty substitution first": "$(true) canary",
    "default of a variable": "${NONE:-canary}",
    "command in a default": "echo ${NONE:-$(canary)}",
    "command in a quoted default": 'echo "${NONE:-`canary`}"',
    "command in a replacement": "A=b; echo ${A/b/`canary`}",
    "positional": "set -- canary; $1",
    "all positional": 'set -- canary; "$@"',
    "indirect": "A=canary; B=A; ${!B}",
    "array": "A=(canary); ${A[0]}",
    "prompt expansion": "A='$(canary)'; echo ${A@P}",
    "arithmetic in a variable": "A='x[$(canary)]'; echo $((A))",
    "arithmetic in a test": "A='x[$(canary)]'; [[ A -eq 0 ]]",
    "arithmetic in an offset": "A='x[$(canary)]'; B=b; echo ${B:A}",
    "arithmetic in a subscript": "A='x[$(canary)]'; echo ${B[A]}",
    "arithmetic of an integer": "declare -i A='x[$(canary)]'",
    "arithmetic of let": "let 'x[$(canary)]'",
    "arithmetic of a command's output": "echo $(( $(echo 'x[$(canary)]') ))",
    "arithmetic of what was read": "read A <<< 'x[$(canary)]'; echo $((A))",
    "arithmetic in another shell": "export A='x[$(canary)]'; bash -c 'echo $((A))'",
    "arithmetic of an argument": "f() { echo $(($1)); }; f 'x[$(canary)]'",
    "arithmetic in a loop": "for A in 'x[$(canary)]'; do ((A)); done",
    "name that is tested": "test -v 'x[$(canary)]'",
    "name that is printed to": "printf -v 'x[$(canary)]' a",
    "name that is unset": "x=(1); unset 'x[$(canary)]'",
    "braces": "{canary,a}",
    "braces inside": "c{anary,x}",
    "nested braces": "{canary{,},x}",
    "pattern as a command": "./canar?",
    "pattern with a class": "./[c]anary",
    "star": "./cana*",
    "substitution": "echo $(canary)",
    "substitution in quotes": 'echo "$(canary)"',
    "substitution in an assignment": "A=$(canary)",
    "substitution in an array": "A=(1 $(canary))",
    "substitution in a redirection": "echo a > $(canary; echo out)",
    "substitution as a command": "$(echo canary)",
    "substitution in arithmetic": "echo $(( $(canary; echo 1) + 1 ))",
    "substitution in old arithmetic": "echo $[ $(canary; echo 1) + 1 ]",
    "subshell in a substitution": "echo $( (canary) )",
    "subshell that looks like arithmetic": "((canary) )",
    "backticks": "echo `canary`",
    "nested backticks": "echo `echo \\`canary\\``",
    "backticks in quotes": 'echo "`canary`"',
    "escaped quotes in backticks": 'echo "`eval \\"canary\\"`"',
    "process substitution": "cat <(canary)",
    "process substitution for writing": "echo a > >(canary); sleep 0.3",
    "subshell": "(canary)",
    "group": "{ canary; }",
    "not": "! canary",
    "not not": "! ! canary",
    "time": "time canary",
    "time of a group": "time { canary; }",
    "time with an option": "time -p canary",
    "if": "if canary; then true; fi",
    "then": "if true; then canary; fi",
    "else": "if false; then true; else canary; fi",
    "elif": "if false; then true; elif canary; then true; fi",
    "for": "for i in 1; do canary; done",
    "for without in": "set -- a; for i do canary; done",
    "for over a substitution": "for i in $(canary); do true; done",
    "counting for": "for ((i=0;i<1;i++)); do canary; done",
    "braces for do": "for i in 1; { canary; }",
    "while": "while canary; do break; done",
    "until": "until canary; do break; done",
    "case": "case a in a) canary;; esac",
    "case with a parenthesis": "case a in (a) canary;; esac",
    "case that falls through": "case a in a) true;& b) canary;; esac",
    "case of a substitution": "case $(canary) in *) true;; esac",
    "select": "select x in a; do canary; break; done <<< 1",
    "test": "[[ $(canary) ]]",
    "test with a command after it": "[ a ] && canary",
    "test that is none": "[ a || canary ]",
    "function": "f() { canary; }; f",
    "function by keyword": "function f { canary; }; f",
    "function that is a subshell": "f() (canary); f",
    "function with another body": "f() if true; then canary; fi; f",
    "function that takes a command": 'f() { "$@"; }; f canary',
    "function that shadows": "ls() { canary; }; ls",
    "function for unknown commands": "command_not_found_handle() { canary; }; no_such_program",
    "function from the environment": "env 'BASH_FUNC_ls%%=() { canary; }' bash -c ls",
    "coproc": "coproc canary; wait",
    "named coproc": "coproc X { canary; }; wait",
    "alias": "shopt -s expand_aliases\nalias ls=canary\nls",
    "alias by array": "shopt -s expand_aliases\nBASH_ALIASES[ls]=canary\nls",
    "hash": "hash -p ./canary ls; ls",
    "hash by array": "BASH_CMDS[ls]=./canary; ls",
    "command": "command canary",
    "command with an option": "command -p ./canary",
    "builtin": "builtin command canary",
    "exec": "exec canary",
    "exec under another name": "exec -a ls canary",
    "eval": "eval canary",
    "eval of pieces": "eval can'a'ry",
    "eval of two words": "eval 'true;' canary",
    "eval of a variable": "X='canary'; eval \"$X\"",
    "eval of an eval": "eval 'eval \"eval canary\"'",
    "builtin eval": "builtin eval canary",
    "trap": "trap canary EXIT",
    "trap for debugging": "trap -- canary DEBUG; true",
    "source": "source <(echo canary)",
    "dot": "echo canary > s; . ./s",
    "mapfile": "mapfile -c 1 -C canary <<< a",
    "completion": "compgen -C canary",
    "completion words": "compgen -W '$(canary)'",
    "jobs": "jobs -x canary",
    "prompt of tracing": "PS4='$(canary)'; set -x; true",
    "start-up file": "echo canary > s; BASH_ENV=./s bash -c true",
    "env": "env canary",
    "env with an assignment": "env A=1 canary",
    "env with options": "env -u A -i PATH=\"$PATH\" canary",
    "env -S": "env -S 'canary a'",
    "env -S attached": "env '-Scanary a'",
    "env -vS": "env -vS 'canary a'",
    "env --split-string": "env --split-string='canary a'",
    "env -S with its own escapes": "env -S 'canary\\_a'",
    "env -S with quotes": "env -S '\"canary\" a'",
    "env by path": "/usr/bin/env canary",
    "env of env": "env env env canary",
    "nohup": "nohup canary",
    "setsid": "setsid -w canary",
    "timeout": "timeout 5 canary",
    "timeout with options": "timeout -k 1 -s KILL 5 canary",
    "timeout with a short long option": "timeout --sig KILL 5 canary",
    "timeout with dashes": "timeout -- 5 canary",
    "nice": "nice -n 5 canary",
    "nice in the old way": "nice -5 canary",
    "ionice": "ionice -c 3 canary",
    "stdbuf": "stdbuf -oL canary",
    "taskset": "taskset -c 0 canary",
    "setarch": "setarch x86_64 canary",
    "flock": "flock x canary",
    "flock with a text": "flock x -c canary",
    "xargs": "echo a | xargs canary",
    "xargs that is given the name": "echo canary | xargs env",
    "xargs with a marker": "echo canary | xargs -I{} env {}",
    "xargs with a marker in a text": "echo canary | xargs -I% sh -c %",
    "xargs --replace": "echo a | xargs --replace canary {}",
    "xargs of a shell": "echo a | xargs sh -c canary",
    "find -exec": "find . -maxdepth 0 -exec canary \\;",
    "find -exec with a plus": "find . -maxdepth 0 -exec canary {} +",
    "find -execdir": "find . -maxdepth 0 -execdir env PATH=\"$PWD:/usr/bin\" canary \\;",
    "find -exec of a shell": "find . -maxdepth 0 -exec sh -c canary \\;",
    "find second -exec": "find . -maxdepth 0 -exec true \\; -exec canary \\;",
    "find that finds it": "find ./canary -exec {} \\;",
    "sh -c": "sh -c canary",
    "bash -c": "bash -c 'canary'",
    "bash -lc": "bash -lc ./canary",
    "bash -ec": "bash -ec canary",
    "bash +e -c": "bash +e -c canary",
    "bash -o": "bash -o errexit -c canary",
    "bash -c with dashes": "bash -c -- canary",
    "bash by path": "/bin/bash -c canary",
    "thrice nested": "bash -c \"bash -c 'bash -c canary'\"",
    "bash -c of an argument": "bash -c '\"$0\"' canary",
    "bash -c of arguments": "bash -c '\"$@\"' _ canary",
    "bash -c of a variable": "X=canary bash -c '$X'",
    "bash -c of a text made here": "X=nary; bash -c \"ca$X\"",
    "base64 into a shell": "echo Y2FuYXJ5Cg== | base64 -d | sh",
    "echo into a shell": "echo canary | bash",
    "echo into a shell in a group": "echo canary | { cat | sh; }",
    "echo into bash -s": "echo canary | bash -s",
    "file into a shell": "echo canary > s; bash < s",
    "script that is standard input": "echo canary | bash /dev/stdin",
    "script that is a substitution": "bash <(echo canary)",
    "here-string into a shell": "bash <<< canary",
    "here-string of a variable": "X=canary; bash <<< $X",
    "here-document into a shell": "bash <<E\ncanary\nE",
    "here-document, quoted, into a shell": "bash <<'E'\ncanary\nE",
    "here-document with tabs": "bash <<-E\n\tcanary\n\tE",
    "here-document with a variable": "X=canary; bash <<E\n$X\nE",
    "here-document before the command": "<<E bash\ncanary\nE",
    "here-document whose end is on two lines": "cat <<EF\nE\\\nF\ncanary",
    "arithmetic of a default": "unset A; : ${A:='x[$(canary)]'}; echo $((A))",
    "here-document for a group": "{ bash; } <<E\ncanary\nE",
    "here-document with a substitution": "cat <<E\n$(canary)\nE",
    "here-document with backticks": "cat <<E\n`canary`\nE",
    "after a here-document": "cat <<E\na\nE\ncanary",
    "on the line of a here-document": "cat <<E; canary\na\nE",
    "after a here-document with spaces": "cat <<E\nE \nE\ncanary",
    "after a quoted here-document": "cat <<'A B'\n$(true)\nA B\ncanary",
    "after two here-documents": "cat <<A; cat <<B\na\nA\nb\nB\ncanary",
    "redirection first": "> out canary",
    "redirection with a name": "{fd}> out canary",
    "redirection of everything": "canary &> out",
    "redirection that closes": ">&-canary",
    "time after a redirection": "x=$(> out time A=1 canary)",
    "after a list": "A=(1)b canary",
    "script of a shell": "bash canary",
    "eval with dashes": "eval -- canary",
    "line that ends in an expansion": "X=canary; $\\\nX",
    "line that ends before a quote": "c$\\\n'\\x61'nary",
    "ANSI-C with braces": "c$'\\x{61'nary",
    "assignment first": "A=1 canary",
    "element first": "A[0]=1 canary",
    "PATH": "mkdir d; cp canary d/ls; PATH=d ls",
    "PATH, exported": "mkdir d; cp canary d/ls; export PATH=d; ls",
    "PATH, declared": "mkdir d; cp canary d/ls; declare PATH=d; ls",
    "PATH by env": "mkdir d; cp canary d/ls; env PATH=\"d:$PATH\" ls",
    "PATH by read": "mkdir d; cp canary d/ls; read PATH <<< d; ls",
    "PATH by printf": "mkdir d; cp canary d/ls; printf -v PATH d; ls",
    "PATH by a loop": "mkdir d; cp canary d/ls; for PATH in d; do ls; done",
    "PATH by a default": "mkdir d; /bin/cp canary d/ls; unset PATH; : ${PATH:=d}; ls",
    "PATH by arithmetic": "mkdir 1; /bin/cp canary 1/ls; (( PATH = 1 )); ls",
    "IFS": "IFS=x; X=canaryxa; $X",
    "IFS in a substitution": "IFS=:; $(echo canary:a)",
    "git's pager": "git init -q; git -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m a; "
    "GIT_EXTERNAL_DIFF=canary; export GIT_EXTERNAL_DIFF; echo b > b; git add b; git commit -qm b 2>/dev/null; "
    "git -c core.pager=cat diff --ext-diff --cached HEAD",
    "loader": "cp /bin/true t; /lib64/ld-linux-x86-64.so.2 /bin/bash -c canary",
    "input replaced after a here-document": "echo canary > s; bash <<E < s\necho a\nE",
    "here-document for another descriptor": "echo canary | bash 3<<E\necho a\nE",
    "here-string for another descriptor": "echo canary | bash 3<<< 'echo a'",
    "here-string for a named descriptor": "echo canary | bash {n}<<< 'echo a'",
    "input copied after a here-string": "echo canary > s; exec 3<s; bash <<< 'echo a' <&3",
    "input moved after a here-string": "echo canary > s; exec 3<s; bash <<< 'echo a' <&3-",
    "input copied as if it were output": "echo canary > s; exec 3<s; bash <<< 'echo a' 0>&3",
    "option with a value before -c": "bash -oc errexit canary",
    "two options with values and -c": "bash -oOc errexit dotglob canary",
    "lone dash after -c": "bash -c - canary",
    "lone plus before -c": "bash + -c canary",
    "-s, unset": "bash +s x <<< canary",
    "-s before -c": "bash -s -c canary <<< 'echo a'",
    "assignment after a double dash": "env -- A=1 canary",
}  # fmt: skip
# The shell finds no complete command in these and runs nothing; a parser that finds one would be wrong in the other
# direction.
HARMLESS = {
    "carriage return": "true\rcanary",
    "no-break space": "true\u00a0;\u00a0canary",
    "in quotes": "echo '; canary'",
    "in a comment": "true # ; canary",
    "in a quoted here-document": "cat <<'E'\n$(canary)\nE",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    program = workspace / "canary"
    program.write_text(f'#!/bin/sh\n: > "{tmp_path}/sang"\n')
    program.chmod(0o755)
    return workspace


def sings(command: str, workspace: Path) -> bool:
    """Return whether the forbidden program runs."""
    environment = {"PATH": f"{workspace}:{os.environ['PATH']}", "HOME": str(workspace)}
    subprocess.run(
        ["bash", "-c", command],
        cwd=workspace,
        env=environment,
        capture_output=True,
        timeout=20,
        stdin=subprocess.DEVNULL,
    )
    return (workspace.parent / "sang").exists()


def decision(policy: Policy, command: str, workspace: Path) -> str:
    context = CallContext("me", "cli:direct", "t", "c", "cli", "direct", workspace, True, "k", lambda text: None)
    return policy.judge("exec", {"command": command}, Plan(command=command), context, [], False).decision


@pytest.mark.parametrize("command", ROWS.values(), ids=ROWS.keys())
def test_a_forbidden_program_is_not_allowed(command, place):
    assert sings(command, place)
    deny = Policy([Rule(do="deny", command="canary")])
    assert decision(deny, command, place) == "deny"
    assert decision(Policy([Rule(do="ask", command="canary")]), command, place) == "ask"
    listed = [Rule(do="allow", command=name) for name in ("true", "echo", "cat", "ls", "cp", "mkdir", "git", "find")]
    assert decision(Policy([*listed, Rule(do="ask", tool="exec")]), command, place) == "ask"
    assert decision(Policy([*listed, Rule(do="deny", command="*")]), command, place) == "deny"


@pytest.mark.parametrize("command", HARMLESS.values(), ids=HARMLESS.keys())
def test_the_program_does_not_run_where_only_its_name_occurs(command, place):
    assert not sings(command, place)


@pytest.mark.parametrize(
    "command", ["ls", "git status && ls -l | head", "echo canaryx", "ls canary", "for f in a b; do cat $f; done"]
)
def test_unrelated_commands_are_allowed(command, place):
    assert decision(Policy([Rule(do="deny", command="canary")]), command, place) == "allow"
