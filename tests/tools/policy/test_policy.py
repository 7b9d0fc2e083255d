"""The policy: rules in order, then defaults; the strictest part decides; taint; what the user is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everloop.config import Config, Rule
from everloop.messages import tool_message, user_message
from everloop.tools.base import Plan, ToolError
from everloop.tools.context import CallContext
from everloop.tools.policy.policy import MAX_SHOWN, Policy, Verdict
from everloop.tools.registry import error_result, marked
from tests.support.places import DOCS

ROOT = Path("/home/me/place")


def context(workspace: Path = ROOT, **changes: Any) -> CallContext:
    values: dict[str, Any] = {"channel": "cli", "chat_id": "direct", "restricted": True, **changes}
    return CallContext("me", "cli:direct", "t", "c", workspace=workspace, idempotency_key="k", progress=print, **values)


def judge(
    *rules: Rule,
    name: str = "read_file",
    arguments: dict[str, Any] | None = None,
    taint: bool = True,
    tainted: bool = False,
    conversation: Any = (),
    where: CallContext | None = None,
    **plan: Any,
) -> Verdict:
    call = arguments or {}
    return Policy(rules, taint=taint).judge(name, call, Plan(**plan), where or context(), conversation, tainted)


def run(command: str, *rules: Rule, **more: Any) -> str:
    return judge(*rules, name="exec", arguments={"command": command}, command=command, **more).decision


# ---------------------------------------------------------------------------------------------- defaults


def test_without_rules_reading_writing_inside_and_commands_are_allowed():
    assert judge(paths=(str(ROOT / "a"),)).decision == "allow"
    assert judge(paths=(str(ROOT),), writes=True).decision == "allow"
    assert run("rm -rf *; $X") == "allow"
    assert judge(sends=True).decision == "allow"


def test_access_outside_a_restricted_workspace_needs_approval():
    assert judge(paths=("/etc/passwd",)).decision == "ask"
    assert judge(paths=(str(ROOT / "a"), f"{ROOT}-sibling/a")).decision == "ask"
    assert judge(paths=("/etc/passwd",), where=context(restricted=False)).decision == "allow"


def test_the_sessions_own_outputs_may_be_read_but_not_written_without_asking():
    where = context(outputs=Path("/var/outputs"))
    assert judge(paths=("/var/outputs/1.txt",), where=where).decision == "allow"
    assert judge(paths=("/var/outputs/1.txt",), writes=True, where=where).decision == "ask"
    assert judge(paths=("/var/outputs2/1.txt",), where=where).decision == "ask"


def test_the_network_needs_approval_unless_a_rule_allows_it():
    assert run("curl x", network=True) == "ask"
    assert run("curl x", Rule(do="allow", command="curl"), network=True) == "ask"
    assert run("curl x", Rule(do="allow", command="curl", network=True), network=True) == "allow"
    assert run("curl x; ls", Rule(do="allow", command="curl", network=True), network=True) == "ask"
    for whole in ({"tool": "exec"}, {"tool": "*"}, {}, {"tool": "exec", "arguments": {"command": "*"}}):
        assert run("curl x", Rule(do="allow", **whole)) == "allow"
        assert run("curl x", Rule(do="allow", **whole), network=True) == "ask"
        assert run("curl x", Rule(do="allow", **whole), Rule(do="deny", tool="exec"), network=True) == "deny"
        assert run("curl x", Rule(do="allow", network=True, **whole), network=True) == "allow"
    named = Rule(do="allow", command="ls", arguments={"network": "true"})
    networked = {"command": "ls", "network": True}
    assert judge(named, name="exec", arguments=networked, command="ls", network=True).decision == "allow"


def test_a_rule_may_match_only_the_network():
    rules = Rule(do="allow", command="curl", network=True), Rule(do="deny", network=True)
    assert run("curl x", *rules, network=True) == "allow"
    assert run("wget x", *rules, network=True) == "deny"
    assert run("wget x", *rules) == "allow"
    assert Rule(do="deny", tool="read_file", network=True).problem()


def test_an_allowed_command_may_redirect_inside_the_workspace_only():
    rules = Rule(do="allow", command="echo"), Rule(do="ask", tool="exec")
    for inside in ("echo x > a", "echo x >> sub/a", "echo x 2>/dev/null", "echo x < a 2>&1", f"echo x > {ROOT}/a"):
        assert run(inside, *rules) == "allow", inside
    outside = ("../a", "/etc/a", "~/a", "$HOME/a", "/dev/tcp/1.2.3.4/80", "sub/../../a")
    for target in outside:
        assert run(f"echo x > {target}", *rules) == "ask", target
        assert run(f"echo x < {target}", *rules) == "ask", target
        assert run(f"timeout 5 echo x > {target}", *rules) == "ask", target
        assert run(f"{{ echo x; }} > {target}", *rules) == "ask", target
    assert run("cd /etc; echo x > a", Rule(do="allow", command="cd"), *rules) == "ask"
    elsewhere = judge(*rules, name="exec", arguments={"working_dir": "/etc"}, command="echo x > a")
    assert elsewhere.decision == "ask"
    named = Rule(do="allow", command="echo", path="/var/log/mine/**")
    assert run("echo x > /var/log/mine/a", named, *rules) == "allow"
    assert run("echo x > /var/log/yours", named, *rules) == "ask"
    assert run("echo x > ../a", rules[0]) == "allow"  # by default: the sandbox prevents it from doing anything
    assert run("echo x > ../a", rules[0], unconfined=True) == "ask"


# ---------------------------------------------------------------------------------------------- rules


def test_the_first_matching_rule_decides():
    first, second = Rule(do="allow", tool="read_*"), Rule(do="deny", tool="*")
    assert judge(first, second).decision == "allow"
    assert judge(second, first).decision == "deny"
    assert judge(first, second, name="write_file").decision == "deny"


def test_rules_match_by_origin_and_by_all_named_arguments():
    rule = Rule(do="deny", origin="telegram:*", arguments={"to": "*@example.com", "count": "3", "tags": '["a"*'})
    values = {"to": "x@example.com", "count": 3, "tags": ["a", "b"]}
    there = context(channel="telegram", chat_id="5")
    assert judge(rule, arguments=values, where=there).decision == "deny"
    assert judge(rule, arguments=values).decision == "allow"
    for key, value in (("to", "x@example.org"), ("count", 4), ("tags", ["b"])):
        assert judge(rule, arguments={**values, key: value}, where=there).decision == "allow"
        left = {name: kept for name, kept in values.items() if name != key}
        assert judge(rule, arguments=left, where=there).decision == "allow"


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("secrets/**", "secrets/a/b", True), ("secrets/**", "secrets", True), ("secrets/**", "secretsx", False),
        ("secrets", "secrets/a", True), ("*.key", "a.key", True), ("*.key", "d/a.key", False),
        ("**/*.key", "d/a.key", True), ("**/*.key", "a.key", True), ("**/*.key", "/etc/a.key", True),
        ("/etc/**", "/etc/passwd", True), ("etc/**", "/etc/x", False), ("a?c", "abc", True), ("a?c", "a/c", False),
        ("[ab].txt", "a.txt", True), ("[!a].txt", "a.txt", False), ("A.txt", "a.txt", False), ("*", "a", True),
        ("*", "a/b", False), ("./a", "a", True), ("/home/me/place/a", "a", True), ("d/**/x", "d/x", True),
        ("d/**/x", "d/e/f/x", True), ("a.b", "axb", False), (".", ".", True), ("**", "a/b", True),
        ("d/", "d/x", True),
    ],
)  # fmt: skip
def test_paths_are_relative_inside_the_workspace_and_absolute_outside(pattern, path, fits):
    verdict = judge(
        Rule(do="deny", path=pattern), paths=(os.path.normpath(ROOT / path),), where=context(restricted=False)
    )
    assert (verdict.decision == "deny") is fits


def test_a_path_rule_matches_no_call_without_a_path():
    assert judge(Rule(do="deny", path="**")).decision == "allow"


def test_of_several_paths_the_strictest_decides():
    rules = Rule(do="allow", path="open/**"), Rule(do="deny", path="shut/**")
    assert judge(*rules, paths=(str(ROOT / "open/a"), str(ROOT / "shut/b"))).decision == "deny"


@pytest.mark.parametrize(
    ("pattern", "command", "fits"),
    [
        ("rm", "rm", True), ("rm", "rm -rf x", True), ("rm", "rmdir x", False), ("rm", "/bin/rm x", True),
        ("rm", "echo rm", False), ("git push", "git push origin", True), ("git push", "git pushy", False),
        ("git push", "git pull", False), ("git push*", "git pushy", True), ("rm -rf *", "rm -rf x", True),
        ("rm -rf *", "rm -fr x", False), ("* --force*", "git push --force", True), ("rm ?", "rm x", True),
        ("rm", "true && rm x", True), ("rm", "timeout 5 rm x", True), ("timeout", "timeout 5 ls", True),
        ("rm", "find . -exec rm {} +", True), ("*", "ls", True), ("deploy.sh", "bash ./deploy.sh", True),
        ("rm", "", False),
    ],
)  # fmt: skip
def test_a_command_rule_matches_a_part_of_the_line(pattern, command, fits):
    assert (run(command, Rule(do="deny", command=pattern)) == "deny") is fits


def test_each_part_is_judged_on_its_own_and_the_strictest_decides():
    rules = Rule(do="allow", command="git"), Rule(do="deny", command="rm"), Rule(do="ask", command="*")
    assert run("git status", *rules) == "allow"
    assert run("git status; ls", *rules) == "ask"
    assert run("git status; ls; rm x", *rules) == "deny"
    assert run("timeout 9 env LANG=C git log", *rules) == "allow"
    assert run("bash -c 'git log; ls'", *rules) == "ask"
    assert run("env", *rules) == "ask"
    assert run("bash script.sh", *rules) == "ask"
    assert run("((rm))", *rules) == "deny"


def test_an_allowed_program_must_be_named_literally():
    rules = Rule(do="allow", command="git"), Rule(do="ask", tool="exec")
    assert run("./git status", *rules) == "ask"
    assert run("PYTHONPATH=x git status", *rules) == "ask"
    assert run("HOME=. git status", *rules) == "ask"
    assert run("git status", *rules) == "allow"


def test_text_known_only_at_run_time_gets_no_milder_decision_than_any_rule_that_might_match():
    deny, ask, allow = (
        Rule(do="deny", command="git push"),
        Rule(do="ask", command="rm"),
        Rule(do="allow", command="*"),
    )
    assert run("$X", deny, ask, allow) == "deny"
    assert run("$X", ask, allow) == "ask"
    assert run("$X", allow) == "allow"
    assert run("$X", allow, Rule(do="ask", tool="exec")) == "ask"
    assert run("git $X", deny) == "deny"
    assert run("git commit -m $X", deny) == "allow"
    assert run("git commit -m $X", Rule(do="allow", command="git commit*"), Rule(do="deny", tool="exec")) == "allow"
    assert run("git log $X", Rule(do="allow", command="git log -?"), Rule(do="deny", tool="exec")) == "deny"
    assert run("$X", Rule(do="deny", command="rm", origin="irc:*")) == "allow"
    assert run("rm -r*", Rule(do="deny", command="rm -rf *")) == "deny"


def test_path_rules_apply_to_redirections_and_file_arguments():
    rule = Rule(do="deny", path="shut/**")
    for command in (
        "echo a > shut/b",
        "cat < shut/b",
        "cat shut/b",
        "tar --file=shut/b",
        f"cat {ROOT}/shut/b",
        "cat ./x/../shut/b",
    ):
        assert run(command, rule) == "deny", command
    assert run("cd shut; echo a > b", rule) == "deny"
    assert run('cd "$X"; echo a > b', rule) == "deny"
    assert run("echo a > $X", rule) == "deny"
    assert run("echo a > open", rule) == "allow"
    assert run("cat b", rule) == "allow"
    call = {"command": "cat b", "working_dir": "shut"}
    assert judge(rule, name="exec", arguments=call, command="cat b").decision == "deny"


def test_the_reason_names_the_rule_in_one_line():
    verdict = judge(Rule(do="allow", tool="x"), Rule(do="deny", tool="read_file", why="not today"))
    assert "2" in verdict.why
    assert "not today" in verdict.why
    assert "\n" not in verdict.why
    assert judge(paths=("/etc/passwd",)).why


def test_without_command_rules_no_command_is_parsed():
    program = """
