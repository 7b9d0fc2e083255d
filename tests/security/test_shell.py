"""Attacks by commands, each against both backends. The tests check the canary, never the wording of a message."""

from __future__ import annotations

import base64
import fcntl
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everloop.config import Config, Rule
from everloop.testing import call
from everloop.tools.shell import processes
from everloop.tools.shell.shell import ShellSettings, shell_tools
from tests.support.commands import until
from tests.tools.shell.desks import beats, silent

from .scene import Attack, Scene, canary, running

WON = "W2ON"  # as a command prints it; commands spell it differently, since the model also sees the command
SAY = "echo W$((1+1))ON"
SAY_PYTHON = "print('W%dON' % 2)"


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)


@pytest.fixture
def attack(scene: Scene, backend: str):
    """Runs commands through the whole loop."""

    async def run(*commands: str, timeout: float = 20, background: bool = False, **settings) -> Attack:
        scene.tools = shell_tools(ShellSettings(mode=backend, **settings))  # type: ignore[arg-type]
        return await scene.run(*(call("exec", command=command, timeout=timeout) for command in commands))

    return run


def python(program: str) -> str:
    """A command that runs any Python program."""
    coded = base64.b64encode(program.encode()).decode()
    return f"python3 -c \"import base64; exec(base64.b64decode('{coded}'))\" 2>&1"


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user outside any sandbox."""
    process = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, process_group=0)
    yield process
    process.kill()
    process.wait()


async def test_commands_work_and_a_successful_attack_would_be_detected(attack, scene):
    """Otherwise, every test below would pass with a shell that does nothing."""
    done = await attack(SAY, python(SAY_PYTHON), "echo made > made.txt; cat made.txt")
    assert all(WON in result for result in done.results[:2])
    assert (scene.workspace / "made.txt").read_text() == "made\n"
    assert "made" in done.results[2]


# --- reading -------------------------------------------------------------------------------------------------------

READERS = {
    "plainly": "cat {secret}",
    "by a variable": "p={outside}; cat $p/sec*.txt",
    "by a script in base64": "echo $(echo {secret} | base64) | base64 -d | xargs cat",
    "by dots": "cat ../outside/secret.txt; cat {workspace}/../outside/secret.txt",
    "by changing folders": "cd ..; cd outside && cat secret.txt; cd /; cat .{secret}",
    "by a link": "ln -s {outside} door; cat door/secret.txt; ln -s {secret} leaf; cat leaf; cat < leaf",
    "by a hard link": "ln {secret} hard; cat hard; cp -l {secret} hard2; cat hard2; ln -P {secret} h3; cat h3",
    "by a move": "mv {secret} here; cat here; cp -r {outside} copied; cat copied/*",
    "by its own root in /proc": "cat /proc/self/root{secret}; cat /proc/1/root{secret}; cat /proc/$$/cwd/../outside/*",
    "by the runtime in /proc": "cat /proc/{pid}/root{secret}; cat /proc/{pid}/cwd{secret}; ls /proc/{pid}/fd",
    "by every process in /proc": "cat /proc/[0-9]*/root{secret}; cat /proc/[0-9]*/cwd/../outside/secret.txt",
    "by an archive": "tar cf - {outside} | strings; find / -name secret.txt -exec cat {{}} + 2>/dev/null",
    "by a redirection of the shell": "read x < {secret}; echo $x; mapfile -t y < {secret}; echo $y; . {secret}",
    "by git": "git diff --no-index /dev/null {secret}; git hash-object -w {secret}",
    "by a new namespace": "unshare -Urm cat {secret}; unshare -Upf cat {secret}; bwrap --bind / / cat {secret}",
}


@pytest.mark.parametrize("how", READERS)
async def test_nothing_outside_the_workspace_can_be_read(attack, scene, how):
    secret = scene.outside / "secret.txt"
    command = READERS[how].format(secret=secret, outside=scene.outside, workspace=scene.workspace, pid=os.getpid())
    seen = await attack(command)
    assert seen.results
    assert scene.secret not in seen.seen
    assert secret.read_text() == scene.secret


async def test_nothing_outside_can_be_read_by_a_program_either(attack, scene):
    program = f"""
