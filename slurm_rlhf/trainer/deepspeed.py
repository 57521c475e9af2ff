"""A model in training under DeepSpeed, and frozen ones that ZeRO-3 shards as they load.

DeepSpeed averages gradients over ranks, so each loss is multiplied by their number; gradient_accumulation_steps stays 1
and the boundary is set by hand, so that the number of micro-batches can differ from step to step.

It cuts one flat buffer per parameter group (ZeRO-1 and -2) or every parameter by itself (ZeRO-3), each with padding at
its end that depends on the number of ranks: `shards` leaves the padding out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.placement.rank_memory import BUCKET
from slurm_rlhf.trainer._deepspeed import (
    copy_masters_to_parameters,
    full_shape,
    gradient_buffers,
    import_deepspeed,
    is_sharded,
    local_shard,
    master_range,
    masters,
    optimizer_states,
    set_loss_scale,
)
from slurm_rlhf.trainer._torch import limit_collectives
from slurm_rlhf.trainer._transformers import shard_new_models
from slurm_rlhf.trainer.distributed import World, release_cache
from slurm_rlhf.trainer.optimizer_state import (
    HOST,
    Fragment,
    fragment_of,
    move_moments,
    moved,
    zero_moments,
)
from slurm_rlhf.trainer.trainer import Trainer, TrainSettings, adamw

HPZ = "zero_hpz_partition_size"


class DeepSpeedTrainer(Trainer):
    """Trains under ZeRO-1, -2 and -3."""

    def __init__(self, module: nn.Module, cfg: TrainSettings, world: World) -> None:
        """Raises ConfigError for fp16 on a device where DeepSpeed has none."""
        shapes = {name: full_shape(parameter) for name, parameter in module.named_parameters()}
        super().__init__(module, cfg, world, shapes, sharded=cfg.zero_stage == 3)
        self._engine = start_deepspeed(module, shapes, cfg, world)
        self.optimizer = self._engine.optimizer
        self._use_scale()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def accumulate(self, loss: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(self._checked(loss) * self.world.size)

    def shards(self, part: nn.Module, kind: Literal["parameters", "optimizer"]) -> Iterator[Fragment]:
        if kind == "parameters":
            return (self._held(name, parameter) for name, parameter in part.named_parameters())
        return self._fragments(part)

    def gathered(self, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in part.named_parameters():
            with gathered_parameters([parameter]):
                yield name, parameter.detach()

    def move(self, where: Literal["host", "device"]) -> None:
        move_optimizer(self._engine, self.cfg.zero_stage, where, self.world.device)

    def _held(self, name: str, parameter: Tensor) -> Fragment:
        whole = (0, parameter.detach().reshape(-1))
        start, own = local_shard(parameter, self.world.rank) if is_sharded(parameter) else whole
        return Fragment(name, start, {"parameter": own})

    def _fragments(self, part: nn.Module) -> Iterator[Fragment]:
        for name, parameter in part.named_parameters():
            at = master_range(parameter, self.optimizer) if parameter.requires_grad else (0, 0, 0, 0)
            group, offset, start, length = at
            if length:
                master = masters(self.optimizer)[group]
                state = self.optimizer.optimizer.state.get(master, {})
                yield fragment_of(name, start, master, state, offset, length)

    def _update(self) -> float:
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def _fill(self, steps: int, fill: Callable[[Fragment], None]) -> None:
        if steps:
            zero_moments(self.optimizer.optimizer, masters(self.optimizer), steps)
        for fragment in self._fragments(self.module):
            fill(fragment)
        copy_masters_to_parameters(self.optimizer)

    def _use_scale(self) -> None:
        if self._scale:
            set_loss_scale(self.optimizer, self._scale.scale)


def start_deepspeed(module: nn.Module, shapes: dict[str, torch.Size], cfg: TrainSettings, world: World) -> Any:
    """Call `deepspeed.initialize` with AdamW over a module that was loaded under `loading`. Collective.

    Raises ConfigError for fp16 on a device where DeepSpeed has none.
    """
    deepspeed = import_deepspeed(world.device)
    if cfg.config.ds.param_dtype == "fp16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        raise ConfigError("ds.param_dtype = fp16: DeepSpeed does not train in it on this device: use bf16 or fp32")
    optimizer = adamw(module, shapes, cfg, world.device)
    elements = sum(shapes[name].numel() for name, parameter in module.named_parameters() if parameter.requires_grad)
    settings = deepspeed_config(cfg, elements, world.size)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    limit_collectives(cfg.config.timeout.collective)
    return engine


def deepspeed_config(cfg: TrainSettings, elements: int, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for training a model of `elements` parameters on `ranks` ranks.

    Stage 1 reduces gradients once per optimizer step, because every rank keeps the whole sum over its
    micro-batches. Stages 2 and 3 keep a rank's part of it only, so they reduce after the backward
    pass of each micro-batch. DeepSpeed can put off this reduction, too (`coalesce_grad_reduction`), at the cost of
    full gradients in memory and sums over micro-batches in bf16; with sums in fp32 that is what stage 1 does.
    """
    # Buffers of DeepSpeed's default size, 2 GB in fp32, would be allocated even for a tiny model.
    bucket = min(elements + elements % 2, BUCKET)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.config.actor.max_norm,
        "bf16": {"enabled": cfg.config.ds.param_dtype == "bf16"},
        # DeepSpeed takes it for a fixed scale; `LossScale` sets it before each step.
        "fp16": {"enabled": cfg.config.ds.param_dtype == "fp16", "loss_scale": 1.0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": cfg.config.ds.grad_comm_dtype,
        "zero_optimization": {
            "stage": cfg.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": ranks > 1,  # on a stream of its own, from two buckets in turns
            **(persistence(elements) | {HPZ: cfg.config.ds.hpz_size} if cfg.zero_stage == 3 else {}),
        },
        "timers": {"throughput": {"enabled": False}},  # after two steps it would wait for the GPU in each forward pass
        "steps_per_print": None,
    }


