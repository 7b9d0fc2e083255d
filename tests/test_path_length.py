"""How far data travels through our code: a streamed delta, a model call, and `everloop run`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The files in which `everloop run` runs something, by room. Each holds a concept that a reader looks for by its name,
# so fewer files would have worse names; code that only some runs need is imported when they need it.
FILES_OF_RUN = {
    "cli": 5,  # arguments, the command, its folder with the question of trust, what commands share, its output
    "config": 2,  # the settings, and the sources they are read from
    "messages and log": 8,  # `messages`, `bus`, `log`, `actions`, `engine`, `commands`, `text`, `threads`
    "context": 4,  # the prompt, the skills it lists, their front matter, and the window it must fit
    "goals": 1,  # the agents that a model may start are listed in its prompt
    "providers": 6,  # the port, the known endpoints, the choice among them, OpenAI's API, its connections, retries
    "runtime": 13,  # one for each part of a turn: dispatcher, session, turn, model call, stream, budgets, and so on
    "sandbox": 1,  # the workspace's files are read within its reach
    "store": 9,  # the port, decisions, transactions, jobs and peers of any store; SQLite's schema, store, SQL, writer
    "tools": 11,  # one for each capability that is offered to the model, with registry, policy and checks of commands
}
LIMITS = {
    "functions that a streamed delta passes": 12,  # from the model's socket to the client's
    "layers of a model call": 5,  # from the engine's port to the socket
    "files in which `everloop run` runs something": sum(FILES_OF_RUN.values()),
}


def test_a_delta_a_model_call_and_a_run_touch_little_of_our_code():
    command = [sys.executable, "benchmarks/path_length.py", "-v"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    counted = {what: int(count) for what, count in re.findall(r"^\| ([^|]+) \| (\d+) \|", done.stdout, re.MULTILINE)}
    assert counted.keys() == LIMITS.keys()
    assert all(0 < counted[what] <= most for what, most in LIMITS.items()), done.stdout
    files = done.stdout.split("\nrun:\n")[1].split("\n|")[0].split()
    rooms = Counter(name.split("/")[0] if "/" in name else "messages and log" for name in files)
    assert {room: count for room, count in rooms.items() if count > FILES_OF_RUN.get(room, 0)} == {}, done.stdout
