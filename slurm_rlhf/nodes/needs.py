"""What a run wants of its nodes, from its configuration and rank map, and what is left of the user's quota."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment
from slurm_rlhf.cluster.slurm_job import ask_jobs
from slurm_rlhf.cluster.slurm_notation import expand
from slurm_rlhf.config.data_files import data_files
from slurm_rlhf.config.evaluation import data_sets
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.reward_sources import in_workers, runs_programs
from slurm_rlhf.config.roles import running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError, PlacementError, RunError
from slurm_rlhf.nodes.accelerators import Wanted
from slurm_rlhf.nodes.step_spec import RANK_MAP
from slurm_rlhf.placement.memory import read_models
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.run_directory import RunDirectory, device_of, mount_of, size_of
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.http_client import Health, health_of

_FILES_OF_A_RANK = 4
_FILES_BESIDE = 32
_FP32 = 4
_ADAM = 12  # bytes of a parameter: a master copy and two moments, all fp32

WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system without locks answers: NFS without its lock daemon, Lustre that is mounted without -o flock."""


@dataclass(frozen=True, slots=True)
class Space:
    """Hold what the checkpoints of a run take: bytes and files of one, how many are kept, what is there already."""

    one: int
    files: int
    kept: int
    there: int  # bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """State what is wanted of the nodes."""

    run_dir: str
    wanted: Wanted
    ranks_on: Mapping[str, int]  # node -> processes of the run
    places: tuple[tuple[str, str], ...] = ()  # (key, path) that every node reads
    sandbox: str = ""  # reward.sandbox, where a reward runs programs; empty: none does
    space: Space | None = None  # None: the models' sizes are not known
    granted_by: str = ""
    quota: Quota | None = None  # this user's quota where the run directory is
    lock: str = ""  # why the run directory cannot be locked
    earlier: tuple[str, ...] = ()  # nodes of the last start in this directory; empty: there was none
    allocation: str = ""  # how the job differs from what its environment says
    servers: tuple[Health, ...] = ()  # servers of rewards and environments, asked by the conductor


def needs_of(config: Config, ranks: RankMap, slurm: SlurmEnvironment | None, granted_by: str) -> Needs:
    """Find out what a run wants. Reads the run directory, asks Slurm and servers, up to 13 s if they are silent."""
    run_dir = Path(config.run_dir)
    ranks_on: dict[str, int] = {}
    for shares in ranks.roles.values():
        for share in shares:
            ranks_on[share.node] = ranks_on.get(share.node, 0) + len(share.ranks)
    return Needs(
        run_dir=str(run_dir),
        wanted=Wanted.by(ranks, config),
        ranks_on=ranks_on,
        places=places_of(config),
        sandbox=config.reward.sandbox if runs_programs(config) else "",
        space=space_of(config),
        granted_by=granted_by,
        quota=quota_on(run_dir),
        lock=lock_problem(run_dir),
        earlier=earlier_nodes(run_dir),
        allocation=allocation_problem(slurm) if slurm is not None else "",
        servers=tuple(health_of(config)),
    )


def places_of(config: Config) -> tuple[tuple[str, str], ...]:
    """List what ranks and conductor read: models, data, the user's files. After a requeue any node may be the first."""
    found = {role.model(config)[1]: role.model(config)[0] for role in running_roles(config)}
    sets = {path: key for key in ("data.prompt_dataset", "eval.dataset") if (path := get(config, key))}
    for path, key in (dict.fromkeys((one.path for one in data_sets(config)), "eval.datasets") | sets).items():
        found |= {str(file): key for file in data_files(path)}
    for key, path in (in_workers(config) if config.reward.workers_num_nodes else {}).items():
        found |= {path: key} if key.endswith(("remote_url", "path")) else {}
    for path in config.train.plugins:
        found.setdefault(path, "train.plugins")
    return tuple((key, str(Path(path).absolute())) for path, key in found.items() if path)


def space_of(config: Config) -> Space | None:
    """Estimate what the checkpoints of a run take: weights, and AdamW's states, of every role that is saved."""
    try:
        models = read_models(config)
    except ModelError:
        return None
    saved = [role for role in running_roles(config) if role.kind == "trained"]
    width = _FP32 if config.ds.param_dtype == "fp32" else 2
    one = sum(models[role.name].parameters * (width + _ADAM) for role in saved)
    files = _FILES_BESIDE + sum(_FILES_OF_A_RANK * role.ranks(config) for role in saved)
    there = size_of(RunDirectory(Path(config.run_dir)).checkpoints)
    return Space(one, files, config.ckpt.max_num, there)