def start_sharded(
    load: Callable[[], nn.Module], param_dtype: str, offload: bool, timeout_s: float, world: World
) -> Any:
    """Make a frozen model whose parameters are sharded over the ranks while `load` loads it. Collective.

    Every forward pass is collective. With `offload` the shards are in host memory. `timeout_s`: limit of a collective.
    """
    with sharded_from_the_start(world, zero3_config(param_dtype, offload)):
        module = load()
    settings = zero3_config(param_dtype, offload, sum(full_shape(p).numel() for p in module.parameters()))
    engine, *_ = import_deepspeed(world.device).initialize(model=module, config=settings)
    limit_collectives(timeout_s)
    engine.eval()
    return engine


@contextmanager
def sharded_from_the_start(world: World, config: dict[str, Any]) -> Iterator[None]:
    """Have `from_pretrained`, inside the block, shard every parameter as it is made. Collective.

    Rank 0 reads the weights, one module at a time, and each rank keeps its shard: no rank ever has the full model.
    `config`: made by `zero3_config`.
    """
    import_deepspeed(world.device)
    with shard_new_models(config):
        yield


def zero3_config(param_dtype: str, offload: bool = False, elements: int = 0, hpz_size: int = 1) -> dict[str, Any]:
    """Return DeepSpeed's configuration for sharding a model as it loads; with `offload`, into host memory.

    `param_dtype`: "fp32", "bf16" or "fp16". `elements`: those of all parameters, once known. `hpz_size`: ds.hpz_size,
    for a model in training.
    """
    where = {"offload_param": {"device": "cpu", "pin_memory": torch.cuda.is_available()}} if offload else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": param_dtype == "bf16"},
        "fp16": {"enabled": param_dtype == "fp16"},
        "zero_optimization": {"stage": 3, **persistence(elements), **where, HPZ: hpz_size},
        "steps_per_print": None,
    }


def persistence(elements: int) -> dict[str, int]:
    """Return the size up to which parameters stay full on every rank, because gathering them does not pay.

    `elements`: those of the model. DeepSpeed's default, 100,000, would keep most parameters of a small model full.
    """
    return {"stage3_param_persistence_threshold": min(elements // 100, 100_000)}


# --- parameters that ZeRO-3 has sharded ------------------------------------------------------------------------------


def gathered_parameters(parameters: list[Any]) -> Any:
    """Make a context in which `parameters` are whole on every rank. Collective, if any of them is sharded."""
    if not any(map(is_sharded, parameters)):
        return nullcontext()
    import deepspeed  # takes seconds

    return deepspeed.zero.GatheredParameters(parameters)


@contextmanager
def gathering(module: nn.Module) -> Iterator[None]:
    """Have each module gather its sharded parameters while it computes, inside the block, as in training."""
    gathered: list[Any] = []

    def gather(part: nn.Module, _: Any) -> None:
        gathered.append(gathered_parameters(list(part.parameters(recurse=False))))
        gathered[-1].__enter__()

    def release(part: nn.Module, _: Any, output: Any) -> None:
        gathered.pop().__exit__(None, None, None)

    sharded = [part for part in module.modules() if any(map(is_sharded, part.parameters(recurse=False)))]
    hooks = [part.register_forward_pre_hook(gather) for part in sharded]
    hooks += [part.register_forward_hook(release) for part in sharded]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- optimizer states in host memory ---------------------------------------------------------------------------------


def move_optimizer(engine: Any, stage: int, where: Literal["host", "device"], device: torch.device) -> None:
    """Move the fp32 masters and AdamW's moments to host memory, or back. The parameters stay for the weight sync.

    Under ZeRO-3 DeepSpeed can do so for its own FusedAdam only, so it is done here; the gradient buffers, whose content
    is not needed between two steps, are freed as well.
    """
    away = where == "host"
    if stage < 3:
        if away:
            engine.offload_states(include=optimizer_states(), pin_memory=True)
        else:
            engine.reload_states()
    else:
        for master in masters(engine.optimizer):
            target = HOST if away else device
            master.data = moved(master.data, target)
            move_moments(engine.optimizer.optimizer.state.get(master, {}), target)
        for buffer in gradient_buffers(engine.optimizer):
            # In place, because DeepSpeed's views of it stay; zeros, because padding is never written and is summed up.
            buffer.untyped_storage().resize_(0 if away else buffer.numel() * buffer.element_size())
            if not away:
                buffer.zero_()
    if away:
        release_cache()
