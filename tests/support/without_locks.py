"""Become a command whose kernel refuses to lock files, as on a file system without locks: `without_locks.py COMMAND`.

A seccomp filter answers flock with EOPNOTSUPP, in this process and all that it starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, EQUAL, ANSWER = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
FLOCK = {"x86_64": 73, "aarch64": 32}


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def refuse_locks() -> None:
    steps = [
        (LOAD, 0, 0, 0),  # the number of the system call
        (EQUAL, 0, 1, FLOCK[platform.machine()]),
        (ANSWER, 0, 0, ERRNO | errno.EOPNOTSUPP),
        (ANSWER, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(steps), code)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    refuse_locks()
    os.execvp(sys.argv[1], sys.argv[1:])
