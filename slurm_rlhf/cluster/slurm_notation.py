"""Read Slurm's notation: lists of nodes, counts per node, and numbers of GPUs.

A list of nodes looks like `gpu[001-003,007],login1,rack[1-2]-n[01-04]`. `scontrol show hostnames` expands it, too, but
many containers lack it, and its exit code is 0 for an invalid list.

    list    = element { (comma | blank) element }
    element = { text | "[" range { "," range } "]" }; with a bracket, the element ends with one
    range   = digits [ "-" digits ]; the zeros of the first number set the width
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import product, zip_longest

from slurm_rlhf.errors import PlacementError

MAX_RANGE = 65536
"""Limit of Slurm on the numbers of one range."""
MAX_NAMES = 1 << 20
"""Limit on the names of one element."""

_ELEMENT = re.compile(r"(?:(?:[\w.\-]*\[[\d,\-]+\])+|[\w.\-]+)(?=[ \t\n,]|\Z)", re.ASCII)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Expand the node list `text` to host names, in the order of `scontrol show hostnames`, repetitions included.

    Raises PlacementError for what is no list, and on an empty one.
    """
    if _ELEMENT.sub("", text).strip(" \t\n,"):
        raise PlacementError(f"invalid node list {text!r}: its elements are like login1 or gpu[001-003,007]")
    names = [name for element in _ELEMENT.findall(text) for name in _names(element)]
    if not names:
        raise PlacementError(f"the node list {text!r} names no node")
    return names


def slurm_order(names: Iterable[str]) -> list[str]:
    """Sort host names as Slurm lists the nodes of a job (`scontrol show hostlistsorted`).

    First by the text before the last number, in which digits are compared as numbers; then names without a number,
    shorter numbers, smaller numbers. Source: `hostrange_cmp` in Slurm's common/hostlist.c, seen in 22.05.
    """
    return sorted(names, key=_slurm_key)


def _slurm_key(name: str) -> tuple[object, ...]:
    before = name.rstrip("0123456789")
    number = name[len(before) :]
    natural = [int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", before))]
    return natural, len(number), int(number or 0)


def _names(element: str) -> Iterator[str]:
    parts = re.split(r"\[(.*?)\]", element)
    numbers = [_numbers(ranges) for ranges in parts[1::2]]
    if math.prod(map(len, numbers)) > MAX_NAMES:
        raise PlacementError(f"invalid node list: {element} has more than {MAX_NAMES} names")
    # scontrol's order: the last bracket runs fastest, then the first, the second, ...
    for chosen in product(*numbers[-2::-1], *numbers[-1:]):
        values = (*chosen[-2::-1], *chosen[-1:])
        yield "".join(map("".join, zip_longest(parts[::2], values, fillvalue="")))


def _numbers(ranges: str) -> list[str]:
    values: list[str] = []
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        if match is None or not 0 <= int(match[2] or match[1]) - int(match[1]) < MAX_RANGE:
            raise PlacementError(
                f"invalid node list: [{ranges}] has {each!r}, which is no number, and no range of up to {MAX_RANGE} "
                "numbers that runs upwards"
            )
        values += [str(number).zfill(len(match[1])) for number in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return values


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
    """Expand counts: `8(x3),4` -> (8, 8, 8, 4). Raises ValueError."""
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > _MAX_NODES:
            raise ValueError(f"expected counts like 8(x15),4, got {part!r}")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def per_node(counts: tuple[int, ...], nodes: int) -> tuple[int, ...]:
    """Return one count for each of `nodes` nodes; a single count is for all of them. Raises ValueError."""
    if len(counts) == 1:
        return counts * nodes
    if len(counts) != nodes:
        raise ValueError(f"{len(counts)} counts for {nodes} nodes")
    return counts


def parse_gpus(text: str) -> int:
    """Count the GPUs in a request: `8`, `a100:4`, `gpu:2`, `gpu:a100:4(S:0-1)`, `gres/gpu=8`, `a100:4,v100:2`.

    Other resources in the list (`cpu=4`, `gres/shard:2`, `nic:1`) are ignored; a type without a number is one GPU.
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


def _split(text: str) -> list[str]:
    """Split at commas that are not inside parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text)]
