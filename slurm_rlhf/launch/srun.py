"""The `srun` command line of one step: pure text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_OPTIONS = """
    ACCOUNT ACCTG_FREQ BCAST BCAST_EXCLUDE BURST_BUFFER CLUSTERS COMPRESS CONSTRAINT CONTAINER CORE_SPEC CPUS_PER_GPU
    CPUS_PER_TASK CPU_BIND CPU_FREQ_REQ DELAY_BOOT DEPENDENCY DISABLE_STATUS DISTRIBUTION DIST_PLANESIZE EPILOG EXACT
    EXCLUSIVE EXIT_ERROR EXIT_IMMEDIATE EXPORT_ENV GPUS GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND GPU_FREQ
    GRES GRES_FLAGS HINT IMMEDIATE KILL_BAD_EXIT LABELIO MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE NNODES
    NO_KILL NPROCS NTASKS NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_SOCKET OPEN_MODE OVERCOMMIT OVERLAP
    PARTITION POWER PROFILE PROLOG QOS REMOTE_CWD REQ_SWITCH RESERVATION RESV_PORTS SEND_LIBS SIGNAL SPREAD_JOB
    STDERRMODE STDINMODE STDOUTMODE TEST_EXEC THREADS THREADS_PER_CORE THREAD_SPEC TIMELIMIT TRES_BIND TRES_PER_TASK
    UMASK UNBUFFEREDIO USE_MIN_NODES WAIT WAIT4SWITCH WCKEY WORKING_DIR
"""
SHAPING = frozenset(
    {f"SLURM_{name}" for name in _OPTIONS.split()} | {"SRUN_CONTAINER", "SRUN_CPUS_PER_TASK", "SRUN_EXPORT_ENV"}
)
"""What srun would read as options of the step (`man srun`, input environment variables).

The job, a shell around it or a user's profile left them there. A site's own stay: SLURM_CONF, SLURM_DEBUG,
SLURM_NETWORK, SLURM_TASK_PROLOG and SLURM_TASK_EPILOG, SLURM_PMI_*.
"""


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
