"""The seam of training: one model on one rank, below its loss; and what its optimizer steps depend on.

`PolicyTrainer`, `ValueTrainer` and `SftTrainer` are above it; `backends` chooses the implementation. A loss is a sum
over this rank's tokens divided by the token count of the whole optimizer step: summed over micro-batches and ranks, its
gradient is that of the mean over all tokens. The number of micro-batches can differ from step to step.

A checkpoint is the same for every implementation: `rank_00003.pt` with the state of `_state`, and the files of
`optimizer_state`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.errors import CheckpointError, RunError
from slurm_rlhf.trainer.distributed import World, barrier
from slurm_rlhf.trainer.lora import settings_of
from slurm_rlhf.trainer.optimizer_state import AsyncSave, Fragment, ShardReader, check_sizes, done, flush, write_shard

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Defines the learning rate as a function of the optimizer step: a checkpoint has to hold the step only."""

    kind: str  # constant, linear or cosine
    peak: float
    total_steps: int
    warmup_ratio: float = 0.0  # share of total_steps
    min_ratio: float = 0.0  # share of peak at which linear and cosine end

    @classmethod
    def of(cls, config: Config, peak: float, total_steps: int, kind: str = "") -> Schedule:
        """Read warm-up and end from the actor's settings, which all models share, and the kind unless it is given."""
        actor = config.actor
        return cls(kind or actor.lr_scheduler, peak, total_steps, actor.lr_warmup_ratio, actor.lr_min_ratio)


def learning_rate(step: int, schedule: Schedule) -> float:
    """Return the learning rate of optimizer step `step`, 0-based.

    Warm-up over w = ceil(warmup_ratio * total_steps) steps: peak * (step + 1) / w. After it, with
    p = (step - w) / max(total_steps - w - 1, 1), at most 1:
        constant  peak
        linear    peak * (min_ratio + (1 - min_ratio) * (1 - p))
        cosine    peak * (min_ratio + (1 - min_ratio) * (1 + cos(pi * p)) / 2)
    so that the first step after the warm-up has the peak and the last step peak * min_ratio. Steps past the end keep
    the last value. Source of the cosine: Loshchilov and Hutter, SGDR (2017), one period.
    """
    warmup = math.ceil(schedule.warmup_ratio * schedule.total_steps)
    if step < warmup:
        return schedule.peak * (step + 1) / warmup
    progress = min((step - warmup) / max(schedule.total_steps - warmup - 1, 1), 1.0)
    if schedule.kind == "constant":
        share = 1.0
    elif schedule.kind == "linear":
        share = 1.0 - progress
    else:
        share = (1.0 + math.cos(math.pi * progress)) / 2.0
    return schedule.peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * share)


