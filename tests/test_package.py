"""The package's root: light to import, complete, and with the right version."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import everloop

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    """Return the standard output of a fresh interpreter that runs the code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_but_the_standard_library():
    loaded = json.loads(
        run_python(
            "import sys; before = set(sys.modules); import everloop; import json;"
            "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
        )
    )
    assert set(loaded) - set(sys.stdlib_module_names) == {"everloop"}


def test_importing_the_package_loads_no_other_module_of_ours():
    loaded = run_python("import sys, everloop; print(*[name for name in sys.modules if name.startswith('everloop')])")
    assert sorted(loaded.split()) == ["everloop", "everloop._version"]


def test_an_agent_loads_only_what_every_agent_needs():
    code = "import sys, everloop.runtime.agent; print(*sys.modules)"
    loaded = set(run_python(code).split())
    assert not loaded & {"aiohttp", "trafilatura", "ddgs", "mcp", "pypdf", "docx", "openpyxl", "prompt_toolkit"}
    assert "everloop.tools.policy.shell_syntax" not in loaded
    assert not loaded & {
        "everloop.cron",
        "everloop.store.overview",
        "everloop.store.search",
        "everloop.store.sqlite.search",
    }


CHAT = "import everloop.runtime.agent, everloop.providers.openai, everloop.store.sqlite, everloop.cli.terminal, sys\n"


def test_a_chat_starts_without_a_library_for_mail_or_http():
    loaded = set(run_python(f"{CHAT}print(*sys.modules)").split())
    assert not loaded & {"email", "http.client", "urllib.request"}


def test_few_classes_are_compiled_when_a_chat_starts():
    """A dataclass takes thirty times as long to define as a struct."""
    code = """
ours = [vars(module).values() for name, module in list(sys.modules.items()) if name.startswith("everloop")]
print(len({one for values in ours for one in values if isinstance(one, type) and "__dataclass_fields__" in vars(one)}))
"""
    assert int(run_python(CHAT + code)) < 60


def test_importing_the_package_takes_under_three_milliseconds():
    code = "import time; start = time.process_time(); import everloop; print((time.process_time() - start) * 1000)"
    assert min(float(run_python(code)) for _ in range(5)) < 3


@pytest.mark.parametrize("name", everloop.__all__)
def test_every_public_name_resolves(name):
    assert getattr(everloop, name) is getattr(everloop, name)


def test_every_public_name_is_listed_by_dir():
    assert set(everloop.__all__) <= set(dir(everloop))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="AgentLop"):
        everloop.AgentLop  # noqa: B018


def test_the_version_is_the_installed_one():
    assert everloop.__version__ == importlib.metadata.version("everloop")


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_a_lock_file_pins_everything_by_hash_and_names_no_index(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    pinned = re.findall(r"^([a-z0-9-]+)==\S+.*\\\n +--hash=sha256:", text, re.MULTILINE)
    assert len(pinned) == len(re.findall(r"^\S", text, re.MULTILINE))
    assert "://" not in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + (project["optional-dependencies"]["dev"] if "dev" in name else [])
    assert {re.split(r"[\[<>=!~]", line)[0].replace("_", "-") for line in wanted} <= set(pinned)
