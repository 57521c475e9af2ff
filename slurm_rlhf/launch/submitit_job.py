"""Submission by submitit.

What works under Slurm is one process on the first node, exec'd by the batch script, with the signal sent to it alone:
by default submitit starts its function on every node inside a step, where the steps of the roles would wait for ever.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurm_rlhf.config.dump import dump_toml
from slurm_rlhf.config.roles import colocations
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.time_limit import minutes
from slurm_rlhf.errors import ConfigError, PlacementError, RunError
from slurm_rlhf.launch.train_job import SIGNAL, TrainJob
from slurm_rlhf.placement.rank_plan import place, role_sizes
from slurm_rlhf.placement.topology import Topology, numbered_names

FOLDER = "submitit"
"""Below the run directory: submitit's pickles and logs, and the configuration as submitted."""

_MOST_TIMEOUTS = 1000


def submit(config: Config, local: bool = False) -> Any:
    """Submit a run with `config`; its submitit job, whose `result()` is the run's summary.

    `local`: on this machine, as a process that outlives this one. Raises ConfigError and PlacementError for what
    cannot be submitted, RunError with sbatch's words when it refuses.
    """
    from submitit.core.utils import FailedJobError

    folder = Path(config.run_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    executor = local_executor(config, folder) if local else slurm_executor(config, folder)
    # submitit's local executor hides the GPUs it was not told of.
    hidden = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")} if local else {}
    job = TrainJob(str(file), config.run_dir, hidden)
    try:
        with _unmarked():
            return executor.submit(job)
    except FailedJobError as error:
        raise RunError(f"sbatch refuses the job: {error}") from None


def local_executor(config: Config, folder: Path) -> Any:
    """submitit's executor of this machine, whose jobs have a time limit too."""
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
    """submitit's executor of Slurm. Raises RunError where there is no Slurm, and as `slurm_parameters`."""
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
    """For submitit's executor of Slurm; pure. Raises ConfigError, PlacementError."""
    slurm = config.slurm
    optional = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "mem": slurm.mem,
        "exclusive": slurm.exclusive,
        "dependency": slurm.dependency,
        "setup": slurm.setup,
    }
    more = {
        "nodes": wanted_nodes(config),
        "ntasks-per-node": 1,
        "signal": f"B:{SIGNAL.name.removeprefix('SIG')}@{int(slurm.signal_lead_s)}",
        "requeue": True,
        **({"gpus-per-node": slurm.gpus_per_node} if slurm.gpus_per_node else {}),
        **({"cpus-per-task": slurm.cpus_per_task} if slurm.cpus_per_task else {}),
        **({"reservation": slurm.reservation} if slurm.reservation else {}),
    }
    return {
        "name": slurm.job_name or Path(config.run_dir).name,
        "nodes": 1,
        "timeout_min": _minutes(config),
        "stderr_to_stdout": True,
        "slurm_use_srun": False,
        "slurm_additional_parameters": more,
        **{f"slurm_{name}": value for name, value in optional.items() if value},
    }


def _minutes(config: Config) -> int:
    slurm = config.slurm
    limit = minutes(slurm.time)
    if limit * 60 <= slurm.signal_lead_s:
        raise ConfigError(
            f"slurm.signal_lead_s = {slurm.signal_lead_s:g} is all of slurm.time = {slurm.time}: the run would be "
            "told to save before it started. Lower the one or raise the other"
        )
    return limit


def wanted_nodes(config: Config) -> int:
    """`slurm.nodes`, or the fewest nodes of `slurm.gpus_per_node` GPUs on which the roles fit.

    Raises PlacementError when no number of such nodes holds them.
    """
    sizes = role_sizes(config)
    least = max(1, *(size.num_nodes for size in sizes))
    if config.slurm.nodes or not config.slurm.gpus_per_node:
        return config.slurm.nodes or least
    most = sum(size.num_nodes or size.engines for size in sizes)
    for count in range(least, max(most, least) + 1):
        try:
            place(Topology.uniform(numbered_names(count), config.slurm.gpus_per_node), sizes, colocations(config))
            return count
        except PlacementError:
            if count >= most:
                raise
    raise AssertionError("unreachable: the last count returns or raises")


@contextmanager
def _unmarked() -> Iterator[None]:
    """Without the variables of a job that this process may be in: the new job would inherit them."""
    names = [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]
    taken = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(taken)