from pathlib import Path
import everloop.tools.policy.policy as policy
from everloop.config import Config, Rule
from everloop.tools.base import Plan
from everloop.tools.context import CallContext
policy.read = None
where = CallContext("me", "a:b", "t", "c", "a", "b", Path("/w"), True, "k", print)
rules = [Rule(do="ask", tool="message"), Rule(do="deny", tool="message", command="rm")]
print(policy.Policy(rules).judge("exec", {}, Plan(command="rm"), where, [], False).decision)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout == "allow\n", done.stderr


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_denied_word_is_denied_however_it_is_quoted(data):
    letters = []
    for letter in "danger":
        forms = [
            letter,
            f"'{letter}'",
            f'"{letter}"',
            f"\\{letter}",
            f"$'\\x{ord(letter):x}'",
            f"{letter}''",
            f"\\\n{letter}",
        ]
        letters.append(data.draw(st.sampled_from(forms)))
    spelling = "".join(letters)
    said = subprocess.run(["bash", "-c", f"printf %s {spelling}"], capture_output=True, timeout=20)
    assert said.stdout == b"danger"
    before = data.draw(st.sampled_from(["", "ls; ", "ls |", "env ", "(", "A=1 "]))
    after = ")" if before == "(" else ""
    assert run(f"{before}{spelling} x{after}", Rule(do="deny", command="danger")) == "deny"


