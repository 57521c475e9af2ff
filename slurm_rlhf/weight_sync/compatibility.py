"""Whether what the actor sends is what an engine can load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_rlhf.errors import SyncError
from slurm_rlhf.listing import shortened_lines
from slurm_rlhf.weight_sync.plan import dtype_name

_SHOWN = 8
_HOLDS = {"float32": {"float32", "bfloat16", "float16"}, "bfloat16": {"bfloat16"}, "float16": {"float16"}}
"""dtype -> those whose every value it can hold. bf16 has more exponent, fp16 more mantissa than the other."""


def check_match(sent: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]], sender: str, receiver: str) -> None:
    """Raise SyncError unless both ends have the same names, shapes, and dtypes that hold what is sent.

    Both lists are [[name, shape, dtype], ...]; `sender` and `receiver` name the two ends in the message.
    """
    ours = {name: tuple(shape) for name, shape, _ in expected}
    theirs = {name: tuple(shape) for name, shape, _ in sent}
    lines = [f"{name}: only {sender} has it" for name in theirs if name not in ours]
    lines += [f"{name}: only {receiver} has it" for name in ours if name not in theirs]
    lines += [
        f"{name}: {list(theirs[name])} at {sender}, {list(shape)} at {receiver}"
        for name, shape in ours.items()
        if theirs.get(name, shape) != shape
    ]
    if lines:
        raise SyncError(
            f"{sender} and {receiver} do not hold the same architecture:{shortened_lines(lines, _SHOWN)}"
            "\nBoth must be started from the same model directory (actor.model_name_or_path)."
        )
    _check_dtypes(sent, expected, sender, receiver)


def _check_dtypes(sent: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]], sender: str, receiver: str) -> None:
    kept = {name: dtype_name(dtype) for name, _, dtype in expected}
    lossy = [
        f"{name}: {theirs} at {sender}, {kept[name]} at {receiver}"
        for name, _, dtype in sent
        if (theirs := dtype_name(dtype)) not in _HOLDS[kept[name]]
    ]
    if lossy:
        raise SyncError(
            f"{receiver} cannot hold the weights of {sender} without rounding them:{shortened_lines(lossy, _SHOWN)}"
            "\nLeave vllm.dtype at auto, which is ds.param_dtype, or name one that holds it."
        )
