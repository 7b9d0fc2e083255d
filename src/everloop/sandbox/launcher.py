"""Run one command and kill everything it started when it ends. Runs as a separate program.

Used where there are no namespaces. It reads its task as JSON from a descriptor, confines its child with Landlock, a
seccomp filter and without capabilities, adopts orphaned descendants, and kills them all when the command ends, when
the runtime asks for it, or when the runtime dies (the pipe `control` is closed). It runs isolated from the package.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False  # importing typing would take longer than everything else
if TYPE_CHECKING:
    from typing import Any, NoReturn

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _OPENAT2 = 444, 445, 446, 437
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER = 1
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS, _SET_CHILD_SUBREAPER, _CAPBSET_DROP = 1, 38, 36, 24
_PATH_BENEATH, _ALL_SCOPES, _TCP = 1, 3, 3
_HERE = -100  # AT_FDCWD: the working directory
_NO_SYMLINKS = 0x04
_NOFOLLOW = 0x100
_CAPABILITY_VERSION = 0x20080522
_NEW_LISTENER = 8
_RECEIVE, _ANSWER, _STILL_VALID = 0xC0502100, 0xC0182101, 0x40082102
_ASKED = {
    "x86_64": {90: "chmod", 91: "fchmod", 268: "fchmodat", 452: "fchmodat2", 280: "utimensat"},
    "aarch64": {52: "fchmod", 53: "fchmodat", 452: "fchmodat2", 88: "utimensat"},
}
_EMPTY_PATH = 0x1000
_TIMES = 32  # bytes of two timespecs
_WRITE_FILE = 2
_GIVE_UP = 5.0
REFUSED = 126

library = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int = 0) -> int:
    return int(library.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


# ------------------------------------------------------------------------------------------------ confinement


def open_place(path: str, follow: bool) -> int:
    """Open a path to grant rights on. Links in a workspace are not followed: a command may be swapping them."""
    flags = os.O_PATH | os.O_CLOEXEC
    if follow:
        return os.open(path, flags)
    how = struct.pack("QQQ", flags, 0, _NO_SYMLINKS)
    return checked(library.syscall(_OPENAT2, _HERE, os.fsencode(path), how, len(how)), path)


def restrict_files(sandbox: dict[str, Any]) -> None:
    """Apply Landlock: only what the rules grant; from ABI 4 on no TCP, from ABI 6 on no signals to other processes."""
    attributes = struct.pack("QQQ", sandbox["rights"], 0 if sandbox["network"] else _TCP, _ALL_SCOPES)
    attributes = attributes[: 24 if sandbox["abi"] >= 6 else 16 if sandbox["abi"] >= 4 else 8]
    ruleset = checked(library.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "Landlock")
    links = set(sandbox["links"])
    for path, rights in sandbox["rules"]:
        try:
            place = open_place(path, path in links)
        except OSError:
            continue  # it was removed or replaced by a link: grant nothing
        rule = struct.pack("=Qi", rights, place)
        checked(library.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"Landlock rule for {path}")
        os.close(place)
    checked(library.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def drop_capabilities() -> None:
    """Drop all capabilities for good: root without them is an ordinary user."""
    for capability in range(64):
        if prctl(_CAPBSET_DROP, capability) < 0:
            break
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    checked(library.capset(header, bytes(24)), "capset")


def filter_calls(program: bytes) -> int:
    """Install the seccomp filter and return the descriptor of its notifications."""
    instructions = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    return checked(library.syscall(_SECCOMP[os.uname().machine], _SET_FILTER, _NEW_LISTENER, description), "seccomp")


def limit(limits: dict[str, Any]) -> None:
    """Set soft and hard resource limits, so that the command cannot raise them."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_DATA: limits["memory_mb"] * 2**20,
        resource.RLIMIT_FSIZE: limits["file_mb"] * 2**20,
    }
    if not limits["counted"]:  # without a control group; the kernel counts all threads of the user
        wanted[resource.RLIMIT_NPROC] = threads_of_user() + limits["processes"]
    for kind, most in wanted.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def threads_of_user() -> int:
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                tasks = os.stat(f"/proc/{name}/task")
            except OSError:
                continue
            count += tasks.st_nlink - 2 if tasks.st_uid == user else 0
    return count


def become(task: dict[str, Any], questions: _socket.socket) -> NoReturn:
    """In the child process: confine itself, then execute the command."""
    os.setsid()
    prctl(_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # ignored in the parent, and inherited
        signal.signal(number, signal.SIG_DFL)
    os.chdir(task["folder"])
    if (sandbox := task.get("sandbox")) is not None:
        checked(prctl(_SET_NO_NEW_PRIVS, 1), "no_new_privs")
        limit(sandbox["limits"])
        restrict_files(sandbox)
        drop_capabilities()
        listener = filter_calls(bytes.fromhex(sandbox["filter"]))
        questions.sendmsg([b"x"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))])
    os.execve(task["command"][0], task["command"], dict(os.environ))


# ------------------------------------------------------------------------------------------------ chmod and utimensat


