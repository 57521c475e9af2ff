"""Judge what each node is by itself: packages, shared memory, limits, GPUs, and the allocation: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_rlhf.errors import UserError, shortened
from slurm_rlhf.nodes.accelerators import judge_accelerators
from slurm_rlhf.nodes.facts import UNKNOWN, NodeFacts
from slurm_rlhf.nodes.needs import Needs
from slurm_rlhf.nodes.network_checks import exclude
from slurm_rlhf.nodes.report import FAILED, OK, WARNING, Check, Finding
from slurm_rlhf.sandbox.box import described
from slurm_rlhf.sandbox.commands import LACKS

Facts = Mapping[str, NodeFacts]

MIB = 1 << 20
SHM_OF_A_RANK = 32 * MIB
"""What NCCL takes of shared memory for a rank: buffers of some MiB for each neighbour."""
FILES_BESIDE = 256
FILES_OF_A_RANK = 8
"""Sockets of a rank to each other rank, in all groups; libraries and logs have the rest."""


def packages(facts: Facts, here: Mapping[str, str]) -> Check:
    """Compare versions with those of the conductor's node."""
    unlike = {
        node: [
            f"{name} {each.versions.get(name)}, here {mine}"
            for name, mine in here.items()
            if each.versions.get(name) != mine
        ]
        for node, each in facts.items()
    }
    found = tuple(
        Finding(
            FAILED,
            (node,),
            f"{node}: {shortened(lines, 8, '; ')}: not the same packages as on the node that runs the conductor",
            f"Install one environment on a file system that all share, or the same one on each, or {exclude(node)}",
        )
        for node, lines in unlike.items()
        if lines
    )
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
            found.append(Finding(FAILED, (node,), said, sweep))
        elif needs.wanted.slots and 0 <= each.shm_free < wanted:
            said = f"/dev/shm of {node} has {each.shm_free // MIB} MiB free, and NCCL may take {wanted // MIB}"
            found.append(Finding(WARNING, (node,), said, f"{sweep}. In a container: --shm-size"))
    least = min((each.shm_free for each in facts.values()), default=0)
    return Check("shared memory", f"at least {least // MIB} MiB free in /dev/shm", tuple(found))


def limits(facts: Facts, needs: Needs) -> Check:
    """Name nodes whose limits on open files or locked memory are too low."""
    found: list[Finding] = []
    files = FILES_BESIDE + FILES_OF_A_RANK * sum(needs.ranks_on.values())
    for node, each in facts.items():
        if UNKNOWN < each.most_files < files:
            said = f"{node}: a process may open {each.most_files} files, and a rank of this run may need {files}"
            remedy = f"Raise its limit (`ulimit -Hn`; nofile in limits.conf, LimitNOFILE of slurmd), or {exclude(node)}"
            found.append(Finding(FAILED, (node,), said, remedy))
        if each.infiniband and each.memlock > UNKNOWN:
            said = f"{node}: a process may lock {each.memlock // MIB} MiB of memory, and InfiniBand registers buffers"
            remedy = (
                "ulimit -l unlimited in the batch script; where that is refused, limits.conf or slurmd's LimitMEMLOCK"
            )
            found.append(Finding(WARNING, (node,), said, remedy))
    return Check("limits", f"{files} open files, locked memory", tuple(found))


def compilers(facts: Facts) -> Check:
    """Name nodes on which nothing can be compiled for Python: on GPUs vLLM's engines need that when they start.

    Name locks, too, for which a rank that compiles an extension of torch would wait.
    """
    found = [
        Finding(
            FAILED,
            (node,),
            f"{node}: {each.compiler}; on GPUs Triton compiles while an engine starts",
            "Load a compiler's module in the batch script (`module load gcc`), install gcc and Python's development "
            f"package there, make the environment with a Python that has its headers, or {exclude(node)}",
        )
        for node, each in facts.items()
        if each.compiler
    ]
    for lock in sorted({lock for each in facts.values() for lock in each.locks}):
        nodes = tuple(node for node, each in facts.items() if lock in each.locks)
        said = f"{shortened(nodes)}: {lock} was left by a process that compiled an extension of torch and was killed"
        remedy = f"A rank that needs the extension waits until it is gone: rm {lock}, unless another node compiles now"
        found.append(Finding(WARNING, nodes, said, remedy))
    return Check("compiler", "a C compiler, and Python's headers", tuple(found))


def sandboxes(facts: Facts) -> Check:
    """Name the kind of sandbox that each node has, nodes that have none, and what a weak kind cannot do."""
    found = [Finding(FAILED, (node,), each.no_sandbox, "") for node, each in facts.items() if each.no_sandbox]
    kinds = sorted({each.sandbox for each in facts.values() if each.sandbox})
    on = {kind: tuple(node for node, each in facts.items() if each.sandbox == kind) for kind in kinds}
    found += [Finding(WARNING, on[kind], f"{shortened(on[kind])}: {described(kind)}", "") for kind in on if LACKS[kind]]
    return Check("sandbox", "; ".join(f"{kind}: {shortened(nodes)}" for kind, nodes in on.items()), tuple(found))


def gpus(facts: Facts, needs: Needs) -> Check:
    """Compare the GPUs of each node with the rank map; name those that are ill or in use."""
    equipment = {node: each.equipment for node, each in facts.items()}
    found: list[Finding] = []
    try:
        notes = judge_accelerators(equipment, needs.wanted, needs.granted_by)
        found += [Finding(WARNING, (), note.removeprefix("note: "), "") for note in notes]
    except UserError as error:
        culprits = tuple(node for node in facts if f"{node}:" in str(error))
        found.append(Finding(FAILED, culprits, str(error), ""))
    found += [
        Finding(
            WARNING, (node,), f"{node}: {line}", f"Have it looked at, and leave it out: {exclude(node)}", avoid=True
        )
        for node, each in facts.items()
        for line in each.unhealthy
    ]
    count = sum(needs.wanted.slots.values())
    return Check("GPUs", f"{count} can be used, and are free and well" if count else "the run wants none", tuple(found))


def allocation(needs: Needs, nodes: Sequence[str], job: str) -> Check:
    """Compare the nodes with those that Slurm says the job has, and with those of the last start."""
    found: list[Finding] = []
    if needs.allocation:
        said = f"job {job} is not what its environment says: {needs.allocation}"
        remedy = "Requeue it (scontrol requeue), or submit it again: a run wants the same nodes throughout"
        found.append(Finding(FAILED, (), said, remedy))
    if needs.earlier and set(needs.earlier) != set(nodes):
        said = (
            f"the last start in this run_dir was on {shortened(needs.earlier, 4)}, this one is on {shortened(nodes, 4)}"
        )
        found.append(Finding(OK, (), said, "It goes on from the newest checkpoint, if any, all the same"))
    return Check("allocation", shortened(nodes, 8), tuple(found))
