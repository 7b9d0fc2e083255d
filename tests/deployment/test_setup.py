"""`make chat` installs with one line of progress, and shows pip's words only when it fails."""

from __future__ import annotations

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


@pytest.mark.parametrize("status", [0, 1])
def test_the_installation_is_one_line_and_pips_words_come_only_when_it_fails(tmp_path: Path, status: int) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "scripts" / "system.sh").write_text("exit 0\n")
    (tmp_path / "requirements.lock").write_text("".join(f"{name}==1.0 \\\n" for name in "abcde"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP.format(status=status))
    python.chmod(0o755)
    done = subprocess.run(["sh", "scripts/setup.sh"], cwd=tmp_path, capture_output=True, text=True)
    told = done.stdout.splitlines()
    if status == 0:
        assert (done.returncode, done.stderr) == (0, "")
        assert told == ["Installing the packages of requirements.lock", "Ready."]
    else:
        assert done.returncode == 2
        assert "html_clean" in done.stderr
        assert "could not be installed" in done.stderr
