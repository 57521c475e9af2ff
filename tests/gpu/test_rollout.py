"""The parts of the rollout side that run on GPUs alone, through strict stand-ins."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gpu_rollout as child
import pytest
import rollout_engine
import torch
from gpu_rollout import MIB, Llm
from gpu_standins import FakeCuda, fake_cuda
from rollout_engine import EngineProcess
from steps import make_step
from tiny_models import make_tiny
from torch.nn import functional

from slurm_rlhf.cluster.stop import TERM, StopRequested
from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine import vllm
from slurm_rlhf.engine.vllm import DeviceMemory, prepare_environment, vllm_environment
from slurm_rlhf.errors import RunError
from slurm_rlhf.groups.engine_pool import EnginePool
from slurm_rlhf.ranks.rank_process import import_libraries
from slurm_rlhf.ranks.worker import RankInfo, Worker
from slurm_rlhf.records import KV_CACHE, WEIGHTS, Sampling, Trajectory
from slurm_rlhf.run.colocation import Colocation
from slurm_rlhf.run.colocation import log as colocation_log
from slurm_rlhf.run.step import TrainingStep
from slurm_rlhf.trainer import _torch
from slurm_rlhf.trainer.distributed import device_bytes
from slurm_rlhf.wire.calls import EngineCalls


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda(["GPU-a"], memory=100 * MIB) as fake:
        yield fake


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", heads=2, kv_heads=1)


def test_memory_goes_and_comes_back_part_by_part(cuda: FakeCuda) -> None:
    llm = Llm()
    memory = DeviceMemory(llm, 0.6)
    before = torch.cuda.mem_get_info()[0]
    memory.require(WEIGHTS, KV_CACHE)
    assert memory.release() == 60 * MIB
    assert llm._levels == [2]  # no weights are kept: those of the next policy come
    assert torch.cuda.mem_get_info()[0] == before + 60 * MIB
    with pytest.raises(RunError, match="asleep: it has freed its weights and kv_cache"):
        memory.require(WEIGHTS, KV_CACHE)
    memory.allocate(WEIGHTS)
    memory.require(WEIGHTS)
    with pytest.raises(RunError, match=r"has its weights already; parts that it lacks: \['kv_cache'\]"):
        memory.allocate(WEIGHTS)
    trainers = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(RunError, match=r"cannot allocate its kv_cache again: .*gpu_memory_utilization = 0.6.*lower it"):
        memory.allocate(KV_CACHE)
    with pytest.raises(RunError, match="freed its kv_cache"):
        memory.require(KV_CACHE)
    del trainers
    memory.allocate(KV_CACHE)
    memory.require(WEIGHTS, KV_CACHE)
    assert torch.cuda.mem_get_info()[0] == before


def test_vllms_environment_on_a_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's threads and its compiler are left to it."""
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    for name in vllm_environment(has_gpu=True):
        monkeypatch.setenv(name, "to be restored")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    prepare_environment()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ


@pytest.mark.parametrize(
    ("rank", "tp", "expected"),
    [(0, 1, "4"), (3, 1, "GPU-d"), (1, 2, "4,5"), (2, 2, "6,GPU-d")],
)
def test_an_engine_sees_its_own_gpus_alone(monkeypatch: pytest.MonkeyPatch, rank: int, tp: int, expected: str) -> None:
    """The variable is set before vLLM is prepared and imported."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-d")
    seen: list[str] = []
    monkeypatch.setattr(vllm, "prepare_environment", lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(vllm, "import_library", lambda: seen.append("imported"))
    config = Config()
    config.vllm.tensor_parallel_size = tp
    import_libraries(config, RankInfo("rollout", rank, 4, rank, "n"))
    assert seen == [expected, "imported"]


class Handle:
    """Engines and trainers that answer at once: who was asked for what, in order."""

    ready: list[int]
    world = 2
    width = 1
    role = "rollout"

    def __init__(self, stated: list[str], name: str) -> None:
        self._stated, self._name = stated, name

    def call_all(self, method: Any, argument: Any = None, /) -> list[Any]:
        self._stated.append(" ".join([self._name, method.__name__, *([argument.part] if argument else [])]))
        return [3 << 30, 2 << 30] if method is EngineCalls.sleep else [None, None]

    def start_all(self, method: Any, /) -> list[Any]:
        self.call_all(method)
        return []


class Weights:
    generation = 1

    def __init__(self, stated: list[str]) -> None:
        self._stated = stated

    def connect(self, parameters: Any, engines: list[int]) -> None: ...

    def update(self, version: int) -> dict[str, float]:
        self._stated.append(f"weights {version}")
        return {"perf/sync_bytes": 1.0}


@dataclass
class Engines:
    """Engines that share their accelerators with trainers, up to where they generate: that is the test's."""

    stated: list[str]
    step: TrainingStep
    colocation: Colocation

    def generate(self, version: int) -> list[Trajectory]:
        return self.step.generate([], Sampling(), version)


