"""The head of a reward model, in the three spellings that are in use."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from slurm_rlhf.errors import ModelError

HEADS = ("score", "value_head", "v_head.summary")
"""Hugging Face sequence classification and OpenRLHF; OpenRLHF with another prefix; TRL's value head. Each a linear
layer with one output, `<head>.weight` [1, H] and perhaps `<head>.bias` [1], on the body's last hidden states."""


def head_name(directory: Path) -> str | None:
    """Which of HEADS the directory holds; None where it holds none. Raises ModelError for several."""
    names = {key for file in _weight_files(directory) for key in _keys(file)}
    found = [head for head in HEADS if f"{head}.weight" in names]
    if len(found) > 1:
        raise ModelError(f"{directory}: {' and '.join(found)} are in it: which of them is the head cannot be told")
    return found[0] if found else None


def take_head(directory: Path, head: nn.Linear, statistics: tuple[float, float] | None) -> None:
    """Give `head` the weights of the directory's head, so that it answers (score - mean) / std with `statistics`.

    Raises ModelError as `load_head`.
    """
    theirs = load_head(directory, head.in_features, torch.float32)
    mean, std = statistics or (0.0, 1.0)
    with torch.no_grad():
        head.weight.copy_(theirs.weight / std)
        if theirs.bias is not None or mean:
            shift = -mean if theirs.bias is None else float(theirs.bias) - mean
            head.bias = nn.Parameter(torch.full((1,), shift / std, dtype=head.weight.dtype))


def load_head(directory: Path, hidden: int, dtype: torch.dtype) -> nn.Linear:
    """The directory's head. Raises ModelError when there is none or it does not give one number per token."""
    names = {key: file for file in _weight_files(directory) for key in _keys(file)}
    found = [head for head in HEADS if f"{head}.weight" in names]
    if len(found) != 1:
        what = f"{' and '.join(found)} are in it" if found else "none of them is in it"
        known = ", ".join(f"{head}.weight" for head in HEADS)
        raise ModelError(
            f"{directory}: a reward model has one head out of {known}; {what}. Sequence classification models of "
            "decoders (AutoModelForSequenceClassification), TRL's and OpenRLHF's value heads can be used."
        )
    key = f"{found[0]}.weight"
    weight = _read(names[key], key)
    if tuple(weight.shape) != (1, hidden):
        raise ModelError(
            f"{directory}: {key} has shape {list(weight.shape)}, not [1, {hidden}]: a reward model gives one number "
            "(num_labels = 1)"
        )
    bias = f"{found[0]}.bias"
    head = nn.Linear(hidden, 1, bias=bias in names, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias in names:
            head.bias.copy_(_read(names[bias], bias))
    return head


def _weight_files(directory: Path) -> list[Path]:
    """The files that the index names; without one the single file."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = directory / f"{name}.index.json"
        if index.is_file():
            return [directory / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if (directory / name).is_file():
            return [directory / name]
    return []  # `models.check_directory` has said so


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
