"""Print the figures of the house: the code that a training step runs through, and what a step takes.

    .venv/bin/python tests/lab/house_figures.py [--only quickstart,executed] [--steps 12]

quickstart: a run of sbatch/quickstart.toml with `--steps` steps: seconds until its first step begins, seconds of a step
(median of those after the second), and the conductor's CPU time for a response in these steps.
executed: the same run under coverage: files and lines of the package that each process runs in one step. It makes no
checkpoint and no evaluation, and comes after two others.

The quickstart's inputs are made first, unless runs/quickstart_input has them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "slurm_rlhf"
INPUT = ROOT / "runs" / "quickstart_input"
PROGRAM = str(ROOT / ".venv" / "bin" / "slurm-rlhf")
WARM = 2
"""Steps that are not measured."""
TRACER = """
import json, os, sys, threading, time

import coverage

OUT, METRICS, FIRST = os.environ["HOUSE_OUT"], os.environ["HOUSE_METRICS"], int(os.environ["HOUSE_FIRST"])
measured = coverage.Coverage(data_file=None, source=[os.environ["HOUSE_PACKAGE"]], config_file=False, messages=False)
measured.set_option("run:disable_warnings", ["module-not-imported", "no-data-collected"])


def steps():
    try:
        with open(METRICS, "rb") as file:
            return file.read().count(b"\\n")
    except OSError:
        return 0


def watch():
    for until, context in ((FIRST, "step"), (FIRST + 1, "after")):
        while steps() < until:
            time.sleep(0.002)
        measured.switch_context(context)
    data = measured.get_data()
    data.set_query_context("step")
    lines = {name: data.lines(name) for name in data.measured_files()}
    path = os.path.join(OUT, f"{os.getpid()}.json")
    with open(path, "w") as file:
        json.dump({"argv": sys.orig_argv, "lines": lines}, file)


measured.start()
threading.Thread(target=watch, daemon=True).start()
"""
"""A sitecustomize.py: coverage from the start of Python on, in a context of its own for one step."""


def make_input() -> None:
    """Make data and model of the quickstart, as quickstart.sh does."""
    if (INPUT / "model" / "config.json").exists():
        return
    INPUT.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, ROOT / "sbatch" / "quickstart_data.py", INPUT], check=True)
    subprocess.run([PROGRAM, "sft", ROOT / "sbatch" / "quickstart_sft.toml"], check=True, stdout=subprocess.DEVNULL)


def quickstart(run_dir: Path, steps: int, **environment: str) -> Iterator[tuple[int, float, float]]:
    """Train; yield each step that is done, at which time after the start, and the conductor's CPU seconds by then."""
    command = [PROGRAM, "train", str(ROOT / "sbatch" / "quickstart.toml"), f"--run_dir={run_dir}"]
    command += [f"--train.max_steps={steps}", "--eval.dataset=", "--logger.progress=none"]
    began, log = time.monotonic(), run_dir.with_suffix(".log")
    with log.open("w") as output:
        run = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
        conductor, known = psutil.Process(run.pid), 0
        while known < steps and run.poll() is None:
            times = conductor.cpu_times()
            if (done := len(metrics(run_dir))) > known:
                known = done
                yield known, time.monotonic() - began, times.user + times.system
            time.sleep(0.01)
        if run.wait():
            raise SystemExit(f"the quickstart has failed:\n{log.read_text()[-4000:]}")


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Read what the run has recorded so far."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_quickstart(directory: Path, steps: int) -> None:
    """Measure start, step and the conductor's CPU time."""
    run_dir = directory / "run"
    seen = list(quickstart(run_dir, steps))
    rows = metrics(run_dir)
    seconds = [row["time/step"] for row in rows]
    (first, _, before), (last, _, after) = next(each for each in seen if each[0] >= WARM), seen[-1]
    responses = (last - first) * 128 * 4  # rollout.batch_size, rollout.n_samples_per_prompt
    print(f"quickstart: its first step begins after {seen[0][1] - seconds[0]:.1f} s")
    print(f"quickstart: a step takes {statistics.median(seconds[WARM:]):.3f} s (median of {len(seconds) - WARM})")
    print(f"conductor: {1e6 * (after - before) / responses:.0f} us of CPU per response ({responses} responses)")


def print_executed(directory: Path) -> None:
    """Count the files and lines that a step runs through, by process."""
    (directory / "tracer").mkdir()
    (directory / "tracer" / "sitecustomize.py").write_text(TRACER)
    out, run_dir = directory / "out", directory / "traced"
    out.mkdir()
    settings = {"HOUSE_OUT": str(out), "HOUSE_METRICS": str(run_dir / "metrics.jsonl"), "HOUSE_FIRST": str(WARM)}
    paths = {"PYTHONPATH": str(directory / "tracer"), "HOUSE_PACKAGE": str(PACKAGE)}
    for _ in quickstart(run_dir, WARM + 3, **settings, **paths):
        pass
    found: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for path in out.glob("*.json"):
        process = json.loads(path.read_text())
        kind = kind_of(process["argv"])
        found[kind] |= {(name, line) for name, lines in process["lines"].items() for line in lines}
    found["all"] = set().union(*found.values())
    for kind, lines in sorted(found.items(), key=lambda each: len(each[1])):
        print(f"one step, {kind}: {len({name for name, _ in lines})} files, {len(lines)} executed lines")


def kind_of(argv: list[str]) -> str:
    """Name the process with this command line."""
    role = next((word.partition("=")[2] for word in argv if word.startswith("--role=")), "")
    if not role:
        return "conductor" if PROGRAM in argv else "others"
    return role if any("rank_process" in word for word in argv[:4]) else f"what starts {role}"


def main() -> None:
    """Print the figures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="quickstart,executed", help="what to print, with commas between")
    parser.add_argument("--steps", type=int, default=12, help="steps of the run that is timed")
    options = parser.parse_args()
    chosen = options.only.split(",")
    with tempfile.TemporaryDirectory(prefix="house-figures-") as name:
        make_input()
        if "quickstart" in chosen:
            print_quickstart(Path(name), options.steps)
        if "executed" in chosen:
            print_executed(Path(name))


if __name__ == "__main__":
    main()
