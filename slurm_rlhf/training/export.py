"""Write a trained model as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from slurm_rlhf.training.dropout import restore_config
from slurm_rlhf.training.parameters import full_parameters

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


def save_hf(model: Any, source: Path, out: Path, rank: int) -> None:
    """Write `model` with the tokenizer of directory `source` to `out`; an export already there is replaced.

    The new directory is complete before it takes the name `out`. Collective under ZeRO-3; rank 0 writes.
    """
    keep = rank == 0
    state = {name: full.cpu().clone() for name, full in full_parameters(model) if keep}
    if keep:
        out.parent.mkdir(parents=True, exist_ok=True)
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
