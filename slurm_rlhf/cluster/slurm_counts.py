"""Slurm's ways to write counts: `8(x15),4` per node, and GPUs in all their spellings."""

from __future__ import annotations

import re

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MAX_NODES = 1 << 20
_OTHER_RESOURCE = re.compile(
    r"(?:gres[:/](?!gpu)|(?:cpu|mem|vmem|node|energy|billing|pages|license|bb|fs|ic|nic|mps|shard)\b)"
)
# gpu:a100:4(S:0-1), gres/gpu:a100=4, gres:gpu:2, a100:4, 4, gpu(IDX:0-3)
_GPU = re.compile(
    r"(?:gres[:/])?(?:gpu(?:[:=][A-Za-z][\w.+-]*)?|[A-Za-z][\w.+-]*)?"
    r"(?:[:=]?(?P<count>\d+))?(?:\([^()]*\))?"
)


def expand_counts(text: str) -> tuple[int, ...]:
    """`8(x3),4` -> (8, 8, 8, 4). Raises ValueError."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MAX_NODES:
            raise ValueError(f"expected counts like 8(x15),4, got {part!r}")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def per_node(counts: tuple[int, ...], nodes: int) -> tuple[int, ...]:
    """One count for each of `nodes` nodes; a single count is that of every node. Raises ValueError."""
    if len(counts) == 1:
        return counts * nodes
    if len(counts) != nodes:
        raise ValueError(f"{len(counts)} counts for {nodes} nodes")
    return counts


def parse_gpus(text: str) -> int:
    """The number of GPUs in a request: `8`, `a100:4`, `gpu:2`, `gpu:a100:4(S:0-1)`, `gres/gpu=8`, `a100:4,v100:2`.

    Other resources in the list (`cpu=4`, `gres/shard:2`, `nic:1`) count nothing; a type without a number is one GPU.
    Raises ValueError.
    """
    total = 0
    for part in _split(text):
        if _OTHER_RESOURCE.match(part):
            continue
        match = _GPU.fullmatch(part)
        if match is None or not part:
            raise ValueError(f"expected GPUs like 8, a100:4 or gpu:a100:4, got {part!r}")
        total += int(match["count"] or 1)
    return total


def count_devices(text: str) -> int:
    """The number of devices in a list of indices or UUIDs: `0,1,2`, `0-3,7`, `GPU-8f1c...`, `MIG-...`, or none."""
    total = 0
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if part in {"NoDevFiles", "-1", "none", "void"}:
            return total
        low, dash, high = part.partition("-")
        total += int(high) - int(low) + 1 if dash and low.isdigit() and high.isdigit() else 1
    return total


def _split(text: str) -> list[str]:
    """Split at commas that are not inside parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text)]
