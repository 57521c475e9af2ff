"""Judge what each node is by itself, and sees of the run directory, of models, data and the disk's space: pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_rlhf.errors import shortened
from slurm_rlhf.nodes.facts import UNKNOWN, NodeFacts
from slurm_rlhf.nodes.needs import Needs, Space, judge_accelerators
from slurm_rlhf.nodes.report import Check, Finding, exclude, failed, warned
from slurm_rlhf.sandbox.box import LACKS, described

Facts = Mapping[str, NodeFacts]

MIB = 1 << 20
SHM_OF_A_RANK = 32 * MIB
"""Shared memory that NCCL takes for a rank: buffers of some MiB for each neighbour."""
OTHER_FILES = 256
FILES_OF_A_RANK = 8
"""Sockets of a rank to each other rank, in all groups; libraries and logs have the rest."""


def packages(facts: Facts, here: Mapping[str, str]) -> Check:
    """Compare versions with those of the conductor's node."""
    found = []
    for node, each in facts.items():
        unlike = [name for name, mine in here.items() if each.versions.get(name) != mine]
        lines = [f"{name} {each.versions.get(name)}, here {here[name]}" for name in unlike]
        if lines:
            said = f"{node}: {shortened(lines, 8, '; ')}: not the same packages as on the node that runs the conductor"
            remedy = "Install one environment on a file system that all share, or the same one on each, or"
            found.append(failed(said, f"{remedy} {exclude(node)}", node))
    shown = ("python", "torch", "vllm", "deepspeed", "transformers", "nccl", "slurm_rlhf")
    return Check("packages", ", ".join(f"{name} {here[name]}" for name in shown if name in here), found)


def shared_memory(facts: Facts, needs: Needs) -> Check:
    """Name nodes whose /dev/shm is full, or, with GPUs, too small for NCCL."""
    found: list[Finding] = []
    for node, each in facts.items():
        wanted = SHM_OF_A_RANK * needs.ranks_on.get(node, 1)
        sweep = (
            f"Remove what ended processes left there (srun -w {node} ls -l /dev/shm), enlarge it, or {exclude(node)}"
        )
        if each.shm:
            said = f"/dev/shm of {node} cannot be used, {each.shm_free // MIB} MiB are free: {each.shm}"
            found.append(failed(said, sweep, node))
        elif needs.wanted.slots and 0 <= each.shm_free < wanted:
            said = f"/dev/shm of {node} has {each.shm_free // MIB} MiB free, and NCCL may take {wanted // MIB}"
            found.append(warned(said, f"{sweep}. In a container: --shm-size", node))
    least = min((each.shm_free for each in facts.values()), default=0)
    return Check("shared memory", f"at least {least // MIB} MiB free in /dev/shm", found)


def limits(facts: Facts, needs: Needs) -> Check:
    """Name nodes whose limits on open files or locked memory are too low."""
    found: list[Finding] = []
    files = OTHER_FILES + FILES_OF_A_RANK * sum(needs.ranks_on.values())
    for node, each in facts.items():
        if UNKNOWN < each.most_files < files:
            said = f"{node}: a process may open {each.most_files} files, and a rank of this run may need {files}"
            remedy = f"Raise its limit (`ulimit -Hn`; nofile in limits.conf, LimitNOFILE of slurmd), or {exclude(node)}"
            found.append(failed(said, remedy, node))
        if each.infiniband and each.memlock > UNKNOWN:
            said = f"{node}: a process may lock {each.memlock // MIB} MiB of memory, and InfiniBand registers buffers"
            remedy = (
                "ulimit -l unlimited in the batch script; where that is refused, limits.conf or slurmd's LimitMEMLOCK"
            )
            found.append(warned(said, remedy, node))
    return Check("limits", f"{files} open files, locked memory", found)


def compilers(facts: Facts) -> Check:
    """Name nodes on which nothing can be compiled for Python: on GPUs vLLM's engines need that when they start.

    Name locks, too, for which a rank that compiles an extension of torch would wait.
    """
    remedy = (
        "Load a compiler's module in the batch script (`module load gcc`), install gcc and Python's development "
        "package there, make the environment with a Python that has its headers, or"
    )
    found = []
    for node, each in facts.items():
        if each.compiler:
            said = f"{node}: {each.compiler}; on GPUs Triton compiles while an engine starts"
            found.append(failed(said, f"{remedy} {exclude(node)}", node))
    for lock in sorted({lock for each in facts.values() for lock in each.locks}):
        nodes = tuple(node for node, each in facts.items() if lock in each.locks)
        said = f"{shortened(nodes)}: {lock} was left by a process that compiled an extension of torch and was killed"
        remedy = f"A rank that needs the extension waits until it is gone: rm {lock}, unless another node compiles now"
        found.append(warned(said, remedy, *nodes))
    return Check("compiler", "a C compiler, and Python's headers", found)


def sandboxes(facts: Facts) -> Check:
    """Name the kind of sandbox that each node has, nodes that have none, and what a weak kind cannot do."""
    found = [failed(each.no_sandbox, "", node) for node, each in facts.items() if each.no_sandbox]
    kinds = sorted({each.sandbox for each in facts.values() if each.sandbox})
    on = {kind: tuple(node for node, each in facts.items() if each.sandbox == kind) for kind in kinds}
    found += [warned(f"{shortened(on[kind])}: {described(kind)}", "", *on[kind]) for kind in on if LACKS[kind]]
    return Check("sandbox", "; ".join(f"{kind}: {shortened(nodes)}" for kind, nodes in on.items()), found)


