"""Environments of their own for the real clients: made once from pinned files, kept in a cache, shared by all workers.

    python -m tests.clients.environments            makes all of them ahead of a test run
    python -m tests.clients.environments openai     makes this one and prints where its python is

The cache is `.clients/` in the project's root, or $EVERLOOP_TEST_CACHE. scripts/clients.sh renews the pins.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
REQUIREMENTS = HERE / "requirements"
NODE = HERE / "node"
# Clients whose pins agree share an environment: fewer to make.
PYTHON_ENVIRONMENTS = {
    "openai": "openai",
    "llm": "openai",
    "langchain-openai": "openai",
    "litellm": "litellm",
    "litellm-provider": "litellm",  # it has Everloop's own packages too; Everloop itself comes by PYTHONPATH
    "schemathesis": "schemathesis",
    "aider": "aider",
    "anthropic": "agents",
    "ollama": "agents",
    "openai-agents": "agents",
    "pydantic-ai": "agents",
    "synapse": "synapse",  # a server, for the Matrix channel
    "nio": "nio",  # a client that encrypts, for the same
}
NODE_ENVIRONMENT = "node"
BROWSERS = "browsers"
NODE_ENVIRONMENTS = {NODE_ENVIRONMENT: NODE, BROWSERS: HERE / "browsers"}
# As before a test gets its own home: installers need the person's settings, proxy and download cache.
_OUTSIDE = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
_IN_CI = _OUTSIDE.get("CI", "").lower() in {"1", "true", "yes"}
_CACHE = Path(_OUTSIDE.get("EVERLOOP_TEST_CACHE") or ROOT / ".clients").resolve()  # npm fails behind a symbolic link
Run = Callable[[Sequence[str]], None]
_TIME = 900  # seconds for one installer


class CannotMake(Exception):
    """Something is missing: the network, node, a writable folder."""


def python_environment(name: str) -> Path:
    """Return the python of a virtual environment with a client. In CI a missing one fails the test, else skips it."""
    return _or_skip(name, lambda: make_python(name, _CACHE))


def node_environment(name: str = NODE_ENVIRONMENT) -> Path:
    """Return the folder whose `node_modules` has the clients for Node.js, or the browser driver."""
    return _or_skip(name, lambda: make_node(_CACHE, NODE_ENVIRONMENTS[name]))


def source_environment() -> dict[str, str]:
    """What a process in such an environment needs to import this checkout's Everloop."""
    return {"PYTHONPATH": str(ROOT / "src")}


def make_python(name: str, cache: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Make the environment if it is missing; raises CannotMake."""
    if name not in PYTHON_ENVIRONMENTS:
        raise CannotMake(f"there is no environment {name!r}; known are {', '.join(sorted(PYTHON_ENVIRONMENTS))}")
    wanted = requirements / f"{PYTHON_ENVIRONMENTS[name]}.txt"
    key = _key(wanted.read_bytes(), sys.version, platform.machine())

    def build(place: Path, run: Run) -> None:
        run([sys.executable, "-m", "venv", "--without-pip", str(place)])
        _install(place / "bin" / "python", wanted, run)

    return _made(cache, f"{wanted.stem}-{key}", build, Path("bin", "python")) / "bin" / "python"


def make_node(cache: Path, node: Path = NODE) -> Path:
    """The same for the packages of a folder's package-lock.json; no package's scripts are run."""
    if _program("node") is None or _program("npm") is None:
        raise CannotMake("node and npm are not here; install Node.js 20 (Debian/Ubuntu: apt install nodejs npm)")
    files = (node / "package.json", node / "package-lock.json")
    key = _key(*(file.read_bytes() for file in files), platform.machine())

    def build(place: Path, run: Run) -> None:
        place.mkdir()
        for file in files:
            shutil.copy(file, place)
        run(["npm", "ci", "--prefix", str(place), "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"])

    return _made(cache, f"{node.name}-{key}", build, Path("node_modules"))


def _made(cache: Path, name: str, build: Callable[[Path, Run], None], proof: Path) -> Path:
    """Return the finished environment. The first caller builds it, the others wait; a partial one is discarded."""
    place, stamp = cache / name, cache / name / ".ready"
    if stamp.exists() and (place / proof).exists():
        return place
    with _locked(cache, name) as lock:
        if stamp.exists() and (place / proof).exists():
            return place
        failure = cache / f"{name}.failed"
        run = _OUTSIDE.get("PYTEST_XDIST_TESTRUNUID")
        if run and failure.exists():  # so that the workers of one run do not all wait for an unreachable network
            known, _, reason = failure.read_text().partition("\n")
            if known == run:
                raise CannotMake(reason)
        shutil.rmtree(place, ignore_errors=True)
        try:
            build(place, lambda command: _run(command, lock))
        except CannotMake as error:
            failure.write_text(f"{run}\n{error}")
            raise
        failure.unlink(missing_ok=True)
        stamp.touch()
        return place


@contextmanager
def _locked(cache: Path, name: str) -> Iterator[int]:
    """The lock ends with its process and the installers that it started, so that none waits for a dead one."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / ".gitignore").write_text("*\n")  # so that it is not committed by accident
        file = (cache / f"{name}.lock").open("w")
    except OSError as error:
        raise CannotMake(f"{cache} cannot be written ({error.strerror}); set EVERLOOP_TEST_CACHE to a folder") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _install(python: Path, wanted: Path, run: Run) -> None:
    """Install with uv if available, which is faster, else with pip; wheels only, so that no package's code runs."""
    checked = ["--only-binary", ":all:", "--require-hashes", "--no-deps", "--quiet", "-r", str(wanted)]
    if (uv := _program("uv")) is not None:
        try:
            return run([uv, "pip", "install", "--python", str(python), *checked])
        except CannotMake:  # uv does not read pip's settings, such as a private index
            pass
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]
    run([*pip, "--retries", "2", "--no-compile", *checked])


def _program(name: str) -> str | None:
    return shutil.which(name, path=_OUTSIDE.get("PATH"))


def _run(command: Sequence[str], lock: int) -> None:
    """The child holds the lock too: if this process is killed, no other builds where the child still writes."""
    try:
        done = subprocess.run(
            command, env=_OUTSIDE, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIME,
            pass_fds=[lock],
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMake(f"{Path(command[0]).name} did not run: {error}") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["it said nothing"]
        raise CannotMake(f"{Path(command[0]).name}: {errors[-1].strip()} (is the network there?)")


def _key(*parts: bytes | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def _or_skip(name: str, make: Callable[[], Path]) -> Path:
    try:
        return make()
    except CannotMake as error:
        line = f"the environment {name!r} of the clients could not be made: {error}"
        if _IN_CI:
            pytest.fail(line, pytrace=False)
        pytest.skip(line)


def make_all(names: Sequence[str], make: Callable[[str], Path]) -> Iterator[Path]:
    """Make several at once: an installer uses one core, or waits for the network. The first failure is raised."""
    with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:
        yield from pool.map(make, names)


def _make(name: str) -> Path:
    node = NODE_ENVIRONMENTS.get(name)
    return make_python(name, _CACHE) if node is None else make_node(_CACHE, node)


def main(names: Sequence[str]) -> int:
    """Make the named environments, or all."""
    one_client_each = {file: client for client, file in PYTHON_ENVIRONMENTS.items()}
    try:
        for place in make_all(names or [*NODE_ENVIRONMENTS, *one_client_each.values()], _make):
            print(place, flush=True)
    except CannotMake as error:
        print(f"everloop: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