# ---------------------------------------------------------------------------------------------- links


def test_a_link_does_not_bypass_a_path_rule(tmp_path):
    workspace = tmp_path / "real"
    (workspace / "shut").mkdir(parents=True)
    (tmp_path / "link").symlink_to(workspace)
    policy = Policy(
        [Rule(do="deny", path="shut/**"), Rule(do="ask", path="ask/**"), Rule(do="deny", tool="write_file", path="w")]
    )
    where = context(tmp_path / "link")
    check = policy.guard(where, "read_file", {"path": "harmless"})
    assert check is not None
    check(str(workspace / "open"), False)
    check(str(workspace / "w"), False)
    for path in ("shut/a", "ask/a"):
        with pytest.raises(ToolError):
            check(str(workspace / path), False)
    writing = policy.guard(where, "write_file", {"path": "harmless"})
    assert writing is not None
    with pytest.raises(ToolError):
        writing(str(workspace / "w"), True)


def test_an_approval_covers_the_path_shown_and_not_the_target_of_a_link(tmp_path):
    policy = Policy([Rule(do="ask", path="ask/**")])
    where = context(tmp_path, approved=True)
    shown, hidden = (
        policy.guard(where, "read_file", {"path": path}, lambda path=path: [str(tmp_path / path)])  # type: ignore[misc]
        for path in ("ask/a", "b")
    )
    assert shown is not None
    assert hidden is not None
    shown(os.path.realpath(tmp_path / "ask/a"), False)
    with pytest.raises(ToolError):
        hidden(os.path.realpath(tmp_path / "ask/a"), False)


