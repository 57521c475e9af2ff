"""Submit a run with submitit, and run the conductor inside such a job.

Under Slurm this works only as one process on the first node, started by `exec` in the batch script, which alone gets
the signal: by default submitit starts its function on every node inside a step, and the steps of the roles would wait
for ever.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.processes import exit_text
from slurm_rlhf.config.check import check, check_stage
from slurm_rlhf.config.pipeline import TRAINING
from slurm_rlhf.config.roles import colocations, of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES, minutes
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import ConfigError, RunError
from slurm_rlhf.nodes.child_process import bound_to_parent
from slurm_rlhf.nodes.requeue import PARENT_REQUEUES
from slurm_rlhf.placement.rank_map import make_blocks, place
from slurm_rlhf.placement.topology import Topology, nodes_needed, numbered_names, role_sizes
from slurm_rlhf.wire import timeouts

FOLDER = "submitit"
"""Below the run directory: pickles and logs of submitit, and the configuration as submitted."""

_MOST_TIMEOUTS = 1000


def submit(config: Config, local: bool = False, command: str = "train") -> Any:
    """Submit a run of `command` with `config` and return its submitit job, whose `result()` is the summary of the run.

    `config` says what to run and, in its group `slurm`, what to ask Slurm for; `command` is `train` or a stage;
    `local`: on this machine, as a process that outlives this one. If the run fails, `result()` raises with the last
    lines of what failed. Raises ConfigError, PlacementError and ModelError for what cannot be submitted, RunError with
    the message of sbatch if it refuses.
    """
    from submitit.core.utils import FailedJobError

    if command not in TRAINING:
        raise ConfigError(f"command takes one of {', '.join(TRAINING)}, got {command!r}")
    if command in STAGES:
        check_stage(config, command)
    else:
        check(config)
    placed = of_command(config, command)
    run_dir = Path(placed.run_dir)
    folder = run_dir / FOLDER
    executor = local_executor(placed, folder) if local else slurm_executor(placed, folder)
    made = not run_dir.exists()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    # submitit's local executor hides the GPUs that it was not asked for.
    hidden = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")} if local else {}
    job = TrainJob(str(file), str(run_dir), hidden, command)
    try:
        # submitit copies what sbatch says to stderr, and raises with the same words.
        with _without_slurm_variables(), nullcontext() if local else redirect_stderr(io.StringIO()):
            return executor.submit(job)
    except FailedJobError as error:
        if made:
            shutil.rmtree(run_dir)
        raise RunError(f"sbatch refuses the job: {error}") from None


def local_executor(config: Config, folder: Path) -> Any:
    """Make submitit's executor of this machine, whose jobs have a time limit too."""
    from submitit import LocalExecutor

    executor = LocalExecutor(folder / "%j", max_num_timeout=_MOST_TIMEOUTS)
    executor.update_parameters(
        timeout_min=_minutes(config),
        signal_delay_s=int(config.slurm.signal_lead_s),
        setup=list(config.slurm.setup),
        stderr_to_stdout=True,
    )
    return executor


def slurm_executor(config: Config, folder: Path) -> Any:
    """Make submitit's executor of Slurm. Raises RunError if there is no Slurm, and as `slurm_parameters`."""
    from submitit import AutoExecutor

    asked = slurm_parameters(config)
    try:
        executor = AutoExecutor(
            folder / "%j",
            cluster="slurm",
            slurm_python=f"exec {shlex.quote(sys.executable)}",
            slurm_max_num_timeout=_MOST_TIMEOUTS,
        )
    except RuntimeError as error:
        raise RunError(f"this machine cannot submit jobs: {error}. Go to a login node, or add --local") from None
    executor.update_parameters(**asked)
    return executor


def slurm_parameters(config: Config) -> dict[str, Any]:
    """Return the parameters of submitit's executor of Slurm; pure. Raises ConfigError, PlacementError."""
    slurm, extra = config.slurm, config.cluster.spares + config.reward.workers_num_nodes
    known = ("partition", "account", "qos", "constraint", "exclude", "mem", "exclusive", "dependency", "setup")
    others = ("gpus_per_node", "cpus_per_task", "reservation")  # submitit has no parameters for these
    more = {
        "nodes": config.slurm.nodes or wanted_nodes(config) + extra,
        "ntasks-per-node": 1,
        "signal": f"B:{SIGNAL.name.removeprefix('SIG')}@{int(slurm.signal_lead_s)}",
        "requeue": True,
        # A node that is down would end the job, and with it the run that goes on with a spare one, or other workers.
        **({"no-kill": True} if extra else {}),
        **{name.replace("_", "-"): value for name in others if (value := getattr(slurm, name))},
    }
    return {
        "name": slurm.job_name or Path(config.run_dir).name,
        "nodes": 1,
        "timeout_min": _minutes(config),
        "stderr_to_stdout": True,
        "slurm_use_srun": False,
        "slurm_additional_parameters": more,
        **{f"slurm_{name}": value for name in known if (value := getattr(slurm, name))},
    }


