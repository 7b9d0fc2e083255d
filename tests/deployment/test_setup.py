"""`make chat` installs with one line of progress, and shows pip's output only when it fails."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PIP = """#!/bin/sh
case "$*" in
*" -r "*) ;;
*) exit 0 ;;
esac
for name in a b c d e; do echo "Collecting $name==1.0"; done
echo "WARNING: lxml does not provide the extra 'html_clean'" >&2
exit {status}
"""


def clone(folder: Path, pip: str) -> None:
    """The part of a clone that the script needs, with a pip that a test can observe."""
    shutil.copytree(SCRIPTS, folder / "scripts")
    (folder / "scripts" / "system.sh").write_text("exit 0\n")
    (folder / "requirements.lock").write_text("".join(f"{name}==1.0 \\\n" for name in "abcde"))
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(pip)
    python.chmod(0o755)


@pytest.mark.parametrize("status", [0, 1])
def test_the_installation_is_one_line_and_pips_output_appears_only_on_failure(tmp_path: Path, status: int) -> None:
    clone(tmp_path, PIP.format(status=status))
    done = subprocess.run(["sh", "scripts/setup.sh"], cwd=tmp_path, capture_output=True, text=True)
    told = done.stdout.splitlines()
    if status == 0:
        assert (done.returncode, done.stderr) == (0, "")
        assert told == ["Installing the packages of requirements.lock", "Ready."]
    else:
        assert done.returncode == 2
        assert "html_clean" in done.stderr
        assert "could not be installed" in done.stderr


def shown(terminal: int, text: bytes) -> bytes:
    """Read until a text is shown."""
    seen = b""
    while text not in seen:
        assert select.select([terminal], [], [], 60)[0], f"{text!r} was never shown: {seen!r}"
        seen += os.read(terminal, 1024)
    return seen


def test_at_a_terminal_each_package_is_counted_when_pip_names_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    clone(tmp_path, PIP.format(status=0).replace('echo "WARNING', 'read word < go; echo "WARNING'))
    ours, theirs = pty.openpty()
    with subprocess.Popen(["sh", "scripts/setup.sh"], cwd=tmp_path, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = shown(ours, b": 5 of 5")  # while pip is still at work: it waits for input
        (tmp_path / "go").write_text("on\n")
        seen += shown(ours, b"Ready.")
        assert process.wait() == 0
    os.close(ours)
    assert b": 1 of 5" in seen
    assert b"requirements.lock: done" in seen
