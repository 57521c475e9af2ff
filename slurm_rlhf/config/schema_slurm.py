"""The group `slurm` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class Slurm:
    """The job, in sbatch's words."""

    partition: str = ""
    """Empty: the cluster's default. From here to slurm.setup for `slurm-rlhf submit` only: scripts have headers."""
    account: str = ""
    """Empty: yours by default."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that the nodes must have."""
    exclude: str = ""
    """Nodes to leave out, in Slurm's words: gpu[007,012]."""
    reservation: str = ""
    """Reservation to run in."""
    job_name: str = ""
    """Empty: the name of the run directory."""
    time: str = "24:00:00"
    """Time limit. Before it is over, the run saves and requeues itself."""
    nodes: int = 0
    """Nodes of the job; 0: as few as the roles fit on."""
    gpus_per_node: int = 0
    """GPUs of each node; 0: none, the run takes CPUs."""
    cpus_per_task: int = 0
    """CPUs of each node; 0: left to Slurm."""
    mem: str = ""
    """Memory of each node, such as 64G; 0: all of it; empty: left to Slurm."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    dependency: str = ""
    """What the job waits for: singleton (no other job of this name runs), afterany:12, ..."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the run: module load, source activate, export."""
    container: str = ""
    """Image in which the ranks run, while the conductor stays outside: a .sif or .sqsh file, or docker://..."""
    container_runtime: Literal["apptainer", "singularity", "pyxis"] = "apptainer"
    """apptainer, singularity, or pyxis (srun --container-image)."""
    container_mounts: list[str] = field(default_factory=list)
    """Directories to show inside beside run_dir and the models: PATH or PATH:PATH_INSIDE."""
    container_python: str = "python3"
    """The interpreter inside."""
    chain: bool = False
    """The job is one of many that go on with one run (--array=1-10%1, --dependency=singleton): instead of requeueing
    itself it leaves the rest to the next one, and when the run is finished it cancels those that still wait."""
    signal_lead_s: float = 600.0
    """Seconds before the end of the allocation at which a run saves and requeues itself, as in --signal=B:USR1@600."""
