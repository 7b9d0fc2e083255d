"""How far data travels through our code: a streamed delta, a model call, and `everloop run`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = {
    "functions that a streamed delta passes": 12,  # from the model's socket to the client's
    "layers of a model call": 5,  # from the engine's port to the socket
    "files in which `everloop run` runs something": 72,
}


def test_a_delta_a_model_call_and_a_run_touch_little_of_our_code():
    command = [sys.executable, "benchmarks/path_length.py", "-v"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    counted = {what: int(count) for what, count in re.findall(r"^\| ([^|]+) \| (\d+) \|", done.stdout, re.MULTILINE)}
    assert counted.keys() == MOST.keys()
    assert all(0 < counted[what] <= most for what, most in MOST.items()), done.stdout
