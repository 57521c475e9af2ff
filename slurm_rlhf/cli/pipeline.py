"""Run `slurm-rlhf pipeline FILE.toml`: stages as jobs of Slurm that wait for each other, or here one after the other.

Each job and each child runs `slurm-rlhf pipeline FILE.toml --only=NAME`: one stage, in its own process. A hash of its
keys and inputs is next to its files, so a stage that is done and has not changed does not run again.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_rlhf.cli.commands import Arguments, commands, find_command, refuse_unread_keys
from slurm_rlhf.cluster.slurm_job import OVER, ask_jobs, command
from slurm_rlhf.cluster.stop import handled
from slurm_rlhf.config.evaluation import MEAN
from slurm_rlhf.config.pipeline import EVALUATED, Pipeline, PipelineStage, read_pipeline
from slurm_rlhf.errors import ConfigError, RunError, meant
from slurm_rlhf.nodes.child_process import bound_to_parent
from slurm_rlhf.nodes.requeue import successor_environment
from slurm_rlhf.observe.run_log import read_object, read_rows
from slurm_rlhf.run_directory import RunDirectory, write_atomically

FILE = "pipeline.json"
"""File in the directory of a pipeline: where its TOML file is, and the job of each stage."""
_STATE = "stage.json"  # file in the directory of a stage: its hash, and whether it is done
_STOPPED = 75
"""Exit code of a stage that was stopped before its end: EX_TEMPFAIL of sysexits.h."""


def pipeline(arguments: Arguments) -> int:
    """Submit the stages that are not done, or run them here. Raises SlurmRlhfError."""
    if len(arguments.words) != 1:
        raise arguments.error("pipeline takes one TOML file")
    whole, hashes = read_whole(Path(arguments.words[0]))
    if only := arguments.options.get("only", ""):
        return _run_one(whole, only, hashes)
    left = left_of(whole, hashes)
    for stage in whole.stages:
        if stage not in left:
            print(f"{stage.name}: done, and nothing of it has changed: {stage.model}")
    _refuse_running(whole)
    whole.root.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, str] = {}
    _write(whole.root / FILE, {"file": str(whole.file), "jobs": jobs})
    if not left or "local" in arguments.options or "SLURM_JOB_ID" in os.environ or shutil.which("sbatch") is None:
        code = _run_here(whole, left)
        if code == 0:
            print(f"all stages are done: `slurm-rlhf report {whole.root}` shows them on one page")
        return code
    try:
        for stage in left:
            jobs[stage.name] = _submit(whole, stage, list(jobs.values())[-1:])
            print(f"{stage.name}: job {jobs[stage.name]}", flush=True)
    finally:
        _write(whole.root / FILE, {"file": str(whole.file), "jobs": jobs})
    print(f"`slurm-rlhf status {whole.root}` shows how far they are; a stage that fails ends those after it")
    return 0


def read_whole(file: Path) -> tuple[Pipeline, dict[str, str]]:
    """Read a pipeline, refuse keys that its stages do not read, and hash the stages. Raises UserError."""
    whole = read_pipeline(file)
    for stage in whole.stages:
        found, rest = find_command([stage.command, *map(str, stage.files), *stage.words])
        refuse_unread_keys(found.read(rest))
    return whole, whole.hashes(_read_by())


def left_of(whole: Pipeline, hashes: Mapping[str, str]) -> list[PipelineStage]:
    """List the first stage that is not done or has changed, and all stages after it."""
    return list(itertools.dropwhile(lambda stage: _is_done(stage, hashes[stage.name]), whole.stages))


def _read_by() -> dict[str, tuple[str, ...]]:
    return {name: found.keys for name, found in commands().items()}


def _is_done(stage: PipelineStage, digest: str) -> bool:
    state = read_object(stage.directory / _STATE)
    return state.get("hash") == digest and bool(state.get("done")) and stage.made


def _refuse_running(whole: Pipeline) -> None:
    """Raise ConfigError if a job of an earlier call may still write into the directory."""
    for name, job in read_object(whole.root / FILE).get("jobs", {}).items():
        if any(one.state not in OVER for one in ask_jobs(job)) and job != os.environ.get("SLURM_JOB_ID"):
            raise ConfigError(f"job {job} of the stage {name} waits or runs: wait for it, or `scancel {job}` first")


def _run_here(whole: Pipeline, left: list[PipelineStage]) -> int:
    """Run stages one after the other, each in a process of its own; return the code of the first that fails."""
    for stage in left:
        print(f"\n== {stage.name}: slurm-rlhf {stage.command}", flush=True)
        words = [sys.executable, "-m", "slurm_rlhf.cli", "pipeline", str(whole.file), f"--only={stage.name}"]
        child = subprocess.Popen(bound_to_parent(words, signal.SIGTERM))

        def pass_on(number: int, frame: object, child: subprocess.Popen[bytes] = child) -> None:
            if number != signal.SIGINT:  # a terminal sends that to the child itself
                child.send_signal(number)

        with handled((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), pass_on):
            code = child.wait()
        if code:
            print(
                f"pipeline: the stage {stage.name} ended with exit code {code}: those after it do not run. "
                f"`slurm-rlhf pipeline {whole.file}` goes on from here",
                file=sys.stderr,
            )
            return code if code > 0 else 128 - code
    return 0


def _run_one(whole: Pipeline, name: str, hashes: dict[str, str]) -> int:
    """Run a stage in this process. Files that it made with other keys or inputs are put aside."""
    stages = {stage.name: stage for stage in whole.stages}
    if name not in stages:
        raise ConfigError(f"--only={name}: no stage has that name{meant(name, stages)} (stages: {', '.join(stages)})")
    stage, state = stages[name], stages[name].directory / _STATE
    for other in itertools.takewhile(lambda one: one is not stage, whole.stages):
        if not _is_done(other, hashes[other.name]):
            raise ConfigError(f"--only={name}: the stage {other.name} before it is not done, or has changed since")
    if _is_done(stage, hashes[name]):
        return 0
    made = [each for each in stage.directory.glob("*") if each != state]
    if made and read_object(state).get("hash") != hashes[name]:
        aside = (stage.directory.with_name(f"{name}.{number}") for number in itertools.count(1))
        stage.directory.rename(next(place for place in aside if not place.exists()))
    stage.directory.mkdir(parents=True, exist_ok=True)
    _write(state, {"hash": hashes[name], "done": False})
    found, rest = find_command([stage.command, *map(str, stage.files), *stage.words, *stage.output])
    os.chdir(whole.file.parent)
    code = 0 if stage.trains and stage.made else found.load()(found.read(rest))
    if code:
        return code
    if not stage.made:
        print(f"pipeline: the stage {name} was stopped before its end", file=sys.stderr)
        return _STOPPED
    _write(state, {"hash": hashes[name], "done": True})
    return 0


def script(whole: Pipeline, stage: PipelineStage) -> str:
    """Write the batch script of a stage; pure."""
    words = [sys.executable, "-m", "slurm_rlhf.cli", "pipeline", str(whole.file), f"--only={stage.name}"]
    # exec: Slurm's signals reach the stage itself, and its exit code is the job's.
    return "\n".join(["#!/usr/bin/env bash", *whole.setup, f"exec {shlex.join(words)}", ""])


def _submit(whole: Pipeline, stage: PipelineStage, after: list[str]) -> str:
    """Submit the job of a stage, to start when the jobs `after` have succeeded; return its number. Raises RunError."""
    file = whole.root / f"{stage.name}.sh"
    file.write_text(script(whole, stage), encoding="utf-8")
    options = [f"--dependency=afterok:{job}" for job in after] + ["--kill-on-invalid-dep=yes"] * bool(after)
    options += [f"--job-name={stage.name}", f"--output={whole.root / stage.name}.%j.log", "--open-mode=append"]
    words = ["sbatch", "--parsable", "--requeue", "--signal=B:USR1@600", *options, *stage.sbatch, str(file)]
    done = command(words, env=successor_environment(os.environ), cwd=str(whole.file.parent))
    if done.returncode:
        raise RunError(f"sbatch refuses the stage {stage.name}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def pipeline_of(root: Path) -> Pipeline | None:
    """Return the pipeline whose directory `root` is; None: it is none. Raises ConfigError."""
    known = read_object(root / FILE)
    return read_pipeline(Path(known["file"])) if "file" in known else None


def pipeline_lines(whole: Pipeline) -> tuple[list[str], bool]:
    """Describe each stage in a line, and tell whether the pipeline is over."""
    jobs, lines, over = read_object(whole.root / FILE).get("jobs", {}), [], True
    width = max(len(stage.name) for stage in whole.stages)
    hashes, before = whole.hashes(_read_by()), True
    for stage in whole.stages:
        state, job = read_object(stage.directory / _STATE), jobs.get(stage.name, "")
        known = ask_jobs(job) if job else []
        if before and _is_done(stage, hashes[stage.name]):
            text = f"done: {stage.model}"
        elif known and known[0].state not in OVER:
            over, text = False, f"job {job}: {known[0].state}"
        elif state.get("done"):
            text = "done before, and changed since: it runs again"
        else:
            text = "begun, and not done" if state else "not begun"
        before = before and text.startswith("done: ")
        ended = f"; job {job}: {known[0].state}" if known and known[0].state in OVER and not before else ""
        ended += f", see {known[0].output}" if ended and Path(known[0].output).is_file() else ""
        lines.append(f"{stage.name:<{width}}  {stage.command:<8}  {text}{ended}{_progress(stage)}")
    return lines, over


def _progress(stage: PipelineStage) -> str:
    rows, score = read_rows(RunDirectory(stage.record).metrics), read_object(stage.directory / EVALUATED).get(MEAN)
    return f", step {rows[-1]['step']}" if rows else "" if score is None else f", score {score:.3g}"


def _write(file: Path, value: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(value) + "\n", durable=True)
