"""A network from another package: the example in docs/channels.md, really installed, passes the page's kit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from everloop.testing import channels
from tests.support.commands import everloop

PAGE = (Path(__file__).parents[2] / "docs" / "channels.md").read_text()
FILES = dict(re.findall(r"^```\w+\n# ([\w.]+)\n(.*?)^```$", PAGE, re.M | re.S))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "everloop_letters.py"):
        (source / name).write_text(FILES[name])
    (target / "test_letters.py").write_text(FILES["test_letters.py"])
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=120)
    return target


def test_the_example_is_short() -> None:
    assert len(FILES["everloop_letters.py"].splitlines()) < 60


@pytest.mark.timeout(240)
def test_an_installed_network_passes_the_kit(letters: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "test_letters.py"],
        cwd=letters,
        env={**os.environ, "PYTHONPATH": str(letters)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(240)  # pip may build the package first
async def test_it_is_listed_by_name_and_an_invalid_key_is_one_line(letters: Path, tmp_path: Path) -> None:
    home = tmp_path / "own-home"
    home.mkdir()
    run: dict[str, Any] = {"EVERLOOP_HOME": str(home), "PYTHONPATH": str(letters)}
    (home / "config.toml").write_text('[channels.letters]\nfolder = "x"\n')
    done = await everloop("channels", "list", "--json", **run)
    assert (done.json["name"], done.json["repeats"], done.json["error"]) == ("letters", "key", "")
    (home / "config.toml").write_text('[channels.letters]\nfolder = "x"\nfoler = "y"\n')
    done = await everloop("channels", "test", "letters", **run)
    assert (done.status, done.err) == (2, "everloop: [channels.letters] foler is unknown; allowed: folder\n")
    (home / "config.toml").write_text("[channels.lettres]\n")
    done = await everloop("channels", "test", "lettres", **run)
    assert done.status == 2
    assert 'there is no network "lettres"; known: ' in done.err
    assert "letters" in done.err


@pytest.mark.timeout(240)
@pytest.mark.may_block
async def test_the_kit_sees_a_channel_that_acknowledges_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted mistake in the example: it removes the file before the message is on disk, and the process dies in
    between.
    """
    accept = '                await inbox.accept(Received(id=id, chat=chat, sender="postman", text=text))\n'
    unlink = "                await asyncio.to_thread(path.unlink)"
    died = tmp_path / "died"
    code = FILES["everloop_letters.py"]
    assert accept in code
    assert unlink in code
    code = code.replace(accept, f"{unlink}\n                self.die()\n{accept}").replace(
        f"{unlink}  #", "                #"
    )
    code += (
        "\n    def die(self):\n"
        "        import os, signal\n"
        f"        if not os.path.exists({str(died)!r}):\n"
        f"            open({str(died)!r}, 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    packages = tmp_path / "packages"
    info = packages / "hasty-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "everloop_hasty.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hasty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[everloop.channels]\nhasty = everloop_hasty:Letters\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    names: dict[str, Any] = {}
    exec(FILES["test_letters.py"], names)
    folders = iter(range(1000))

    @asynccontextmanager
    async def new_post() -> AsyncIterator[Any]:
        post = names["Post"](tmp_path / f"post-{next(folders)}")
        post.settings |= {"name": "letters", "network": "hasty"}
        yield post

    async with channels.Forker() as forker:
        scene = channels.Scene(forker, new_post, tmp_path / "kit", [("1", "hello")], patience=3.0)
        # The message is neither in the network nor in the inbox: the wait for it times out.
        with pytest.raises(AssertionError, match=r"not done within .*: 0 of 1 messages were accepted"):
            await scene.run([(10_000, "before"), (10_000, "before")])
