"""Engines that get adapters alone: which policy each response is of, and what is left of older ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import rollout_engine as child
from msgspec.structs import replace
from rollout_engine import EngineProcess
from tiny_models import make_tiny

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import SyncError
from slurm_rlhf.records import Sampling, Trajectory
from slurm_rlhf.trainer.export import save_hf
from slurm_rlhf.trainer.lora import attach
from slurm_rlhf.trainer.models import load_policy

SAMPLING = Sampling(max_new_tokens=16, temperature=0.9)
AHEAD = 2
KEYS = {"lora.rank": 3, "lora.alpha": 6.0, "vllm.sync_mode": "inflight", "train.async_queue_size": AHEAD}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def engine(engine_process: EngineProcess, path: Path) -> EngineProcess:
    engine_process.run(child.start, path, keys=KEYS)
    return engine_process


def gap(engine: EngineProcess, done: list[Trajectory], seed: int) -> float:
    return float(engine.run(child.differences, done, [seed], SAMPLING.temperature)[0])


def test_log_probs_are_those_of_the_policy_after_each_of_20_updates(engine: EngineProcess) -> None:
    """The prompts are the same each time, and the longest come out of the prefix cache if it is of this policy."""
    assert gap(engine, engine.run(child.generate, child.requests(SAMPLING)), 0) < 1e-5
    for version in range(1, 21):
        engine.run(child.update, version)
        done = engine.run(child.generate, child.requests(SAMPLING, samples=2, version=version))
        assert {span.version for one in done for span in one.versions} == {version}
        assert gap(engine, done, version) < 1e-5
        assert gap(engine, done, version - 1) > 1e-2
        assert engine.run(child.adapters) == [f"policy-{version}-{version}"]
        assert engine.run(child.adapters_in_vllm) == 1


def test_a_version_that_comes_again_with_other_weights_is_another_policy(engine: EngineProcess) -> None:
    """As after a restart from a checkpoint: nothing that was cached under the number may be read."""
    for seed in (31, 32):
        engine.run(child.update, seed, 7)
        assert gap(engine, engine.run(child.generate, child.requests(SAMPLING)), seed) < 1e-5
        assert engine.run(child.do, "status").version == 7


def test_a_response_ends_under_the_policy_with_which_it_began(engine: EngineProcess) -> None:
    """One policy more than may be ahead is in the engine at a time, and the batches hold requests of each."""
    done: list[Trajectory] = []
    for version in range(40, 41 + AHEAD):
        engine.run(child.update, version)
        for request in child.requests(SAMPLING, version=version):
            engine.run(child.do, "add", replace(request, key=f"{version}.{request.key}", sample=version))
        done += [one for _ in range(3) for one in engine.run(child.do, "step")]
    assert engine.run(child.adapters_in_vllm) == AHEAD + 1
    with pytest.raises(SyncError, match="no room for its adapter: versions 40, 41, 42 are in flight"):
        engine.run(child.update, 43)
    engine.run(child.usable)
    done += engine.run(child.generate, [])
    assert len(done) == (AHEAD + 1) * len(child.PROMPT_LENGTHS)
    for one in done:
        assert [span.version for span in one.versions] == [one.sample]
        assert gap(engine, [one], one.sample) < 1e-5
    engine.run(child.update, 50)
    assert engine.run(child.adapters_in_vllm) == 1


def test_two_batches_in_flight(engine_process: EngineProcess, path: Path) -> None:
    engine_process.run(child.start, path, asynchronous=True, keys=KEYS)
    for seed in (1, 2):
        done = engine_process.run(child.generate, child.requests(SAMPLING, samples=2), 4, seed)
        assert {span.version for one in done for span in one.versions} == {seed - 1}
        assert gap(engine_process, done, seed - 1) < 1e-5


def test_layers_without_a_place_are_named(engine: EngineProcess) -> None:
    layers = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    assert engine.run(child.unsupported, [*layers, "model.layers.0.odd"]) == ["model.layers.0.odd"]


def test_vllm_has_room_for_the_next_larger_rank(engine: EngineProcess) -> None:
    assert engine.run(child.rooms, [1, 2, 8, 9, 100, 512]) == [1, 8, 8, 16, 128, 512]


def test_vllm_reads_the_files_of_an_export(engine: EngineProcess, path: Path, tmp_path: Path) -> None:
    model = load_policy(path, Ds(param_dtype="fp32"), 64).model
    attach(model, 3, 6.0, ["q_proj", "down_proj"])
    save_hf(model, model.named_parameters(), path, tmp_path / "out", rank=0)
    layers = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")]
    assert engine.run(child.read_by_vllm, tmp_path / "out" / "adapter") == dict.fromkeys(layers, (3, 2.0))
