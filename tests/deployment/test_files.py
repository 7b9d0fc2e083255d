"""The files of a deployment are well formed, agree with each other and with the code, and contain no secret."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from everloop.config import Config

from .files import DEPLOY, ROOT, UNITS, VARIABLE, compose, instructions, only, unit

OURS = ("serve", "worker")
DRAIN = max(value for name, value in dataclasses.asdict(Config()).items() if "drain" in name)


# ---------------------------------------------------------------------------------------------- Compose


def test_no_password_and_no_key_has_a_default():
    text = (ROOT / "compose.yaml").read_text()
    named = {(name, kind) for name, kind, _ in VARIABLE.findall(text)}
    assert ("POSTGRES_PASSWORD", "?") in named
    assert ("POSTGRES_PASSWORD", "-") not in named
    for service in compose()["services"].values():
        for name, value in service["environment"].items():
            if re.search("PASSWORD|KEY", name):
                assert VARIABLE.fullmatch(value), f"{name} must come from outside"


@pytest.mark.parametrize("name", ["example.env", "everloop.env"])
def test_the_examples_of_variables_name_what_is_needed_and_contain_no_secret(name: str):
    lines = [line for line in (DEPLOY / name).read_text().splitlines() if line and not line.startswith("#")]
    given = dict(line.split("=", 1) for line in lines)
    assert all(not value for variable, value in given.items() if re.search("PASSWORD|KEY", variable))
    if name == "example.env":
        needed = {
            variable for variable, kind, _ in VARIABLE.findall((ROOT / "compose.yaml").read_text()) if kind == "?"
        }
        assert needed <= given.keys()


def test_servers_and_workers_share_image_store_and_workspaces():
    services = compose()["services"]
    for key in ("image", "build", "environment", "volumes"):
        assert services["serve"][key] == services["worker"][key]
    assert services["worker"]["deploy"]["replicas"] == 2
    assert "ports" not in services["worker"]  # otherwise a second one could not be started
    assert "container_name" not in services["worker"]


def test_only_this_machine_reaches_the_server_and_none_reaches_the_database():
    services = compose()["services"]
    assert all(port.startswith("127.0.0.1:") for port in services["serve"]["ports"])
    assert "ports" not in services["postgres"]


def test_the_address_of_the_store_is_the_database_that_compose_makes():
    services = compose()["services"]
    made, address = services["postgres"]["environment"], services["serve"]["environment"]["EVERLOOP_STORE"]
    assert address == f"postgresql://{made['POSTGRES_USER']}@postgres/{made['POSTGRES_DB']}"


@pytest.mark.parametrize("name", OURS)
def test_a_container_has_no_privileges_restarts_and_gets_time_to_end(name: str):
    service = compose()["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    assert service["restart"] == "always"
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN
    assert service["depends_on"] == {"postgres": {"condition": "service_healthy"}}


def test_every_file_that_compose_names_is_there():
    document = compose()
    for service in (document["services"][name] for name in OURS):
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (ROOT / source).is_file() if source.startswith(".") else source in document["volumes"]


def test_the_settings_of_a_deployment_can_be_read(tmp_path: Path):
    shutil.copy(DEPLOY / "config.toml", tmp_path)
    config = Config.load(env={}, home=tmp_path)
    assert config.server_tokens
    assert config.lease_seconds == Config().lease_seconds
    assert config.drain_seconds <= DRAIN


# ---------------------------------------------------------------------------------------------- the image


def test_the_image_runs_unprivileged_and_can_confine_commands():
    assert only("USER") not in ("root", "0")
    assert [head for head, _ in instructions()].index("USER") > [head for head, _ in instructions()].index("RUN")
    packages = " ".join(rest for head, rest in instructions() if head == "RUN")
    assert "bubblewrap" in packages
    assert "useradd --system --uid 10001 --user-group --home-dir /var/lib/everloop" in packages
    assert "EVERLOOP_HOME=/var/lib/everloop" in only("ENV")
    assert any(volume.startswith("home:/var/lib/everloop") for volume in compose()["services"]["serve"]["volumes"])


def test_files_copied_into_the_image_are_not_ignored_and_suffice_to_build_the_package(tmp_path: Path):
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in (rest.split()[:-1] for head, rest in instructions() if head == "COPY"):
        for source in sources:
            assert source in kept, f"{source} is kept out by .dockerignore"
            place = ROOT / source
            if place.is_dir():
                shutil.copytree(place, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(place, tmp_path)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "everloop/cli/serve.py" in names
    assert any(name.startswith("everloop/skills/") for name in names)


def test_everything_the_image_installs_is_pinned_by_hash():
    pip = [rest for head, rest in instructions() if head == "RUN" and rest.startswith("pip")]
    assert len(pip) == 2
    assert "--require-hashes --requirement requirements.lock" in pip[0]
    assert "--no-deps --no-build-isolation ." in pip[1]
    lock = (ROOT / "requirements.lock").read_text()
    assert all(re.search(rf"^{name}==", lock, re.M) for name in ("psycopg-binary", "hatchling", "aiohttp"))


# ---------------------------------------------------------------------------------------------- systemd


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_ends_gently_and_restarts(path: Path):
    service = unit(path)["Service"]
    assert service["KillSignal"] == "SIGTERM"
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > DRAIN
    assert service["Restart"] == "always"
    assert unit(path)["Unit"]["StartLimitIntervalSec"] == "0"
    assert service["User"] != "root"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_drops_all_privileges_except_those_the_sandbox_needs(path: Path):
    service, text = unit(path)["Service"], path.read_text()
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID", "LockPersonality"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    for name in ("RestrictNamespaces", "ProtectKernelTunables", "ProtectKernelLogs", "ProtectHostname", "ProtectProc"):
        assert name not in service  # bubblewrap would not work; the unit says why
        assert re.search(rf"^#.*\b{name}\b", text, re.M)


def test_the_two_units_differ_only_in_what_they_start():
    serve, worker = (path.read_text().splitlines()[1:] for path in UNITS)
    different = [pair for pair in zip(serve, worker, strict=True) if pair[0] != pair[1]]
    assert [one.partition("=")[0] for one, _ in different] == ["Description", "ExecStart"]
    commands = [unit(path)["Service"]["ExecStart"].split() for path in UNITS]
    assert [command[1:] for command in commands] == [["serve"], ["worker"]]


def test_systemd_accepts_the_units(tmp_path: Path):
    """Where systemd is installed; elsewhere the tests above have read them."""
    for path in UNITS:
        text = path.read_text().replace("/opt/everloop/bin/everloop", sys.executable)
        (tmp_path / path.name).write_text(text)
    if (analyze := shutil.which("systemd-analyze")) is not None:
        command = [analyze, "verify", *(str(tmp_path / path.name) for path in UNITS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")


BWRAP = [
    "bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox", "--ro-bind", "/", "/",
    "--proc", "/proc", "--dev", "/dev", "true",
]  # fmt: skip


@pytest.mark.platform("needs bubblewrap and namespaces")
def test_commands_can_be_confined_with_the_privileges_that_a_unit_leaves():
    who = ["--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"] if os.getuid() == 0 else []
    if shutil.which("setpriv") is None or shutil.which("bwrap") is None or subprocess.run(BWRAP).returncode:
        pytest.skip("this machine has no setpriv, no bubblewrap, or no namespaces to be had")
    done = subprocess.run(["setpriv", "--no-new-privs", *who, *BWRAP], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