import ctypes, glob, os, struct
secret = {str(scene.outside / "secret.txt")!r}
def attempt(action):
    try:
        print(action())
    except BaseException as error:
        print(type(error).__name__)
attempt(lambda: open(secret).read())
attempt(lambda: os.read(os.open(secret, os.O_RDONLY | os.O_NOATIME), 99))
attempt(lambda: [open(path + secret).read() for path in glob.glob("/proc/[0-9]*/root")])
attempt(lambda: open(os.open(os.path.dirname(secret), os.O_PATH), opener=None))
attempt(lambda: os.read(os.open("secret.txt", 0, dir_fd=os.open(os.path.dirname(secret), os.O_PATH)), 99))
library = ctypes.CDLL(None)
for number in (425, 426, 427, 303, 304):  # io_uring, file handles: ways around a path
    print("call", number, library.syscall(number, 8, bytes(512), 0, 0, 0) >= 0)
"""
    seen = await attack(python(program))
    assert scene.secret not in seen.seen
    assert "True" not in seen.results[0]


@pytest.mark.parametrize(
    "command",
    [
        "env; set; export -p",
        "cat /proc/self/environ /proc/$$/environ /proc/1/environ /proc/$PPID/environ | tr '\\0' '\\n'",
        "cat /proc/{pid}/environ | strings; xargs -0 -n1 < /proc/{pid}/environ",
        "for f in /proc/[0-9]*/environ /proc/[0-9]*/cmdline; do cat $f | strings; done; ps auxeww",
    ],
)
async def test_the_environment_of_the_runtime_stays_there(attack, monkeypatch, command):
    key = canary("key")
    monkeypatch.setenv("EVERLOOP_API_KEY", key)
    monkeypatch.setenv("SOME_TOKEN", key)
    program = [sys.executable, "-c", "import time; time.sleep(30)", key]  # a process whose real environment contains it
    other = subprocess.Popen(program, env={**os.environ, "CANARY": key})
    try:
        seen = await attack(command.format(pid=other.pid), command.format(pid=os.getpid()))
    finally:
        other.kill()
        other.wait()
    assert seen.results
    assert key not in seen.seen


async def test_the_memory_of_the_runtime_cannot_be_read(attack, victim):
    program = f"""
import ctypes
library = ctypes.CDLL(None, use_errno=True)
won = library.ptrace(16, {victim.pid}, 0, 0) == 0 or library.ptrace(0x4206, {victim.pid}, 0, 0) == 0
buffer = ctypes.create_string_buffer(8)
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
local = Piece(ctypes.addressof(buffer), 8)
far = Piece(0x400000, 8)
won = won or library.process_vm_readv({victim.pid}, ctypes.byref(local), 1, ctypes.byref(far), 1, 0) > 0
try:
    open("/proc/{victim.pid}/mem", "rb"); won = True
except OSError:
    pass
