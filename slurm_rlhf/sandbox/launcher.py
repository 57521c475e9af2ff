"""Take rights away from this process, then become the program that is not trusted: `launcher.py RULES PROGRAM...`.

Imports the standard library alone, because it runs as a file inside the sandbox. It sets limits, leaves root, and asks
the kernel for a filter of system calls (seccomp): in every kind of sandbox no sockets, no tracing, no new namespaces,
no process group of its own, by which all its processes are ended. Without namespaces (`landlock` in the rules) Landlock
closes the file system, and the filter also refuses signals and changes of files' modes and of other processes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # importing typing, json and signal would more than double the start of each program
if TYPE_CHECKING:
    from typing import Any

MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Machine -> index of its number among a call's numbers, seccomp's number of it, its number of `clone`."""
CLONE3, PRLIMIT = 435, (302, 261)
NEW_NAMESPACES = 0x7E020000
KEEP_CAPABILITIES, AMBIENT, AMBIENT_RAISE, READ_ALL = 8, 47, 2, 2
NO_NEW_PRIVILEGES, SET_SECCOMP, SET_DEATH_SIGNAL = 38, 22, 1
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EPERM, ENOSYS, SIGKILL = 1, 38, 9
LIST = 1 << 3  # right on directories alone
READ = 1 << 0 | 1 << 2 | LIST  # execute, read, list
READ_WRITE_FILE = 1 << 1 | 1 << 2
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Version of Landlock -> all rights on files that it knows."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def main(rules: dict[str, Any], program: list[str]) -> None:
    """Become `program`; raises OSError where the kernel refuses what the rules ask for."""
    limit(rules)
    libc = ctypes.CDLL(None, use_errno=True)
    if rules["user"]:
        leave_root(libc, rules["user"])
    asked(libc.prctl(SET_DEATH_SIGNAL, SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    asked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if rules["landlock"]:
        close_files(libc, rules["readable"], rules["writable"])
    if rules["filter"]:
        filter_calls(libc, rules["refused"])
    os.execv(program[0], program)


def asked(answer: int, what: str) -> int:
    """Return what the kernel answered; raises OSError where it refused."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return answer


def limit(rules: dict[str, Any]) -> None:
    """Set the limits; the one on CPU seconds ends the process by a signal that it cannot catch."""
    limits = {
        resource.RLIMIT_CPU: rules["cpu_s"],
        resource.RLIMIT_AS: rules["memory"],
        resource.RLIMIT_NPROC: rules["processes"],
        resource.RLIMIT_NOFILE: rules["files"],
        resource.RLIMIT_FSIZE: rules["disk"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))


def leave_root(libc: Any, user: int) -> None:
    """Become `user`, who keeps one right of root: to read this Python, which may lie in root's home."""
    os.setgroups([])
    os.setresgid(user, user, user)
    asked(libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0), "PR_SET_KEEPCAPS")
    os.setresuid(user, user, user)
    right = 1 << READ_ALL
    asked(libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", right, right, right, 0, 0, 0)), "capset")
    asked(libc.prctl(AMBIENT, AMBIENT_RAISE, READ_ALL, 0, 0), "PR_CAP_AMBIENT")


def close_files(libc: Any, readable: list[str], writable: str) -> None:
    """Let this process read below `readable`, write below `writable`, and open no other file (Landlock)."""
    version = asked(libc.syscall(CREATE_RULESET, None, 0, 1), "Landlock")
    rights = RIGHTS[min(version, max(RIGHTS))]
    attributes = struct.pack("QQQ", rights, 3, 3)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = asked(libc.syscall(CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    allowed = [(path, READ) for path in readable] + [(path, READ_WRITE_FILE) for path in DEVICES] + [(writable, rights)]
    for path, wanted in allowed:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", wanted if os.path.isdir(path) else wanted & ~LIST, place)
        asked(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(place)
    asked(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def filter_calls(libc: Any, refused: list[list[int]]) -> None:
    """Refuse system calls from here on (seccomp); `refused`: numbers of each, one per machine of `MACHINES`."""
    column, machine, clone = MACHINES[os.uname().machine]
    load, equal, above, any_bit, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    no, missing, kill, yes = 0x50000 | EPERM, 0x50000 | ENOSYS, 0x80000000, 0x7FFF0000
    code = [(load, 0, 0, 4), (equal, 1, 0, machine), (leave, 0, 0, kill), (load, 0, 0, 0)]
    code += [(above, 0, 1, 0x40000000), (leave, 0, 0, kill)]  # the x32 ABI, whose numbers differ
    for numbers in refused:
        code += [(equal, 0, 1, numbers[column]), (leave, 0, 0, no)]
    code += [(equal, 0, 1, CLONE3), (leave, 0, 0, missing)]  # a filter cannot read its flags: libc then calls clone
    # Refused by the first argument: clone with flags for new namespaces, prlimit of another process than this one.
    for number, refuses in ((clone, (any_bit, 0, 1, NEW_NAMESPACES)), (PRLIMIT[column], (equal, 1, 0, 0))):
        code += [(equal, 0, 4, number), (load, 0, 0, 16), refuses, (leave, 0, 0, no), (leave, 0, 0, yes)]
    code.append((leave, 0, 0, yes))
    packed = b"".join(struct.pack("HBBI", *line) for line in code)
    memory = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(memory))
    asked(libc.prctl(SET_SECCOMP, 2, program, 0, 0), "seccomp")


if __name__ == "__main__":
    main(eval(sys.argv[1], {"__builtins__": {}}), sys.argv[2:])  # `box` writes it, as a literal
