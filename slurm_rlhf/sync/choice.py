"""Which backend a group takes when nobody says."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rlhf.errors import ConfigError

BACKENDS = ("auto", "gloo", "nccl", "ipc", "disk")


def choose(
    wanted: Sequence[str],
    nodes: Sequence[str],
    devices: Sequence[str],
    colocated: bool = False,
    inside: bool = False,
) -> tuple[str, str]:
    """(backend, why) from what each member wants, its node, and its GPU ("" without one).

    `colocated`: actor and engines share their slots, which without GPUs nothing else shows. `inside`: no weights have
    to leave their node, because on each there are actor ranks that hold the whole model.

    Raises ConfigError, without a name for the members, where they cannot agree.
    """
    if len(set(wanted)) > 1:
        raise ConfigError(f"its members use different backends: {', '.join(sorted(set(wanted)))}")
    (backend,) = set(wanted)
    inside = inside or len(set(nodes)) == 1
    if backend == "ipc" and not inside:
        raise ConfigError(
            f"sync.backend = ipc joins roles of one node, and these are on {', '.join(sorted(set(nodes)))}: use auto"
        )
    if backend == "nccl" and not all(devices):
        raise ConfigError("sync.backend = nccl needs a GPU and a torch with NCCL for every member: use auto or gloo")
    if backend != "auto":
        return backend, "sync.backend says so"
    if colocated and inside:
        return "ipc", "actor and engines share their slots (train.colocate_all)"
    if not all(devices):
        return "gloo", "not every member has a GPU"
    if len(set(devices)) < len(devices):
        return ("ipc", "roles share GPUs") if inside else ("gloo", "NCCL refuses two ranks on one GPU")
    return "nccl", "every member has a GPU of its own"
