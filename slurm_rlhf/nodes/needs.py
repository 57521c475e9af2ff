"""What a run wants of its nodes, from its configuration and rank map, and what is left of the user's quota."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.cluster.slurm_job import command
from slurm_rlhf.config.evaluation import data_sets
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.reward_sources import in_workers, runs_programs
from slurm_rlhf.config.roles import running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.user_data import data_files
from slurm_rlhf.errors import ModelError
from slurm_rlhf.nodes.accelerators import Wanted
from slurm_rlhf.placement.memory import read_models
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.run_directory import RunDirectory, mount_of, size_of
from slurm_rlhf.user_files import file_and_name
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.http import Health, health_of

_FILES_OF_A_RANK = 4
_FILES_OTHER_SOURCE = 32
_FP32 = 4
_ADAM = 12  # bytes of a parameter: a master copy and two moments, all fp32


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
    servers: tuple[Health, ...] = ()  # servers of rewards and environments, asked by the conductor


def needs_of(config: Config, ranks: RankMap, granted_by: str) -> Needs:
    """Find out what a run wants. Reads the run directory, asks servers and for the quota, for up to 8 s."""
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
        servers=tuple(health_of(config)),
    )


def places_of(config: Config) -> tuple[tuple[str, str], ...]:
    """List what ranks and conductor read: models, data, the user's files. After a requeue any node may be the first."""
    found = {role.model(config)[1]: role.model(config)[0] for role in running_roles(config)}
    sets = {path: key for key in ("data.prompt_dataset", "eval.dataset") if (path := get(config, key))}
    for path, key in (dict.fromkeys((one.path for one in data_sets(config)), "eval.datasets") | sets).items():
        found |= {str(file): key for file in data_files(path)}
    for key, path in (in_workers(config) if config.reward.workers_num_nodes else {}).items():
        found |= {file_and_name(path)[0]: key} if key.endswith(("remote_url", "path")) else {}
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
    files = _FILES_OTHER_SOURCE + sum(_FILES_OF_A_RANK * role.ranks(config) for role in saved)
    there = size_of(RunDirectory(Path(config.run_dir)).checkpoints)
    return Space(one, files, config.ckpt.max_num, there)


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
    device, point, kind = mount_of(directory)
    if kind == "lustre":
        words, place = ["lfs", "quota", "-q", "-u", str(os.getuid()), str(point)], str(point)
    else:
        # Long lines and no words for the grace time: each line has all of its fields.
        words, place = ["quota", "-w", "-p", "-u"], device
    # A quota that is used up gives the same exit status.
    said = command(words, timeout_s=timeouts.QUOTA_S).stdout
    return read_quota(said, place, " ".join(words[:2] if kind == "lustre" else words[:1]))


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
