"""The linear head of the critic and of reward models, and how reward models store it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from slurm_rlhf.config.model_directory import REWARD_HEADS, reward_head, weight_files
from slurm_rlhf.errors import ModelError
from slurm_rlhf.trainer.optimizer_state import Fragment


class ValueHead(nn.Linear):
    """Computes one output in fp32 from fp32 weights, whatever the precision of the body is.

    In bf16 a value near 9 could only be a multiple of 0.06. ZeRO wants all parameters in one precision, and has fp32
    masters for those it trains: the head computes with its masters' numbers, and its parameters get the gradient.
    """

    def __init__(self, hidden: int, bias: bool = False) -> None:
        super().__init__(hidden, 1, bias=bias, dtype=torch.float32)
        self._exact: dict[str, Tensor] = {}

    def store_as(self, dtype: torch.dtype) -> None:
        """Give the parameters the precision of the body, and keep computing with the fp32 numbers that they have."""
        if dtype != torch.float32:
            self._exact = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
            self.to(dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values, fp32 [A], of hidden states [A, H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), self._fp32("weight"), self._fp32("bias")).squeeze(-1)

    def _fp32(self, name: str) -> Any:
        parameter = getattr(self, name)
        if name not in self._exact:
            return parameter if parameter is None else parameter.float()
        exact = self._exact[name] = self._exact[name].to(parameter.device)
        rounded = parameter.float()
        return exact + (rounded - rounded.detach())  # the number of `exact`, the gradient of `parameter`

    def write_masters(self, fragments: Iterable[Fragment]) -> None:
        """Write the numbers that `store_as` has rounded into the optimizer's fp32 masters."""
        for fragment in fragments if self._exact else ():
            master = fragment.tensors["fp32"]
            exact = self._exact[fragment.name].flatten()
            master.copy_(exact[fragment.start : fragment.start + master.numel()])

    def read_masters(self, fragments: Iterable[Fragment]) -> None:
        """Compute with the masters' numbers from now on. Collective where the parameters are in less than fp32."""
        if not self._exact:
            return
        device = self.weight.device
        exact = {name: torch.zeros(numbers.shape, device=device) for name, numbers in self._exact.items()}
        for fragment in fragments:
            master = fragment.tensors["fp32"]
            exact[fragment.name].view(-1)[fragment.start : fragment.start + master.numel()] = master
        for numbers in exact.values():
            dist.all_reduce(numbers)
        self._exact = exact


def head_name(directory: Path) -> str | None:
    """Return which of REWARD_HEADS the directory has, or None. Raises ModelError if it has several."""
    names = {key for file in weight_files(directory) for key in _keys(file)}
    found = [head for head in REWARD_HEADS if f"{head}.weight" in names]
    if len(found) > 1:
        raise ModelError(
            f"{directory}: {' and '.join(found)} are in it, and a reward model has one head: remove the others"
        )
    return found[0] if found else None


def take_head(directory: Path, head: ValueHead, statistics: tuple[float, float] | None) -> None:
    """Copy the directory's head to `head`; with `statistics`, so that it returns (score - mean) / std.

    Raises ModelError as `load_head` does.
    """
    theirs = load_head(directory, head.in_features)
    mean, std = statistics or (0.0, 1.0)
    with torch.no_grad():
        head.weight.copy_(theirs.weight / std)
        if theirs.bias is not None or mean:
            shift = -mean if theirs.bias is None else float(theirs.bias) - mean
            head.bias = nn.Parameter(torch.full((1,), shift / std, dtype=head.weight.dtype))


def load_head(directory: Path, hidden: int) -> ValueHead:
    """Load the directory's head, fp32. Raises ModelError unless there is one and it has one output."""
    names = {key: file for file in weight_files(directory) for key in _keys(file)}
    found = reward_head(names, directory)
    key = f"{found}.weight"
    weight = _read(names[key], key)
    if tuple(weight.shape) != (1, hidden):
        raise ModelError(
            f"{directory}: {key} has shape {list(weight.shape)}, not [1, {hidden}]: a reward model gives one number "
            "(num_labels = 1). Use another model."
        )
    bias = f"{found}.bias"
    head = ValueHead(hidden, bias=bias in names)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias in names:
            head.bias.copy_(_read(names[bias], bias))
    return head


def _keys(file: Path) -> list[str]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        return list(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _read(file: Path, key: str) -> Tensor:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(key)
    tensor: Tensor = torch.load(file, map_location="cpu", mmap=True, weights_only=True)[key]
    return tensor
