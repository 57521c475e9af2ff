"""Make a Hugging Face directory of the actor's part of a checkpoint: `... ACTOR_DIRECTORY BASE_MODEL OUT DTYPE`.

The checkpoint has fp32 masters in fragments (`optimizer_state`), whatever ZeRO stage and number of ranks wrote them, so
that no process group is needed. One process holds the model, once, in host memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, get_args

import torch

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import CheckpointError, SlurmRlhfError
from slurm_rlhf.trainer.models import PolicyModule, load_policy
from slurm_rlhf.trainer.optimizer_state import Fragment, ShardReader
from slurm_rlhf.trainer.parameters import save_hf

Dtype = Literal["fp32", "bf16", "fp16"]


def export(actor: Path, base: Path, out: Path, dtype: Dtype) -> None:
    """Write the policy in `actor`, a directory of a checkpoint, to `out`; everything but weights is that of `base`.

    Raises CheckpointError for a checkpoint that is not of this model, ModelError.
    """
    module = load_policy(base, Ds(param_dtype=dtype, attn_implementation="eager"), chunk_tokens=1)
    fill(module, actor)
    save_hf(module.model, module.model.named_parameters(), base, out, rank=0)


def fill(module: PolicyModule, actor: Path) -> None:
    """Give every trained parameter of `module` the value in the checkpoint. Raises CheckpointError."""
    state = torch.load(_state_file(actor), weights_only=True)
    ours = {name: parameter.numel() for name, parameter in module.named_parameters()}
    for name, size in state["sizes"].items():
        if ours.get(name) != size:
            raise CheckpointError(
                f"{actor} is of another model than {module.model.name_or_path}: parameter {name} has {size} elements "
                f"in it and {ours.get(name, 0)} there"
            )
    reader = ShardReader(actor, 0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in state["sizes"]:
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
    dtype = next(known for known in get_args(Dtype) if known == sys.argv[4])
    try:
        export(actor, base, out, dtype)
    except SlurmRlhfError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
