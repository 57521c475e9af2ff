"""A rank that saves beside its steps is killed at random moments: as a program, who starts, kills and looks."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.trainer.async_save import AsyncSave, flush
from slurm_rlhf.trainer.optimizer_state import MOMENTS, Fragment, ShardReader, write_shard

PARAMETERS, ELEMENTS = 6, 50_000
CPU = torch.device("cpu")


def fragments(value: float) -> list[Fragment]:
    kinds = ("fp32", *MOMENTS)
    return [
        Fragment(f"p{number}", 0, {kind: torch.full((ELEMENTS,), value + number) for kind in kinds})
        for number in range(PARAMETERS)
    ]


def save_for_ever(run_dir: Path) -> None:
    """What a rank and the conductor do: step, copy, and write beside the next step, which changes what was copied."""
    checkpoints, saves, step = CheckpointDir(run_dir), AsyncSave(), 0
    while True:
        step += 1
        live = fragments(float(step))
        path = checkpoints.begin(step) / "actor"
        path.mkdir()

        def write(copies: list[Fragment], path: Path = path) -> None:
            write_shard(path, 0, copies)
            flush(path, "rank_00000.*")

        pending = saves.begin(live, CPU, write)
        for fragment in live:
            for tensor in fragment.tensors.values():
                tensor.fill_(-1.0)
        pending.written.result()
        checkpoints.commit(step, {"step": step})
        checkpoints.prune(2)


def assert_whole(run_dir: Path) -> tuple[int, bool]:
    """The newest checkpoint loads, with the values of its step; (the step, whether a half one lies beside it)."""
    checkpoints = CheckpointDir(run_dir)
    path = checkpoints.resolve("auto")
    assert path is not None
    step = checkpoints.load_state(path, ["actor"])["step"]
    reader = ShardReader(path / "actor", 0)
    for fragment in fragments(0.0):
        reader.fill(fragment)
        expected = step + float(fragment.name[1:])
        assert all(bool((tensor == expected).all()) for tensor in fragment.tensors.values()), path
    return step, any(checkpoints.root.glob("step_??????.tmp"))


def kill(run_dir: Path, delay_s: float) -> None:
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(run_dir)
        finally:
            os._exit(1)
    while not any(CheckpointDir(run_dir).root.glob("step_??????")):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.002)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def main() -> None:
    torch.set_num_threads(1)
    base, kills = Path(sys.argv[1]), int(sys.argv[2])
    draw, halves = random.Random(0), 0
    for number in range(kills):
        run_dir = base / str(number)
        kill(run_dir, draw.uniform(0.0, 0.15))
        step, half = assert_whole(run_dir)
        halves += half
        print(f"killed after {step} checkpoints{', while one was being written' * half}", flush=True)
    assert halves, "no kill came while something was written"


if __name__ == "__main__":
    main()
