"""Files that a stage writes while it trains: metrics, a log, a checkpoint; and the signals that stop it."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.checkpoint.resume import changed_keys, load_state, refuse_other_adapters, refuse_other_model
from slurm_rlhf.cluster.stop import INTERRUPT, STOP_FILE, TERM, USR1, Reason, handled
from slurm_rlhf.config.roles import ACTOR, of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.errors import CheckpointError, printable
from slurm_rlhf.observe.run_log import truncate_after
from slurm_rlhf.observe.run_status import append_metrics, write_summary
from slurm_rlhf.observe.trackers import Trackers
from slurm_rlhf.report.page import write_page
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.trainer.distributed import World, barrier

_CONFIG = "config.toml"
"""File of a checkpoint with the configuration that wrote it."""


class StageRecord:
    """Writes metrics, a log and, until the model is written, checkpoints to `<output_dir>.run`.

    Rank 0 writes; `save` is collective. Metrics go to trackers, too, inside a `with` block after `begin`.
    """

    def __init__(self, name: str, config: Config, world: World) -> None:
        """`name`: of the stage."""
        self._name = name
        self._config = config
        self._world = world
        own = of_command(config, name)
        self._paths = RunDirectory(Path(own.run_dir))
        self._trackers = Trackers(own, self._paths, self.say)
        self._checkpoints = CheckpointDir(self._paths.root)
        self.root = self._paths.root
        """Directory of all that it writes."""
        self._steps = 0  # optimizer steps from the first session to the end
        self.model: Mapping[str, str] = {}
        """Path of the first model -> hash of its contents."""

    def begin(
        self, steps: int, model: Mapping[str, str] | None = None, order: PromptOrder | None = None
    ) -> tuple[Path | None, dict[str, Any]]:
        """Return the checkpoint to go on from, by the key `resume`, and its state; (None, {}) at the beginning.

        `model`: path -> `model_contents` of the one to start from; `order`: goes on where the checkpoint was. Metrics
        of an earlier start that has left no checkpoint are put aside. Raises CheckpointError, ConfigError.
        """
        checkpoint = self._checkpoints.resolve(self._config.resume)
        state = load_state(checkpoint, [self._name]) if checkpoint else {}
        changes = changed_keys(checkpoint / _CONFIG, self._config) if checkpoint else []
        self.model = model or {}
        refuse_other_model(state.get("model", {}), self.model, f"{self._name}.output_dir")
        refuse_other_adapters(changes, f"{self._name}.output_dir")
        if state and order is not None:
            order.load_state_dict(state["order"])
        if state and state["steps"] != steps:
            raise CheckpointError(
                f"{checkpoint} is of a training of {state['steps']} steps, and this one has {steps}: the learning rate "
                f"follows their number. Restore {self._name}.max_steps, {self._name}.max_epochs and the examples, or "
                "add --resume=never"
            )
        barrier()  # rank 0 writes only when all ranks have read the checkpoint
        if self._world.rank == 0:
            self._paths.root.mkdir(parents=True, exist_ok=True)
            self._paths.config.write_text(dump_toml(self._config), encoding="utf-8")
            if checkpoint is None:
                self._paths.put_aside()
            truncate_after(self._paths.metrics, state.get("step", 0))
        self._steps = steps
        self._summarize("running", state.get("step", 0))
        if changes:
            self.say(f"warning: changed since step {state['step']}: {', '.join(changes)}")
        return checkpoint, state

    def __enter__(self) -> StageRecord:
        if self._world.rank == 0:
            self._trackers.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._world.rank == 0:
            self._trackers.close(failed=kind is not None)

    def _summarize(self, status: str, step: int) -> None:
        if self._world.rank == 0:
            world, seed = {ACTOR: self._world.size}, self._config.train.seed
            write_summary(
                self._paths.summary,
                {"status": status, "steps": step, "total_steps": self._steps, "world": world, "seed": seed},
            )
            try:
                write_page(self._paths.report, [self._paths])
            except Exception as error:  # no error of the page may end the training
                self.say(f"warning: {self._paths.report.name} was not written: {type(error).__name__}: {error}")

    def say(self, text: str) -> None:
        """Print a line, and append it to the log. Rank 0 only; elsewhere nothing happens."""
        if self._world.rank:
            return
        print(f"{self._name}: {printable(text)}", flush=True)
        if self._paths.root.is_dir():
            with (self._paths.root / f"{self._name}.log").open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step."""
        if self._world.rank == 0:
            append_metrics(self._paths.metrics, step, metrics)
            self._trackers.metrics(step, metrics)

    def save(self, step: int, steps: int, order: dict[str, Any], write: Callable[[Path], object]) -> None:
        """Save a checkpoint, in place of the one before; `write` is called on each rank with the same directory."""
        if self._world.rank == 0:
            path = self._checkpoints.begin(step)
            (path / self._name).mkdir()
            (path / _CONFIG).write_text(dump_toml(self._config), encoding="utf-8")
        barrier()
        write(self._checkpoints.of(step).with_suffix(".tmp") / self._name)
        if self._world.rank == 0:
            self._checkpoints.commit(step, {"step": step, "steps": steps, "order": order, "model": self.model})
            self._checkpoints.prune(1)

    @property
    def asked(self) -> bool:
        """Tell whether a file `STOP_FILE` asks the training to save and to end."""
        return (self.root / STOP_FILE).exists()

    def stopped(self, step: int) -> None:
        """Tell that the training stops after `step`, which is saved. Collective."""
        self._summarize("stopped", step)
        barrier()
        if self._world.rank == 0:
            (self.root / STOP_FILE).unlink(missing_ok=True)  # it would stop the next start, too

    def finished(self) -> None:
        """Tell that the model is written, and remove the checkpoints. Collective: no rank ends before that."""
        if self._world.rank == 0:
            shutil.rmtree(self._paths.checkpoints, ignore_errors=True)
        self._summarize("finished", self._steps)
        barrier()


REASONS = {signal.SIGTERM: TERM, signal.SIGINT: INTERRUPT, signal.SIGUSR1: USR1}
ELSEWHERE = Reason("a signal to another rank", False, TERM.exit_code)


class StopSignals:
    """Remembers the first signal, inside a `with` block; a second one has its usual effect."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        """Which signal has come; None: none."""
        self._taken = ExitStack()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._taken.enter_context(handled(REASONS, self._came))
        return self

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.reason = REASONS[signal.Signals(number)]
        self._taken.close()

    def __exit__(self, *_: object) -> None:
        self._taken.close()
