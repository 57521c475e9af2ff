"""What runs in a job of submitit's: the conductor as a child, and submitit's checkpoint protocol around it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_rlhf.errors import RunError
from slurm_rlhf.launch.exec_shim import shimmed
from slurm_rlhf.launch.job_chain import PARENT_GOES_ON

SIGNAL = signal.SIGUSR2
"""With which Slurm, submitit's local executor and the conductor itself tell submitit to save and requeue."""

_LAST_WORDS = 30  # lines
_POLL_S = 0.1


@dataclass
class TrainJob:
    """What submitit calls on the first node of the job; `result()` of the job is what it returns."""

    config: str  # TOML file
    run_dir: str
    environment: dict[str, str | None]  # what submitit's executor changed, as it was; None: not set
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _watch: threading.Thread | None = field(default=None, init=False, repr=False)

    def __call__(self) -> dict[str, Any]:
        """Runs the conductor until it ends; the run's summary. Raises RunError with the last words of what failed."""
        signal.signal(signal.SIGTERM, self._relay)  # scancel: save and leave, not requeue
        child = subprocess.Popen(
            shimmed([sys.executable, "-m", "slurm_rlhf.cli", "train", self.config], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**_restored(os.environ, self.environment), PARENT_GOES_ON: str(int(SIGNAL))},
        )
        self._child = child
        words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._watch = threading.Thread(target=_follow, args=(child, words), name="conductor", daemon=True)
        self._watch.start()
        self._wait()
        if child.returncode:
            raise RunError(f"slurm-rlhf train {end_text(child.returncode)}:\n{''.join(words) or '(it said nothing)'}")
        return dict(json.loads((Path(self.run_dir) / "summary.json").read_text(encoding="utf-8")))

    def checkpoint(self) -> Any:
        """Called by submitit when the job is preempted or its time is up: save, then run the same again."""
        from submitit.helpers import DelayedSubmission

        if self._child is not None:
            self._relay(signal.SIGTERM)
            self._wait()  # as long as saving takes; the end of the allocation is the deadline
        return DelayedSubmission(TrainJob(self.config, self.run_dir, self.environment))

    def _wait(self) -> None:
        """In small steps and without a lock: a signal's handler may call this on top of itself."""
        while self._watch is not None and self._watch.is_alive():
            time.sleep(_POLL_S)

    def _relay(self, number: int, frame: object = None) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def __getstate__(self) -> dict[str, Any]:
        fields = {"config": self.config, "run_dir": self.run_dir, "environment": self.environment}
        return {**fields, "_child": None, "_watch": None}


def end_text(status: int) -> str:
    """How a process ended whose exit status is `status`: negative, or 128 and more, for a signal."""
    number = -status if status < 0 else status - 128
    if number not in set(signal.Signals):
        return f"ended with status {status}"
    name = signal.Signals(number).name
    return f"was cancelled ({name})" if number == signal.SIGTERM else f"was ended by {name}"


def _restored(environ: Mapping[str, str], changed: Mapping[str, str | None]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in changed}
    return kept | {name: value for name, value in changed.items() if value is not None}


def _follow(child: subprocess.Popen[bytes], words: deque[str]) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        text = line.decode("utf-8", errors="replace")
        words.append(text)
        sys.stderr.write(text)
        sys.stderr.flush()
    child.wait()
