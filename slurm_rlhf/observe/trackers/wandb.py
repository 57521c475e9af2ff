"""Weights & Biases: offline files in the run directory, or the server of `wandb login`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.observe.samples import Sample
from slurm_rlhf.observe.trackers.sink import COLUMNS, TrackedRun, grouped, table_row

EVALUATION = "evaluation_step"
"""The axis of evaluations: W&B takes steps in their order only, and an evaluation may come late."""


class WandbSink:
    """Implements `Sink`. Each start of an offline run is a directory; the id they share makes them one run."""

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._run: Any = None
        self._last = 0

    def open(self) -> str:
        import wandb

        tracked = self._tracked
        Path(tracked.directory).mkdir(parents=True, exist_ok=True)
        # Neither the command line nor the environment of the process, nor what it prints: they may hold secrets.
        quiet = {"console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_meta": True}
        self._run = wandb.init(
            project=tracked.project,
            name=tracked.name,
            id=tracked.id,
            dir=tracked.directory,
            mode="online" if tracked.online else "offline",
            resume="allow" if tracked.online else None,
            config=tracked.config,
            settings=wandb.Settings(**quiet, x_disable_stats=True, x_disable_machine_info=True),
        )
        self._run.define_metric("eval/*", step_metric=EVALUATION)
        self._run.define_metric("train/eval", step_metric=EVALUATION)
        if tracked.online:
            return f"wandb: {self._run.url}"
        place = shlex.quote(str(Path(tracked.directory, "wandb")))
        return f"wandb: offline; from a node with a network: wandb sync {place}/offline-run-*-{tracked.id}"

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, Any] = grouped(metrics)
        if any(name.startswith("eval/") or name == "train/eval" for name in row):
            row[EVALUATION] = step
        if step > self._last:
            self._last = step
            self._run.log(row, step=step)
        else:
            self._run.log(row, step=self._last)  # the step that is being written takes what is late

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[table_row(sample) for sample in samples])
        self._last = max(step, self._last)
        self._run.log({"samples": table}, step=self._last)

    def close(self, failed: bool) -> None:
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # ends its process
