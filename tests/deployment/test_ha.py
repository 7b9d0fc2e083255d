"""The files of a deployment with failover are well formed and agree with each other. The containers are not run."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from everloop.config.sources import DSN

from .files import DEPLOY, ROOT, VARIABLE

HA = DEPLOY / "ha"
TEXT = (HA / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
PATRONI: dict[str, Any] = yaml.safe_load((HA / "patroni.yml").read_text())
ETCD = [name for name in COMPOSE["services"] if name.startswith("etcd")]
TARGETS = re.findall(r"^FROM \S+ AS (\w+)$", (HA / "Dockerfile").read_text(), re.M)


def pooler() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(comment_prefixes=(";",))
    parser.read(HA / "pgbouncer.ini")
    return parser


def test_no_password_has_a_default_and_the_example_names_every_one():
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|KEY", name):
                assert VARIABLE.fullmatch(value), f"{name} must come from outside"
    lines = [line for line in (HA / "example.env").read_text().splitlines() if line and not line.startswith("#")]
    given = dict(line.split("=", 1) for line in lines)
    assert all(not value for name, value in given.items() if re.search("PASSWORD|KEY", name))
    assert {name for name, kind, _ in VARIABLE.findall(TEXT) if kind == "?"} <= given.keys()


def test_every_named_file_image_and_service_exists():
    services = COMPOSE["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= services.keys()
        build = service.get("build", {})
        if build.get("context") == "deploy/ha":
            assert build["target"] in TARGETS, name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (ROOT / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    for copied in re.findall(r"^COPY (\S+)", (HA / "Dockerfile").read_text(), re.M):
        assert (HA / copied).is_file()


def test_the_addresses_lead_to_the_servers_and_to_the_pooler():
    services, parser = COMPOSE["services"], pooler()
    for name in ("serve", "worker"):
        env = services[name]["environment"]
        assert DSN(env["EVERLOOP_STORE"]).well_formed
        assert DSN(env["EVERLOOP_STORE_POOL"]).well_formed
        hosts = env["EVERLOOP_STORE"].partition("@")[2].partition("/")[0].split(",")
        assert hosts == [name for name in services if name.startswith("db")]
        assert env["EVERLOOP_STORE_POOL"].endswith(f"@pgbouncer:{parser['pgbouncer']['listen_port']}/everloop")
    assert "host=haproxy port=5432 dbname=everloop" in parser["databases"]["everloop"]
    proxy = (HA / "haproxy.cfg").read_text()
    for name in ("db1", "db2"):
        assert services[name]["environment"]["PATRONI_NAME"] == name
        assert f"server {name} {services[name]['environment']['PATRONI_POSTGRESQL_CONNECT_ADDRESS']} check" in proxy


def test_the_databases_and_etcd_are_in_volumes_that_outlive_their_containers():
    """PostgreSQL's image has an anonymous volume in /var/lib/postgresql/data, which would hide this one."""
    data = Path(PATRONI["postgresql"]["data_dir"])
    assert data != Path("/var/lib/postgresql/data")
    for name in ("db1", "db2"):
        mounted = [
            volume.partition(":")[2] for volume in COMPOSE["services"][name]["volumes"] if volume.startswith(name)
        ]
        assert mounted == [str(data.parent)]
    for name in ETCD:
        assert COMPOSE["services"][name]["volumes"] == [f"{name}:/var/lib/etcd"]
    assert "--data-dir=/var/lib/etcd" in (HA / "Dockerfile").read_text()


def test_each_etcd_knows_the_others_and_patroni_knows_all_of_them():
    assert PATRONI["etcd3"]["hosts"] == [f"{name}:2379" for name in ETCD]
    assert len(ETCD) == 3
    for name in ETCD:
        env = COMPOSE["services"][name]["environment"]
        assert env["ETCD_NAME"] == name
        assert env["ETCD_ADVERTISE_CLIENT_URLS"] == f"http://{name}:2379"
        assert env["ETCD_INITIAL_ADVERTISE_PEER_URLS"] == f"http://{name}:2380"
        assert env["ETCD_INITIAL_CLUSTER"] == ",".join(f"{one}=http://{one}:2380" for one in ETCD)


def test_a_databases_health_is_checked_where_patroni_answers():
    check = COMPOSE["services"]["db1"]["healthcheck"]["test"]
    port = PATRONI["restapi"]["listen"].rpartition(":")[2]
    assert f"http://127.0.0.1:{port}/readiness" in check[-1]
    assert check == COMPOSE["services"]["db2"]["healthcheck"]["test"]


def test_only_a_standby_with_every_commit_is_promoted_and_before_a_call_gives_up():
    dcs = PATRONI["bootstrap"]["dcs"]
    assert dcs["synchronous_mode"] is True
    assert dcs["loop_wait"] + 2 * dcs["retry_timeout"] <= dcs["ttl"] < 30
    assert pooler()["pgbouncer"]["pool_mode"] == "transaction"


def test_only_this_machine_reaches_the_server_and_none_reaches_the_databases():
    published = {name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service}
    assert published == {"serve": ["127.0.0.1:8002:8002"]}


def test_what_the_page_says_to_change_on_machines_of_their_own_is_in_the_files():
    page = (ROOT / "docs" / "failover.md").read_text()
    section = page.partition("On machines of their own")[2].partition("Everloop needs two addresses")[0]
    for name, texts in {
        "haproxy.cfg": ("resolvers docker init-addr last,libc,none", "resolvers docker", "bind"),
        "pgbouncer.ini": ("host=haproxy", "listen_addr"),
        "patroni.yml": ("bin_dir", "data_dir"),
    }.items():
        assert f"`{name}`" in section
        for text in texts:
            assert f"`{text}`" in section
            assert text in (HA / name).read_text()
    services = COMPOSE["services"]
    assert set(re.findall(r"`((?:db|etcd)\d)`", section)) == {
        name for name in services if re.fullmatch(r"(db|etcd)\d", name)
    }
    (folder,) = re.findall(r"`create.sh` in `([^`]+)`", section)
    assert f"post_init: sh {folder}/create.sh" in (HA / "patroni.yml").read_text()


def test_scripts_are_valid_shell():
    for script in HA.glob("*.sh"):
        subprocess.run([str(shutil.which("sh")), "-n", str(script)], check=True)


def test_the_password_is_written_in_the_form_pgbouncer_reads(tmp_path: Path):
    """With quotes, dollars and spaces, by the real script."""
    script = (HA / "pgbouncer.sh").read_text().replace("/tmp/users.txt", str(tmp_path / "users.txt"))
    script = script.replace("exec pgbouncer", "exec true")
    subprocess.run(["sh", "-c", script], env={"EVERLOOP_PASSWORD": 'a"b $c\\n%s', "PATH": "/usr/bin:/bin"}, check=True)
    assert (tmp_path / "users.txt").read_text() == '"everloop" "a""b $c\\n%s"\n'
    assert (tmp_path / "users.txt").stat().st_mode & 0o077 == 0
