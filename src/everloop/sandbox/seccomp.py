"""The seccomp filters of both backends: the system calls that a confined command may not make."""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
# Offsets into struct seccomp_data: the low halves of the arguments.
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND, _THIRD, _FOURTH = 0, 4, 16, 24, 32, 40
_ALLOW, _REFUSE, _ASK = 0x7FFF0000, 0x00050000, 0x7FC00000

# A new namespace grants rights inside it, which exposes more kernel code to attack.
_NAMESPACES = 0x7E020000
_NEW_TIME = 0x80
_TERMINAL_REQUESTS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: inject input into a terminal
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_DATAGRAM = 2
_SET_ID = 0o6000  # set-user-ID and set-group-ID bits: the owner may be root
_MAKES_A_FILE = 0x400040  # O_CREAT, O_TMPFILE
_MODES = (  # (call, offset of its mode, offset of its flags)
    ("chmod", _SECOND, None), ("fchmod", _SECOND, None), ("fchmodat", _THIRD, None), ("fchmodat2", _THIRD, None),
    ("creat", _SECOND, None), ("mknod", _SECOND, None), ("mknodat", _THIRD, None), ("mkdir", _SECOND, None),
    ("mkdirat", _THIRD, None), ("open", _THIRD, _SECOND), ("openat", _FOURTH, _THIRD),
)  # fmt: skip

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS = {  # name: (x86_64, aarch64)
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "chmod": (90, None), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "connect": (42, 203), "creat": (85, None), "delete_module": (176, 106), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fremovexattr": (199, 16), "fsetxattr": (190, 7),
    "lremovexattr": (198, 15), "lsetxattr": (189, 6), "mkdir": (83, None), "mkdirat": (258, 34),
    "mknod": (133, None), "mknodat": (259, 33), "open": (2, None), "openat": (257, 56), "openat2": (437, 437),
    "removexattr": (197, 14), "removexattrat": (466, 466), "setxattr": (188, 5), "setxattrat": (463, 463),
    "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fsopen": (430, 430), "fspick": (433, 433), "init_module": (175, 105), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, None),
    "iopl": (172, None), "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "kill": (62, 129), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "request_key": (249, 218), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268),
    "settimeofday": (164, 170), "socket": (41, 198), "socketpair": (53, 199), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "tgkill": (234, 131), "tkill": (200, 130), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282), "vhangup": (153, 58), "futimesat": (261, None),
    "mq_open": (240, 180), "msgget": (68, 186), "semget": (64, 190), "shmget": (29, 194), "utime": (132, None),
    "utimensat": (280, 88), "utimes": (235, None),
}  # fmt: skip

# Kernel keyrings are shared with the runtime; io_uring bypasses this filter; file handles bypass path checks; the
# others need rights that a command does not have, or access other processes.
_NEVER = (
    "acct", "add_key", "bpf", "chroot", "clock_adjtime", "clock_settime", "delete_module", "finit_module", "fsconfig",
    "fsmount", "fsopen", "fspick", "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm",
    "iopl", "kexec_file_load", "kexec_load", "keyctl", "mount", "mount_setattr", "move_mount", "name_to_handle_at",
    "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root", "quotactl", "quotactl_fd", "reboot",
    "request_key", "setdomainname", "sethostname", "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount2",
    "userfaultfd", "vhangup",
)  # fmt: skip
# Without a PID namespace, a command sees the processes of other users and programs.
_NOT_AMONG_OTHERS = ("kcmp", "pidfd_getfd", "process_madvise", "process_vm_readv", "process_vm_writev", "ptrace")
# Landlock does not cover extended attributes: these could change files outside the workspace.
_ATTRIBUTES = (
    "fremovexattr", "fsetxattr", "lremovexattr", "lsetxattr", "removexattr", "removexattrat", "setxattr", "setxattrat"
)  # fmt: skip
_OLD_TIMES = ("futimesat", "utime", "utimes")  # current C libraries use utimensat
_LASTING = ("mq_open", "msgget", "semget", "shmget")  # System V and POSIX IPC outlives the command
_SIGNALS = ("kill", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "tgkill", "tkill")


def supported() -> bool:
    """Return whether the system call numbers of this architecture are known."""
    return platform.machine() in _ARCHITECTURES


def namespaced_filter() -> bytes:
    """Return the filter for a command in its own namespaces, which already isolate its sockets."""
    program = _Program()
    program.refuse(_NEVER)
    program.refuse_namespaces()
    program.refuse_set_id()
    # Network namespaces do not isolate other families, such as VSOCK to a virtual machine's host.
    program.only_sockets((_UNIX, _INET, _INET6, _NETLINK))
    return program.assembled()


