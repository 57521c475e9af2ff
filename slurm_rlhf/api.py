"""Train and submit from a script or a notebook, like the commands of the same names."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_rlhf.algorithms.registry import AdvantageFunction, Algorithm, register_algorithm
from slurm_rlhf.cluster.processes import keep_others_out
from slurm_rlhf.cluster.stop import INTERRUPT
from slurm_rlhf.config.load import settled
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, DataError
from slurm_rlhf.observe.run_status import Summary
from slurm_rlhf.run_directory import RunDirectory


def train(
    config: Config,
    *,
    reward: Callable[..., Any] | None = None,
    prompts: Sequence[str | dict[str, Any]] | None = None,
    algorithm: Algorithm | AdvantageFunction | str | None = None,
) -> Summary:
    """Run a training to its end, as `slurm-rlhf train` does, and return how it went.

    Roles start as processes of their own on this machine, or on the nodes of the Slurm allocation of this process.
    `config` is not changed. config.run_dir must be set; a run goes on from its newest checkpoint there.

    reward: a function that replaces reward.remote_url, with the same arguments, from a module that workers can import.
    With config.reward.workers = 0 it is called in this process, so the script or notebook may define it.
    prompts: texts, or rows as in a JSONL file (dicts with data.input_key, and data.label_key for the reward), instead
    of data.prompt_dataset. They are written to the run directory.
    algorithm: the name of one, a record, or an advantage function (which then needs no critic). Advantages are computed
    in this process. A policy loss runs in the actor's processes: it has to be in a file that train.plugins names.

    A run that gets a signal to stop saves and returns with `status` "stopped" in the summary, otherwise "finished".
    Ctrl-C saves, and then raises KeyboardInterrupt; the same call goes on from there.
    Raises SlurmRlhfError: UserError, whose message says how to fix the cause, or RunError if the run broke.
    """
    from slurm_rlhf.cli.train import train_here
    from slurm_rlhf.nodes.mpi.assignment import launched

    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("slurm_rlhf.train listens for signals: call it in the main thread of its process")
    if launched(os.environ) is not None:
        raise ConfigError(
            "this process is one of several that mpirun or srun --mpi started, and each would start a run of its own: "
            "use `slurm-rlhf train FILE.toml` there"
        )
    config = settled(config)
    if not config.run_dir:
        raise ConfigError("run_dir is not set: name where to put everything of the run (config.run_dir = 'runs/first')")
    if algorithm is not None:
        config.algo.advantage.estimator = _take_algorithm(algorithm)
    if reward is not None:
        _take_reward(config, reward)
    if prompts is not None:
        config.data.prompt_dataset = str(_write_prompts(config, prompts))
    keep_others_out()
    if train_here(config) == INTERRUPT.exit_code:
        raise KeyboardInterrupt  # the caller's script expects a complete run
    return Summary.read(RunDirectory(Path(config.run_dir)).summary)


def submit(config: Config, *, local: bool = False, command: str = "train") -> Any:
    """Submit a run to Slurm, as `slurm-rlhf submit` does; returns a submitit job.

    `job.result()` waits and returns the run's summary as a dict. Your own rewards and algorithms must be in files that
    train.plugins names. `local`: run on this machine, in a process that goes on when this one ends.
    `command`: `train`, or a stage: `sft`, `rm` or `dpo`.
    Raises ConfigError, PlacementError, ModelError, and RunError if sbatch refuses.
    """
    from slurm_rlhf.nodes.submitit_job import submit as by_submitit

    return by_submitit(settled(config), local, command)


def _take_algorithm(algorithm: Algorithm | AdvantageFunction | str) -> str:
    """Register the algorithm that the caller passed, in this process, and return its name."""
    if isinstance(algorithm, str):
        return algorithm
    if not isinstance(algorithm, Algorithm):
        if not callable(algorithm):
            raise ConfigError(
                f"algorithm takes a name, a slurm_rlhf.Algorithm or an advantage function, got {algorithm!r}"
            )
        algorithm = Algorithm(getattr(algorithm, "__name__", type(algorithm).__name__), algorithm)
    if algorithm.policy_loss is not None:
        raise ConfigError(
            f"algorithm {algorithm.name!r} has a policy loss, which runs in the actor's processes: those do not have "
            "objects of this process. Put the algorithm into a Python file that calls "
            "slurm_rlhf.register_algorithm, name the file in config.train.plugins, and pass the name alone: "
            f"algorithm={algorithm.name!r}"
        )
    return register_algorithm(algorithm, replace=True).name


def _take_reward(config: Config, reward: Callable[..., Any]) -> None:
    from slurm_rlhf.rewards.function import register_reward

    if not callable(reward):
        raise ConfigError(f"reward takes a function, got {reward!r}: a file goes into config.reward.remote_url")
    register_reward(reward, replace=True)
    config.reward.function = getattr(reward, "__name__", type(reward).__name__)
    config.reward.remote_url = config.reward.model_name_or_path = ""


def _write_prompts(config: Config, prompts: Sequence[str | dict[str, Any]]) -> Path:
    """Write the prompts to a JSONL file of the run, so that it can be resumed and repeated."""
    if isinstance(prompts, str) or not prompts:
        raise DataError(f"prompts takes a list of texts or rows with at least one entry, got {prompts!r}")
    lines = []
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str | dict):
            raise DataError(f"prompts[{number}] must be a text or a dict, got {type(prompt).__name__}")
        row = {config.data.input_key: prompt} if isinstance(prompt, str) else prompt
        try:
            lines.append(json.dumps(row, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(f"prompts[{number}] cannot be written as JSON: {error}") from None
    file = Path(config.run_dir) / "prompts.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file
