"""Which accelerators a role's processes see: the one table of visibility variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_rlhf.errors import PlacementError
from slurm_rlhf.placement.topology import GPU, Topology

VISIBILITY: dict[str, bool] = {
    "CUDA_VISIBLE_DEVICES": True,
    "HIP_VISIBLE_DEVICES": True,
    "ROCR_VISIBLE_DEVICES": False,
    "GPU_DEVICE_ORDINAL": False,
}
"""Variable -> True: set to the rank map's devices; False: removed, because it would choose among them once more.

CUDA reads the first; ROCm reads the first two, which must agree, among what the last two have left over.
"""


def visibility(
    topology: Topology, node: str, slots: Sequence[int], environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """(variables to set, variables to remove) so that a process on `node` sees the devices of `slots`, in that order.

    Slurm numbers the devices it granted, or renumbers them where it confines the job to them; `environ` of the step
    says which, and slot i is the i-th of them. Raises PlacementError when fewer were granted than the map uses.
    """
    devices = _devices(topology, node, slots, environ) if topology.accelerator == GPU else ""
    return (
        {name: devices for name, is_set in VISIBILITY.items() if is_set},
        [name for name, is_set in VISIBILITY.items() if not is_set],
    )


def _devices(topology: Topology, node: str, slots: Sequence[int], environ: Mapping[str, str]) -> str:
    known = topology.node(node)
    granted = next((found for name in VISIBILITY if (found := _listed(environ.get(name, "")))), [])
    if known.devices or not granted:
        return known.visible(slots)
    if max(slots) >= len(granted):
        raise PlacementError(
            f"node {node}: the rank map uses GPU {max(slots)}, but the step was granted {len(granted)} "
            f"({','.join(granted)}): ask for all of them with --gpus-per-node"
        )
    return ",".join(granted[slot] for slot in slots)


def _listed(value: str) -> list[str]:
    return [device for device in value.split(",") if device and device != "NoDevFiles"]