def shared_filter(*, network: bool, signals: bool) -> bytes:
    """Return the filter for a command that shares namespaces with the host.

    `signals`: Landlock already confines signals. Landlock does not restrict Unix sockets by path, so only socket pairs
    are allowed. Changes of file modes and times are decided by the launcher, through the filter's notifications.
    """
    program = _Program()
    program.refuse((*_NEVER, *_NOT_AMONG_OTHERS))
    if not signals:
        program.refuse(_SIGNALS)
    program.refuse(_ATTRIBUTES, errno.ENOTSUP)
    program.refuse_namespaces()
    program.refuse_set_id()
    program.refuse(_OLD_TIMES, errno.ENOSYS)
    program.refuse(_LASTING)
    program.ask(("chmod", "fchmod", "fchmodat", "fchmodat2", "utimensat"))
    program.only_sockets((_INET, _INET6, _NETLINK) if network else ())
    program.only_connected_pairs()
    if not network:
        program.refuse(("connect",))
    return program.assembled()


class _Program:
    """A BPF program under construction. Each block leaves the system call number in the accumulator."""

    def __init__(self) -> None:
        self._machine = platform.machine()
        self._column = list(_ARCHITECTURES).index(self._machine)
        self._code: list[tuple[int, int, int, int]] = []
        self._add(_LOAD, _ARCHITECTURE)
        self._add(_EQUAL, _ARCHITECTURES[self._machine], 1, 0)
        self._refuse(errno.EPERM)  # the same numbers mean other calls on another architecture
        self._add(_LOAD, _NUMBER)
        if self._machine == "x86_64":
            self._add(_AT_LEAST, 0x40000000, 0, 1)  # x32 system call numbers
            self._refuse(errno.ENOSYS)

    def refuse(self, names: tuple[str, ...], error: int = errno.EPERM) -> None:
        for name in names:
            if (number := _NUMBERS[name][self._column]) is not None:
                self._add(_EQUAL, number, 0, 1)
                self._refuse(error)

    def refuse_namespaces(self) -> None:
        self.refuse(("clone3",), errno.ENOSYS)  # a filter cannot read its flags; C libraries fall back to clone
        for name, flags in (("clone", _NAMESPACES), ("unshare", _NAMESPACES | _NEW_TIME)):
            self._argument(name, _FIRST, 3)
            self._add(_ANY_BIT, flags, 0, 1)
            self._refuse(errno.EPERM)
            self._add(_LOAD, _NUMBER)
        self._argument("ioctl", _SECOND, 2 * len(_TERMINAL_REQUESTS) + 1)
        for request in _TERMINAL_REQUESTS:
            self._add(_EQUAL, request, 0, 1)
            self._refuse(errno.EPERM)
        self._add(_LOAD, _NUMBER)

    def refuse_set_id(self) -> None:
        self.refuse(("openat2",), errno.ENOSYS)  # a filter cannot read its flags either
        for name, mode, flags in _MODES:
            if _NUMBERS[name][self._column] is None:
                continue
            self._argument(name, mode if flags is None else flags, 3 if flags is None else 5)
            if flags is not None:
                self._add(_ANY_BIT, _MAKES_A_FILE, 0, 3)
                self._add(_LOAD, mode)
            self._add(_ANY_BIT, _SET_ID, 0, 1)
            self._refuse(errno.EPERM)
            self._add(_LOAD, _NUMBER)

    def ask(self, names: tuple[str, ...]) -> None:
        for name in names:
            if (number := _NUMBERS[name][self._column]) is not None:
                self._add(_EQUAL, number, 0, 1)
                self._add(_RETURN, _ASK)

    def only_sockets(self, families: tuple[int, ...]) -> None:
        self._argument("socket", _FIRST, len(families) + 2)
        for index, family in enumerate(families):
            self._add(_EQUAL, family, len(families) - index, 0)
        self._refuse(errno.EACCES)
        self._add(_LOAD, _NUMBER)

    def only_connected_pairs(self) -> None:
        """Refuse datagram pairs: they could still send to a socket of another process."""
        self._argument("socketpair", _SECOND, 4)
        self._add(_AND, 0xF)
        self._add(_EQUAL, _DATAGRAM, 0, 1)
        self._refuse(errno.EACCES)
        self._add(_LOAD, _NUMBER)

    def assembled(self) -> bytes:
        self._add(_RETURN, _ALLOW)
        return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, yes, no, value in self._code)

    def _argument(self, name: str, offset: int, length: int) -> None:
        """Load an argument if this is the call; otherwise skip the next `length` instructions."""
        number = _NUMBERS[name][self._column]
        assert number is not None
        self._add(_EQUAL, number, 0, length + 1)
        self._add(_LOAD, offset)

    def _refuse(self, error: int) -> None:
        self._add(_RETURN, _REFUSE | error)

    def _add(self, code: int, value: int, yes: int = 0, no: int = 0) -> None:
        self._code.append((code, yes, no, value))
