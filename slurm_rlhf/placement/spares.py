"""Choose the nodes that a run starts on, where its allocation has some to spare: pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slurm_rlhf.errors import PlacementError, shortened


def chosen(nodes: Sequence[str], bad: Collection[str], spares: int) -> list[str]:
    """Return as many nodes as a run has without its `spares`: the first in the order of the allocation that are good.

    Where too few are good, bad ones stay in: what is wrong with them then ends the run. Raises PlacementError if the
    allocation has no more nodes than spares.
    """
    if spares >= len(nodes):
        raise PlacementError(
            f"cluster.spares = {spares}, but the allocation has {len(nodes)} nodes: {shortened(nodes, 4)}. Ask for as "
            f"many more as are to stay in reserve (sbatch --nodes), or set cluster.spares lower"
        )
    wanted = len(nodes) - spares
    good = [node for node in nodes if node not in bad]
    taken = set([*good, *(node for node in nodes if node in bad)][:wanted])
    return [node for node in nodes if node in taken]
