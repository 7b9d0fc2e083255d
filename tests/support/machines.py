"""Machines on one machine: network namespaces with addresses of their own, joined by a bridge.

A machine can be lost (its processes end and its network is silent, as after a power failure), frozen, cut off from all
others, or cut off from one of them. This needs root and Linux: `available` says so.

The bridge is in its own namespace, and the addresses are in the range reserved for benchmarks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NOWHERE = "02:00:00:00:00:01"  # a hardware address that no machine has: packets to it are lost silently

READS = "+dac_read_search"  # this Python and its packages may be in a folder that only root can read


def available() -> str:
    """Return why such machines cannot be made here; "" if they can."""
    if os.getuid() != 0 or shutil.which("ip") is None or shutil.which("setpriv") is None:
        return "network namespaces need Linux, root, and the packages iproute2 and util-linux"
    name = f"el{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "network namespaces cannot be made here"
    _ip("netns", "delete", name)
    return ""


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Machine:
    """A namespace. Its processes can be started again after they ended."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.address = f"{network.prefix}.{number}"
        self.namespace = f"{network.name}-{name}"
        self._link = f"v{number}"  # the bridge's end of its cable
        self._network = network

    def _create(self) -> None:
        switch = self._network.switch
        _ip("netns", "add", self.namespace)
        _ip("-n", switch, "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("-n", switch, "link", "set", self._link, "master", "br0", "up")
        _ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.namespace, "link", "set", device, "up")

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, user: str = "postgres") -> None:
        """Start a program on this machine. It looks up the names of the other machines in its own /etc/hosts."""
        inside = ["ip", "netns", "exec", self.namespace, "setpriv", "--reuid", user, "--regid", user, "--init-groups"]
        inside += ["--inh-caps", READS, "--ambient-caps", READS]
        with log.open("ab") as output:
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            child = subprocess.Popen([*inside, *command], cwd="/", env=dict(environment), **files)
        self._network.children.append(child)

    def processes(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """Kill all of its processes at once. The kernel closes their connections."""
        give_up = time.monotonic() + 30
        while left := self.processes():
            for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees the others end
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
            self._network.reap()
            assert time.monotonic() < give_up, f"{self.name} does not end"
            time.sleep(0.02)

    def lose(self) -> None:
        """Look like a power failure from outside: nothing is closed, and nothing responds."""
        self.cut()
        self.kill()

    def freeze(self) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)

    def thaw(self) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def cut(self) -> None:
        """Unplug its cable at the switch: packets in both directions are lost."""
        _ip("-n", self._network.switch, "link", "set", self._link, "nomaster")

    def mend(self) -> None:
        _ip("-n", self._network.switch, "link", "set", self._link, "master", "br0")

    def cut_from(self, other: Machine) -> None:
        """Lose every packet between these two. Both remain connected to all others."""
        for one, far in ((self, other), (other, self)):
            lost = ("lladdr", NOWHERE, "nud", "permanent", "dev", "eth0")
            _ip("-n", one.namespace, "neighbor", "replace", far.address, *lost)

    def mend_to(self, other: Machine) -> None:
        for one, far in ((self, other), (other, self)):
            _ip("-n", one.namespace, "neighbor", "delete", far.address, "dev", "eth0")


class Network:
    """Machines that reach each other, and can be reached from here by their addresses."""

    def __init__(self, names: Sequence[str]) -> None:
        self.name = f"el{os.getpid()}"
        self.switch = f"{self.name}-switch"
        self.prefix = f"198.18.{os.getpid() % 256}"
        self.machines = {name: Machine(self, name, number) for number, name in enumerate(names, 11)}
        self.children: list[subprocess.Popen[bytes]] = []

    def create(self) -> None:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", self.switch, "link", "set", "br0", "up")
        here = ("type", "veth", "peer", "name", "v1", "netns", self.switch)
        _ip("link", "add", self.name, *here)
        _ip("-n", self.switch, "link", "set", "v1", "master", "br0", "up")
        _ip("address", "add", f"{self.prefix}.1/24", "dev", self.name)
        _ip("link", "set", self.name, "up")
        lines = [f"{machine.address} {name}\n" for name, machine in self.machines.items()]
        for machine in self.machines.values():
            folder = Path(
                "/etc/netns", machine.namespace
            )  # `ip netns exec` puts its files in the place of those in /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
            machine._create()

    def reap(self) -> None:
        for child in self.children:
            child.poll()

    def close(self) -> None:
        for machine in self.machines.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                machine.kill()
        for child in self.children:
            child.wait()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self.name)
        for name in (self.switch, *(machine.namespace for machine in self.machines.values())):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    made = Network(names)
    try:
        made.create()
        yield made
    finally:
        made.close()