def colocated(stated: list[str], offload: bool, generate: Callable[..., Any]) -> Engines:
    handle, roles = Handle(stated, "engines"), {"actor": Handle(stated, "actor"), "critic": Handle(stated, "critic")}
    colocation = Colocation(roles, handle, offload)  # type: ignore[arg-type]
    started: Any = SimpleNamespace(up=dict.fromkeys(range(handle.world), 0), take_part=lambda up, version: None)
    pool = EnginePool(SimpleNamespace(), started, handle, Weights(stated), True)  # type: ignore[arg-type]
    episodes = SimpleNamespace(sample=generate, post=lambda *work: None)
    return Engines(stated, make_step(Config(), roles, colocation=colocation, pool=pool, episodes=episodes), colocation)


def test_a_turn_gives_and_takes_memory_in_order(caplog: pytest.LogCaptureFixture) -> None:
    stated: list[str] = []
    engines = colocated(stated, True, lambda *_: stated.append("generate") or [])
    with caplog.at_level(logging.INFO, colocation_log.name):
        engines.colocation.put_engines_to_sleep()
        assert stated == ["engines sleep"]
        assert "at least 2.0 GiB freed on each GPU" in caplog.text
        stated.clear()
        engines.step.sync(0)
        assert stated == []  # asleep they have no room for weights
        assert engines.generate(3) == []
        assert stated == [
            "actor sleep",
            "critic sleep",
            "engines wake_up weights",
            "weights 3",
            "engines wake_up kv_cache",
            "generate",
            "engines sleep",
            "actor wake_up",
            "critic wake_up",
        ]
        metrics = engines.step._synced
        assert metrics["perf/sleep_freed_bytes"] == float(2 << 30)
        assert {"time/wake_up", "time/sleep", "perf/sync_bytes"} < set(metrics)


def test_a_stop_in_a_turn_gives_the_gpus_back() -> None:
    stated: list[str] = []

    def stopped(*_: Any) -> None:
        raise StopRequested(TERM)

    engines = colocated(stated, False, stopped)
    with pytest.raises(StopRequested):
        engines.generate(1)
    assert stated == ["engines wake_up weights", "weights 1", "engines wake_up kv_cache", "engines sleep"]


class Attending(Worker):
    def attention(self) -> str:
        return "FLASH_ATTN"


def attending() -> Worker:
    return Attending(Config(), RankInfo("actor", 0, 1, 0, "n"), cast(Any, None))


def test_a_rank_says_what_its_gpu_holds(cuda: FakeCuda) -> None:
    held = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    said = attending().memory()
    assert said.total == 100 * MIB
    assert said.used >= held.numel()
    assert said.gpu
    assert said.attention == "FLASH_ATTN"
    assert device_bytes(torch.device("cuda", 0)) == 100 * MIB


def test_without_a_gpu_a_rank_says_nothing_of_one() -> None:
    seen = attending().memory()
    assert (seen.gpu, seen.used > 0, seen.total) == ("", True, 0)  # the memory of the process
    assert device_bytes(torch.device("cpu")) == 0