def test_a_path_rule_applies_under_every_name_of_the_workspace():
    where = context(real_workspace=Path("/disk/place"))
    rule = Rule(do="deny", path="shut/**")
    assert judge(rule, paths=("/disk/place/shut/a",), where=where).decision == "deny"
    assert judge(rule, paths=(f"{ROOT}/shut/a",), where=where).decision == "deny"
    assert run("cat /disk/place/shut/a", rule, where=where) == "deny"


def test_without_path_rules_there_is_no_guard():
    assert Policy([Rule(do="deny", command="rm")]).guard(context()) is None


# ---------------------------------------------------------------------------------------------- taint


def test_after_untrusted_content_calls_that_could_send_data_need_approval():
    assert judge(sends=True, tainted=True).decision == "ask"
    assert judge(sends=True, tainted=True, taint=False).decision == "allow"
    assert judge(tainted=True).decision == "allow"
    assert judge(Rule(do="allow", tool="*"), sends=True, tainted=True).decision == "ask"
    assert judge(Rule(do="allow", tool="*", tainted=True), sends=True, tainted=True).decision == "allow"
    assert judge(Rule(do="deny", tool="*"), sends=True, tainted=True).decision == "deny"


def test_after_untrusted_content_every_part_of_a_command_needs_an_explicit_rule():
    rules = Rule(do="allow", command="curl", tainted=True), Rule(do="allow", command="cat")
    assert run("curl a", *rules, sends=True, tainted=True) == "allow"
    assert run("timeout 5 curl a", *rules, sends=True, tainted=True) == "allow"
    assert run("cat a | curl b", *rules, sends=True, tainted=True) == "ask"


