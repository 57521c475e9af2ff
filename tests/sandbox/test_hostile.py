"""Hostile programs in each kind of sandbox that this machine has: none escapes, each ends at its limit."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import scaled, until

from slurm_rlhf.sandbox.box import Limits, execute, problem

pytestmark = pytest.mark.slow
SIDE_BY_SIDE = 6


@dataclass(frozen=True)
class Targets:
    """Targets outside the sandbox."""

    victim: int  # a process
    secret: str  # a file, in a directory of its own
    word: str  # the content of the secret
    port: int  # a TCP port of this machine
    unix: str  # a socket
    folder: str  # the secret's


@dataclass(frozen=True)
class Hostile:
    family: str
    code: str
    hows: tuple[str, ...] = ("exit",)  # ways in which it may end
    limits: dict[str, Any] = field(default_factory=lambda: {"seconds": scaled(60)})


SHORT = {"seconds": 0.3}
MODULES = ("sys", "time", "mmap", "shutil", "signal", "socket", "subprocess", "threading")
TRY = """
import {modules}
libc = "ctypes" in globals() and ctypes.CDLL(None, use_errno=True)
def done(x):
    if x: print("ESCAPED", x, flush=True)
def attempt():
    {body}
try:
    attempt()
except Exception as error:
    print(type(error).__name__)
