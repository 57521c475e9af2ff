"""RLHF on HPC clusters with nothing but Slurm (or MPI, or one machine), torchrun, DeepSpeed and vLLM.

    from slurm_rlhf import load_config, train

    summary = train(load_config("run.toml"), reward=my_function, prompts=["1+1=", "1+2="])

Everything that a program may rely on is in `__all__`. Importing the package loads none of it, and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_rlhf.algorithms.losses import PolicyInputs as PolicyInputs
    from slurm_rlhf.algorithms.registry import AdvantageInputs as AdvantageInputs
    from slurm_rlhf.algorithms.registry import Algorithm as Algorithm
    from slurm_rlhf.algorithms.registry import register_algorithm as register_algorithm
    from slurm_rlhf.api import submit as submit
    from slurm_rlhf.api import train as train
    from slurm_rlhf.config.load import load_config as load_config
    from slurm_rlhf.config.schema import Config as Config
    from slurm_rlhf.observe.run_status import Summary as Summary
    from slurm_rlhf.records import Experience as Experience
    from slurm_rlhf.records import Trajectory as Trajectory
    from slurm_rlhf.rewards.function import register_reward as register_reward

__version__ = "0.1.0"

_HOMES = {
    "AdvantageInputs": "slurm_rlhf.algorithms.registry",
    "Algorithm": "slurm_rlhf.algorithms.registry",
    "Config": "slurm_rlhf.config.schema",
    "Experience": "slurm_rlhf.records",
    "PolicyInputs": "slurm_rlhf.algorithms.losses",
    "Summary": "slurm_rlhf.observe.run_status",
    "Trajectory": "slurm_rlhf.records",
    "load_config": "slurm_rlhf.config.load",
    "register_algorithm": "slurm_rlhf.algorithms.registry",
    "register_reward": "slurm_rlhf.rewards.function",
    "submit": "slurm_rlhf.api",
    "train": "slurm_rlhf.api",
}
"""Public name -> the module that has it, imported when the name is first used (PEP 562)."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
