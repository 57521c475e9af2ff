"""The `srun` command line of one step: pure text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHAPING = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_GRES",
    "SLURM_KILL_BAD_EXIT",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_OPEN_MODE",
    "SLURM_TRES_PER_TASK",
    "SLURM_WAIT",
)
"""What the job left in the environment and srun would read as options of the step."""


@dataclass(frozen=True, slots=True)
class Step:
    """One task on each of `nodes`, which share them with the other steps of the job.

    `cpus` and `gpus` of each node; 0: left to Slurm. `output` may hold srun's patterns; empty: srun's own output.
    `together`: the end of one task ends the others. `options`: more of srun's own.
    """

    name: str
    nodes: tuple[str, ...]
    cpus: int = 0
    gpus: int = 0
    output: str = ""
    together: bool = True
    options: tuple[str, ...] = ()


def step_command(step: Step, command: list[str]) -> list[str]:
    """Argument vector of the step. Its tasks run `command`, with srun's own environment as theirs.

    Without --overlap and --mem=0 the second step would wait for the first, and roles that wait for each other would
    never start. -N and -n belong together: -w alone means every node of the job.
    """
    count = len(step.nodes)
    return [
        "srun",
        f"--job-name={step.name}",
        "--overlap",
        "--mem=0",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(step.nodes)}",
        *([f"--cpus-per-task={step.cpus}"] if step.cpus else []),
        *([f"--gres=gpu:{step.gpus}"] if step.gpus else []),
        *(["--kill-on-bad-exit=1"] if step.together else ["--kill-on-bad-exit=0", "--no-kill"]),
        "--wait=0",
        "--input=none",
        "--mpi=none",
        "--export=ALL",
        *([f"--output={step.output}", "--open-mode=append"] if step.output else []),
        *step.options,
        *command,
    ]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for srun, without what would change the step that its command line describes."""
    return {name: value for name, value in environ.items() if name not in SHAPING}