"""


def tried(body: str) -> str:
    """A program that imports what `body` names: it starts faster."""
    named = ["os", *(module for module in MODULES if f"{module}." in body)] + ["ctypes"] * (
        "libc." in body or "ctypes." in body
    )
    return TRY.format(body=body.replace("\n", "\n    "), modules=", ".join(named))


def programs(count: int, at: Targets, seed: int = 0) -> list[Hostile]:
    """`count` programs: every variant at least once if they are enough, then again those that end by themselves.

    A program that runs to a limit takes ten times as long as others.
    """
    rng = random.Random(seed)
    variants = [*readers(at), *writers(at), *callers(at), *killers(at), *climbers(at)]
    found = [*greedy()]
    while len(found) < count:
        found += rng.sample(variants, len(variants))
    return rng.sample(found[:count], count)


def greedy() -> Iterator[Hostile]:
    forks = ("os.fork()", "threading.Thread(target=time.sleep, args=(9,)).start()", "subprocess.Popen(['sleep', '9'])")
    for fork, pause in product(forks, ("pass", "time.sleep(0.001)")):
        loop = f"while True:\n    try: {fork}\n    except (OSError, RuntimeError): {pause}"
        yield Hostile("fork bomb", tried(loop), ("time", "memory", "exit"), SHORT)
    memory = ("bytearray(10 << 30)", "b'a' * (10 << 30)", "mmap.mmap(-1, 10 << 30)", "list(range(1 << 31))")
    for grab in memory:
        yield Hostile("10 GB", tried(f"done(len({grab}))"), ("exit", "memory"))
    for parts in (8, 20):
        code = (
            f"for i in range({parts}):\n    if os.fork() == 0: x = b'a' * (200 << 20); time.sleep(99)\ntime.sleep(99)"
        )
        yield Hostile("10 GB in parts", tried(code), ("memory", "exit"))
    prints = ("print('x' * 99)", "os.write(2, b'x' * 9999)", "sys.stdout.write('x'); sys.stdout.flush()")
    for say, start in product(prints, ("", "os.fork()\n")):
        limits = {"seconds": scaled(60), "output": 20_000}
        yield Hostile("endless print", tried(f"{start}while True: {say}"), ("output",), limits)
    for folder, name in product((".", "/dev/shm", "/tmp"), ("'f'", "'f%d' % i")):
        code = f"for i in range(300): open(os.path.join('{folder}', {name}), 'ab').write(b'x' * (1 << 20))\ndone(1)"
        yield Hostile("full disk", tried(code), ("exit",), {"seconds": scaled(60), "disk": 8 << 20})
    ignored = "for n in (1, 2, 3, 14, 15, 24, 25): signal.signal(n, signal.SIG_IGN)\n"
    for wait, deaf in product(("time.sleep(99)", "while True: pass", "signal.pause()"), ("", ignored)):
        yield Hostile("endless", tried(deaf + wait), ("time",), SHORT)
    yield Hostile("spin", tried(ignored + "while True: pass"), ("exit",), {"seconds": scaled(60), "cpu_s": 1})
    for leave in ("os.setsid()", "os.setpgid(0, 0)", "pass"):
        code = f"if os.fork() == 0:\n    {leave}\n    os.close(1); os.close(2); time.sleep(99)"
        yield Hostile("stays", tried(code))


def readers(at: Targets) -> Iterator[Hostile]:
    ways = (
        "done(open(p).read())",
        "done(os.read(os.open(p, os.O_RDONLY), 9))",
        "os.symlink(p, 'l'); done(open('l').read())",
        "os.link(p, 'l'); done(open('l').read())",
        "shutil.copy(p, 'c'); done(open('c').read())",
        "done(subprocess.run(['cat', p], capture_output=True).stdout)",
        "done(b'w' in subprocess.run(['head', '-c9', p], stdout=-1).stdout)",
        "f = libc.open(p.encode(), 0); done(f >= 0 and os.read(f, 9))",
    )
    places = (
        "",
        "/proc/1/root",
        f"/proc/{at.victim}/root",
        "/proc/self/root",
        "../../../../../..",
        "/proc/self/cwd/../..",
    )
    for way, place in product(ways, places):
        yield Hostile("another user's file", tried(f"p = {place + at.secret!r}\n{way}"))
    for way in ("done(os.listdir(p))", "done([e.name for e in os.scandir(p)])", "os.chdir(p); done(os.listdir())"):
        yield Hostile("another user's folder", tried(f"p = {at.folder!r}\n{way}"))


def writers(at: Targets) -> Iterator[Hostile]:
    ways = (
        "open(p, 'a').write('x')",
        "os.truncate(p, 0)",
        "os.unlink(p)",
        "os.rename(p, p + '2')",
        "os.chmod(p, 0o777)",
        "os.utime(p, (1, 1))",
        "os.symlink(p, 'l'); open('l', 'w').write('x')",
        "os.replace(__file__, p)",
        "os.setxattr(p, 'user.x', b'1')",
        "os.chown(p, 0, 0)",
    )
    for way in ways:
        yield Hostile("changes a file", tried(f"p = {at.secret!r}\n{way}\ndone(1)"))
    folders = (
        at.folder,
        "/usr",
        "/etc",
        "/",
        sys.prefix,
        "/dev",
        "/proc/sys/kernel",
        "/lib",
        "/opt",
        "/..",
        "/var/tmp",
    )
    for folder, way in product(folders, ("open(p, 'w')", "os.mkdir(p)", "os.symlink('/', p)", "os.mkfifo(p)")):
        yield Hostile("writes outside", tried(f"p = {folder + '/hostile'!r}\n{way}\ndone(1)"))


def callers(at: Targets) -> Iterator[Hostile]:
    ways = (
        f"s = socket.socket(); s.connect(('127.0.0.1', {at.port})); done(1)",
        f"done(socket.create_connection(('localhost', {at.port}), 5))",
        f"s = socket.socket(socket.AF_UNIX); s.connect({at.unix!r}); done(1)",
        f"s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + 'hostile-{at.port}'); done(1)",
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', 9)); done(1)",
        "s = socket.socket(socket.AF_INET6); s.bind(('::1', 0)); done(1)",
        "s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); done(1)",
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); done(1)",
        "s = socket.socket(40, socket.SOCK_STREAM); done(1)",
        f"import urllib.request as u; done(u.urlopen('http://127.0.0.1:{at.port}', timeout=5))",
        f"a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.connect({at.unix!r}); done(1)",
        "p = ctypes.create_string_buffer(120); done(libc.syscall(425, 8, p) >= 0)",
        "done(libc.syscall(29, 0, 4096, 0o1777) >= 0)",
        f"subprocess.run(['bash', '-c', 'echo x > /dev/tcp/127.0.0.1/{at.port}'], check=True); done(1)",
    )
    for way in ways:
        yield Hostile("network", tried(way))


def killers(at: Targets) -> Iterator[Hostile]:
    for target, number in product((at.victim, "os.getppid()", 1, -1, "-os.getppid()", -at.victim), (9, 15, 19)):
        yield Hostile("signal", tried(f"os.kill({target}, {number})"), ("exit", "time"), SHORT)
    ways = (
        f"os.killpg({at.victim}, 9)",
        f"done(libc.syscall(200, {at.victim}, 9) == 0)",
        f"done(libc.syscall(234, {at.victim}, {at.victim}, 9) == 0)",
        f"signal.pidfd_send_signal(os.pidfd_open({at.victim}), 9); done(1)",
        f"os.setpriority(os.PRIO_PROCESS, {at.victim}, 19); done(1)",
        f"os.sched_setaffinity({at.victim}, [0]); done(1)",
        f"import resource; resource.prlimit({at.victim}, resource.RLIMIT_CPU, (1, 1)); done(1)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); done(1)",
    )
    for way in ways:
        yield Hostile("signal", tried(way))
    ways = (
        f"done(libc.ptrace(16, {at.victim}, 0, 0) == 0)",
        f"done(libc.ptrace(0x4206, {at.victim}, 0, 0) == 0)",
        "done(libc.ptrace(0, 0, 0, 0) == 0)",
        f"done(open('/proc/{at.victim}/mem', 'rb'))",
        f"done(open('/proc/{at.victim}/environ', 'rb').read())",
        f"done(os.listdir('/proc/{at.victim}/fd'))",
        f"done(os.readlink('/proc/{at.victim}/exe'))",
        f"done(libc.syscall(310, {at.victim}, None, 0, None, 0, 0) == 0)",
        f"done(libc.syscall(438, os.pidfd_open({at.victim}), 0, 0) >= 0)",
    )
    for way in ways:
        yield Hostile("ptrace", tried(way))


def climbers(at: Targets) -> Iterator[Hostile]:
    ways = (
        f"for n in os.listdir('/proc'):\n    if n == '{at.victim}': done(open('/proc/' + n + '/cmdline').read())",
        "os.write(os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY), b'x'); done(1)",
        "os.write(os.open('/proc/sysrq-trigger', os.O_WRONLY), b'h'); done(1)",
        "os.write(os.open('/proc/self/uid_map', os.O_WRONLY), b'0 0 1'); done(1)",
        "done(open('/dev/kmsg', 'rb'))",
        "done(open('/dev/mem', 'rb'))",
        "done(os.listdir('/root') and open('/root/.bashrc').read())",
        "done(open('/etc/passwd').read())",
        "done(open('/etc/shadow').read())",
        "done(os.listdir('/home'))",
        "done(os.listdir('/sys/class/net'))",
        "os.setuid(0); done(1)",
        "os.setgroups([0]); done(1)",
        "os.chroot('.'); done(1)",
        "os.mknod('d', 0o60666, os.makedev(8, 0)); done(open('d', 'rb'))",
        "done(libc.unshare(0x10000000) == 0)",
        "done(libc.unshare(0x00020000) == 0)",
        f"done(libc.setns(os.open('/proc/{at.victim}/ns/mnt', 0), 0) == 0)",
        "done(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0)",
        "done(libc.umount2(b'/tmp', 2) == 0)",
        "done(libc.syscall(56, 0x10000011, 0, 0, 0, 0) > 0)",
        "done(libc.syscall(321, 0, None, 0) >= 0)",
        "done(libc.syscall(298, None, 0, -1, -1, 0) >= 0)",
        "done(libc.syscall(250, 0, -3, 0) >= 0)",
        "subprocess.run(['sudo', '-n', 'true'], check=True); done(1)",
        "subprocess.run(['su', '-c', 'true'], check=True, stdin=-3); done(1)",
        "subprocess.run(['unshare', '-Ur', 'true'], check=True, stderr=-3); done(1)",
        "os.chmod('/usr/bin/bash', 0o4755); done(1)",
        "for n in range(3, 99):\n    try: os.write(n, b'x')\n    except OSError: continue\n    done(n)",
        "for n in range(3, 99):\n    try: d = os.fstat(n)\n    except OSError: continue\n    done(n)",
    )
    for way in ways:
        yield Hostile("climbs", tried(way))


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Targets]:
    """Make the targets that a program could reach; at the end all of them have to be as they were."""
    folder = tmp_path / "others"
    folder.mkdir()
    secret, word = folder / "secret", "w" * 40
    secret.write_text(word)
    before = secret.stat()
    with ExitStack() as stack:
        victim = stack.enter_context(subprocess.Popen(["sleep", "100000"], start_new_session=True))
        stack.callback(victim.kill)
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0)))]
        port = listeners[0].getsockname()[1]
        for address in (f"{folder}/unix", f"\0hostile-{port}"):
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            listeners[-1].bind(address)
            listeners[-1].listen()
        names = sorted(os.listdir(folder))
        yield Targets(victim.pid, str(secret), word, port, f"{folder}/unix", str(folder))
        assert victim.poll() is None
        assert os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert Path(f"/proc/{victim.pid}/stat").read_text().split()[2] == "S"
        for listener in listeners:
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert sorted(os.listdir(folder)) == names
        assert secret.read_text() == word
        assert (secret.stat().st_mode, secret.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def left_over(mark: str) -> list[int]:
    """Processes whose command line names a directory of the sandbox."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if mark in " ".join(one.info["cmdline"] or ())]


