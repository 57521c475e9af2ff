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

TYPE_CHECKING = False  # typing, json and signal would take more than half of the start, which each program pays for
if TYPE_CHECKING:
    from typing import Any

NEVER = {
    "socket": (41, 198),
    "connect": (42, 203),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""System call -> its numbers on x86_64 and aarch64. Shared memory and queues of System V outlive their process."""

NEVER_BESIDE_OTHERS = {
    "socketpair": (53, 199),  # a datagram socket reaches any Unix socket of the node
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "kcmp": (312, 272),
    "chmod": (90, 53),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 54),
    "lchown": (94, 54),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, 88),
    "utimes": (235, 88),
    "futimesat": (261, 88),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
"""Calls on processes and files that Landlock leaves open; namespaces hide these."""

MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Machine -> its place in the tables, its number for seccomp, its number of `clone`."""
CLONE3, PRLIMIT = 435, (302, 261)
NEW_NAMESPACES = 0x7E020000
KEEP_CAPABILITIES, AMBIENT, AMBIENT_RAISE, READ_ALL = 8, 47, 2, 2
NO_NEW_PRIVILEGES, SET_SECCOMP, SET_DEATH_SIGNAL = 38, 22, 1
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EPERM, ENOSYS, SIGKILL = 1, 38, 9
LIST = 1 << 3  # a right that no file has
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
        filter_calls(libc, rules["landlock"])
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


def filter_calls(libc: Any, beside_others: bool) -> None:
    """Refuse the calls of the tables from here on (seccomp); `beside_others`: no namespaces hide others."""
    column, machine, clone = MACHINES[os.uname().machine]
    refused = NEVER | (NEVER_BESIDE_OTHERS if beside_others else {})
    load, equal, above, any_bit, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    no, missing, kill, yes = 0x50000 | EPERM, 0x50000 | ENOSYS, 0x80000000, 0x7FFF0000
    code = [(load, 0, 0, 4), (equal, 1, 0, machine), (leave, 0, 0, kill), (load, 0, 0, 0)]
    code += [(above, 0, 1, 0x40000000), (leave, 0, 0, kill)]  # x32 numbers the same calls otherwise
    for numbers in refused.values():
        code += [(equal, 0, 1, numbers[column]), (leave, 0, 0, no)]
    code += [(equal, 0, 1, CLONE3), (leave, 0, 0, missing)]  # its flags cannot be read here: libc then calls clone
    # Of these two the first argument decides: new namespaces among the flags, and another process than this one.
    for number, refuses in ((clone, (any_bit, 0, 1, NEW_NAMESPACES)), (PRLIMIT[column], (equal, 1, 0, 0))):
        code += [(equal, 0, 4, number), (load, 0, 0, 16), refuses, (leave, 0, 0, no), (leave, 0, 0, yes)]
    code.append((leave, 0, 0, yes))
    packed = b"".join(struct.pack("HBBI", *line) for line in code)
    memory = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(memory))
    asked(libc.prctl(SET_SECCOMP, 2, program, 0, 0), "seccomp")


if __name__ == "__main__":
    main(eval(sys.argv[1], {"__builtins__": {}}), sys.argv[2:])  # `box` writes it, as a literal
