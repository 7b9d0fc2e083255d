"""Execute a program that cannot connect to abstract Unix sockets of other programs. Runs as a separate program.

Abstract sockets belong to a network namespace, so a command with access to the host's network could reach those of the
desktop session and other programs. Landlock (ABI 6, Linux 6.12) limits it to sockets of its own process tree.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_SET_NO_NEW_PRIVS = 38
_ABSTRACT_UNIX_SOCKET = 1
REFUSED = 126


def main() -> None:
    library = ctypes.CDLL(None, use_errno=True)
    attributes = struct.pack("QQQ", 0, 0, _ABSTRACT_UNIX_SOCKET)
    ruleset = library.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if (
        ruleset < 0
        or library.prctl(_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0) < 0
        or library.syscall(_RESTRICT_SELF, ruleset, 0) < 0
    ):
        os.write(2, f"everloop: the command could not be started: {os.strerror(ctypes.get_errno())}\n".encode())
        os._exit(REFUSED)
    os.close(ruleset)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
