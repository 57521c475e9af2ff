"""A tracker in a process of its own, seen from the conductor: calls go in by a thread, so that none of them waits."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_rlhf.observe.metrics import finite
from slurm_rlhf.observe.samples import Sample
from slurm_rlhf.observe.trackers.sink import TrackedRun

MOST_WAITING = 10_000
"""Calls that may wait for a tracker that does not take them; then it is given up."""


class TrackerFailed(Exception):
    """A tracker cannot go on. The message fits behind its name."""


class ProcessSink:
    """Implements `Sink` by a process that does the same. Whatever fails there is raised by the next call here.

    The process leaves with the conductor, whatever ends that one: the end of its input closes the run.
    """

    def __init__(self, name: str, run: TrackedRun, log: Path, close_s: float, python: str = "") -> None:
        """`log`: takes what the library prints; `close_s`: seconds that the last calls may take."""
        self._name, self._run, self._log, self._close_s = name, run, log, close_s
        self._python = python or sys.executable
        self._calls: queue.Queue[list[Any] | None] = queue.Queue(MOST_WAITING)
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []
        self._note = self._failed = ""

    def open(self) -> str:
        """Start the process and return at once; what it says comes later, see `news`."""
        with self._log.open("a") as log:
            # Its own session: Ctrl-C on the terminal and Slurm's signals are for the conductor.
            self._process = subprocess.Popen(
                [self._python, "-m", "slurm_rlhf.observe.trackers", self._name],
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
        self._call(["open", asdict(self._run)])
        return ""

    def news(self) -> str:
        """Return what the tracker has said since the last look; empty: nothing."""
        note, self._note = self._note, ""
        return note

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has no NaN, and no tracker shows one.
        plain = {name: finite(value) for name, value in metrics.items()}
        self._call(["metrics", step, {name: value for name, value in plain.items() if value is not None}])

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._call(["samples", step, [asdict(sample) for sample in samples]])

    def close(self, failed: bool) -> None:
        """Wait until everything is written, `close_s` at most; then the process is ended."""
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
        self._threads[1].join(5)  # the last answer
        if self._failed:
            raise TrackerFailed(self._failed)

    def give_up(self) -> None:
        """End what is left of the process and of those that it started. Raises nothing."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all are gone
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
        """Send calls, in a thread."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (call := self._calls.get()) is not None:
                    pipe.write(json.dumps(call) + "\n")
                    pipe.flush()
        except (OSError, ValueError):
            pass  # it is gone; `_read` says so

    def _read(self) -> None:
        """Take answers, in a thread."""
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
