"""Weight updates from a DeepSpeed actor to a vLLM engine, for any model, number of ranks, ZeRO stage and precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plain_policy import expected_logprobs, load_plain
from ranks import Ranks
from tiny_models import make_tiny
from training_ranks import make_experience, share
from waiting import HANG_S, scaled

from slurm_rlhf.config.schema import Config
from slurm_rlhf.records import Sampling, Trajectory
from slurm_rlhf.weights.lead import WeightSync
from slurm_rlhf.wire.calls import (
    ActorCalls,
    Asked,
    EngineCalls,
    GenerateBatch,
    PackedPrompts,
    StartCalls,
    TrainBatch,
)
from slurm_rlhf.wire.handles import EngineHandle, RoleHandle, gather

ACTORS = 2
SAMPLING = Sampling(max_new_tokens=16, temperature=0.9)


@dataclass(frozen=True, slots=True)
class Cell:
    arch: str
    tied: bool
    tp: int
    zero: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.arch}-{'tied' if self.tied else 'untied'}-tp{self.tp}-zero{self.zero}-{self.dtype}"


def updates(cell: Cell, place: Path) -> list[tuple[float, float]]:
    """After each of two updates: largest difference of the engine's log-probs from a transformers forward of the
    weights that the actor gathers at that time, and of those that the engine had before."""
    shape = {"hidden": 128, "heads": 4, "kv_heads": 2, "dtype": cell.dtype}
    first, other = (make_tiny(place / f"m{seed}", cell.arch, cell.tied, seed=seed, **shape) for seed in (1, 2))
    actors = Ranks("actor", _config(cell, place / "a", other), ACTORS)
    engines = Ranks("rollout", _config(cell, place / "e", first), cell.tp, other=actors)
    try:
        for ranks in (actors, engines):
            ranks.launch()
        return _updates(cell, place, first, actors, engines)
    except Exception as error:
        error.add_note(actors.log() + engines.log())
        raise
    finally:
        for ranks in (actors, engines):
            ranks.close()


def _updates(cell: Cell, place: Path, stale: Path, actors: Ranks, engines: Ranks) -> list[tuple[float, float]]:
    for ranks in (actors, engines):
        ranks.server.wait_for(ranks.role, ranks.world, HANG_S)
    actor: RoleHandle[ActorCalls] = RoleHandle(actors.server, "actor", ACTORS, actors.config.timeout)
    rollout = EngineHandle(engines.server, "rollout", cell.tp, cell.tp, engines.config.timeout)
    start = 4
    started = gather([*actor.start_all(StartCalls.start, start), *rollout.start_all(StartCalls.start, start)])
    sync = WeightSync(actors.config, actor, rollout, "127.0.0.1")
    sync.connect(started[0].parameters or [], [0])
    found = []
    for version in (1, 2):
        sync.update(version)
        actor.call_all(ActorCalls.export, str(place / f"v{version}"))
        sampled = _generate(rollout, version)
        found.append((largest_gap(sampled, place / f"v{version}"), largest_gap(sampled, stale)))
        stale = place / f"v{version}"
        _train(actor)
    return found


def _config(cell: Cell, run_dir: Path, model: Path) -> Config:
    config = Config(run_dir=str(run_dir))
    config.actor.model_name_or_path = str(model)
    config.actor.learning_rate = 3e-2
    config.actor.lr_scheduler, config.actor.lr_warmup_ratio = "constant", 0.0
    config.ds.zero_stage, config.ds.param_dtype = cell.zero, cell.dtype
    config.data.max_len = 128
    config.vllm.tensor_parallel_size = cell.tp
    config.vllm.max_num_seqs = 16
    config.sync.bucket_mb = 1
    config.timeout.sync = config.timeout.collective = scaled(120.0)
    return config


def _generate(rollout: EngineHandle, version: int) -> list[Trajectory]:
    rng = np.random.default_rng(version)
    texts = [rng.integers(2, 60, 4 + 5 * i).astype(np.int32) for i in range(8)]
    most = SAMPLING.max_new_tokens
    asked = [Asked(SAMPLING.n * i + k, i, k, version, 0, most, texts[i]) for i in range(8) for k in range(SAMPLING.n)]
    batch = GenerateBatch(PackedPrompts.pack(asked), SAMPLING, 1, len(asked))
    return rollout.call(0, EngineCalls.generate, batch).result().found


def _train(actor: RoleHandle[ActorCalls]) -> None:
    experience = make_experience(0)
    tokens = float(experience.action_mask.sum())
    batches = [TrainBatch(*share(experience, rank, ACTORS, 100), tokens) for rank in range(ACTORS)]
    gather(actor.start_each(ActorCalls.train_step, batches))


def largest_gap(trajectories: list[Trajectory], directory: Path) -> float:
    """Largest difference of rollout log-probs from a transformers forward of `directory`'s weights in fp32."""
    model = load_plain(directory)
    return max(
        float(np.abs(expected_logprobs(model, t, SAMPLING.temperature) - t.rollout_logprobs).max())
        for t in trajectories
    )
