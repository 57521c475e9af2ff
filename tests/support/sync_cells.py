"""Weight updates from a DeepSpeed actor to a vLLM engine, for any model, number of ranks, ZeRO stage and precision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ranks import WarmRanks
from tiny_models import make_tiny
from training_ranks import make_experience, share
from waiting import HANG_S, scaled
from zygote import Zygote

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
from slurm_rlhf.wire.handles import ControlServer, EngineHandle, RoleHandle, gather

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


class Bench:
    """Two actor ranks, and engines of one and of two ranks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.zygote = Zygote("slurm_rlhf.trainer.trainers")
        self.actors = WarmRanks(self.zygote, root, "actor", ACTORS)
        self.engines = {tp: WarmRanks(self.zygote, root, "rollout", tp) for tp in (1, 2)}

    def run(self, cell: Cell) -> list[tuple[float, float]]:
        """After each of two updates: largest difference of the engine's log-probs from a transformers forward of the
        weights that the actor gathers at that time, and of those that the engine had before."""
        place = self.root / str(cell)
        shape = {"hidden": 128, "heads": 4, "kv_heads": 2, "dtype": cell.dtype}
        first, other = (make_tiny(place / f"m{seed}", cell.arch, cell.tied, seed=seed, **shape) for seed in (1, 2))
        actor_config, engine_config = (self._config(cell, place / role, m) for role, m in (("a", other), ("e", first)))
        servers = [self.actors.live(actor_config), self.engines[cell.tp].live(engine_config, actor_config)]
        try:
            return self._updates(cell, place, first, *servers, actor_config, engine_config)
        except Exception as error:
            error.add_note(self.actors.log(actor_config.run_dir) + self.actors.log(engine_config.run_dir))
            raise
        finally:
            for server in servers:
                server.close()

    def _updates(
        self,
        cell: Cell,
        place: Path,
        stale: Path,
        actor_server: ControlServer,
        engine_server: ControlServer,
        actor_config: Config,
        engine_config: Config,
    ) -> list[tuple[float, float]]:
        actor_server.wait_for("actor", ACTORS, HANG_S)
        engine_server.wait_for("rollout", cell.tp, HANG_S)
        actor: RoleHandle[ActorCalls] = RoleHandle(actor_server, "actor", ACTORS, actor_config.timeout)
        rollout = EngineHandle(engine_server, "rollout", cell.tp, cell.tp, engine_config.timeout)
        start = 4
        started = gather([*actor.start_all(StartCalls.start, start), *rollout.start_all(StartCalls.start, start)])
        sync = WeightSync(actor_config, actor, rollout, "127.0.0.1")
        sync.connect(started[0].parameters or [], [0])
        found = []
        for version in (1, 2):
            sync.update(version)
            actor.call_all(ActorCalls.export, str(place / f"v{version}"))
            sampled = self._generate(rollout, version)
            gaps = (largest_gap(sampled, place / f"v{version}"), largest_gap(sampled, stale))
            found.append(gaps)
            stale = place / f"v{version}"
            self._train(actor)
        gather(
            [handle.shut_down(rank) for handle, count in ((actor, ACTORS), (rollout, cell.tp)) for rank in range(count)]
        )
        return found

    def _config(self, cell: Cell, run_dir: Path, model: Path) -> Config:
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

    def _generate(self, rollout: EngineHandle, version: int) -> list[Trajectory]:
        rng = np.random.default_rng(version)
        texts = [rng.integers(2, 60, 4 + 5 * i).astype(np.int32) for i in range(8)]
        most = SAMPLING.max_new_tokens
        asked = [
            Asked(SAMPLING.n * i + k, i, k, version, 0, most, texts[i]) for i in range(8) for k in range(SAMPLING.n)
        ]
        batch = GenerateBatch(PackedPrompts.pack(asked), SAMPLING, 1, len(asked))
        return rollout.call(0, EngineCalls.generate, batch).result().found

    def _train(self, actor: RoleHandle[ActorCalls]) -> None:
        experience = make_experience(0)
        tokens = float(experience.action_mask.sum())
        batches = [TrainBatch(*share(experience, rank, ACTORS, 100), tokens) for rank in range(ACTORS)]
        gather(actor.start_each(ActorCalls.train_step, batches))

    def end(self) -> None:
        for ranks in (self.actors, *self.engines.values()):
            ranks.end()
        self.zygote.end()


def largest_gap(trajectories: list[Trajectory], directory: Path) -> float:
    """Largest difference of rollout log-probs from a transformers forward of `directory`'s weights in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    largest = 0.0
    for t in trajectories:
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].double() / SAMPLING.temperature
        expected = logits.log_softmax(-1).gather(1, ids[0, len(t.prompt_ids) :, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(expected - t.rollout_logprobs).max()))
    return largest
