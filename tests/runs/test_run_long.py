"""Runs of many steps: no process grows, nothing stays open, and what is written at each step costs the same."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from slurm_cluster import OVER, Cluster, said
from training_runs import is_worker, metrics, started, workspace

STEPS, WARM = 2000, 500
SLURM_STEPS, SLURM_WARM = 700, 500
KEPT = 3  # ckpt.max_num
RECORDS = 20_000  # bytes of a step's metrics, in JSON and for TensorBoard, and of its samples
LONG = (
    *("--rollout.batch_size=2", "--rollout.n_samples_per_prompt=4", "--train.batch_size=8"),
    *("--rollout.max_new_tokens=4", "--eval.dataset=", "--train.num_episodes=1000", "--logger.progress=none"),
    *("--ckpt.save_steps=25", f"--ckpt.max_num={KEPT}", "--ckpt.async_save=true"),
)
CHEAP = ("--algo.advantage.estimator=group_norm", "--algo.kl.init_coef=0")

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.slow]


# --- what the processes of a run hold while it goes on ----------------------------------------------------------------


MB = 1_000_000
COUNTED = ("files", "threads")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process."""

    step: int  # steps that the run had done
    rss: int  # bytes
    files: int  # open descriptors, sockets and pipes included
    threads: int
    cpu_s: float


@dataclass(slots=True)
class History:
    """Holds samples of a run's processes and of its directory."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by the name of a process
    disk: list[tuple[int, int, int]] = field(default_factory=list)  # step, bytes of records, bytes of all else

    def look(self, run_dir: Path, step: int) -> None:
        """Add a sample of every process of the run, and of its directory; who ends meanwhile is left out."""
        for name, pid in processes(run_dir):
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    sample = Sample(
                        step,
                        process.memory_info().rss,
                        process.num_fds(),
                        process.num_threads(),
                        times.user + times.system,
                    )
            except (psutil.Error, OSError):
                continue
            self.samples.setdefault(name, []).append(sample)
        records = sum(size(run_dir / name) for name in ("metrics.jsonl", "samples.jsonl", "tensorboard"))
        self.disk.append((step, records, size(run_dir) - records))

    def follow(self, run_dir: Path, every: int, ended: Callable[[], bool]) -> None:
        """Look after every so many steps until the run has `ended`."""
        due, path = 1, run_dir / "metrics.jsonl"
        while not ended():
            step = path.read_bytes().count(b"\n") if path.exists() else 0
            if step >= due:
                self.look(run_dir, step)
                due = step + every
            time.sleep(0.05)

    def whole(self, after: int) -> dict[str, list[Sample]]:
        """The samples after a step, of the processes that were there all along."""
        last = max(step for step, _, _ in self.disk)
        kept = {name: [one for one in seen if one.step >= after] for name, seen in self.samples.items()}
        return {name: seen for name, seen in kept.items() if seen and last - seen[-1].step < 0.1 * last}


def slope_per_100(points: Sequence[tuple[float, float]]) -> float:
    """Compute the growth of the second number per 100 of the first: Theil and Sen's median of slopes.

    A few points that lie apart, as while a report is being written, do not tilt it.
    """
    pairs = [(b[0] - a[0], b[1] - a[1]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] != a[0]]
    if not pairs:
        raise ValueError(f"a slope needs points at two places; these are {len(points)} at one")
    return 100.0 * statistics.median(rise / run for run, rise in pairs)


def more(samples: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """Find what has grown from the first third of the samples to the last: name -> (median then, median now).

    The most would count threads that live as long as a weight update does, which only some samples meet.
    """
    third = max(len(samples) // 3, 1)
    found = {}
    for what in COUNTED:
        parts = samples[:third], samples[-third:]
        first, last = (statistics.median_high(getattr(one, what) for one in part) for part in parts)
        if last > first:
            found[what] = (first, last)
    return found


def cpu_per_100(samples: Sequence[Sample]) -> tuple[float, float]:
    """CPU seconds per 100 steps in the first half of the samples and in the second."""
    middle = len(samples) // 2
    halves = (samples[: middle + 1], samples[middle:])
    return tuple(100.0 * (h[-1].cpu_s - h[0].cpu_s) / (h[-1].step - h[0].step) for h in halves)  # type: ignore[return-value]


def processes(run_dir: Path) -> Iterator[tuple[str, int]]:
    """Name and process id of all whose command line names the run: conductor, torchruns, ranks, srun and wrappers."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if f"--run_dir={run_dir}" in words:
            yield f"{kind(words)} {process.pid}", process.pid


