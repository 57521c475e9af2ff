"""Models whose weights never change: whole on every rank, or cut over the role's ranks by DeepSpeed ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slurm_rlhf.config.schema import Config, Ref, Reward
from slurm_rlhf.records import F32, Experience
from slurm_rlhf.training.collate import TokenBatch
from slurm_rlhf.training.deepspeed_engine import computed_as
from slurm_rlhf.training.distributed import join_world, limit_collectives, local_device
from slurm_rlhf.training.forward import per_action
from slurm_rlhf.training.models import load_policy
from slurm_rlhf.training.optimizer_fragments import sizes
from slurm_rlhf.training.zero3_init import born_sharded, import_deepspeed, zero3_config


class Frozen:
    """A module without gradients. Under ZeRO-3 every forward is collective: each rank calls it equally often."""

    def __init__(self, config: Config, group: Ref | Reward, dtype: str, load: Callable[[], nn.Module]) -> None:
        """`load` makes the module on the host, its parameters in `dtype`, "bf16" or "fp32".

        Collective under ZeRO-3, and needs no process group without.
        """
        self.device = local_device()
        self._module: Any
        if group.zero_stage == 0:
            self._module = load().to(self.device).requires_grad_(False).eval()
            return
        world = join_world(config.timeout.collective)
        with born_sharded(world, zero3_config(dtype, group.offload)):
            module = load()
        cut = zero3_config(dtype, group.offload, sum(sizes(module).values()))
        self._module, *_ = import_deepspeed(world.device).initialize(model=module, config=cut)
        limit_collectives(config.timeout.collective)
        self._module.eval()

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            return self._module(*args)


class Autocast(nn.Module):
    """A module with fp32 parameters that computes in bf16, as DeepSpeed makes the actor do at ZeRO stage 0."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, *args: Any) -> Any:
        with torch.autocast(input_ids.device.type, dtype=torch.bfloat16):
            return self.inner(input_ids, *args)


class FrozenPolicy:
    """The policy that the actor starts from, in the actor's precisions: before its first step the two are equal."""

    def __init__(self, config: Config) -> None:
        """Raises ModelError."""
        ds = computed_as(config.ds)

        def load() -> nn.Module:
            module = load_policy(
                config.actor.model_name_or_path,
                ds,
                config.train.logprob_chunk_tokens,
                max_len=config.data.max_len,
            )
            return Autocast(module) if ds.param_dtype != config.ds.param_dtype else module

        self.model = Frozen(config, config.ref, ds.param_dtype, load)
        self.temperature = config.rollout.temperature

    def logprobs(self, exp: Experience, micro: list[list[int]]) -> dict[str, F32]:
        """{"logprobs": fp32 [A]} at the rollout temperature; micro-batches as rows of `exp`. Collective."""
        return {"logprobs": per_action(exp, micro, self.model.device, self._forward)}

    def _forward(self, batch: TokenBatch) -> torch.Tensor:
        logprobs: torch.Tensor = self.model(batch.input_ids, batch.action_index, batch.targets, self.temperature)[0]
        return logprobs
