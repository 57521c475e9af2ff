"""Compute what a run needs of its nodes, from its configuration and rank map, and what is left of the user's quota.

Pure rules judge whether the GPUs that the nodes report are what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import convert

from slurm_rlhf.cluster.gpu_query import GpuProcess, GpuState, is_busy
from slurm_rlhf.cluster.slurm_job import command
from slurm_rlhf.config.architectures import missing
from slurm_rlhf.config.evaluation import data_sets
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.reward_sources import in_workers, runs_programs
from slurm_rlhf.config.roles import running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.user_data import data_files
from slurm_rlhf.errors import shortened, shortened_lines
from slurm_rlhf.nodes.report import Finding, failed, warned
from slurm_rlhf.placement.memory import known_models
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.topology import GPU
from slurm_rlhf.run_directory import RunDirectory, mount_of, size_of
from slurm_rlhf.user_files import file_and_name
from slurm_rlhf.wire import timeouts
from slurm_rlhf.workers.http import Health, health_of

Answers = Mapping[str, Mapping[str, Any]]
"""Node -> what `node_look.equipment` returned there."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the first driver branch for Linux that runs it. Source: CUDA release notes, table of minor
version compatibility."""
_UNLIKE = 0.05  # share of the memory: cards of one kind differ by less
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """State what a run needs on the nodes."""

    slots: Mapping[str, int]  # node -> GPUs that its rank map uses; empty: it has none
    attention: str = "sdpa"

    @classmethod
    def by(cls, ranks: RankMap, config: Config) -> Wanted:
        used: dict[str, int] = {}
        if ranks.topology.accelerator == GPU:
            for shares in ranks.roles.values():
                for share in shares:
                    used[share.node] = max(used.get(share.node, 0), 1 + max(share.gpus))
        return cls(used, config.ds.attn_implementation)


def judge_accelerators(answers: Answers, wanted: Wanted, granted_by: str) -> list[Finding]:
    """Return what is wrong with the GPUs, or not as one may expect; `granted_by`: how to get GPUs here."""
    lacking = {node: words for node, said in answers.items() if (words := missing(wanted.attention, said["modules"]))}
    if lacking:
        words = next(iter(lacking.values()))
        return [failed(f"{words}\n  It is missing on {shortened([*lacking], 4)}.", "", *lacking)]
    built = sorted({str(said["cuda_build"]) for said in answers.values()})
    if not wanted.slots and any(built):
        why = next((f" ({said['said']})" for said in answers.values() if said.get("said")), "")
        text = (
            f"there is no GPU here{why}, and the environment holds the CUDA builds (torch for CUDA {built[-1]}), "
            f"whose vLLM does not run on CPUs: {granted_by}, or make the CPU environment: bash "
            "sbatch/environment.sh --cpu"
        )
        return [failed(text, "")]
    if wanted.slots and not all(built):
        text = (
            "torch is a CPU build here, so the ranks compute on CPUs although there are GPUs. The GPU environment: "
            "bash sbatch/environment.sh --gpu"
        )
        return [warned(text, "")]
    for rule in (_absent, _sliced, _old_driver, _busy):
        found = {node: list(rule(node, answers[node], wanted)) for node in wanted.slots if node in answers}
        if problems := [line for lines in found.values() for line in lines]:
            remedy = _REMEDIES[rule.__name__].format(granted_by=granted_by)
            text = f"GPUs cannot be used:{shortened_lines(problems, _SHOWN)}\n{remedy[0].upper()}{remedy[1:]}."
            return [failed(text, "", *(node for node, lines in found.items() if lines))]
    return _unlike(answers, wanted)


def seen_by_processes(
    answers: Sequence[Mapping[str, Any]], gpus: bool, attention: str
) -> tuple[Wanted, dict[str, dict[str, Any]]]:
    """Merge the answers of the processes of each node, each of which reports the GPUs that it sees.

    Returns (what the run needs: all of them, and at least one; node -> the merged answer).
    """
    merged: dict[str, dict[str, Any]] = {}
    for said in answers:
        there = merged.setdefault(said["node"], {**said, "gpus": []})
        known = {card["uuid"] for card in there["gpus"]}
        there["gpus"] = [*there["gpus"], *(card for card in said.get("gpus", []) if card["uuid"] not in known)]
    slots = {node: max(1, len(said["gpus"])) for node, said in merged.items()} if gpus else {}
    return Wanted(slots, attention), merged


_REMEDIES = {
    "_absent": "{granted_by}; leave a node with a broken driver out with sbatch --exclude=NODE",
    "_sliced": "NCCL and CUDA IPC do not work between slices: ask for whole GPUs, or switch MIG off as root "
    "(nvidia-smi -mig 0)",
    "_old_driver": "use nodes with a newer driver, a CUDA forward compatibility package on LD_LIBRARY_PATH, or an "
    "environment with builds for the older CUDA",
    "_busy": "the engines count on their share of the memory: end that process, wait for it, leave the node out with "
    "sbatch --exclude=NODE, or choose other GPUs with CUDA_VISIBLE_DEVICES",
}


def _absent(node: str, said: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    count, needed = len(said["gpus"]) + said["slices"], wanted.slots[node]
    if not count:
        yield f"{node}: no GPU can be used, the run needs {needed}: {said['said'] or 'CUDA_VISIBLE_DEVICES hides them'}"
    elif count < needed:
        yield f"{node}: {count} GPU{'s' if count > 1 else ''} can be used, the run needs {needed}"


def _sliced(node: str, said: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    if said["slices"]:
        yield f"{node}: CUDA_VISIBLE_DEVICES names {said['slices']} MIG slices"
    cut = [str(card.index) for card in _cards(said, wanted.slots[node]) if card.mig]
    if cut:
        yield f"{node}: GPU {', '.join(cut)} is cut into MIG slices"


def _old_driver(node: str, said: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    built, can = str(said["cuda_build"]), str(said["driver_cuda"])
    major, branch = int(built.split(".", maxsplit=1)[0]), str(said["driver"]).split(".")[0]
    oldest = OLDEST_DRIVER.get(major, 0)
    by_version = int(can.split(".", maxsplit=1)[0]) < major if can else None
    old = branch.isdigit() and int(branch) < oldest if by_version is None else by_version
    if old:
        known = f" (CUDA {can})" if can else ""
        needed = f"driver {oldest} or newer" if oldest else "a newer driver"
        yield f"{node}: driver {said['driver']}{known} is too old for torch's CUDA {built}, which needs {needed}"


def _busy(node: str, said: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    for card in _cards(said, wanted.slots[node]):
        if is_busy(card):
            who = ", ".join(_called(process) for process in card.processes) or "processes that are not seen from here"
            used = f"{card.used_mib / 1024:.1f} of {card.memory_mib / 1024:.0f} GiB"
            yield f"{node}: {used} of GPU {card.index} are taken already by {who}"


def _called(process: GpuProcess) -> str:
    whose = f" of {process.user}" if process.user else ""
    return f"{os.path.basename(process.name)} (pid {process.pid}{whose})"


def _unlike(answers: Answers, wanted: Wanted) -> list[Finding]:
    kinds: dict[str, list[int]] = {}
    for node, slots in wanted.slots.items():
        for card in _cards(answers[node], slots) if node in answers else ():
            kinds.setdefault(card.name, []).append(card.memory_mib)
    sizes = [size for found in kinds.values() for size in found]
    if not sizes or (len(kinds) == 1 and max(sizes) <= (1 + _UNLIKE) * min(sizes)):
        return []
    listed = [f"{len(found)} x {name} ({min(found) / 1024:.0f} GiB)" for name, found in sorted(kinds.items())]
    text = (
        f"GPUs of unlike kinds or sizes: {', '.join(listed)}. Ranks of a role wait for the slowest of them, and what "
        "does not fit the smallest does not fit; better give each role GPUs of one kind"
    )
    return [warned(text, "")]


def _cards(said: Mapping[str, Any], slots: int) -> list[GpuState]:
    """Return the first `slots` of a node: those that the rank map uses."""
    return convert(said["gpus"][:slots], list[GpuState])


_FILES_OF_A_RANK = 4
_OTHER_FILES = 32
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
    if (models := known_models(config)) is None:
        return None
    saved = [role for role in running_roles(config) if role.kind == "trained"]
    width = _FP32 if config.ds.param_dtype == "fp32" else 2
    one = sum(models[role.name].parameters * (width + _ADAM) for role in saved)
    files = _OTHER_FILES + sum(_FILES_OF_A_RANK * role.ranks(config) for role in saved)
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
        # -w: a file system is one line; -p: the grace time is a number. So each line has all of its fields.
        words, place = ["quota", "-w", "-p", "-u"], device
    # The exit status says nothing: it is a failure, too, where a quota is used up.
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
