"""The environments of the clients: pinned, made once, and never partial."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .environments import (
    PYTHON_ENVIRONMENTS,
    REQUIREMENTS,
    ROOT,
    CannotMake,
    make_all,
    make_python,
    node_environment,
)

MAKE = """
import sys, pathlib
from tests.clients.environments import make_python
python = make_python("openai", pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
(python.parent / sys.argv[3]).touch()
"""
MISSING = "from tests.clients.environments import node_environment; node_environment()"


def write_pins(folder: Path, version: str = "1.0", digest: str = "") -> Path:
    """A requirements file of one small package, which is next to it."""
    folder.mkdir(exist_ok=True)
    wheel = folder / f"pebble-{version}-py3-none-any.whl"
    facts = f"pebble-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pebble.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: pebble\nVersion: {version}\n")
        archive.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{facts}/RECORD", "")
    digest = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
    pin = f"pebble=={version}" + (f" --hash=sha256:{digest}" if digest != "none" else "")
    lines = ["--no-index", f"--find-links {folder}", pin]
    (folder / "openai.txt").write_text("\n".join(lines))
    return folder


def version_in(python: Path) -> str:
    return subprocess.run(
        [python, "-c", "import pebble; print(pebble.VERSION)"], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_an_environment_has_what_its_file_pins_and_is_made_once(tmp_path):
    pins = write_pins(tmp_path / "pins")
    python = make_python("openai", tmp_path / "cache", pins)
    assert version_in(python) == "1.0"
    (python.parent / "canary").touch()
    assert make_python("llm", tmp_path / "cache", pins) == python
    assert (python.parent / "canary").exists()


def test_two_are_made_at_once_and_returned_in_order():
    both = threading.Barrier(2, timeout=30)

    def make(name: str) -> Path:
        both.wait()
        return Path(name)

    assert [*make_all(["b", "a"], make)] == [Path("b"), Path("a")]


def test_the_one_of_several_that_cannot_be_made_is_reported():
    def make(name: str) -> Path:
        if name == "b":
            raise CannotMake("no network")
        return Path(name)

    made = make_all(["a", "b", "c"], make)
    assert next(made) == Path("a")
    with pytest.raises(CannotMake, match="no network"):
        next(made)


def test_other_pins_make_another_environment(tmp_path):
    old = make_python("openai", tmp_path / "cache", write_pins(tmp_path / "pins"))
    new = make_python("openai", tmp_path / "cache", write_pins(tmp_path / "pins", "2.0"))
    assert (version_in(old), version_in(new)) == ("1.0", "2.0")


def test_a_partial_environment_is_discarded(tmp_path):
    pins = write_pins(tmp_path / "pins")
    python = make_python("openai", tmp_path / "cache", pins)
    place = python.parent.parent
    (place / ".ready").unlink()
    (place / "lib" / "rest-of-a-killed-installer").touch()
    assert version_in(make_python("openai", tmp_path / "cache", pins)) == "1.0"
    assert not (place / "lib" / "rest-of-a-killed-installer").exists()


@pytest.mark.parametrize("digest", ["0" * 64, "none"])
def test_a_package_that_is_not_the_pinned_one_is_refused(digest, tmp_path):
    pins = write_pins(tmp_path / "pins", digest=digest)
    for _ in range(2):  # leftovers of the first try must not pass for an environment
        with pytest.raises(CannotMake) as caught:
            make_python("openai", tmp_path / "cache", pins)
        assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("pebble.py"))


def test_several_processes_at_once_make_one_environment(tmp_path):
    pins = write_pins(tmp_path / "pins")
    with served(pins) as (address, fetched):
        wanted = pins / "openai.txt"
        wanted.write_text(wanted.read_text().replace(f"--find-links {pins}", f"--find-links {address}"))
        arguments = [sys.executable, "-c", MAKE, str(tmp_path / "cache"), str(pins)]
        running = [subprocess.Popen([*arguments, f"canary{number}"], cwd=ROOT) for number in range(3)]
        assert [process.wait(50) for process in running] == [0, 0, 0]
    python = make_python("openai", tmp_path / "cache", pins)
    assert sorted(path.name for path in python.parent.glob("canary*")) == ["canary0", "canary1", "canary2"]
    assert len([path for path in fetched if path.endswith(".whl")]) == 1


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The files of a folder at a slow address on loopback, and the requested paths."""
    fetched: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            fetched.append(self.path)
            time.sleep(3 * self.path.endswith(".whl"))  # to notice a process that does not wait

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nothing_of_the_cache_is_ever_committed(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    make_python("openai", tmp_path / "cache", write_pins(tmp_path / "pins"))
    said = subprocess.run(["git", "-C", tmp_path, "status", "--short"], capture_output=True, text=True, check=True)
    assert "cache" not in said.stdout


@pytest.mark.parametrize(("ci", "outcome"), [("true", "Failed: "), ("", "Skipped: ")])
def test_a_missing_environment_fails_in_ci_and_skips_elsewhere(ci, outcome, tmp_path):
    environment = {"PATH": str(tmp_path), "CI": ci, "EVERLOOP_TEST_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", MISSING], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert outcome in done.stderr.splitlines()[-1]
    assert not (tmp_path / "cache").exists()


def test_every_environment_is_pinned_with_hashes_and_names_no_index():
    for name in set(PYTHON_ENVIRONMENTS.values()):
        text = (REQUIREMENTS / f"{name}.txt").read_text()
        assert text.count("--hash=sha256:") >= text.count("==") > 10
        assert "://" not in text
        assert "index" not in "".join(line for line in text.splitlines() if line.startswith("-"))


@pytest.fixture
def node_folder() -> Path:
    return node_environment()


@pytest.mark.timeout(60, func_only=True)
def test_the_packages_of_node_are_found_from_their_folder(node_folder):
    program = "import('openai').then((module) => console.log(typeof module.default))"
    environment = {"PATH": os.environ["PATH"]}
    said = subprocess.check_output(["node", "-e", program], cwd=node_folder, env=environment, text=True)
    assert said.strip() == "function"
