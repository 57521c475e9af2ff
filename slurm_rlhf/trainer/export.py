"""Models as Hugging Face directories. As a program, it exports the actor's part of a checkpoint.

`python -m slurm_rlhf.trainer.export ACTOR_DIRECTORY BASE_MODEL OUT DTYPE`

The checkpoint has fp32 masters in fragments (`optimizer_state`), whatever ZeRO stage and number of ranks wrote them, so
that no process group is needed. One process holds the model, once, in host memory.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import CheckpointError, ModelError, SlurmRlhfError
from slurm_rlhf.trainer.forward_fixes import restore_config
from slurm_rlhf.trainer.lora import attach, merge, settings_of
from slurm_rlhf.trainer.models import PolicyModule, load_policy
from slurm_rlhf.trainer.optimizer_state import Fragment, ShardReader, check_sizes, flush

_COPIED = ("*token*.json", "tokenizer.model", "vocab.*", "merges.txt", "chat_template.*", "generation_config.json")
"""Patterns of the files that an export copies from its source."""

ADAPTER = "adapter"
"""Directory inside an export that has the adapters alone, in PEFT's format."""

HEAD = "score"
"""Name of the head of transformers' sequence classification."""

Dtype = Literal["fp32", "bf16", "fp16"]


def save_hf(model: Any, whole: Iterable[tuple[str, Tensor]], source: Path, out: Path, rank: int) -> None:
    """Write `model` with the tokenizer of directory `source` to `out`; an export already there is replaced.

    `whole`: its parameters, which may be gathered one at a time, so every rank iterates over all. Rank 0 writes; the
    new directory is complete before it gets the name `out`.
    """
    state = {name: full.cpu().clone() for name, full in whole if rank == 0}
    if rank == 0:
        adapter = merge(model, state)
        with _replacing(out) as new:
            _write(model, _with_buffers(model, state), source, new)
            _write_adapter(model, adapter, source, new / ADAPTER, task_type="CAUSAL_LM")


def save_reward(
    body: Any,
    whole: Iterable[tuple[str, Tensor]],
    head: Tensor,
    settings: dict[str, Any],
    source: Path,
    out: Path,
    rank: int,
) -> None:
    """Write a reward model as transformers' sequence classification with one label, as `save_hf` does.

    `whole`: the parameters of `body`; `head`: fp32 [1, H]; `settings`: fields of its config.json. Raises ModelError as
    `classifier` does.
    """
    state = {name: full.cpu().clone() for name, full in whole if rank == 0}
    if rank != 0:
        return
    adapter, model = merge(body, state), classifier(body.config, settings)
    named, learned = (
        {f"{model.base_model_prefix}.{name}": tensor for name, tensor in found.items()} | {f"{HEAD}.weight": head}
        for found in (_with_buffers(body, state), adapter)
    )
    with _replacing(out) as new:
        _write(model, named, source, new)
        _write_adapter(body, learned, source, new / ADAPTER, task_type="SEQ_CLS", modules_to_save=[HEAD])


def classifier(config: Any, settings: dict[str, Any]) -> Any:
    """Make transformers' sequence classification of a body with `config`, without memory for its weights.

    Raises ModelError where transformers has none with a linear layer `HEAD`.
    """
    from transformers import AutoModelForSequenceClassification

    settled = type(config).from_dict({**config.to_dict(), "num_labels": 1, **settings})
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(settled, dtype=config.dtype)
    except ValueError as error:
        raise ModelError(f"transformers has no sequence classification for a {config.model_type}: {error}") from None
    if not isinstance(getattr(model, HEAD, None), torch.nn.Linear):
        raise ModelError(
            f"transformers' {type(model).__name__} has no linear layer {HEAD!r}, which reward models are saved with: "
            "start from a decoder such as Qwen 3 or Llama"
        )
    return model


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Give a directory to write in, which takes the name `out` when the block ends."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*"):  # left by an export that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        yield new
        if out.exists():
            out.rename(old)
        new.rename(out)


def _with_buffers(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    buffers = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return state | {name: model.state_dict()[name].cpu() for name in sorted(buffers)}


def _write(model: Any, state: dict[str, Tensor], source: Path, out: Path) -> None:
    from transformers import GenerationConfig

    # Some models come with generation settings that transformers refuses to save; the file is copied as it is.
    model.generation_config = GenerationConfig()
    model.save_pretrained(out, state_dict=state)
    restore_config(out, source)
    (out / "generation_config.json").unlink(missing_ok=True)
    for file in (file for pattern in _COPIED for file in source.glob(pattern)):
        shutil.copyfile(file, out / file.name)
    flush(out.iterdir())  # before the rename makes it the export


def _write_adapter(model: Any, adapter: dict[str, Tensor], source: Path, out: Path, **kind: Any) -> None:
    """Write the adapters of `model`, if it has any, as PEFT does; `kind`: fields of its config."""
    if not (settings := settings_of(model)):
        return
    described = {
        **kind,
        "peft_type": "LORA",
        "base_model_name_or_path": str(source.absolute()),
        "r": settings["rank"],
        "lora_alpha": settings["alpha"],
        "target_modules": settings["targets"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    out.mkdir()
    (out / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    flush(out.iterdir())


def export(actor: Path, base: Path, out: Path, dtype: Dtype) -> None:
    """Write the policy in `actor`, a directory of a checkpoint, to `out`; everything but weights is that of `base`.

    Adapters are merged into their layers, and also written to the directory `ADAPTER`. Raises CheckpointError for a
    checkpoint that is not of this model, ModelError.
    """
    module = load_policy(base, Ds(param_dtype=dtype, attn_implementation="eager"), chunk_tokens=1)
    state = torch.load(_state_file(actor), weights_only=True)
    if adapter := state.get("adapter"):
        attach(module.model, **adapter, dtype=torch.float32)
    fill(module, actor, state["sizes"])
    save_hf(module.model, module.model.named_parameters(), base, out, rank=0)


def fill(module: PolicyModule, actor: Path, sizes: Mapping[str, int]) -> None:
    """Give the parameters of `sizes`, name -> elements, the values in the checkpoint. Raises CheckpointError."""
    check_sizes(actor, sizes, {name: p.numel() for name, p in module.named_parameters() if name in sizes})
    reader = ShardReader(actor, 0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in sizes:
                master = torch.empty(parameter.numel(), dtype=torch.float32)
                reader.fill(Fragment(name, 0, {"fp32": master}))
                parameter.copy_(master.view(parameter.shape))


def _state_file(actor: Path) -> Path:
    file = actor / "rank_00000.pt"
    if not file.is_file():
        raise CheckpointError(f"{actor}: no {file.name}. It is not a part of a checkpoint.")
    return file


def main() -> None:
    actor, base, out = map(Path, sys.argv[1:4])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # in host memory, whatever GPUs are here and in use
    dtype = next(known for known in get_args(Dtype) if known == sys.argv[4])
    try:
        export(actor, base, out, dtype)
    except SlurmRlhfError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
