"""Messages of the start of a run to its engines and its user."""

from __future__ import annotations

import json
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from golden_files import ranks

from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.groups.engines import Engines
from slurm_rlhf.nodes.ways import ways
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import CPU, Node, RoleSize, Topology
from slurm_rlhf.records import ParameterSpec
from slurm_rlhf.run.startup import Startup
from slurm_rlhf.wire.calls import StartAnswer
from slurm_rlhf.wire.handles import EngineHandle

CPUS = place(Topology((Node("vm", 2),), CPU), [RoleSize("actor", 1, 2)])


def answered(*answers: StartAnswer) -> SimpleNamespace:
    futures: list[Future[StartAnswer]] = []
    for answer in answers:
        futures.append(Future())
        futures[-1].set_result(answer)
    return SimpleNamespace(start_all=lambda call, request: futures)


def run_config(tmp_path: Path, **kinds: str) -> Config:
    """A configuration with a model of each kind."""
    config = Config()
    for role, kind in kinds.items():
        model = tmp_path / role
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": kind}))
        put(config, f"{role}.model_name_or_path", str(model))
    return config


def test_how_a_run_computes_is_named(tmp_path: Path) -> None:
    config = run_config(tmp_path, actor="qwen2", critic="mamba2")
    assert [*ways(config, ["actor"], CPUS)] == ["activation checkpointing off", "sequences packed", "AdamW fused"]
    stated = "critic padded (mamba2, ds.packing_samples = auto)"
    assert [*ways(config, ["actor", "critic"], CPUS)] == ["activation checkpointing off", stated, "AdamW fused"]
    # Engines map the memory of the actor.
    assert "GPU memory in growing segments (critic)" in [*ways(config, ["actor", "critic"], ranks())]
    config.ds.grad_comm_dtype, config.ds.hpz_size, config.lora.rank = "bf16", 2, 8
    config.vllm.sync_mode, config.vllm.keep_kv_cache, config.ds.attn_implementation = "inflight", True, "eager"
    config.train.gradient_checkpointing, config.ds.compile, config.train.full_determinism = "full", True, True
    with_engines = replace(CPUS, roles={**CPUS.roles, "rollout": CPUS.roles["actor"]})
    computing = [*ways(config, ["actor"], CPUS)]
    assert [*ways(config, ["actor"], with_engines)] == [
        *computing,
        "sampling ahead (train.async_queue_size = 1)",
        "KV cache kept over updates (no token is computed anew)",
    ]
    assert computing == [
        "activation checkpointing full (updates 1.18 times as long)",
        "actor padded (qwen2, ds.packing_samples = auto)",
        "layers compiled (1.21 times as fast)",
        "attention eager",
        "parameters copied by 2 ranks (1/2 of them more on each GPU)",
        "gradients summed in bf16 (half the bytes)",
        "adapters of rank 8",
    ]


def test_engines_learn_what_the_first_rank_of_the_actor_is_going_to_send(tmp_path: Path) -> None:
    sent = [cast(ParameterSpec, "embeddings"), cast(ParameterSpec, "head")]
    roles = {
        "actor": answered(StartAnswer("read", sent), StartAnswer()),
        "critic": answered(StartAnswer("with a new head")),
        "rollout": EngineHandle(cast(Any, None), "rollout", 2, 1, Config().timeout),
    }
    notes: list[str] = []
    stated: list[Any] = []

    def wait(parameters: list[ParameterSpec]) -> list[int]:
        stated.append(parameters)
        return [1]

    reporting = SimpleNamespace(note=notes.append)
    startup: Any = SimpleNamespace(
        run=SimpleNamespace(config=run_config(tmp_path, actor="qwen2"), ranks=CPUS, reporting=reporting),
        supervisor=SimpleNamespace(roles=roles),
        inputs=SimpleNamespace(total_steps=3),
        _tell_when_ready=lambda role, futures: None,
    )
    Startup._start_trainers(startup, cast(Any, SimpleNamespace(wait=wait)))
    assert stated == [sent]
    assert notes[-3:] == ["read", "with a new head", "1 of 2 engines are ready; the others join when they are"]


@pytest.mark.parametrize(
    ("preflight", "pool", "why"),
    [
        ("auto", mock.MagicMock(), "engine 0 is lost"),
        ("off", mock.MagicMock(), "preflight is off, and auto measures it"),
        ("auto", None, "the actor samples itself"),
    ],
)
def test_a_run_without_a_prediction_says_why(
    monkeypatch: pytest.MonkeyPatch, preflight: Any, pool: Any, why: str
) -> None:
    failed = mock.Mock(side_effect=RunError("engine 0 is lost"))
    monkeypatch.setattr("slurm_rlhf.run.startup.Measurement", failed)
    notes: list[str] = []
    reporting = SimpleNamespace(prediction=None, gpus=None, note=notes.append)
    state, step = SimpleNamespace(policy_version=0), SimpleNamespace(awake=nullcontext, pool=pool)
    startup: Any = SimpleNamespace(
        run=SimpleNamespace(config=Config(preflight=preflight), ranks=CPUS, reporting=reporting, state=state),
        supervisor=SimpleNamespace(roles={}),
        inputs=SimpleNamespace(prompts=SimpleNamespace(prompts=[SimpleNamespace(token_ids=(5,))])),
    )
    Startup._measure_cpus(startup, cast(Any, step))
    assert reporting.prediction is None
    assert notes == [f"the speed of the CPUs was not measured, so no step is predicted: {why}"]


def test_the_first_engine_that_starts_says_how_it_samples() -> None:
    handle = cast(Any, EngineHandle(cast(Any, None), "rollout", 2, 1, Config().timeout))
    asked: list[Future[StartAnswer]] = [Future(), Future()]
    handle.call = lambda engine, method, total_steps: asked[engine]
    server: Any = SimpleNamespace(peers=lambda role: [SimpleNamespace(rank=rank, lost="") for rank in (0, 1)])
    notes: list[str] = []
    engines = Engines(handle, server, None, {0: "vm", 1: "vm"}, Config(), notes.append, lambda: False)
    engines.begin(False, notes.append)
    engines.look()
    for start in asked:
        start.set_result(StartAnswer("two batches at a time"))
    assert [*engines.up] == [0, 1]
    assert notes == ["two batches at a time"]