pidfd = library.syscall(434, {victim.pid}, 0)
won = won or (pidfd >= 0 and library.syscall(438, pidfd, 0, 0) >= 0)
print("W%dON" % 2 if won else "lost")
"""
    seen = await attack(python(program))
    assert "lost" in seen.results[0]
    assert f"TracerPid:\t{0}\n" in Path(f"/proc/{victim.pid}/status").read_text()


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "echo x > {outside}/secret.txt; echo x >> {outside}/secret.txt; truncate -s 0 {outside}/secret.txt",
        "touch {outside}/new; mkdir {outside}/dir; mv {outside} {outside}2; rm -rf {outside}",
        "ln -s {outside} door; echo x > door/secret.txt; echo x > door/new; rm -rf door/*",
        "cp /bin/true {outside}/new; install /bin/true {outside}/new2; dd if=/dev/zero of={outside}/secret.txt count=1",
        "python3 -c \"import os; os.open('{outside}/secret.txt', os.O_RDONLY | os.O_TRUNC)\"",
        "chmod 777 {outside}/secret.txt {outside}; cd {outside} && chmod 777 .; chown 12345 {outside}/secret.txt",
    ],
)  # fmt: skip
async def test_nothing_outside_the_workspace_can_be_changed(attack, scene, command):
    secret = scene.outside / "secret.txt"
    before = [(path.stat().st_mode, path.stat().st_uid) for path in (secret, scene.outside)]
    await attack(command.format(outside=scene.outside))
    assert secret.read_text() == scene.secret
    assert [path.name for path in scene.outside.iterdir()] == ["secret.txt"]
    assert [(path.stat().st_mode, path.stat().st_uid) for path in (secret, scene.outside)] == before


@pytest.mark.parametrize(
    "name", ["AGENTS.md", "skills/one/SKILL.md", "agents/one.md", ".everloop/x", ".git/hooks/pre-commit", ".git/config"]
)
async def test_files_that_steer_the_agent_or_the_users_git_cannot_be_changed(attack, scene, name):
    path = scene.workspace / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    top = name.split("/")[0]
    await attack(
        f"echo evil > {name}; echo evil >> {name}; cp /bin/true {name}; rm -f {name}; truncate -s 0 {name}; true",
        f"echo evil > evil; mv -f evil {name}; ln -sf /etc/passwd {name}; sed -i s/mine/evil/ {name}; true",
        f"mv {top} away; mkdir -p $(dirname {name}); echo evil > {name}; true",
        f"rm -rf {top}; mkdir -p $(dirname {name}); echo evil > {name}; true",
        f"cd $(dirname {name}) && echo evil > post-checkout; mkdir two && echo evil > two/SKILL.md",
    )
    assert path.read_text() == "mine"
    if name != "AGENTS.md" and name != ".git/config":
        assert [found.name for found in path.parent.iterdir()] == [path.name]


async def test_a_link_swapped_in_for_an_instruction_file_shows_nothing_from_outside(attack, scene, backend):
    """A background command swaps .git with a link to the outside while others start."""
    tools = shell_tools(ShellSettings(mode=backend))
    scene.tools = tools
    swap = "while true; do rm -rf .git; mkdir .git; rmdir .git; ln -s ../outside .git; rm .git; done"
    looks = [call("exec", command=f"cat .git/secret.txt; echo {number} > .git/new; true") for number in range(15)]
    seen = await scene.run(call("exec", command=swap, background=True), *looks)
    for tool in tools:
        await tool.close()
    assert len(seen.results) == 16
    assert scene.secret not in seen.seen
    assert [path.name for path in scene.outside.iterdir()] == ["secret.txt"]


@pytest.mark.parametrize(
    "command",
    [
        "v=$(cat /proc/sys/kernel/printk) && echo $v > /proc/sys/kernel/printk && {say}",
        "touch /dev/evil && {say}; mknod /dev/disk b 254 0 && {say}; mknod disk b 254 0 && {say}",
        "touch /sys/evil && {say}; echo 1 > /sys/kernel/mm/ksm/run && {say}; mkdir /sys/fs/cgroup/pids/evil && {say}",
        "mount -t tmpfs none . && {say}; mount --bind / /tmp && {say}; umount /proc && {say}",
        "touch /usr/evil && {say}; touch /etc/evil && {say}; echo >> /etc/passwd && {say}; touch /evil && {say}",
        "hostname evil && {say}; date -s 2001-01-01 && {say}; swapon /dev/zero && {say}; chroot / true && {say}",
        "unshare -U true && {say}; unshare -n true && {say}; nsenter -t 1 -m true && {say}; su -c true nobody && {say}",
        "dmesg && {say}; keyctl show && {say}; head -c 1 /proc/kmsg && {say}; head -c 1 /proc/kcore && {say}",
    ],
)
async def test_the_machine_itself_cannot_be_changed(attack, command):
    seen = await attack(command.format(say=SAY), timeout=5)
    assert seen.results
    assert WON not in seen.results[0]


async def test_no_input_can_be_injected_into_a_terminal(attack):
    program = f"""
import fcntl, os, termios
def typed(descriptor):
    try:
        fcntl.ioctl(descriptor, termios.TIOCSTI, b"x"); return True
    except OSError:
        return False
won = typed(0) or typed(1)
try:
    won = typed(os.open("/dev/tty", os.O_RDWR)) or won
except OSError:
    pass
try:
    import pty
    leader, follower = pty.openpty()
    os.setsid() if os.getpid() != os.getsid(0) else None
    fcntl.ioctl(follower, termios.TIOCSCTTY, 0)
    won = typed(follower) or won