def _minutes(config: Config) -> int:
    slurm = config.slurm
    limit = minutes(slurm.time)
    if limit * 60 <= slurm.signal_lead_s:
        raise ConfigError(
            f"slurm.signal_lead_s = {slurm.signal_lead_s:g} is all of slurm.time = {slurm.time}: the run would be "
            "asked to save before it started. Lower slurm.signal_lead_s or raise slurm.time"
        )
    return limit


def wanted_nodes(config: Config) -> int:
    """Return the fewest nodes of `slurm.gpus_per_node` GPUs on which the roles fit; without it as many as a role asks.

    Raises PlacementError when no number of such nodes holds them.
    """
    sizes, each, together = role_sizes(config), config.slurm.gpus_per_node, colocations(config)
    least = max(1, *(size.num_nodes for size in sizes))
    if not each:
        return least
    count = nodes_needed(each, make_blocks(sizes, together)) or least
    place(Topology.uniform(numbered_names(count), each), sizes, together)
    return count


@contextmanager
def _without_slurm_variables() -> Iterator[None]:
    """Hide the variables of the job that this process may be in: the new job would inherit them."""
    names = [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]
    taken = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(taken)


SIGNAL = signal.SIGUSR2
"""The signal with which Slurm, submitit's local executor and the conductor tell submitit to save and requeue."""

_LAST_LINES = 30  # lines of an error


@dataclass
class TrainJob:
    """Run the conductor as a child; submitit calls this on the first node of the job."""

    config: str  # TOML file
    run_dir: str
    environment: dict[str, str | None]  # values before submitit's executor changed them; None: not set
    command: str = "train"
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _watch: threading.Thread | None = field(default=None, init=False, repr=False)

    def __call__(self) -> dict[str, Any]:
        """Run the conductor until it ends; return the summary. Raises RunError with the last lines of what failed."""
        signal.signal(signal.SIGTERM, self._relay)  # scancel: save and leave, not requeue
        child = subprocess.Popen(
            bound_to_parent([sys.executable, "-m", "slurm_rlhf.cli", self.command, self.config], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**_restore(os.environ, self.environment), PARENT_REQUEUES: str(int(SIGNAL))},
        )
        self._child = child
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._watch = threading.Thread(target=_copy_errors, args=(child, lines), name="conductor", daemon=True)
        self._watch.start()
        self._wait()
        if child.returncode:
            cancelled = child.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
            how = "was cancelled (SIGTERM)" if cancelled else exit_text(child.returncode)
            raise RunError(f"slurm-rlhf {self.command} {how}:\n{''.join(lines) or '(it said nothing)'}")
        return dict(json.loads((Path(self.run_dir) / "summary.json").read_text(encoding="utf-8")))

    def checkpoint(self) -> Any:
        """Save, then run the same again. Submitit calls it when the job is preempted or its time is up."""
        from submitit.helpers import DelayedSubmission

        if self._child is not None:
            self._relay(signal.SIGTERM)
            self._wait()  # as long as saving takes; the end of the allocation is the deadline
        return DelayedSubmission(TrainJob(self.config, self.run_dir, self.environment, self.command))

    def _wait(self) -> None:
        """Wait in small steps and without a lock: a signal handler may call this while it already waits."""
        while self._watch is not None and self._watch.is_alive():
            time.sleep(timeouts.POLL_S)

    def _relay(self, number: int, frame: object = None) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_child": None, "_watch": None}


def _restore(environ: Mapping[str, str], changed: Mapping[str, str | None]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in changed}
    return kept | {name: value for name, value in changed.items() if value is not None}


def _copy_errors(child: subprocess.Popen[bytes], lines: deque[str]) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        text = line.decode("utf-8", errors="replace")
        lines.append(text)
        sys.stderr.write(text)
        sys.stderr.flush()
    child.wait()
