"""Promises that every `Trainer` keeps, whichever library is behind it: one, two and three ranks, in three precisions.

Run as a program, this file is the rank that torchrun starts. To prove another trainer: its row in TRAINERS.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from training_ranks import as_rank, torchrun
from waiting import HANG_S

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CheckpointError, RunError

pytestmark = pytest.mark.slow

TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {"ds.zero_stage": 0, "train.full_determinism": True},
    "zero1": {"ds.zero_stage": 1, "train.full_determinism": True},
    "zero2": {"ds.zero_stage": 2, "train.full_determinism": True},
    "zero3": {"ds.zero_stage": 3, "train.full_determinism": True},
}
"""Name -> the keys that choose it."""
CASES = [(name, dtype) for dtype in ("fp32", "bf16", "fp16") for name in TRAINERS]
MOVES = ("plain", "zero2", "zero3")
STEPS, SAVED, ROWS, WIDTH = 4, 2, 12, 7
LRS = [1e-3 * share for share in (0.25, 0.5, 0.75, 1.0)]
BOUND = {"fp32": 2e-7, "bf16": 2e-4, "fp16": 4e-5}
"""Bound of a master's difference from AdamW in float64, after four steps of up to 1e-3."""
NORM = {"fp32": 1e-6, "bf16": 3e-3, "fp16": 5e-4}