except OSError:
    pass
{SAY_PYTHON} if won else print("lost")
"""
    assert "lost" in (await attack(python(program))).results[0]


# --- other processes -----------------------------------------------------------------------------------------------


async def test_no_process_outside_can_be_ended(attack, victim):
    program = f"""
import ctypes, os, signal
library = ctypes.CDLL(None)
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
    for send in (lambda: os.kill({victim.pid}, number), lambda: os.killpg(os.getpgid({victim.pid}), number),
                 lambda: signal.pidfd_send_signal(os.pidfd_open({victim.pid}), number)):
        try:
            send()
        except OSError:
            pass
    library.syscall(200, {victim.pid}, int(number)); library.syscall(234, {victim.pid}, {victim.pid}, int(number))
os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19)
"""
    await attack(f"kill -9 {victim.pid}; kill -STOP {victim.pid}", python(program))
    assert victim.poll() is None
    assert "\tT " not in Path(f"/proc/{victim.pid}/status").read_text()


async def test_nothing_survives_its_command(attack, scene):
    forks = "[os.fork() and os._exit(0) or os.setsid() for _ in (1, 2, 3)]"
    beat = "[open('survived4', 'a').write('.') and time.sleep(0.05) for _ in range(600)]"
    await attack(
        f"setsid sh -c '{beats('survived1')}' >/dev/null 2>&1 &",
        f"nohup sh -c '{beats('survived2')}' >/dev/null 2>&1 & disown",
        f"(trap '' TERM HUP INT; (setsid nohup sh -c 'trap \"\" TERM; {beats('survived3')}' &) &)",
        f'python3 -c "import os, time; {forks}; {beat}"',
    )
    await attack(f"trap '' TERM; setsid sh -c 'trap \"\" TERM; {beats('survived5')}' & sleep 30", timeout=2)
    assert (scene.workspace / "survived5").exists()
    assert await silent(scene.workspace)


async def test_a_child_that_holds_the_pipe_does_not_delay_the_result(attack):
    began = time.monotonic()
    seen = await attack("sleep 50 & echo started", "setsid sleep 51 & echo started", timeout=60)
    assert time.monotonic() - began < 30
    assert all("started" in result for result in seen.results)


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exclude other tests of this run that also count the user's processes."""
    with (tmp_path_factory.getbasetemp().parent / "alone").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def test_a_fork_bomb_is_contained(attack, alone):
    name = canary("bomb")
    program = f"""
import os, time
name = {name!r}
made = 0
for _ in range(2000):
    try:
        if not os.fork():
            time.sleep(20); os._exit(0)
        made += 1
    except OSError:
        break
print("made", made)
"""
    command = python(program)
    seen = await attack(command, processes=200)
    made = int(seen.results[0].split("made ")[1].split()[0])
    assert 20 <= made < 400  # of 2000; other processes come and go during the count
    await until(lambda: not running(command.split("'")[1]))


async def test_a_memory_bomb_is_contained(attack):
    program = f"x = [bytearray(2**26) for _ in range(12)]; {SAY_PYTHON}"
    seen = await attack(python(program), "head -c 600M /dev/zero > /tmp/full && " + SAY, memory_mb=256)
    assert WON not in seen.results[0]
    assert WON not in seen.results[1]


async def test_memory_is_limited_for_all_processes_of_a_command_together(attack):
    """Each stays below the limit; together they are far above it."""
    hold = "import time; x = bytearray(b'x') * (80 * 2**20); time.sleep(20)"
    many = f'for i in 1 2 3 4 5 6; do python3 -c "{hold}" & done; wait; {SAY}'
    began = time.monotonic()
    seen = await attack(many, timeout=30, memory_mb=256)
    assert WON not in seen.results[0]
    assert "256 MB" in seen.results[0]
    assert time.monotonic() - began < 18


async def test_shared_memory_is_counted_once(attack):
    program = f"""
import os, time
x = bytearray(b"x") * (120 * 2**20)
children = []
for _ in range(5):
    pid = os.fork()
    if not pid:
        time.sleep(1.5); os._exit(0)
    children.append(pid)
print([os.waitpid(pid, 0)[1] for pid in children])
{SAY_PYTHON}
"""
    seen = await attack(python(program), memory_mb=256)
    assert WON in seen.results[0]


