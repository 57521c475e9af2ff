"""Hostile programs in each kind of sandbox that this machine has: none escapes, each ends at its limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from hostile_programs import Hostile, Targets, programs
from waiting import until

from slurm_rlhf.sandbox.box import Limits, execute, problem

pytestmark = pytest.mark.slow
SIDE_BY_SIDE = 6


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Targets]:
    """What a program could reach; at the end all of it has to be as it was."""
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
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += [int(entry.name)] if mark.encode() in (entry / "cmdline").read_bytes() else []
            except OSError:
                continue
    return found


def escapes(kind: str, hostile: Hostile) -> list[str]:
    """Run one; say what is wrong with how it ended."""
    program = [sys.executable, "-IS", "{work}/p.py"]
    limits = Limits(**hostile.limits)
    ended = execute(kind, program, {"p.py": hostile.code}, b"", limits)
    wrong = [] if ended.how in hostile.hows else [f"ended by {ended.how}"]
    wrong += ["escaped"] if b"ESCAPED" in ended.output and not _known(kind, hostile) else []
    wrong += ["printed too much"] if len(ended.output) > limits.output else []
    return [f"{hostile.family}: {each} {ended.code} {ended.output[-300:]!r}\n{hostile.code}" for each in wrong]


def _known(kind: str, hostile: Hostile) -> bool:
    """What `commands.LACKS` says of a kind: in Landlock's files can be made without end, up to the size of each."""
    return kind == "landlock" and hostile.family == "full disk" and "f%d" in hostile.code


def check(kind: str, count: int, targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("bubblewrap", 600),
        ("landlock", 400),
        pytest.param("bubblewrap", 5000, marks=pytest.mark.full),
        pytest.param("landlock", 5000, marks=pytest.mark.full),
    ],
)
def test_no_hostile_program_escapes(
    kind: str, count: int, targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(kind, count, targets, tmp_path, monkeypatch)