URL = "https://a.example/page?x=1"


def fetch(url: str, *conversation: Any) -> str:
    options = {"name": "web_fetch", "arguments": {"url": url}, "sends": True, "url": url, "tainted": True}
    return judge(conversation=list(conversation), **options).decision  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        URL, f"see {URL}.", f"({URL})", f"<{URL}>", f"[title]({URL})", f'"{URL}",', f"**{URL}**", f"read {URL}, then",
        f"{URL}\nmore", f"请看{URL}。", f"`{URL}`", f"[{URL}]({URL})", f'<a href="{URL}">x</a>', f"{URL}!?",
        f"https://b.example/ {URL}", f"https://b.example/?next={URL} but {URL}",
    ],
)  # fmt: skip
def test_an_address_that_the_user_wrote_may_be_fetched(text):
    assert fetch(URL, user_message(text)) == "allow"


@pytest.mark.parametrize(
    "text",
    [
        "", "https://a.example/", f"{URL}&q=2", f"{URL}#part", f"{URL}/more", f"x{URL}",
        f"https://b.example/?next={URL}", URL.upper(), "https://a.example/page?x=", "a.example/page?x=1", f"{URL}0",
        f"{URL}.5", f"https://b.example/,{URL}", f"{URL})secret", f"{URL}%20", f"view-source:{URL}",
    ],
)  # fmt: skip
def test_an_address_that_only_resembles_one_the_user_wrote_needs_approval(text):
    assert fetch(URL, user_message(text)) == "ask"