def escapes(kind: str, hostile: Hostile) -> list[str]:
    """Run one; say what is wrong with how it ended."""
    program = [sys.executable, "-IS", "{work}/p.py"]
    limits = Limits(**hostile.limits)
    ended = execute(kind, program, {"p.py": hostile.code}, b"", limits)
    wrong = [] if ended.how in hostile.hows else [f"ended by {ended.how}"]
    many = hostile.family == "full disk" and "f%d" in hostile.code  # any number of files, up to a size each
    known = {"landlock": many, "apptainer": "'/dev/" in hostile.code or (many and os.geteuid() == 0)}  # `LACKS` says so
    wrong += ["escaped"] if b"ESCAPED" in ended.output and not known.get(kind) else []
    wrong += ["printed too much"] if len(ended.output) > limits.output else []
    return [f"{hostile.family}: {each} {ended.code} {ended.output[-300:]!r}\n{hostile.code}" for each in wrong]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("bubblewrap", 600),
        ("landlock", 400),
        pytest.param("bubblewrap", 5000, marks=pytest.mark.full),
        pytest.param("landlock", 5000, marks=pytest.mark.full),
        pytest.param("apptainer", 400, marks=pytest.mark.full),
    ],
)
def test_no_hostile_program_escapes(
    kind: str, count: int, targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := problem(kind):
        pytest.skip(f"no {kind} here: {why}")
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(boxes))
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        wrong = [each for found in pool.map(lambda one: escapes(kind, one), programs(count, targets)) for each in found]
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:20])
    until(lambda: not left_over(str(boxes)), "the end of all processes")
    assert not list(boxes.iterdir())
