"""A model in training under DeepSpeed: accumulation over micro-batches and ranks, optimizer steps, save and load.

A loss that is a sum over this rank's tokens divided by the token count of the whole optimizer step has, summed over
micro-batches and ranks, the gradient of the mean over all tokens. DeepSpeed averages over ranks, so each loss is
multiplied by their number; gradient_accumulation_steps stays 1 and the boundary is set by hand, so that the number of
micro-batches can differ from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_rlhf.algorithms.policy_loss_inputs import Metrics
from slurm_rlhf.errors import CheckpointError, RunError
from slurm_rlhf.records import Experience
from slurm_rlhf.training._deepspeed import copy_masters_to_parameters, set_loss_scale
from slurm_rlhf.training.async_save import AsyncSave, flush
from slurm_rlhf.training.deepspeed_engine import EngineConfig, learning_rate, start_deepspeed
from slurm_rlhf.training.distributed import World
from slurm_rlhf.training.loss_scale import LossScale
from slurm_rlhf.training.optimizer_state import (
    Fragment,
    ShardReader,
    local_fragments,
    make_moments,
    offload_optimizer,
    reload_optimizer,
    sizes,
    write_shard,
)


class TrainEngine:
    """Trains `module` under DeepSpeed with AdamW, on the process group that `join_world` has joined."""

    def __init__(self, module: nn.Module, cfg: EngineConfig, world: World) -> None:
        self.cfg = cfg
        self.world = world
        self.steps = 0  # optimizer steps taken
        self.module = module
        self._engine = start_deepspeed(module, cfg, world)
        self._scale = LossScale.of(cfg.ds)
        self._skipped = 0  # steps in a row
        self._async_save = AsyncSave()
        self._use_scale()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward through DeepSpeed's engine, where ZeRO-3 gathers parameters."""
        return self._engine(*args, **kwargs)

    def accumulate(self, loss: Tensor, is_last: bool) -> None:
        """Run the backward pass. Collective: every rank calls it as often; `is_last` marks a step's last call."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        own = self._scale.scale if self._scale and not self.cfg.zero_stage else 1.0
        # A loss that is not finite makes every gradient so: then all ranks, which add them up, skip the step alike.
        finite = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan).to(loss.dtype)
        self._engine.backward(loss * finite * (self.world.size * own))

    def step(self) -> dict[str, float]:
        """Clip the gradient and update; return `lr`, and `grad_norm` before clipping.

        A step whose loss or gradient is not finite on some rank is skipped on all: it changes no parameter and does not
        count. Raises RunError after more than `most_skipped` in a row; in fp16, where each halves the loss scale, only
        when that is the smallest. The answer has `skipped_steps` (0 or 1), in fp16 `loss_scale`, and no `grad_norm` of
        a step that was skipped.
        """
        lr = learning_rate(self.steps, self.cfg.schedule)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self.cfg.zero_stage:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
        elif math.isfinite(norm := self._clip()):
            self._engine.step()
        else:
            self._engine.zero_grad()
        told = {"lr": lr, "skipped_steps": float(not math.isfinite(norm))}
        if self._scale:
            told["loss_scale"] = self._scale.scale
        if math.isfinite(norm):
            self.steps += 1
            told["grad_norm"] = norm
        self._judge(norm)
        return told

    def fragments(self, part: nn.Module) -> Iterator[Fragment]:
        """Yield this rank's fp32 masters of `part` of the module, named as in `part`; live memory. Not collective."""
        return local_fragments(part, self._engine.optimizer, self.world)

    def sleep(self) -> None:
        """Move the optimizer's states to host memory until `wake_up`; only reads may come in between."""
        offload_optimizer(self._engine, self.cfg.zero_stage)

    def wake_up(self) -> None:
        """Move the optimizer's states back to the device."""
        reload_optimizer(self._engine, self.cfg.zero_stage, self.world.device)

    def save(self, directory: Path) -> None:
        """Write everything that the next steps depend on. Collective: every rank gives the same directory."""
        self._async_save.wait()
        self._write(directory, local_fragments(self.module, self._engine.optimizer, self.world), self._state())
        torch.distributed.barrier()

    def save_async(self, directory: Path) -> float:
        """Copy what `save` writes and write it beside the next steps; returns the seconds that the copy took.

        Not collective. Waits for the write before. The files are those of `save`, byte for byte.
        """
        state = self._state()

        def write(fragments: list[Fragment]) -> None:
            self._write(directory, fragments, state)
            flush(directory, f"rank_{self.world.rank:05d}.*")

        fragments = local_fragments(self.module, self._engine.optimizer, self.world)
        return self._async_save.begin(fragments, self.world.device, write)

    def written(self) -> Future[None]:
        """Return what is done once the last `save_async` is written, and raises what went wrong."""
        return self._async_save.written()

    def finish_save(self) -> None:
        """Wait until nothing is being written."""
        self._async_save.wait()

    def load(self, directory: Path) -> None:
        """Continue where `save` was called, by as many ranks as now or by others, under any ZeRO stage. Collective.

        With as many ranks and the same stage the next steps are bit for bit those that would have followed; otherwise
        they differ by the order in which ranks add up gradients. New ranks keep the random state of `seed_rank`.
        Raises CheckpointError for the checkpoint of another model and for a damaged one.
        """
        self._async_save.wait()
        state = self._read_state(directory)
        optimizer = self._engine.optimizer
        if state["steps"]:
            make_moments(optimizer, state["steps"])
        reader = ShardReader(directory, self.world.rank)
        alone = World(0, 1, self.world.device)  # under ZeRO-0 a rank fills every parameter, else its own part
        for fragment in local_fragments(self.module, optimizer, alone):
            reader.fill(fragment)
        copy_masters_to_parameters(optimizer)
        self.steps = state["steps"]
        if self._scale and "loss_scale" in state:  # none in a checkpoint of a run in bf16 or fp32
            self._scale.load(state["loss_scale"])
            self._use_scale()
        if state["own"]:
            torch.set_rng_state(state["rng"])
            if state["cuda_rng"] is not None and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_rng"])

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the fragments; a copy."""
        cuda = torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None
        state = {"steps": self.steps, "sizes": sizes(self.module), "rng": torch.get_rng_state(), "cuda_rng": cuda}
        return state | ({"loss_scale": self._scale.state()} if self._scale else {})

    def _write(self, directory: Path, fragments: Iterable[Fragment], state: dict[str, Any]) -> None:
        write_shard(directory, self.world.rank, fragments)
        torch.save(state, _rank_file(directory, self.world.rank))

    def _read_state(self, directory: Path) -> dict[str, Any]:
        """Read the state that this rank has written; if there is none, rank 0's, with "own" False."""
        own = _rank_file(directory, self.world.rank)
        path = own if own.is_file() else _rank_file(directory, 0)
        if not path.is_file():
            raise CheckpointError(f"{directory}: no {path.name}. It is not a checkpoint of this role.")
        state: dict[str, Any] = torch.load(path, weights_only=True)
        saved, ours = state.get("sizes"), sizes(self.module)
        if saved is None:
            raise CheckpointError(f"{directory} was written by an earlier version, whose checkpoints this cannot read.")
        for name in sorted(saved.keys() | ours.keys()):
            if saved.get(name) != ours.get(name):
                raise CheckpointError(
                    f"{directory} is of another model: parameter {name} has {saved.get(name, 0)} elements in it and "
                    f"{ours.get(name, 0)} here. Resume with the model it was trained from."
                )
        return {**state, "own": path == own}

    def _clip(self) -> float:
        """Measure and clip the gradient at ZeRO-0, where DeepSpeed neither reports the norm nor stops at NaN.

        There it does not scale losses either: the gradient is divided by our scale first.
        """
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        if self._scale:
            for grad in grads:
                grad.mul_(1.0 / self._scale.scale)
        total = nn.utils.get_total_norm(grads)
        norm = float(total)
        if 0.0 < self.cfg.max_norm < norm:
            nn.utils.clip_grads_with_norm_(parameters, self.cfg.max_norm, total)
        return norm

    def _use_scale(self) -> None:
        if self._scale and self.cfg.zero_stage:
            set_loss_scale(self._engine.optimizer, self._scale.scale)

    def _judge(self, norm: float) -> None:
        """Count skipped steps, and choose the next loss scale. Raises RunError for a step that ends the run."""
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._scale:
            if math.isfinite(norm):
                self._scale.step_passed()
            else:
                self._scale.step_overflowed(self.steps)
            self._use_scale()
        elif self._skipped > self.cfg.most_skipped:
            raise RunError(
                f"loss or gradient of optimizer step {self.steps} is not finite, {self._skipped} times in a row "
                f"(train.max_skipped_steps = {self.cfg.most_skipped}); the parameters were not changed. Usual causes: "
                "a learning rate that is too high, or rewards out of range (see reward.clip_range)."
            )


def optimizer_step(
    engine: TrainEngine,
    exp: Experience,
    micro: list[list[int]],
    loss_of: Callable[[Experience], tuple[Tensor, Metrics]],
) -> dict[str, float]:
    """Accumulate the gradients of the micro-batches (rows of `exp`), then step. Collective.

    Every rank needs as many micro-batches. Returns this rank's sums of the metrics, and `lr` and `grad_norm` of the
    whole step. Raises RunError.
    """
    sums: Metrics = {}
    for number, rows in enumerate(micro, start=1):
        loss, metrics = loss_of(exp.select(rows))
        engine.accumulate(loss, is_last=number == len(micro))
        sums = {name: sums[name] + value if name in sums else value for name, value in metrics.items()}
    stats = engine.step()
    values = torch.stack([value.double() for value in sums.values()]).tolist()  # one copy from the device for all
    return dict(zip(sums, values, strict=True)) | stats


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.pt"
