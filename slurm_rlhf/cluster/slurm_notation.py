"""Read Slurm's notation: lists of nodes, counts per node, and numbers of GPUs.

A list of nodes looks like `gpu[001-003,007],login1,rack[1-2]-n[01-04]`. `scontrol show hostnames` expands it, too, but
many containers lack it, and its exit code is 0 for an invalid list.

    list    = element { (comma | blank) element }
    element = { text | "[" range { "," range } "]" }; with a bracket, the element ends with one
    range   = digits [ "-" digits ]; the zeros of the first number set the width
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

from slurm_rlhf.errors import PlacementError

MAX_RANGE = 65536
"""Limit of Slurm on the numbers of one range."""
MAX_NAMES = 1 << 20
"""Limit on the names of one element."""

_SEPARATORS = " \t\n,"
_TEXT = re.compile(r"[A-Za-z0-9_.\-]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> list[str]:
    """Expand the node list `text` to host names, in the order of `scontrol show hostnames`, repetitions included.

    Raises PlacementError with the position of the first character that is wrong, and on an empty list.
    """
    names: list[str] = []
    position = 0
    while position < len(text):
        if text[position] in _SEPARATORS:
            position += 1
        else:
            found, position = _element(text, position)
            names.extend(found)
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


def _element(text: str, start: int) -> tuple[Iterator[str], int]:
    """Return the names of the element at `start`, and the position after it."""
    texts = [""]  # text before each bracket, and after the last
    numbers: list[list[str]] = []
    position = start
    while position < len(text) and text[position] not in _SEPARATORS:
        if text[position] == "[":
            found, position = _bracket(text, position)
            numbers.append(found)
            texts.append("")
        else:
            match = _TEXT.match(text, position)
            if match is None:
                raise _error(text, position, f"{text[position]!r} is not valid in a host name")
            if numbers and (match.end() == len(text) or text[match.end()] in _SEPARATORS):
                raise _error(text, position, f"{match[0]!r} after the last bracket: Slurm wants the number at the end")
            texts[-1] += match[0]
            position = match.end()
    count = 1
    for values in numbers:
        count *= len(values)
    if count > MAX_NAMES:
        raise _error(text, start, f"{count} names in one element, more than {MAX_NAMES}")
    return _names(texts, numbers), position


def _names(texts: list[str], numbers: list[list[str]]) -> Iterator[str]:
    # scontrol's order: the last bracket runs fastest, then the first, the second, ...
    order = [*reversed(range(len(numbers)))]
    order = order[1:] + order[:1]
    for values in product(*(numbers[index] for index in order)):
        chosen = dict(zip(order, values, strict=True))
        yield "".join(part + chosen.get(index, "") for index, part in enumerate(texts))


def _bracket(text: str, start: int) -> tuple[list[str], int]:
    """Return the numbers of the bracket that opens at `start`, and the position after it."""
    values: list[str] = []
    position = start + 1
    while True:
        match = _RANGE.match(text, position)
        if match is None:
            raise _error(text, position, "a number is missing")
        low, high = match[1], match[2] or match[1]
        count = int(high) - int(low) + 1
        if count < 1:
            raise _error(text, position, f"the range {match[0]} runs backwards")
        if count > MAX_RANGE:
            raise _error(text, position, f"the range {match[0]} has {count} numbers, Slurm allows {MAX_RANGE}")
        values.extend(str(number).zfill(len(low)) for number in range(int(low), int(low) + count))
        position = match.end()
        if text[position : position + 1] == "]":
            return values, position + 1
        if text[position : position + 1] != ",":
            raise _error(text, position, "expected ',', '-' and a number, or ']'")
        position += 1


def _error(text: str, position: int, what: str) -> PlacementError:
    begin = max(0, position - 40)
    shown = text[begin : position + 40].translate({9: " ", 10: " "})
    where = "at its end" if position >= len(text) else f"at character {position + 1}"
    pointer = " " * (position - begin)
    return PlacementError(f"invalid node list, {where}: {what}\n  {shown}\n  {pointer}^")


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


def count_devices(text: str) -> int:
    """Count the devices in a list of indices or UUIDs, which may be empty: `0,1,2`, `0-3,7`, `GPU-8f1c...`."""
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
