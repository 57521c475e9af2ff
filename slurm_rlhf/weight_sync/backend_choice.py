"""Which backend a group takes when nobody says."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rlhf.errors import ConfigError

BACKENDS = ("auto", "gloo", "nccl", "ipc", "disk")


def share_gpus(devices: Sequence[str], actors: int) -> bool:
    """Whether every engine rank has an actor rank on its GPU. `devices`: of each member, the first `actors` being the
    actor's."""
    return all(devices) and set(devices[actors:]) <= set(devices[:actors])


def choose(
    wanted: Sequence[str],
    nodes: Sequence[str],
    devices: Sequence[str],
    colocated: bool = False,
    inside: bool = False,
    twins: bool = False,
) -> tuple[str, str]:
    """(backend, why) from what each member wants, its node, and its GPU ("" without one).

    `colocated`: actor and engines share their slots, which without GPUs nothing else shows. `inside`: no weights have
    to leave their node, because on each there are actor ranks that hold the whole model. `twins`: see `share_gpus`.

    Raises ConfigError, without a name for the members, where they cannot agree.
    """
    if len(set(wanted)) > 1:
        raise ConfigError(f"its members use different backends: {', '.join(sorted(set(wanted)))}")
    (backend,) = set(wanted)
    inside = inside or len(set(nodes)) == 1
    if backend == "ipc" and all(devices) and not twins:
        raise ConfigError(
            "sync.backend = ipc hands weights over on the GPU that an actor rank and an engine rank share "
            "(train.colocate_all), and here are engine ranks whose GPU has no actor rank: use auto"
        )
    if backend == "ipc" and not (inside or twins):
        raise ConfigError(
            f"sync.backend = ipc joins roles of one node, and these are on {', '.join(sorted(set(nodes)))}: use auto"
        )
    if backend == "nccl" and not all(devices):
        raise ConfigError("sync.backend = nccl needs a GPU and a torch with NCCL for every member: use auto or gloo")
    if backend != "auto":
        return backend, "sync.backend says so"
    if twins:
        return "ipc", "each engine rank shares its GPU with an actor rank"
    if colocated and inside and not all(devices):
        return "ipc", "actor and engines share their slots (train.colocate_all)"
    if not all(devices):
        return "gloo", "not every member has a GPU"
    if len(set(devices)) < len(devices):
        return "gloo", "NCCL refuses two ranks on one GPU, and there are engine ranks whose GPU has no actor rank"
    return "nccl", "every member has a GPU of its own"
