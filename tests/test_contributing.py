"""The additions that CONTRIBUTING.md shows: applied to a copy of the source as written, and their tests run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
NEW = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.M | re.S)
DIFF = re.compile(r"^```diff\n--- (\S+)\n(.*?)^```$", re.M | re.S)
TESTS = ("tests/tools/test_days.py", "tests/tools/test_builtin.py", "tests/server/test_whoami.py")
# The tests that know all tools, endpoints and paths; the table in docs/providers.md is left to its reader.
CHOSEN = "days or date or all_tools_of or whoami or acts_for or orchard or share_an_address or every_path"


def without_sign(line: str) -> str:
    return line[1:] if line.strip() else line  # editors remove the space of an empty line


def change(path: Path, diff: str) -> None:
    text = path.read_text()
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(without_sign(line) for line in lines if line[0] != "+")
        assert text.count(before) == 1, f"{path.name} does not have once:\n{before}"
        text = text.replace(before, "".join(without_sign(line) for line in lines if line[0] != "-"))
    path.write_text(text)


@pytest.mark.timeout(300)  # it starts a pytest of its own
def test_every_addition_of_the_newcomers_path_is_green(tmp_path):
    unneeded = shutil.ignore_patterns("__pycache__", ".*", "*.db", "*.png")
    for folder in ("src", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unneeded)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    new, diffs = NEW.findall(TEXT), DIFF.findall(TEXT)
    assert (len(new), len(diffs)) == (3, 8)
    for name, text in new:
        assert not (ROOT / name).exists()
        (tmp_path / name).write_text(text)
    for name, text in diffs:
        change(tmp_path / name, text)
    tests = [*TESTS, "tests/server/test_openapi.py", "tests/providers/test_endpoints.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests, "-k", CHOSEN],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{tmp_path}"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 7, done.stdout