def gpus(facts: Facts, needs: Needs) -> Check:
    """Compare the GPUs of each node with the rank map; name those that are ill or in use."""
    equipment = {node: each.equipment for node, each in facts.items()}
    found = judge_accelerators(equipment, needs.wanted, needs.granted_by)
    for node, each in facts.items():
        remedy = f"Have it looked at, and leave it out: {exclude(node)}"
        found += [warned(f"{node}: {line}", remedy, node, avoid=True) for line in each.unhealthy]
    count = sum(needs.wanted.slots.values())
    return Check("GPUs", f"{count} can be used, and are free and well" if count else "the run wants none", found)


_GB = 1e9
_MAKE_ROOM = "Free space, keep fewer (ckpt.max_num), or take another disk (run_dir)"


def run_directory(facts: Facts, needs: Needs, token: str) -> Check:
    """Name nodes that do not see the canary, which holds `token`, or cannot write next to it."""
    found: list[Finding] = []
    blind = tuple(node for node, each in facts.items() if each.canary != token)
    if blind:
        seen = shortened([node for node in facts if node not in blind] or ["the node that runs the conductor"], 4)
        said = f"run_dir {needs.run_dir} is not shared by all nodes: {shortened(blind, 4)} cannot see what {seen} wrote"
        said += " there"
        remedy = (
            "Put it on a file system that every node mounts (often /scratch or your home; not /tmp): "
            f"--run_dir=/SHARED/DIRECTORY, or leave nodes without the mount out: {exclude(*blind)}"
        )
        found.append(failed(said, remedy, *blind))
    locked = {node: each.run_dir for node, each in facts.items() if each.run_dir and node not in blind}
    if locked:
        said = f"run_dir {needs.run_dir} cannot be written on {shortened(locked, 4)}: {next(iter(locked.values()))}"
        found.append(failed(said, f"Mount it there for writing, or {exclude(*locked)}", *locked))
    return Check("run directory", f"{needs.run_dir}: every node sees the canary and can write", found)


def places(facts: Facts) -> Check:
    """Name nodes that cannot read a model, the data, or a file of the user."""
    lacking: dict[tuple[str, str, str], list[str]] = {}
    for node, each in facts.items():
        for place in each.places:
            if place.problem:
                lacking.setdefault((place.key, place.path, place.problem), []).append(node)
    found = []
    for (key, path, problem), nodes in lacking.items():
        remedy = f"Put it on a file system that every node mounts, mend its permissions, or {exclude(*nodes)}"
        found.append(failed(f"{key} = {path} cannot be read on {shortened(nodes, 4)}: {problem}", remedy, *nodes))
    seen = dict.fromkeys(place.key for each in facts.values() for place in each.places)
    return Check("models and data", f"every node reads {', '.join(seen) or 'nothing'}", found)


def space(facts: Facts, needs: Needs) -> Check:
    """Compare the free bytes and files of the run directory with the checkpoints that the run keeps.

    What the user's quota leaves counts, where it is less than what the file system has.
    """
    want, quota = needs.space, needs.quota
    known = [each for each in facts.values() if each.free_bytes >= 0]
    if want is None or not known:
        return Check("disk space", "not known: the sizes of the models cannot be read")
    free = min(each.free_bytes for each in known)
    files = min((each.free_files for each in known if each.free_files >= 0), default=-1)
    place = of_bytes = of_files = f"run_dir {needs.run_dir}"
    if quota is not None and quota.free_bytes is not None and quota.free_bytes < free:
        free, of_bytes = quota.free_bytes, f"your quota on {place} (by `{quota.by}`)"
    if quota is not None and quota.free_files is not None and (files < 0 or quota.free_files < files):
        files, of_files = quota.free_files, f"your quota on {place} (by `{quota.by}`)"
    found = _lacking_bytes(of_bytes, want, free + want.there) or _lacking_files(of_files, want, files)
    text = f"{want.kept} checkpoints of {_size(want.one)} each, {_size(free)} free"
    return Check("disk space", text, found)


def _lacking_bytes(place: str, want: Space, room: int) -> list[Finding]:
    if room < want.one:
        said = f"{place} has room for {_size(room)}, and one checkpoint takes about {_size(want.one)}"
        return [failed(said, _MAKE_ROOM)]
    total = want.kept * want.one
    if room < total:
        fit = room // max(want.one, 1)
        said = f"{place} has room for {fit} checkpoints, and ckpt.max_num = {want.kept} take {_size(total)}"
        return [warned(said, _MAKE_ROOM)]
    return []


def _lacking_files(place: str, want: Space, files: int) -> list[Finding]:
    if not 0 <= files < want.files * want.kept:
        return []
    said = f"{place} has {files} inodes left, and the checkpoints take about {want.files * want.kept}"
    return [(failed if files < want.files else warned)(said, _MAKE_ROOM)]


def _size(count: int) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB / 10 else f"{count / 1e6:.1f} MB"