class Modes:
    """Perform chmod and utimensat for the command, on writable paths only: Landlock does not cover these calls.

    Paths are resolved and changed here through descriptors, so the command cannot swap a path in between.
    """

    def __init__(self, sandbox: dict[str, Any]) -> None:
        self._names = _ASKED[os.uname().machine]
        writable = [path for path, rights in sandbox["rules"] if rights & _WRITE_FILE]
        self._writable = [path for path in writable if os.path.dirname(path) != "/dev"]  # not the devices

    def answer(self, listener: int) -> bool:
        """Answer one notification; return False when no process is left to send any."""
        question = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, question)
        except OSError:
            return False
        id, pid, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", question)
        try:
            self._change(listener, id, pid, self._names[number], arguments)
            error = 0
        except OSError as problem:
            error = problem.errno or 1
        except (ValueError, OverflowError):  # an invalid address or path
            error = errno.EFAULT
        try:
            fcntl.ioctl(listener, _ANSWER, struct.pack("=QqiI", id, 0, -error, 0))
        except OSError:
            return True  # the caller is gone; others may still send notifications
        return True

    def _change(self, listener: int, id: int, pid: int, name: str, arguments: list[int]) -> None:
        opened: list[int] = []
        try:
            follow = True
            if name == "fchmod":
                base, path, mode = self._descriptor(pid, arguments[0]), b"", arguments[1]
            elif name == "chmod":
                base, path, mode = f"/proc/{pid}/cwd", self._text(pid, arguments[0]), arguments[1]
            else:
                base, path, mode = self._descriptor(pid, arguments[0]), self._text(pid, arguments[1]), arguments[2]
                follow = name == "fchmodat" or not arguments[3] & _NOFOLLOW
            times = self._memory(pid, mode, _TIMES) if name == "utimensat" and mode else None
            opened.append(os.open(base, os.O_PATH | os.O_CLOEXEC))
            fcntl.ioctl(listener, _STILL_VALID, struct.pack("=Q", id))  # otherwise the pid may have been reused
            if path:
                flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
                opened.append(os.open(path, flags, dir_fd=opened[0]))
            place = os.readlink(f"/proc/self/fd/{opened[-1]}")
            if not any(place == top or place.startswith(top.rstrip("/") + "/") for top in self._writable):
                raise PermissionError(1, "not writable")
            if name == "utimensat":
                checked(library.utimensat(opened[-1], b"", times, _EMPTY_PATH), "utimensat")
            else:
                os.chmod(f"/proc/self/fd/{opened[-1]}", mode & 0o1777)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    @staticmethod
    def _descriptor(pid: int, number: int) -> str:
        number = ctypes.c_int(number & 0xFFFFFFFF).value
        return f"/proc/{pid}/cwd" if number == _HERE else f"/proc/{pid}/fd/{number}"

    def _text(self, pid: int, address: int) -> bytes:
        """Read a path from the command's memory; empty for a call that takes only a descriptor."""
        text = b""
        while address and b"\0" not in text and len(text) < 4096:
            start = address + len(text)
            text += self._memory(pid, start, 256 - start % 256)  # never across a page boundary
        return text.split(b"\0")[0]

    @staticmethod
    def _memory(pid: int, address: int, length: int) -> bytes:
        with open(f"/proc/{pid}/mem", "rb", 0) as memory:
            memory.seek(address)
            if len(data := memory.read(length)) < length:  # the caller is gone, and so is its memory
                raise OSError(errno.EFAULT, "no such memory")
        return data


# ------------------------------------------------------------------------------------------------ supervision


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for child in found:  # the list grows during the iteration
        found += children(child)
    return found


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def kill_all() -> None:
    """Kill all descendants until none is left. Orphans are re-parented to this process, a subreaper."""
    deadline = time.monotonic() + _GIVE_UP
    while time.monotonic() < deadline:
        signal_all(descendants(os.getpid()), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def supervise(pid: int, control: int, questions: _socket.socket, modes: Modes | None) -> int:
    """Wait for the command and return its status. "T" on `control` sends SIGTERM; closing it ends everything."""
    watched: list[Any] = [control]
    if modes is not None:
        watched.append(questions)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                return ended[1]
        ready, _, _ = select.select([*watched, reading], [], [])
        if control in ready:
            if os.read(control, 1) != b"T":
                return signal.SIGKILL
            signal_all(descendants(os.getpid()), signal.SIGTERM)
        if reading in ready:
            os.read(reading, 4096)
        for source in [source for source in ready if source not in (control, reading)]:
            if source is questions:
                watched.remove(questions)
                _, sent, _, _ = questions.recvmsg(1, 64)
                watched += [struct.unpack("i", data[:4])[0] for _, _, data in sent]
            elif modes is not None and not modes.answer(source):
                watched.remove(source)


def is_closed(control: int) -> bool:
    """Return whether the runtime has died or closed the pipe.

    When a process is killed, its files are closed first; its children get a new parent only some time later.
    """
    while select.select([control], [], [], 0)[0]:
        if not os.read(control, 64):
            return True
    return False


def enter_group(folder: str | None) -> None:
    """Join the command's control group. When memory runs out, the kernel kills the command, not the runtime."""
    if folder is not None:
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def main() -> NoReturn:
    with open(int(sys.argv[1]), "rb") as file:
        task = json.loads(file.read())
    control, runtime = int(sys.argv[2]), os.getppid()
    os.set_inheritable(control, False)
    prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if "sandbox" in task:
            enter_group(task["group"])
        questions, asking = _socket.socketpair()
        pid = os.fork()
        if not pid:
            become(task, asking)
        asking.close()
    except BaseException as error:
        os.write(2, f"everloop: the command could not be started: {error}\n".encode())
        os._exit(REFUSED)
    status = supervise(pid, control, questions, Modes(task["sandbox"]) if "sandbox" in task else None)
    kill_all()
    if "private" in task and (is_closed(control) or os.getppid() != runtime):  # no runtime is left to remove it
        import shutil

        shutil.rmtree(task["private"], ignore_errors=True)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