def kind(words: Sequence[str]) -> str:
    """Name the kind of a run's process and its role: `rank of actor`."""
    line = " ".join(words)
    role = re.search(r"--role=(\w+)", line)
    if role is None:
        return "conductor"
    if is_worker(line):
        return f"rank of {role[1]}"
    return f"torchrun of {role[1]}" if "torch.distributed.run" in line else f"{Path(words[0]).name} of {role[1]}"


def size(place: Path) -> int:
    """Bytes of a file, or of the files below a directory; what vanishes meanwhile is not counted."""
    total = 0
    for path in [place, *place.rglob("*")]:
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


# --- the tests --------------------------------------------------------------------------------------------------------


def assert_flat(history: History, run_dir: Path, steps: int, warm: int) -> None:
    """Every process after its warm-up, and the run directory."""
    found = history.whole(warm)
    assert len(metrics(run_dir)) == steps
    roles = {name.rpartition(" ")[0] for name in found}
    assert {"conductor", "rank of actor", "rank of rollout"} <= roles  # under Slurm ranks are started by no torchrun
    for name, samples in found.items():
        assert slope_per_100([(one.step, one.rss / MB) for one in samples]) < 1.0, name
        assert more(samples) == {}, name
    (conductor,) = (samples for name, samples in found.items() if name.startswith("conductor"))
    before, after = cpu_per_100(conductor)
    assert after < 1.5 * before
    checkpoint = max(size(path) for path in (run_dir / "checkpoints").glob("step_??????"))
    disk = [each for each in history.disk if each[0] >= warm]
    assert max(others for _, _, others in disk) < (KEPT + 2) * checkpoint + 3 * MB
    assert slope_per_100([(step, records) for step, records, _ in disk]) < 100 * RECORDS


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("more_words", [(), CHEAP], ids=str)
def test_two_thousand_steps(tmp_path: Path, more_words: tuple[str, ...]) -> None:
    """PPO with all of its roles, and group_norm, which has actor and engine only."""
    run_dir, history = tmp_path / "run", History()
    words = (*LONG, f"--train.max_steps={STEPS}", *more_words)
    with started(workspace(tmp_path), run_dir, *words) as run:
        history.follow(run_dir, 10, lambda: run.process.poll() is not None)
        code, output = run.wait()
    assert code == 0, output
    assert_flat(history, run_dir, STEPS, WARM)


@pytest.mark.timeout(1200)
def test_many_steps_under_slurm(slurm: Cluster) -> None:
    run_dir, history = slurm.shared / "long", History()
    config = workspace(slurm.shared / "long_work")
    options = ["--nodes=3", "--gres=gpu:8", "--cpus-per-task=4", "--mem=8000"]
    words = (*LONG, *CHEAP, "--vllm.num_engines=1", "--vllm.num_nodes=1", f"--train.max_steps={SLURM_STEPS}")
    job = slurm.submit(config, run_dir, options, *words)
    history.follow(run_dir, 2, lambda: slurm.job(job)["JobState"] in OVER)
    assert slurm.wait_over(job) == ("COMPLETED", 0), said(run_dir)
    assert_flat(history, run_dir, SLURM_STEPS, SLURM_WARM)