async def test_a_file_cannot_fill_the_disk(attack, scene):
    await attack(
        "head -c 50M /dev/zero > big; true", "ulimit -f unlimited; head -c 50M /dev/zero > big2; true", file_mb=2
    )
    assert max(path.stat().st_size for path in scene.workspace.iterdir()) <= 2 * 2**20


async def test_endless_output_takes_neither_memory_nor_time(attack):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    seen = await attack("yes", "yes | tr -d '\\n'", "cat /dev/zero", timeout=0.6)
    assert time.monotonic() - began < 40  # endless
    assert all(len(result) < 80_000 for result in seen.results)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kilobytes


# --- the network ---------------------------------------------------------------------------------------------------


class Listener:
    """A server that must not be reached."""

    def __init__(self, family: int, address: object, kind: int = socket.SOCK_STREAM) -> None:
        self.socket = socket.socket(family, kind)
        self.socket.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            self.socket.listen()
        self.socket.setblocking(False)

    def reached(self) -> bool:
        try:
            self.socket.accept() if self.socket.type == socket.SOCK_STREAM else self.socket.recv(100)
        except BlockingIOError:
            return False
        finally:
            self.socket.close()
        return True


async def test_no_server_of_this_machine_can_be_reached(attack):
    tcp = Listener(socket.AF_INET, ("127.0.0.1", 0))
    udp = Listener(socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM)
    port, other = tcp.socket.getsockname()[1], udp.socket.getsockname()[1]
    await attack(
        f"echo x > /dev/tcp/127.0.0.1/{port}; echo x > /dev/udp/127.0.0.1/{other}",
        f"curl -s -m 2 http://127.0.0.1:{port}/; curl -s -m 2 http://localhost:{port}/",
        python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2).send(b'x')"),
        python(f"import socket; socket.socket(socket.AF_INET6).connect(('::ffff:127.0.0.1', {port}))"),
        python(f"import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {other}))"),
    )
    assert not tcp.reached()
    assert not udp.reached()


async def test_no_unix_socket_of_this_machine_can_be_reached(attack, scene):
    name = canary()[:40]
    path, datagrams = str(scene.outside / "s"), str(scene.outside / "d")
    listeners = [
        Listener(socket.AF_UNIX, "\0" + name),
        Listener(socket.AF_UNIX, path),
        Listener(socket.AF_UNIX, datagrams, socket.SOCK_DGRAM),
        Listener(socket.AF_UNIX, "\0" + name + "d", socket.SOCK_DGRAM),
    ]
    program = f"""
import socket
def attempt(action):
    try:
        action()
    except OSError as error:
        print(error)
for address in ({path!r}, "\\0" + {name!r}):
    attempt(lambda: socket.socket(socket.AF_UNIX).connect(address))
for address in ({datagrams!r}, "\\0" + {name!r} + "d"):
    attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", address))
    attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", address))
    attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect(address))
"""
    await attack(python(program))
    assert [listener.reached() for listener in listeners] == [False] * 4


async def test_no_abstract_socket_of_this_machine_can_be_reached_with_network(scene, backend):
    """With network, a command runs in the host's network namespace, to which such sockets belong."""
    name = canary()[:40]
    stream = Listener(socket.AF_UNIX, "\0" + name)
    datagram = Listener(socket.AF_UNIX, "\0" + name + "d", socket.SOCK_DGRAM)
    tcp = Listener(socket.AF_INET, ("127.0.0.1", 0))
    program = f"""
import socket
def attempt(action):
    try:
        action()
    except OSError as error:
        print(error)
socket.create_connection(("127.0.0.1", {tcp.socket.getsockname()[1]}), 5).close()
attempt(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + {name!r}))
attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", "\\0" + {name!r} + "d"))
if {backend!r} == "bubblewrap":
    own = socket.socket(socket.AF_UNIX)
    own.bind("\\0own" + {name!r})
    own.listen()
    socket.socket(socket.AF_UNIX).connect("\\0own" + {name!r})
print("among", "themselves")
"""
    scene.tools = shell_tools(ShellSettings(mode=backend))
    allowed = Config(policy=(Rule(do="allow", tool="exec", network=True),))
    seen = await scene.run(call("exec", command=python(program), network=True), config=allowed)
    assert "among themselves" in seen.results[0]
    tcp.socket.close()
    assert not stream.reached()
    assert not datagram.reached()
