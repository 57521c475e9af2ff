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

    `cpus` of each node; 0: left to Slurm. `gpus` on each of them, in the same order; empty: none. `uneven`: the job
    has not the same number of GPUs on each of its nodes. `output` may hold srun's patterns; empty: srun's own output.
    `together`: its tasks are of no use without each other, so a node that dies ends it. `options`: more of srun's own.
    """

    name: str
    nodes: tuple[str, ...]
    cpus: int = 0
    gpus: tuple[int, ...] = ()
    output: str = ""
    together: bool = True
    uneven: bool = False
    options: tuple[str, ...] = ()


def step_command(step: Step, command: list[str]) -> list[str]:
    """Argument vector of the step. Its tasks run `command`, with srun's own environment as theirs.

    Without --overlap and --mem=0 the second step would wait for the first, and roles that wait for each other would
    never start. -N and -n belong together: -w alone means every node of the job.

    In a job with unlike numbers of GPUs a step that asks for none fails, --gres=gpu:N is refused on the larger nodes,
    and --gpus=N over several nodes is dealt out anyhow (Slurm 22.05): each node is a component of its own there.
    """
    if not step.uneven or not step.gpus:
        resources = f"--gres=gpu:{step.gpus[0]}" if step.gpus else "--gres=none"
        return ["srun", *_component(step, step.nodes, resources, command)]
    words: list[str] = []
    for node, gpus in zip(step.nodes, step.gpus, strict=True):
        words += [":" if words else "srun", *_component(step, (node,), f"--gpus={gpus}", command)]
    return words


def _component(step: Step, nodes: tuple[str, ...], resources: str, command: list[str]) -> list[str]:
    count = len(nodes)
    return [
        f"--job-name={step.name}",
        "--overlap",
        "--mem=0",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        *([f"--cpus-per-task={step.cpus}"] if step.cpus else []),
        resources,
        "--kill-on-bad-exit=0",
        *([] if step.together else ["--no-kill"]),
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
