"""A model's parameters: described, rounded for the weight transfer, and exported."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurm_rlhf.records import ParameterSpec
from slurm_rlhf.trainer.forward_fixes import restore_config

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

LocalParameters = Mapping[str, tuple[int, Tensor]]
"""name -> (index of the first element in the flat parameter, this rank's elements [n]); tied parameters once."""


def describe(shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> list[ParameterSpec]:
    """Describe parameters in precision `dtype`, written as in "float32"."""
    written = str(dtype).removeprefix("torch.")
    return [ParameterSpec(name, list(shape), written) for name, shape in shapes.items()]


class Rounded(LocalParameters):
    """Local parameters in the precision that the model computes with: under autocast (ZeRO-0, bf16) they are fp32.

    One parameter at a time is rounded, when it is asked for.
    """

    def __init__(self, parameters: LocalParameters, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> tuple[int, Tensor]:
        first, elements = self._parameters[name]
        if self._last is None or self._last[0] != name:
            self._last = (name, elements.to(self._dtype))
        return first, self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


# --- as a Hugging Face directory -------------------------------------------------------------------------------------


def save_hf(model: Any, whole: Iterable[tuple[str, Tensor]], source: Path, out: Path, rank: int) -> None:
    """Write `model` with the tokenizer of directory `source` to `out`; an export already there is replaced.

    `whole`: its parameters, of which one at a time may be whole; every rank asks for all. The new directory is complete
    before it takes the name `out`. Rank 0 writes.
    """
    keep = rank == 0
    state = {name: full.cpu().clone() for name, full in whole if keep}
    if keep:
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f".{out.name}.*"):  # of an export that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            new, old = Path(scratch) / "new", Path(scratch) / "old"
            _write(model, state, source, new)
            if out.exists():
                out.rename(old)
            new.rename(out)


def _write(model: Any, state: dict[str, Tensor], source: Path, out: Path) -> None:
    from transformers import GenerationConfig

    buffers = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state |= {name: model.state_dict()[name].cpu() for name in sorted(buffers)}
    # Some models come with generation settings that transformers refuses to save; the file is copied as it is.
    model.generation_config = GenerationConfig()
    model.save_pretrained(out, state_dict=state)
    restore_config(out, source)
    (out / "generation_config.json").unlink(missing_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    _flush(out.iterdir())


def _flush(files: Iterable[Path]) -> None:
    """Write the files to the disk, before the rename makes them the export."""
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
