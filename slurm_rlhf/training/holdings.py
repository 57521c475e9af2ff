"""What this rank itself has of a model's parameters, without gathering any of them."""

from __future__ import annotations

from torch import Tensor, nn

from slurm_rlhf.training.parameters import is_sharded


def holdings(model: nn.Module, rank: int) -> dict[str, tuple[int, Tensor]]:
    """name -> (index of the first element in the flat parameter, this rank's elements [n]); tied parameters once.

    Under ZeRO-3 rank r holds elements r * s to (r + 1) * s of n, s = ceil(n / ranks), the last ranks fewer or none;
    else every rank holds all. Views where memory allows: valid until the next optimizer step. Not collective.
    """
    held = {}
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            shard = parameter.ds_tensor  # DeepSpeed's own, padded to the same size on every rank
            first = rank * shard.ds_numel
            count = max(0, min(shard.ds_numel, parameter.ds_numel - first))
            held[name] = (min(first, parameter.ds_numel), shard.detach().flatten()[:count])
        else:
            held[name] = (0, parameter.detach().reshape(-1))
    return held