class TrainSettings:
    """Holds the settings of the optimizer steps of a model; all trained models share the actor's."""

    def __init__(self, config: Config, schedule: Schedule, ranks: int) -> None:
        """`schedule`: learning rate by step. `ranks`: number of the optimizer's ranks, on which its stage depends."""
        self.config, self.schedule = config, schedule
        self.zero_stage = stage_of(config, ranks)  # 0: plain PyTorch trains the model

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the 16-bit type in which a model with fp32 parameters (stage 0) computes; None: no autocast."""
        dtype = self.config.ds.param_dtype
        return None if self.zero_stage or dtype == "fp32" else DTYPES[dtype]


def stage_of(config: Config, ranks: int) -> int:
    """Choose the ZeRO stage of an optimizer over `ranks`: 0 where stages 1 and 2 would do nothing but copy.

    On one rank in fp32 they shard nothing and keep no masters, but copy every gradient through buffers: a seventh of
    the update time of a small model. They stay with ds.enable_sleep, and with train.full_determinism, because stage 0
    rounds the gradient norm differently, and older checkpoints are continued bit for bit.
    """
    ds = config.ds
    idle = ranks == 1 and ds.zero_stage in (1, 2) and ds.param_dtype == "fp32" and not ds.enable_sleep
    return 0 if idle and not config.train.full_determinism else ds.zero_stage


def stored_as(ds: Ds) -> Ds:
    """Return `ds` with the precision that parameters have: fp32 at stage 0, where autocast rounds in the forward."""
    return dataclasses.replace(ds, param_dtype="fp32") if ds.zero_stage == 0 else ds


def adamw(
    module: nn.Module, shapes: Mapping[str, torch.Size], cfg: TrainSettings, device: torch.device
) -> torch.optim.AdamW:
    """Make torch's AdamW for a module on `device`, whose whole parameters have `shapes`.

    It is fused: torch's default runs ten kernels, on CPUs for one parameter after the other. With
    train.full_determinism it is not, because it may round differently from the run that wrote a checkpoint.
    """
    actor = cfg.config.actor
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for _, p in named], "weight_decay": 0.0}]
    if actor.weight_decay:
        matrices = [p for name, p in named if len(shapes[name]) >= 2]
        rest = [p for name, p in named if len(shapes[name]) < 2]
        groups = [{"params": matrices, "weight_decay": actor.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    first, second = actor.adam_betas
    fused = None if cfg.config.train.full_determinism else True
    return torch.optim.AdamW(groups, lr=cfg.schedule.peak, betas=(first, second), fused=fused)


class Trainer(ABC):
    """Trains `module` with AdamW on one rank of the process group that `join_world` has joined.

    An implementation has `forward`, `accumulate`, `shards`, `gathered`, `move`, and the methods with an underscore that
    are abstract. All methods are for one thread. They block, and are collective, unless they say otherwise: every rank
    calls them equally often, in the same order, and one that waits longer than timeout.collective for another gets a
    RuntimeError.
    """

    optimizer: Any  # set by the implementation, with `param_groups`

    def __init__(
        self, module: nn.Module, cfg: TrainSettings, world: World, shapes: Mapping[str, torch.Size], sharded: bool
    ) -> None:
        """`shapes`: full shapes by name; `sharded`: each rank has a part of the parameters; forward is collective."""
        self.module = module
        self.cfg = cfg
        self.world = world
        self.shapes = shapes
        self.sharded = sharded
        self.steps = 0  # optimizer steps taken
        self._scale = LossScale.of(cfg.config.ds)
        self._skipped = 0  # skipped steps in a row
        self._saver = AsyncSave()

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's forward pass, in the precision of training; collective only if `sharded`.

        Called by `trainers` for losses, log-probs and values, and by `generation` where it samples layer by layer.
        """

    @abstractmethod
    def accumulate(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch's loss; `last` marks the last call before `step`.

        Called by `TrainedModel.train_step`.
        """

    def step(self) -> dict[str, float]:
        """Clip the gradient and update; return `lr`, and `grad_norm` before clipping. Called by `train_step`.

        A step whose loss or gradient is not finite on some rank is skipped on all: it changes no parameter and does not
        count. Raises RunError after more than train.max_skipped_steps in a row; in fp16, where each halves the loss
        scale, only when that is the smallest. The answer has `skipped_steps` (0 or 1), in fp16 `loss_scale`, and no
        `grad_norm` of a step that was skipped.
        """
        lr = learning_rate(self.steps, self.cfg.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = self._update()
        metrics = {"lr": lr, "skipped_steps": float(not math.isfinite(norm))}
        if self._scale:
            metrics["loss_scale"] = self._scale.scale
        if math.isfinite(norm):
            self.steps += 1
            metrics["grad_norm"] = norm
        self._judge(norm)
        return metrics

    @abstractmethod
    def shards(self, part: nn.Module, kind: Literal["parameters", "optimizer"]) -> Iterator[Fragment]:
        """Yield what this rank has of `part` of the module: live memory, named as in `part`. Not collective.

        Called with "parameters" for the weight transfer: every parameter, with the rank's elements as "parameter"; with
        "optimizer" by `save` and for the critic's head: the rank's part of the fp32 masters ("fp32") and of AdamW's
        moments. The parts of all ranks together cover every trained parameter. Valid until the next step.
        """

    @abstractmethod
    def gathered(self, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole parameter) of `part`, for exports and for `generation`; tied parameters once.

        Collective only if `sharded`: then a parameter is whole until the next one is asked for.
        """

    def save(self, directory: Path, async_save: bool = False) -> Future[None]:
        """Write all that the next steps depend on; every rank gives the same directory. Raises OSError.

        Called by a rank's worker and by `stages`. With `async_save` it only copies, and a thread writes the same files
        while the next steps are taken: not collective, and it waits for an earlier write, whose errors the Future has.
        """
        state = self._state()

        def write(fragments: Iterable[Fragment]) -> None:
            write_shard(directory, self.world.rank, fragments)
            torch.save(state, _rank_file(directory, self.world.rank))
            flush(directory.glob(f"rank_{self.world.rank:05d}.*"))

        fragments = self.shards(self.module, "optimizer")
        if async_save:
            return self._saver.begin(fragments, self.world.device, write)
        self._saver.wait()
        write(fragments)
        barrier()
        return done()

    def load(self, directory: Path) -> None:
        """Continue where `save` was called, by as many ranks as now or by others, under any ZeRO stage and trainer.

        Called by a rank's worker and by `stages`, before the first step.
        With as many ranks and the same stage the next steps are bit for bit those that would have followed; otherwise
        they differ by the order in which ranks add up gradients. New ranks keep the random state of `seed_rank`.
        Raises CheckpointError for the checkpoint of another model and for a damaged one.
        """
        self._saver.wait()
        state = self._read_state(directory)
        self._fill(state["steps"], ShardReader(directory, self.world.rank).fill)
        self.steps = state["steps"]
        if self._scale and "loss_scale" in state:  # none in a checkpoint of a run in bf16 or fp32
            self._scale.load(state["loss_scale"])
            self._use_scale()
        if state["own"]:
            torch.set_rng_state(state["rng"])
            if state["cuda_rng"] is not None and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_rng"])

    @abstractmethod
    def move(self, where: Literal["host", "device"]) -> None:
        """Move the optimizer's states between two steps; on the host they are only read. Not collective.

        Called by a rank's worker before and after the engines' turn (ds.enable_sleep).
        """

    @abstractmethod
    def _update(self) -> float:
        """Clip and step, and return the norm of the gradient; leave the parameters alone where that is not finite."""

    @abstractmethod
    def _fill(self, steps: int, fill: Callable[[Fragment], None]) -> None:
        """Have `fill` write all that AdamW has after `steps` steps, and the parameters."""

    def _use_scale(self) -> None:
        """Use the changed `self._scale` in the next step; not needed where each step reads it."""

    def _checked(self, loss: Tensor) -> Tensor:
        """Make a loss that is not finite NaN: then the sum of gradients is NaN, and all ranks skip the step."""
        return loss * torch.where(torch.isfinite(loss), 1.0, math.nan).to(loss.dtype)

    def _judge(self, norm: float) -> None:
        """Count skipped steps, and choose the next loss scale. Raises RunError for a step that ends the run."""
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._scale:
            if math.isfinite(norm):
                self._scale.step_passed()
            else:
                self._scale.step_overflowed(self.steps)
            self._use_scale()
        elif self._skipped > (most := self.cfg.config.train.max_skipped_steps):
            raise RunError(
                f"loss or gradient of optimizer step {self.steps} is not finite, {self._skipped} times in a row "
                f"(train.max_skipped_steps = {most}); the parameters were not changed. Usual causes: "
                "a learning rate that is too high, or rewards out of range (see reward.clip_range)."
            )

    def _state(self) -> dict[str, Any]:
        """Return a copy of what a checkpoint holds besides the fragments."""
        cuda = torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None
        state = {"steps": self.steps, "sizes": self._sizes(), "rng": torch.get_rng_state(), "cuda_rng": cuda}
        optional = {"loss_scale": self._scale and self._scale.state(), "adapter": settings_of(self.module)}
        return state | {name: value for name, value in optional.items() if value}

    def _sizes(self) -> dict[str, int]:
        """Count the elements of every trained parameter; tied parameters appear once."""
        return {name: self.shapes[name].numel() for name, p in self.module.named_parameters() if p.requires_grad}

    def _read_state(self, directory: Path) -> dict[str, Any]:
        """Read the state that this rank has written; if there is none, rank 0's, with "own" False."""
        own = _rank_file(directory, self.world.rank)
        path = own if own.is_file() else _rank_file(directory, 0)
        if not path.is_file():
            raise CheckpointError(f"{directory}: no {path.name}. It is not a checkpoint of this role.")
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if "sizes" not in state:
            raise CheckpointError(f"{directory} was written by an earlier version, whose checkpoints this cannot read.")
        check_sizes(directory, state["sizes"], self._sizes())
        return {**state, "own": path == own}


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.pt"


@dataclass(slots=True)
class LossScale:
    """Holds the loss scale s of fp16: gradients are multiplied by it until the step, so that small ones do not vanish.

    A step that overflows is skipped. s := s / 2 after it, s := 2 s after `window` steps in a row that did not overflow.
    fp16 has 10 mantissa bits, against bf16's 7, but numbers from 6e-8 to 65504 only. Source of the scheme:
    Micikevicius et al., Mixed Precision Training (2018), section 3.2. There is no hysteresis.
    """

    scale: float
    window: int
    least: float
    passed: int = 0  # steps in a row since the scale changed
    overflows: int = 0  # steps in a row that were skipped

    @classmethod
    def of(cls, ds: Ds) -> LossScale | None:
        """Read the settings; None where gradients need no scale."""
        if ds.param_dtype != "fp16":
            return None
        return cls(2.0**ds.initial_scale_power, ds.loss_scale_window, ds.min_loss_scale)

    def step_passed(self) -> None:
        """Count a step whose gradient was finite."""
        self.overflows = 0
        self.passed += 1
        if self.passed == self.window:
            self.scale, self.passed = 2.0 * self.scale, 0

    def step_overflowed(self, step: int) -> None:
        """Halve the scale, because optimizer step `step` had a gradient that is not finite.

        Raises RunError if the scale is the smallest already: then the scale is not the cause.
        """
        self.overflows += 1
        if self.scale <= self.least:
            raise RunError(
                f"the gradient of optimizer step {step} is not finite, {self.overflows} times in a row and now at the "
                f"smallest loss scale, ds.min_loss_scale = {self.least:g}; the parameters were not changed. Usual "
                "causes: activations beyond fp16's 65504 (set ds.param_dtype = bf16), a learning rate that is too "
                "high, or rewards out of range (see reward.clip_range)."
            )
        self.scale, self.passed = max(self.scale / 2.0, self.least), 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "passed": self.passed, "overflows": self.overflows}

    def load(self, state: dict[str, float]) -> None:
        """Continue where `state` was called."""
        self.scale, self.passed, self.overflows = state["scale"], int(state["passed"]), int(state["overflows"])
