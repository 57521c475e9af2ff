"""Choose the nodes that a run starts on, where its allocation has some to spare: pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slurm_rlhf.errors import PlacementError, shortened


def chosen(nodes: Sequence[str], bad: Collection[str], failed: Collection[str], spares: int) -> list[str]:
    """Return as many nodes as a run has without its `spares`: the first in the order of the allocation that are good.

    Where too few are good, `bad` ones stay in, and `failed` ones last: what is wrong with them then ends the run.
    Raises PlacementError if the allocation has no more nodes than spares.
    """
    if spares >= len(nodes):
        raise PlacementError(
            f"cluster.spares = {spares}, but the allocation has {len(nodes)} nodes: {shortened(nodes, 4)}. Ask for as "
            "many more as are to stay in reserve (sbatch --nodes), or set cluster.spares lower"
        )
    preferred = sorted(nodes, key=lambda node: (node in failed, node in bad))
    taken = preferred[: len(nodes) - spares]
    return [node for node in nodes if node in taken]