def test_an_address_counts_in_parts_and_in_search_results_but_not_in_pages_or_answers():
    assert (
        fetch(URL, user_message([{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": URL}]))
        == "allow"
    )
    found = marked(f"1. Title\n   {URL}\n   words", "web_search")
    assert fetch(URL, tool_message("1", "web_search", found)) == "allow"
    assert fetch(URL, tool_message("1", "web_search", error_result(f"Wrong query: {URL}"))) == "ask"
    assert fetch(URL, tool_message("1", "web_fetch", URL)) == "ask"
    assert fetch(URL, tool_message("1", "exec", URL)) == "ask"
    assert fetch(URL, {"role": "assistant", "content": URL}) == "ask"
    assert fetch(URL, {"role": "system", "content": URL}) == "ask"
    assert fetch(URL, user_message([{"type": "image_url", "image_url": {"url": URL}}])) == "ask"


def test_a_secret_cannot_be_appended_to_an_address_the_user_wrote():
    said = user_message("read https://evil.example/ please")
    assert fetch("https://evil.example/", said) == "allow"
    assert fetch("https://evil.example", said) == "allow"
    for url in (
        "https://evil.example/?q=s",
        "https://evil.example/s",
        "https://s.evil.example/",
        "https://evil.example/#s",
    ):
        assert fetch(url, said) == "ask"
    for url in (
        "https://evil.example/ ",
        "https://s@evil.example/",
        "http://evil.example/",
        "https://evil.example/?",
        "",
    ):
        assert fetch(url, said) == "ask"


# ---------------------------------------------------------------------------------------------- what is shown


def test_the_call_to_approve_is_shown_exactly():
    rule = Rule(do="ask", tool="*")
    assert judge(rule, name="add", arguments={"a": 1, "b": "é"}).shown == 'add {\n  "a": 1,\n  "b": "é"\n}'
    assert judge(rule, shown="rm x\n(in /w)", command="rm x").shown == "rm x\n(in /w)"
    assert "rm y" in judge(rule, shown="harmless", command="rm y").shown


def test_a_command_is_shown_in_full_or_not_run():
    command = "echo " + "a" * 9_000 + "; danger; " + "b" * 9_000
    rule = Rule(do="ask", tool="exec")
    assert "danger" in judge(rule, name="exec", shown=command, command=command).shown
    command = "echo " + "a" * MAX_SHOWN + "; danger"
    assert judge(rule, name="exec", shown=command, command=command).decision == "deny"
    assert judge(Rule(do="ask"), name="message", shown="a" * (MAX_SHOWN + 1), sends=True).decision == "deny"


def test_a_long_argument_is_shortened_in_the_middle_so_that_the_others_stay_visible():
    shown = judge(Rule(do="ask"), name="write_file", arguments={"content": "x" * 90_000, "path": "a.txt"}).shown
    assert len(shown) < 5_000
    assert "a.txt" in shown
    assert "90000" in shown


def test_invisible_characters_are_made_visible():
    hidden = "\x1b[2K\r\u202e\u200b\u00a0\u3000\x07\x00\ufeff\u2066\U000e0041\u2800\u3164\x9b\u2028"
    command = f"echo a{hidden}b"
    shown = judge(Rule(do="ask"), name="exec", shown=command, command=command).shown
    assert not set(shown) & set(hidden.replace("[", "").replace("2", "").replace("K", ""))
    assert all(f"U+{ord(character):04X}" in shown for character in "\x1b\r\u202e\u200b\u00a0\U000e0041")


# ---------------------------------------------------------------------------------------------- grants


def test_a_grant_covers_exactly_one_call_and_a_denying_rule_wins():
    def granted(*names: str) -> CallContext:
        return context(granted=frozenset(names))

    ask = Rule(do="ask", tool="exec")
    verdict = judge(ask, name="exec", arguments={"command": "ls"}, command="ls")
    assert verdict.grants == ("exec:ls",)
    assert run("ls", ask, where=granted("exec:ls")) == "allow"
    assert run("ls -l", ask, where=granted("exec:ls")) == "ask"
    assert run("ls", Rule(do="deny", command="ls"), ask, where=granted("exec:ls")) == "deny"
    networked = {"command": "ls", "network": True, "working_dir": "a b"}
    verdict = judge(name="exec", arguments=networked, command="ls", network=True)
    assert verdict.grants == ("exec+network@a%20b:ls",)
    assert (
        judge(name="exec", arguments=networked, command="ls", network=True, where=granted("exec:ls")).decision == "ask"
    )
    reads = judge(paths=("/etc/a", "/etc/b"))
    assert reads.grants == ("path:/etc/a", "path:/etc/b")
    assert judge(paths=("/etc/a", "/etc/b"), where=granted("path:/etc/a")).decision == "ask"
    assert judge(paths=("/etc/a",), where=granted("path:/etc/a")).granted
    assert judge(paths=("/etc/a",), writes=True, where=granted("path:/etc/a")).grants == ("path+write:/etc/a",)
    assert judge(Rule(do="ask"), name="launch", where=granted("tool:launch")).decision == "allow"


def test_a_grant_does_not_replace_approval_after_untrusted_content():
    names = frozenset({"exec+network:curl x", "exec:make", "tool:message"})
    where = context(granted=names)
    networked: dict[str, Any] = {
        "name": "exec",
        "arguments": {"command": "curl x", "network": True},
        "command": "curl x",
    }
    assert judge(**networked, network=True, sends=True, where=where).granted
    assert judge(**networked, network=True, sends=True, where=where, tainted=True).decision == "ask"
    made = judge(Rule(do="ask"), name="exec", arguments={"command": "make"}, command="make", where=where, tainted=True)
    assert made.decision == "allow"
    assert not made.granted  # its writes are checked like those of any other command
    assert judge(Rule(do="ask"), name="message", sends=True, where=where, tainted=True).decision == "ask"


# ---------------------------------------------------------------------------------------------- the page

PAGE = (DOCS / "policy.md").read_text()
EXAMPLES = re.findall(
    r"^```toml\n(.*?)^```\n\n\| call \| decision \|\n\|---\|---\|\n((?:\|[^\n]*\n)+)", PAGE, re.M | re.S
)
ROWS = [
    (rules, *found)
    for rules, table in EXAMPLES
    for found in re.findall(r"^\| `(\w+)`: `(.*)`(, with network)? \| (\w+) \|$", table, re.M)
]


@pytest.mark.parametrize(("rules", "name", "what", "network", "decision"), ROWS)
def test_the_examples_in_the_docs_decide_as_described(rules, name, what, network, decision, tmp_path):
    (tmp_path / "config.toml").write_text(rules)
    policy = Config.load(home=tmp_path).policy
    what = what.replace("\\|", "|")
    if name == "exec":
        assert run(what, *policy, network=bool(network)) == decision
    else:
        assert judge(*policy, name=name, paths=(os.path.join(ROOT, what),)).decision == decision


def test_the_docs_have_examples():
    assert len(EXAMPLES) == 2
    assert len(ROWS) == 20
