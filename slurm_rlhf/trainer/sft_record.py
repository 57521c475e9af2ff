"""What `slurm-rlhf sft` leaves beside its model: metrics, a log, and checkpoints until the model is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.config.key_text import dump_toml
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CheckpointError, printable
from slurm_rlhf.observe.metrics import MetricsLog
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.trainer.distributed import World

ROLE = "sft"
"""Directory of the model's state in a checkpoint."""


class SftRecord:
    """Holds the directory `<sft.output_dir>.run`. Rank 0 writes; `save` is collective."""

    def __init__(self, config: Config, world: World) -> None:
        self._config = config
        self._world = world
        out = Path(config.sft.output_dir)
        self._paths = RunDirectory(out.with_name(f"{out.name}.run"))
        self._checkpoints = CheckpointDir(self._paths.root)
        self._metrics = MetricsLog(self._paths.metrics)

    def begin(self, steps: int) -> tuple[Path | None, dict[str, Any]]:
        """Return the checkpoint to go on from, by the key `resume`, and its state; (None, {}) at the beginning.

        Metrics of an earlier start that has left no checkpoint are put aside. Raises CheckpointError.
        """
        checkpoint = self._checkpoints.resolve(self._config.resume)
        state = self._checkpoints.load_state(checkpoint, [ROLE]) if checkpoint else {}
        if state and state["steps"] != steps:
            raise CheckpointError(
                f"{checkpoint} is of a training of {state['steps']} steps, and this one has {steps}: the learning rate "
                "follows their number. Restore sft.max_steps, sft.max_epochs and the examples, or add --resume=never"
            )
        self._together()  # all have read before anything is written
        if self._world.rank == 0:
            self._paths.root.mkdir(parents=True, exist_ok=True)
            self._paths.config.write_text(dump_toml(self._config), encoding="utf-8")
            if checkpoint is None:
                self._put_aside()
            self._metrics.truncate_after(state.get("step", 0))
        return checkpoint, state

    def _together(self) -> None:
        if self._world.size > 1:
            dist.barrier()

    def _put_aside(self) -> None:
        paths, metrics = self._paths, self._paths.metrics
        if metrics.exists():
            metrics.rename(next(free for n in count(1) if not (free := paths.aside(metrics, n)).exists()))

    def say(self, text: str) -> None:
        """Print a line, and append it to the log. Rank 0 only; elsewhere nothing happens."""
        if self._world.rank:
            return
        print(f"sft: {printable(text)}", flush=True)
        if self._paths.root.is_dir():
            with (self._paths.root / "sft.log").open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step."""
        if self._world.rank == 0:
            self._metrics.append(step, metrics)

    def save(self, step: int, steps: int, order: dict[str, Any], write: Callable[[Path], object]) -> None:
        """Save a checkpoint, in place of the one before; `write` is called on each rank with the same directory."""
        if self._world.rank == 0:
            (self._checkpoints.begin(step) / ROLE).mkdir()
        self._together()
        write(self._checkpoints.of(step).with_suffix(".tmp") / ROLE)
        if self._world.rank == 0:
            self._checkpoints.commit(step, {"step": step, "steps": steps, "order": order})
            self._checkpoints.prune(1)

    def finished(self) -> None:
        """Remove the checkpoints: the model is written."""
        if self._world.rank == 0:
            shutil.rmtree(self._paths.checkpoints, ignore_errors=True)
