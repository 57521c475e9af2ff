"""All trackers of a run. None of them ends it: one that fails is told of once, and switched off."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_rlhf.config.check import TENSORBOARD
from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.schema import Config
from slurm_rlhf.observe.metrics import TensorBoardEvents
from slurm_rlhf.observe.samples import Sample
from slurm_rlhf.observe.trackers.process import ProcessSink
from slurm_rlhf.observe.trackers.sink import Sink, TrackedRun
from slurm_rlhf.run_directory import RunDirectory, write_atomically

log = logging.getLogger(__name__)


class Trackers:
    """Passes everything on to the trackers that `logger.use` names. `open` comes first, `close` last."""

    def __init__(self, config: Config, directory: RunDirectory, told: Callable[[str], None]) -> None:
        """`told` takes lines for the user."""
        self._config, self._directory, self._told = config, directory, told
        self._sinks: dict[str, Sink] = {}
        if TENSORBOARD in config.logger.use and config.logger.tensorboard:
            self._sinks[TENSORBOARD] = TensorBoardEvents(directory.tensorboard)

    def open(self) -> None:
        """Start all trackers; a run that goes on has the id that it had."""
        config = self._config
        if others := [name for name in dict.fromkeys(config.logger.use) if name != TENSORBOARD]:
            try:
                run_id = kept_id(self._directory.trackers / "id")
            except OSError as error:
                self._told(f"warning: no {', '.join(others)}: {error}. The run goes on")
                return
            for name in others:
                run = tracked_run(config, run_id, self._directory.trackers / name)
                log_file = self._directory.logs / f"tracker.{name}.log"
                self._sinks[name] = ProcessSink(name, run, log_file, config.timeout.tracker)
        for name in list(self._sinks):
            self._guarded(name, lambda sink: self._say(sink.open()))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step."""
        self._each(lambda sink: sink.metrics(step, metrics))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Pass on responses of a step."""
        self._each(lambda sink: sink.samples(step, samples))

    def close(self, failed: bool) -> None:
        """End this part of the run; waits timeout.tracker at most for each."""
        self._each(lambda sink: sink.close(failed))
        self._sinks = {}

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name in list(self._sinks):
            self._guarded(name, call)

    def _guarded(self, name: str, call: Callable[[Sink], None]) -> None:
        sink = self._sinks[name]
        try:
            call(sink)
        except Exception as error:
            del self._sinks[name]
            log.info("tracker %s failed", name, exc_info=True)
            self._told(f"warning: {name} gets nothing more of this run: {error}. The run goes on")
            if isinstance(sink, ProcessSink):
                sink.give_up()
        if isinstance(sink, ProcessSink):
            self._say(sink.news())

    def _say(self, text: str) -> None:
        if text:
            self._told(text)


def kept_id(path: Path) -> str:
    """Return the id in a file; a new one is written where there is none. Raises OSError."""
    try:
        if re.fullmatch(r"[0-9a-f]{8}", known := path.read_text(encoding="utf-8").strip()):
            return known
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    new = os.urandom(4).hex()
    write_atomically(path, new + "\n", durable=True)
    return new


def tracked_run(config: Config, run_id: str, directory: Path) -> TrackedRun:
    """Say which run a tracker is told of; its name is that of the run directory where `logger.run_name` is empty."""
    values = {name: get(config, name) for name in all_keys()}
    plain = {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()
    }
    name = config.logger.run_name or Path(config.run_dir).resolve().name or "run"
    return TrackedRun(run_id, name, config.logger.project, str(directory.resolve()), config.logger.online, plain)