def test_the_attention_kernel_is_that_of_the_first_pass(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "_seen", [])
    _torch._watch_once.cache_clear()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
    usual = functional.scaled_dot_product_attention
    asked: list[tuple[Any, ...]] = []

    def choice(*arguments: Any, **named: Any) -> int:
        asked.append((arguments[3:], named))
        return 1

    q = torch.randn(1, 4, 8, 16, device="cuda")
    expected = usual(q, q, q, is_causal=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_sdp_choice", choice)
        assert _torch.attention_kernel() == ""
        assert _torch.attention_kernel() == ""
        found = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert asked == [((), {"is_causal": True})]
    assert torch.equal(found.cpu(), expected.cpu())
    assert functional.scaled_dot_product_attention is usual
    assert _torch.attention_kernel() == "sdpa: FLASH_ATTENTION"


def test_pytorchs_dispatcher_takes_the_question() -> None:
    """The arguments are those that transformers gives; the answer here is the CPU's."""
    q = torch.randn(1, 4, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    for arguments in ((None, 0.0, True), (mask, 0.0, False)):
        assert torch._fused_sdp_choice(q, q, q, *arguments, scale=None, enable_gqa=False) in (0, 1)


def test_the_stand_ins_are_as_the_installed_vllm(engine_process: EngineProcess) -> None:
    checked = engine_process.run(child.signatures)
    assert checked == ["GPUModelRunner.get_model", "GPUModelRunner.get_model", "Worker.sleep", "Worker.wake_up"]
    assert engine_process.run(child.asynchronous) == [True, True]


def test_the_limits_of_temperatures_are_vllms(engine_process: EngineProcess) -> None:
    coldest, stated = engine_process.run(child.sampling_limits)
    for temperature, allowed in ((coldest, True), (0.99 * coldest, False)):
        problems = list(rule_problems(changed(Config(), {"rollout.temperature": temperature})))
        assert (problems == []) is allowed, problems
    assert "temperature must be in [0, 2], got 2.1" in stated


def test_engine_arguments_on_a_gpu(engine_process: EngineProcess, path: Path) -> None:
    arguments = partial(engine_process.run, child.arguments, path)
    usual = {
        "async_scheduling": None,  # vLLM's rules
        "enforce_eager": False,
        "enable_sleep_mode": False,
        "kv_cache_memory_bytes": None,
        "enable_chunked_prefill": None,
        "gpu_memory_utilization": 0.9,
        "fuse_allreduce_rms": False,  # vLLM's rules: where TP ranks have Hopper and FlashInfer
    }
    assert arguments() == usual
    assert arguments(vllm__enforce_eager=True) == usual | {"enforce_eager": True}
    shared = {"train__colocate_all": True, "vllm__gpu_memory_utilization": 0.5}
    assert arguments(**shared) == usual | {"enable_sleep_mode": True, "gpu_memory_utilization": 0.5}
    assert "needs vLLM's sleep mode, which it does not have on cuda" in arguments(**shared, sleeps=False)
    assert "adapters on GPUs know no fp32" in arguments(lora__rank=8)
    assert arguments(lora__rank=8, ds__param_dtype="bf16") == usual


def test_weights_are_used_as_they_are_loaded(engine_process: EngineProcess) -> None:
    """Neither tied heads nor experts are packed anew, as on CPUs."""
    assert engine_process.run(child.unpacked_on_a_gpu) == 0


def test_attention_is_imported_before_a_heartbeat_counts(engine_process: EngineProcess) -> None:
    """An attention kernel that was not built for this GPU is no error."""
    engine_process.run(child.signatures)  # vLLM is there, under the platform of this machine
    names = engine_process.run(child.imports)
    assert names[0] == "vllm.v1.engine.llm_engine"
    assert "vllm.vllm_flash_attn" in names


def test_an_engine_names_the_attention_of_its_layers(engine_process: EngineProcess, path: Path) -> None:
    engine_process.run(rollout_engine.start, path)
    assert engine_process.run(rollout_engine.do, "status.attention") == "CPU_ATTN"
    assert engine_process.run(rollout_engine.do, "_ready._level") == vllm.DISCARD


def test_slopes_of_alibi_which_no_update_brings_are_kept_asleep(engine_process: EngineProcess, tmp_path: Path) -> None:
    engine_process.run(rollout_engine.start, make_tiny(tmp_path / "bloom", "bloom"))
    assert engine_process.run(rollout_engine.do, "_ready._level") == vllm.KEEP