def lock_problem(run_dir: Path) -> str:
    """Say why files in the run directory cannot be locked, and on which file system; empty where they can."""
    file = run_dir / f".lock.{os.getpid()}"
    try:
        with file.open("w", encoding="utf-8") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            return ""
        point, kind = mount_of(run_dir)
        return f"{error.strerror or error} on {point}{f' ({kind})' if kind else ''}"
    finally:
        file.unlink(missing_ok=True)
    return ""


def earlier_nodes(run_dir: Path) -> tuple[str, ...]:
    """Return the nodes of the last start in this directory; empty where there was none."""
    try:
        ranks = RankMap.from_json(json.loads((run_dir / RANK_MAP).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, PlacementError):
        return ()
    return (*(node.name for node in ranks.topology.nodes), *ranks.topology.workers)


def allocation_problem(slurm: SlurmEnvironment) -> str:
    """Say how the nodes of the job differ from those that its environment names; empty where Slurm does not answer."""
    try:
        jobs = [
            job for job in ask_jobs(str(slurm.job_id), timeouts.SLURM_PREFLIGHT_S) if job.number == str(slurm.job_id)
        ]
        now = expand(jobs[0].nodes) if jobs else []
    except (RunError, PlacementError):
        return ""
    return nodes_differ(slurm.job_nodes, now) if now else ""


def nodes_differ(named: Sequence[str], now: Sequence[str]) -> str:
    """Say which nodes one list has and the other has not; empty where they are the same."""
    gone = [node for node in named if node not in now]
    more = [node for node in now if node not in named]
    told = []
    if gone:
        told.append(f"{', '.join(gone)} no longer belong{'' if len(gone) > 1 else 's'} to it")
    if more:
        told.append(f"it has {', '.join(more)} as well")
    return " and ".join(told)


_KIB = 1024
_FIELDS = 8  # used, quota, limit, grace of the blocks, and of the files


@dataclass(frozen=True, slots=True)
class Quota:
    """Hold what this user may still write. None: without a limit."""

    by: str  # the command that says so
    free_bytes: int | None
    free_files: int | None


def quota_on(directory: Path) -> Quota | None:
    """Ask for the quota of this user on the file system of `directory`. Blocks for 5 s at most.

    None where there is no program to ask, no quota, or no answer that can be read. Lustre has `lfs quota`, others (NFS
    with rquotad, XFS, ext4) `quota`.
    """
    point, kind = mount_of(directory)
    if kind == "lustre":
        command, place = ["lfs", "quota", "-q", "-u", str(os.getuid()), str(point)], str(point)
    else:
        # Long lines and no words for the grace time: each line has all of its fields.
        command, place = ["quota", "-w", "-p", "-u"], device_of(point)
    if shutil.which(command[0]) is None:
        return None
    try:
        # Its exit status is that of a quota which is used up, too.
        said = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeouts.QUOTA_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_quota(said.stdout, place, " ".join(command[:2] if kind == "lustre" else command[:1]))


def read_quota(text: str, place: str, by: str) -> Quota | None:
    """Read what `quota -w -p` or `lfs quota -q` printed of `place`; a long name of it may have a line of its own.

    A star marks what is over its quota, brackets what Lustre could not ask all servers for. The hard limit counts: what
    is over the soft one can be written for a while. Kilobytes are of 1024 bytes; 0 is no limit.
    """
    words = text.split()
    for at, word in enumerate(words):
        fields = [each.strip("*[]") for each in words[at + 1 : at + 1 + _FIELDS]]
        if word == place and len(fields) == _FIELDS:
            free = [_left(fields[:3]), _left(fields[4:7])]
            if free == [None, None]:
                return None
            return Quota(by, None if free[0] is None else _KIB * free[0], free[1])
    return None


def _left(fields: Sequence[str]) -> int | None:
    if not all(field.isdigit() for field in fields):
        return None
    used, soft, hard = map(int, fields)
    most = hard or soft
    return max(most - used, 0) if most else None
