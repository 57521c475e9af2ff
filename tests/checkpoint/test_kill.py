"""A process that saves is killed with SIGKILL: the checkpoint before it stays usable, and the next save works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.checkpoint.resume import load_state

ROOT = Path(__file__).parents[2]

SAVE = """
import os, shutil, signal, sys
from pathlib import Path
from slurm_rlhf.checkpoint.directory import CheckpointDir

def save(run_dir, step, note):
    checkpoints = CheckpointDir(run_dir)
    path = checkpoints.begin(step)
    for role in ("actor", "critic"):
        (path / role).mkdir()
        (path / role / "model.bin").write_bytes(note.encode() * 1000)
    checkpoints.commit(step, {"note": note})
    checkpoints.prune(1)
"""

# The k-th child dies right before its k-th operation on a file; the first child that lives has seen them all.
KILL_AT_EVERY_OPERATION = (
    SAVE
    + """
TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")

def die_at(k):
    def hook(event, args):
        nonlocal k
        if event in TOUCHES:
            k -= 1
            if k == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

base, before, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
save(base / "template", before, "old")
k = status = 1
while status:
    run_dir = base / f"killed_{k:03d}"
    shutil.copytree(base / "template", run_dir)
    child = os.fork()
    if child == 0:
        die_at(k)
        save(run_dir, step, "new")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    k += 1
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
def test_kill_before_every_single_file_operation(tmp_path: Path, step: int) -> None:
    command = [sys.executable, "-c", KILL_AT_EVERY_OPERATION, tmp_path, "1", str(step)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)
    runs = sorted(tmp_path.glob("killed_*"))
    notes = []
    for run in runs:
        checkpoints = CheckpointDir(run)
        path = checkpoints.resolve("auto")
        assert path is not None, run.name
        note = load_state(path)["note"]
        assert all((path / role / "model.bin").read_bytes() == note.encode() * 1000 for role in ("actor", "critic"))
        notes.append(note)
        checkpoints.begin(3)
        checkpoints.commit(3, {})
        checkpoints.prune(1)
        assert [entry.name for entry in checkpoints.root.iterdir()] == ["step_000003"], run.name
    assert len(runs) > 30
    # Old until the rename, new from there on, and no way back.
    assert notes == sorted(notes, reverse=True)
    assert {"old", "new"} == set(notes)