class Model(nn.Module):
    """Two layers whose sizes no number of ranks divides, and one that only rows above a bound reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.expert, self.last = nn.Linear(WIDTH, 13), nn.Linear(13, 13), nn.Linear(13, 5)
        for parameter in self.parameters():  # numbers that all precisions have
            parameter.data = parameter.data.bfloat16().float()

    def forward(self, rows: torch.Tensor, routed: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(rows.to(self.first.weight.dtype)))
        out: torch.Tensor = self.last(self.expert(hidden) if routed else hidden)
        return out


def rows_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 5, generator=generator)


def loss_of(forward: Callable[..., Any], step: int, chosen: list[int], routed: bool = True) -> torch.Tensor:
    rows, wanted = rows_of(step)
    out = forward(rows[chosen], routed)
    return ((out.to(torch.promote_types(out.dtype, torch.float32)) - wanted[chosen]) ** 2).sum() / ROWS


def in_float64() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Masters after STEPS steps, and the gradients' norms, of AdamW on the whole batch."""
    module = Model().double()
    groups = [
        {"params": [p for p in module.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer, norms = torch.optim.AdamW(groups, betas=(0.9, 0.95)), []
    for step, lr in enumerate(LRS):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss_of(module, step, list(range(ROWS))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}, norms


# --- what each rank does ---------------------------------------------------------------------------------------------


def make(name: str, dtype: str) -> Any:
    from slurm_rlhf.config.keys import put
    from slurm_rlhf.trainer.backends import loading, start_trainer
    from slurm_rlhf.trainer.distributed import join_world
    from slurm_rlhf.trainer.trainer import DTYPES, Schedule, TrainSettings

    config = Config()
    config.ds.param_dtype, config.train.max_skipped_steps = dtype, 1
    config.ds.initial_scale_power, config.ds.loss_scale_window = 8, 2  # it doubles after a save
    config.actor.weight_decay, config.actor.max_norm = 0.1, 0.5
    for key, value in TRAINERS[name].items():
        put(config, key, value)
    world = join_world(HANG_S, HANG_S)
    with loading(config.ds, world) as ds:
        module = Model().to(DTYPES[ds.param_dtype])
    trainer = start_trainer(module, TrainSettings(config, Schedule("constant", LRS[-1], STEPS, 1.0), world.size), world)
    assert type(trainer).__name__ == ("PlainTrainer" if name == "plain" else "DeepSpeedTrainer")
    return trainer


def take(trainer: Any, step: int, spoil: float = 0.0) -> dict[str, float]:
    """Take a step of two micro-batches; `spoil` makes rank 0's loss infinite, or its gradient NaN, too."""
    rank, size = trainer.world.rank, trainer.world.size
    mine = list(range(rank, ROWS, size))
    for last, chosen in ((False, mine[:1]), (True, mine[1:])):
        loss = loss_of(trainer.forward, step, chosen)
        spoiled = loss * spoil if math.isnan(spoil) else loss + spoil
        trainer.accumulate(spoiled if rank == 0 else loss, last)
    metrics: dict[str, float] = trainer.step()
    return metrics


def all_shards(trainer: Any) -> dict[str, torch.Tensor]:
    """Put the shards of all ranks together, "<kind>|<parameter>" -> fp32 [n]; each element is on one rank."""
    found: dict[str, torch.Tensor] = {}
    for name, shape in trainer.shapes.items():
        for kind in ("fp32", "exp_avg", "exp_avg_sq", "times"):
            found[f"{kind}|{name}"] = torch.zeros(shape.numel())
    for shard in trainer.shards(trainer.module, "optimizer"):
        for kind, tensor in [*shard.tensors.items(), ("times", torch.ones(len(shard.tensors["fp32"])))]:
            assert tensor.dtype == torch.float32
            found[f"{kind}|{shard.name}"][shard.start : shard.start + len(tensor)] += tensor
    for tensor in found.values():
        torch.distributed.all_reduce(tensor)
    assert all((tensor == 1).all() for key, tensor in found.items() if key.startswith("times"))
    return {key: tensor for key, tensor in found.items() if not key.startswith("times")}


def assert_parameters(trainer: Any) -> None:
    """Check that the model computes with the masters, rounded, and that a rank's shards are parts of the whole."""
    masters = all_shards(trainer)
    held = {
        shard.name: (shard.start, shard.tensors["parameter"]) for shard in trainer.shards(trainer.module, "parameters")
    }
    covered = dict.fromkeys(held, 0)
    for name, whole in trainer.gathered(trainer.module):
        assert whole.shape == trainer.shapes[name]
        assert torch.equal(whole.flatten(), masters[f"fp32|{name}"].to(whole.dtype)), name
        start, own = held[name]
        covered[name] = len(own)
        assert torch.equal(own, whole.flatten()[start : start + len(own)])
    counts = torch.tensor(list(covered.values()))
    torch.distributed.all_reduce(counts)
    ranks = 1 if trainer.sharded else trainer.world.size
    assert counts.tolist() == [ranks * shape.numel() for shape in trainer.shapes.values()]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def train_and_save(name: str, dtype: str, out: Path) -> None:
    """Steps that are skipped and four that count, the last two while an asynchronous save is written."""
    trainer, metrics = make(name, dtype), []
    for step, spoil in enumerate((math.nan, math.inf)):
        before = all_shards(trainer)
        skipped = take(trainer, step, spoil)
        assert (skipped["skipped_steps"], "grad_norm" in skipped, trainer.steps) == (1.0, False, step)
        assert equal(all_shards(trainer), before)
        metrics.append(take(trainer, step))
    rank, now, behind = trainer.world.rank, out / f"{name}.{dtype}", out / f"{name}.{dtype}.behind"
    for directory in (now, behind):
        directory.mkdir(exist_ok=True)
    torch.rand(rank + 1)  # makes the random state the rank's own
    assert trainer.save(now).done()
    save_file(all_shards(trainer), out / f"{name}.{dtype}.saved.{rank}")
    with writing_held() as free:
        pending = trainer.save(behind, async_save=True)
        metrics += [take(trainer, step) for step in range(SAVED, STEPS)]
        assert not pending.done()
        free.set()
        pending.result(HANG_S)
    files = list(now.glob(f"rank_{rank:05d}.*"))
    assert len(files) == 2
    assert all((behind / file.name).read_bytes() == file.read_bytes() for file in files)
    assert trainer.steps == STEPS
    assert_parameters(trainer)
    save_file({"drawn": torch.rand(3)}, out / f"{name}.{dtype}.drawn.{rank}")
    result = all_shards(trainer)
    if rank == 0:
        save_file(result, out / f"{name}.{dtype}.safetensors")
        (out / f"{name}.{dtype}.json").write_text(json.dumps(metrics))
    refuse(trainer, out)
    torch.distributed.barrier()  # rank 0 has written what another rank reads next


@contextmanager
def writing_held() -> Iterator[threading.Event]:
    """Have every write of a save wait, inside the block, for the event."""
    from slurm_rlhf.trainer import trainer as seam

    usual, free = seam.write_shard, threading.Event()

    def late(*arguments: Any) -> None:
        assert free.wait(HANG_S)
        usual(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "write_shard", late)
        yield free


def load_and_go_on(name: str, dtype: str, out: Path, writers: dict[str, Path]) -> None:
    """Load what every trainer has written in this precision; the shards are equal, and so are the steps that follow."""
    for writer, where in writers.items():
        trainer = make(name, dtype)
        trainer.load(where / f"{writer}.{dtype}")
        assert trainer.steps == SAVED
        loaded = all_shards(trainer)
        assert equal(loaded, load_file(where / f"{writer}.{dtype}.saved.0")), writer
        assert_parameters(trainer)
        if name in MOVES:
            move_there_and_back(trainer, loaded)
        metrics, result = [take(trainer, step) for step in range(SAVED, STEPS)], all_shards(trainer)
        expected = load_file(where / f"{writer}.{dtype}.safetensors")
        last = json.loads((where / f"{writer}.{dtype}.json").read_text())[SAVED:]
        if writer == name and where == out and trainer.world.size < 3:  # sums of three depend on their order
            assert equal(result, expected), (name, dtype)
            assert metrics == last
            assert equal({"drawn": torch.rand(3)}, load_file(out / f"{name}.{dtype}.drawn.{trainer.world.rank}"))
        for key in ("lr", "loss_scale"):
            assert [step.get(key) for step in metrics] == [step.get(key) for step in last]
        for key, tensor in result.items():
            torch.testing.assert_close(
                tensor, expected[key], rtol=NORM[dtype], atol=BOUND[dtype], msg=f"{writer} {key}"
            )


def move_there_and_back(trainer: Any, loaded: dict[str, torch.Tensor]) -> None:
    """Move the state as on a GPU, where the host has other memory: whoever still looks at the old one reads NaN."""
    from slurm_rlhf.trainer import deepspeed, optimizer_state

    def elsewhere(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = tensor.to(device, copy=True)
        tensor.fill_(math.nan)
        return copy

    with pytest.MonkeyPatch.context() as patch:
        for module in (deepspeed, optimizer_state):
            patch.setattr(module, "moved", elsewhere)
        for where in ("host", "device"):
            trainer.move(where)
            if where == "host" and getattr(trainer.cfg, "zero_stage", 0) == 3:
                assert trainer._engine.optimizer.grad_partitions_flat_buffer.untyped_storage().nbytes() == 0
            assert equal(all_shards(trainer), loaded)


def refuse(trainer: Any, out: Path) -> None:
    """Steps in a row that are not finite change nothing and end the run; only own checkpoints are loaded."""
    before = all_shards(trainer)
    if trainer.cfg.config.ds.param_dtype != "fp16":
        take(trainer, 0, spoil=math.inf)
        with pytest.raises(RunError, match=r"not finite, 2 times in a row \(train\.max_skipped_steps = 1\)"):
            take(trainer, 0, spoil=math.nan)
        assert equal(all_shards(trainer), before)
    with pytest.raises(CheckpointError, match="not a checkpoint of this role"):
        trainer.load(out / "nowhere")
    (out / "old").mkdir(exist_ok=True)
    torch.save({}, out / "old" / f"rank_{trainer.world.rank:05d}.pt")
    with pytest.raises(CheckpointError, match="written by an earlier version"):
        trainer.load(out / "old")


def one_rank_lacks_a_gradient() -> None:
    """An expert that no row of this rank reaches has the gradient of the other ranks' rows on all."""
    found = []
    for routed in (True, False):  # reached by rows of all ranks, then by rows of rank 0 alone
        trainer = make("plain", "fp32")
        trainer.accumulate(loss_of(trainer.forward, 0, [0, 1], routed or trainer.world.rank == 0), last=True)
        assert all(parameter.grad is not None for parameter in trainer.module.parameters())
        found.append(trainer.module.expert.weight.grad.clone())
        total = found[-1].clone()
        torch.distributed.all_reduce(total)
        assert torch.equal(total, trainer.world.size * found[-1]), "the ranks differ"
    torch.testing.assert_close(found[0], trainer.world.size * found[1])  # all ranks have the same rows


def main(request: dict[str, Any]) -> None:
    out = Path(request["out"])
    for cases in (CASES[:-2], CASES[-2:-1], CASES[-1:]):
        for name, dtype in cases:
            train_and_save(name, dtype, out)
        for name, dtype in cases:
            writers = {
                writer: out for writer, other in CASES if other == dtype and (out / f"{writer}.{dtype}").is_dir()
            }
            load_and_go_on(name, dtype, out, writers)
            if request["other"]:
                load_and_go_on(name, dtype, out, dict.fromkeys(writers, Path(request["other"])))
    if torch.distributed.get_world_size() > 1:
        one_rank_lacks_a_gradient()


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run two ranks, three that load what those wrote, and one; they assert what is equal bit for bit."""
    outs = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (2, 3, 1)}
    for ranks, other in ((2, ""), (3, str(outs[2])), (1, str(outs[3]))):
        torchrun(ranks, 220.0, __file__, out=str(outs[ranks]), other=other)
    return outs


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_steps_are_those_of_adamw_in_float64(results: dict[int, Path], name: str, dtype: str, ranks: int) -> None:
    expected, norms = in_float64()
    ours = load_file(results[ranks] / f"{name}.{dtype}.safetensors")
    apart = {key: float((ours[f"fp32|{key}"] - value.flatten()).abs().max()) for key, value in expected.items()}
    assert max(apart.values()) < BOUND[dtype]
    metrics = json.loads((results[ranks] / f"{name}.{dtype}.json").read_text())
    assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=NORM[dtype])
    assert min(norms) > 0.5
    assert [step["lr"] for step in metrics] == pytest.approx(LRS)
    scales = [step["loss_scale"] for step in metrics if "loss_scale" in step]
    assert [scale / scales[-2] for scale in scales] == ([] if dtype != "fp16" else [2, 1, 1, 2])


if __name__ == "__main__":
    as_rank(main)
