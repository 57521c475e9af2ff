"""Send what a run measures to trackers: TensorBoard, Weights & Biases, trackio, MLflow (`logger.use`).

A tracker that fails does not end the run: it is reported once and switched off. The conductor writes TensorBoard's
events itself. The others are libraries with threads, signal handlers, servers and a network, so each runs in a process
of its own: nothing that they do can hold or end the run.

To add a tracker: a class with the methods of `sinks.Sink` and its row in `sinks.SINKS`, a row in
`config.check.PACKAGES`, an extra in pyproject.toml.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_rlhf.config.check import TENSORBOARD
from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.schema import Config
from slurm_rlhf.observe.run_log import Sample
from slurm_rlhf.observe.run_status import TensorBoardEvents, finite
from slurm_rlhf.observe.sinks import Sink, TrackedRun
from slurm_rlhf.run_directory import RunDirectory, write_atomically

MOST_WAITING = 10_000
"""Calls that may wait for a tracker; if there are more, the tracker has failed."""


class TrackerFailed(Exception):
    """Report that a tracker cannot go on. The message is printed after its name."""


class ProcessSink:
    """Implement `Sink` by a process with the sink `name`. An error there is raised by the next call here.

    The process ends with the conductor, because it closes the run when its input ends.
    """

    def __init__(self, name: str, log: Path, close_s: float) -> None:
        """`log`: file for what the library prints; `close_s`: seconds that the last calls may take."""
        self._name, self._log, self._close_s = name, log, close_s
        self._calls: queue.Queue[list[Any] | None] = queue.Queue(MOST_WAITING)
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []
        self._note = self._failed = ""

    def open(self, run: TrackedRun) -> str:
        """Start the process and return at once; `news` returns its answer later."""
        with self._log.open("a") as log:
            # In a session of its own: Ctrl-C on the terminal and Slurm's signals are for the conductor.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slurm_rlhf.observe.sinks", self._name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        for work in (self._write, self._read):
            thread = threading.Thread(target=work, name=f"{self._name} {work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._call(["open", asdict(run)])
        return ""

    def news(self) -> str:
        """Return the tracker's note since the last call; empty if there is none."""
        note, self._note = self._note, ""
        return note

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has no NaN, and no tracker shows it.
        plain = {name: finite(value) for name, value in metrics.items()}
        self._call(["metrics", step, {name: value for name, value in plain.items() if value is not None}])

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._call(["samples", step, [asdict(sample) for sample in samples]])

    def close(self, failed: bool) -> None:
        """Wait for at most `close_s` until everything is written, then end the process."""
        if self._process is None:
            return
        deadline = time.monotonic() + self._close_s
        try:
            if not self._failed:
                self._call(["close", failed])
            self._calls.put(None, timeout=self._close_s)
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, queue.Full):
            raise TrackerFailed(
                f"did not finish within {self._close_s:g} s (timeout.tracker); its log is {self._log}"
            ) from None
        finally:
            self.give_up()
        self._threads[1].join(5)
        if self._failed:
            raise TrackerFailed(self._failed)

    def give_up(self) -> None:
        """End the process and all that it has started. Raises nothing."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _call(self, call: list[Any]) -> None:
        if self._failed:
            raise TrackerFailed(self._failed)
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TrackerFailed(f"{MOST_WAITING} calls wait for it; its log is {self._log}") from None

    def _write(self) -> None:
        """Send calls, in a thread of their own."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (call := self._calls.get()) is not None:
                    pipe.write(json.dumps(call) + "\n")
                    pipe.flush()
        except (OSError, ValueError):
            pass  # the process has ended; `_read` reports it

    def _read(self) -> None:
        """Receive answers, in a thread of their own."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            self._note = answer.get("note") or self._note
            if failed := answer.get("failed"):
                self._failed = f"{failed}; its log is {self._log}"
        if (code := self._process.wait()) and not self._failed:
            self._failed = f"its process ended with exit code {code}; its log is {self._log}"


log = logging.getLogger(__name__)


class Trackers:
    """Pass everything on to the trackers that `logger.use` names. `open` is called first, `close` last."""

    def __init__(self, config: Config, directory: RunDirectory, note: Callable[[str], None]) -> None:
        """`note` shows a line to the user."""
        self._config, self._directory, self._note = config, directory, note
        self._sinks: dict[str, Sink] = {}
        if TENSORBOARD in config.logger.use and config.logger.tensorboard:
            self._sinks[TENSORBOARD] = TensorBoardEvents(directory.tensorboard)

    def open(self) -> None:
        """Start all trackers; a run that is resumed keeps its id."""
        config = self._config
        for name in dict.fromkeys(config.logger.use):
            if name != TENSORBOARD:
                log_file = self._directory.logs / f"tracker.{name}.log"
                log_file.parent.mkdir(parents=True, exist_ok=True)
                self._sinks[name] = ProcessSink(name, log_file, config.timeout.tracker)
        for name in list(self._sinks):
            self._guarded(name, lambda sink, name=name: self._say(sink.open(self._run(name))))  # type: ignore[misc]

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step."""
        self._each(lambda sink: sink.metrics(step, metrics))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Pass on responses of a step."""
        self._each(lambda sink: sink.samples(step, samples))

    def close(self, failed: bool) -> None:
        """End this part of the run; wait for at most timeout.tracker for each."""
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
            self._note(f"warning: {name} gets nothing more of this run: {error}. The run goes on")
            if isinstance(sink, ProcessSink):
                sink.give_up()
        if isinstance(sink, ProcessSink):
            self._say(sink.news())

    def _say(self, text: str) -> None:
        if text:
            self._note(text)

    def _run(self, name: str) -> TrackedRun:
        """Describe the run to the tracker `name`. Raises OSError."""
        config, directory = self._config, self._directory.trackers / name
        values = {key: get(config, key) for key in all_keys()}
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values.items()
        }
        title = config.logger.run_name or Path(config.run_dir).resolve().name or "run"
        run_id = "" if name == TENSORBOARD else kept_id(self._directory.trackers / "id")
        return TrackedRun(run_id, title, config.logger.project, str(directory.resolve()), config.logger.online, plain)


def kept_id(path: Path) -> str:
    """Return the id in a file, or write a new one. Raises OSError."""
    try:
        if re.fullmatch(r"[0-9a-f]{8}", known := path.read_text(encoding="utf-8").strip()):
            return known
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    new = os.urandom(4).hex()
    write_atomically(path, new + "\n", durable=True)
    return new
