"""Training's CUDA branches through the stand-ins of gpu_standins.py: where tensors go, and when the host waits.

DeepSpeed's engine is a stand-in, too, whose methods are compared with the installed class.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from gpu_standins import FakeCuda, check_signature, fake_cuda
from tiny_models import make_reward, make_tiny
from torch import Tensor, nn
from training_ranks import make_config, make_experience
from waiting import HANG_S

from slurm_rlhf.config.schema import Config
from slurm_rlhf.ranks.model_workers import ReferenceWorker
from slurm_rlhf.ranks.rank_process import import_libraries
from slurm_rlhf.ranks.worker import RankInfo
from slurm_rlhf.trainer import deepspeed as zero
from slurm_rlhf.trainer import distributed, frozen, trainers
from slurm_rlhf.trainer._deepspeed import import_deepspeed
from slurm_rlhf.trainer._torch import limit_collectives
from slurm_rlhf.trainer.distributed import World, undisturbed
from slurm_rlhf.trainer.frozen import FrozenPolicy, RewardModel
from slurm_rlhf.trainer.trainer import Schedule, TrainSettings, adamw
from slurm_rlhf.trainer.trainers import PolicyTrainer, ValueTrainer

pytestmark = [pytest.mark.usefixtures("own_environment")]

GPU = torch.device("cuda", 1)


class Engine:
    """DeepSpeed's: what `DeepSpeedTrainer` asks of it, computed plainly."""

    def __init__(self, module: nn.Module, shapes: Any, cfg: TrainSettings, device: torch.device) -> None:
        self.module = module.to(device)
        self.optimizer: Any = adamw(self.module, shapes, cfg, device)
        self.stage = cfg.zero_stage
        self.offloaded: list[Any] = []
        self.boundaries: list[bool] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundaries.append(is_boundary)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def get_global_grad_norm(self) -> Tensor:
        return self._norm

    def step(self) -> None:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        self._norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def offload_states(self, include: Any = None, *, pin_memory: bool = True) -> None:
        self.offloaded.append((sorted(each.value for each in include), pin_memory))

    def reload_states(self) -> None:
        self.offloaded.append("back")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_tiny(path / "policy", layers=1)
    make_reward(path / "reward", layers=1)
    return path


def _load_before(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the models in memory already: transformers makes them on torch's meta device, which has no stand-in."""
    config = config_of(models)
    for module, loader, given in (
        (trainers, "load_policy", (models / "policy", config.ds, 7)),
        (frozen, "load_policy", (models / "policy", config.ds, 7)),
        (trainers, "load_critic", (models / "policy", config.ds, 0)),
        (frozen, "load_reward", (models / "reward", config.ds)),
    ):
        real = getattr(module, loader)
        loaded = [real(*given)]
        monkeypatch.setattr(
            module, loader, lambda *a, real=real, loaded=loaded, **k: loaded.pop() if loaded else real(*a, **k)
        )


@pytest.fixture
def cuda(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Two GPUs, this rank's the second."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name in ("RANK", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, *, warn_only=False: None)
    joined = dist.init_process_group

    def over_gloo(backend: str | None = None, **given: Any) -> None:
        """Takes what the real one takes."""
        asked.append((backend, torch.cuda.current_device() if backend == "nccl" else -1))
        joined("gloo", **given)

    asked: list[tuple[str | None, int]] = []
    monkeypatch.setattr(dist, "init_process_group", over_gloo)

    def start(module: nn.Module, shapes: dict[str, torch.Size], cfg: TrainSettings, world: World) -> Any:
        return Engine(module, shapes, cfg, world.device)

    check_signature(zero.start_deepspeed, start)
    monkeypatch.setattr(zero, "start_deepspeed", start)
    _load_before(models, monkeypatch)
    with fake_cuda(["GPU-a", "GPU-b"]) as fake:
        fake.asked = asked  # type: ignore[attr-defined]
        try:
            yield fake
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def config_of(models: Path, **ds: Any) -> Config:
    config = make_config(models / "policy", **ds)
    config.train.full_determinism = True
    config.reward.model_name_or_path = str(models / "reward")
    return config


def waits(cuda: FakeCuda, work: Any) -> dict[str, int]:
    cuda.syncs.clear()
    work()
    return dict(cuda.syncs)


def split(rows: int, parts: int) -> list[list[int]]:
    return [list(range(part, rows, parts)) for part in range(parts)]


def test_deepspeeds_stand_in_takes_what_deepspeed_takes() -> None:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    for name, ours in vars(Engine).items():
        if not name.startswith("_"):
            theirs = getattr(DeepSpeedEngine, name)
            # DeepSpeed's own wrapper, for NVIDIA's profiler, hides the arguments.
            wrapped = inspect.getclosurevars(theirs).nonlocals.get("func", theirs)
            check_signature(wrapped, ours, name)
    assert {state.value for state in zero.optimizer_states()} == {
        OffloadStateTypeEnum.optim_states.value,
        OffloadStateTypeEnum.hp_params.value,
    }


def test_a_rank_of_torchrun_meets_the_others_on_its_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet in a thread of their own, which does not have the GPU of the main thread."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    assert distributed.join_world(30.0, 30.0).device == GPU
    assert cuda.asked == [("nccl", 1)]  # type: ignore[attr-defined]


def test_a_rank_joins_nccl_on_the_gpu_of_its_local_rank(cuda: FakeCuda) -> None:
    world = distributed.join_world(30.0, 30.0)
    assert world.device == GPU
    assert cuda.asked == [("nccl", 1)]  # type: ignore[attr-defined]  the device comes before the group
    assert distributed.join_world(30.0, 30.0) == world
    assert len(cuda.asked) == 1  # type: ignore[attr-defined]
    limit_collectives(20.0)
    distributed.seed_rank(1, 0, full_determinism=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    assert "pin_memory" in zero.zero3_config("bf16", offload=True)["zero_optimization"]["offload_param"]
    assert zero.zero3_config("bf16", offload=True)["zero_optimization"]["offload_param"]["pin_memory"] is True


@pytest.mark.parametrize("kind", [PolicyTrainer, ValueTrainer])
def test_the_host_waits_as_often_whatever_the_number_of_micro_batches(
    cuda: FakeCuda, models: Path, kind: Any, tmp_path: Path
) -> None:
    trainer = kind(config_of(models), 4)
    assert all(parameter.is_cuda for parameter in trainer.backend.module.parameters())
    exp = make_experience(0, 12)
    forward = trainer.logprobs if kind is PolicyTrainer else trainer.values
    assert waits(cuda, lambda: forward(exp, split(12, 3))) == {"to": 1}
    assert waits(cuda, lambda: forward(exp, split(12, 6))) == {"to": 1}
    steps = [waits(cuda, lambda parts=parts: trainer.train_step(exp, split(12, parts), 50.0)) for parts in (3, 6)]
    assert steps[0] == steps[1]
    assert sum(steps[0].values()) == 2, "the norm of the gradient, and all metrics at once"
    assert trainer.backend._engine.boundaries == [False] * 2 + [True] + [False] * 5 + [True]


def test_transformers_still_asks_what_it_is_not_to_ask() -> None:
    from transformers import masking_utils

    from slurm_rlhf.trainer._transformers import _none_packed, packed_rows_are_known

    real = masking_utils.find_packed_sequence_indices
    check_signature(real, _none_packed)
    assert real.__name__ in masking_utils._preprocess_mask_arguments.__code__.co_names
    positions = torch.arange(5)[None].expand(3, -1)
    assert real(positions) is None
    assert real(torch.tensor([[0, 1, 2, 0, 1]])) is not None
    with packed_rows_are_known():
        assert masking_utils.find_packed_sequence_indices is _none_packed
    assert masking_utils.find_packed_sequence_indices is real


def test_numbers_are_those_of_the_cpu(cuda: FakeCuda, models: Path) -> None:
    exp = make_experience(1, 8)
    on_gpu = PolicyTrainer(config_of(models), 4)
    found = [on_gpu.logprobs(exp, split(8, 3))["logprobs"]]
    metrics = [on_gpu.train_step(exp, split(8, 3), 50.0)]
    dist.destroy_process_group()
    cuda.remove()
    plain = PolicyTrainer(config_of(models), 4)
    found.append(plain.logprobs(exp, split(8, 3))["logprobs"])
    metrics.append(plain.train_step(exp, split(8, 3), 50.0))
    assert (found[0] == found[1]).all()
    assert metrics[0] == metrics[1]


def test_what_deepspeed_learns_of_a_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without fp16 stays one, and may be called GPU-a; torch computes fp16 on every CPU."""
    accelerator = SimpleNamespace(is_fp16_supported=lambda: False, available_memory=lambda: int("GPU-a"))
    monkeypatch.setattr(import_deepspeed(torch.device("cpu")).accelerator, "get_accelerator", lambda: accelerator)
    import_deepspeed(GPU)
    assert not accelerator.is_fp16_supported()
    assert accelerator.available_memory() == torch.cuda.mem_get_info()[0]
    import_deepspeed(torch.device("cpu"))
    assert accelerator.is_fp16_supported()


def test_adamw_is_fused_unless_a_run_has_to_round_as_before(cuda: FakeCuda, models: Path) -> None:
    for deterministic, fused in ((False, True), (True, None)):
        config = config_of(models)
        config.train.full_determinism = deterministic
        cfg = TrainSettings(config, Schedule("constant", 1e-3, 10), ranks=1)
        for device in (torch.device("cpu"), GPU):
            (group,) = adamw(nn.Linear(2, 2).to(device), {}, cfg, device).param_groups
            assert group["fused"] is fused


def test_frozen_models_wait_once_a_batch(cuda: FakeCuda, models: Path) -> None:
    exp = make_experience(2, 12)
    reference, reward = FrozenPolicy(config_of(models)), RewardModel(config_of(models))
    assert reference.model.device == reward.model.device == GPU
    assert torch.cuda.current_device() == GPU.index
    for parts in (2, 6):
        assert waits(cuda, lambda parts=parts: reference.logprobs(exp, split(12, parts))) == {"to": 1}
        assert waits(cuda, lambda parts=parts: reward.score(exp, split(12, parts))) == {"to": 1}


def test_a_checkpoint_keeps_the_random_state_of_the_gpu(
    cuda: FakeCuda, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = PolicyTrainer(config_of(models, zero_stage=0), 4)
    trainer.save(tmp_path)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state + 1)
    assert not torch.equal(torch.cuda.get_rng_state(), state)
    trainer.load(tmp_path)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_an_asynchronous_save_waits_once_and_copies_to_pinned_memory(
    cuda: FakeCuda, models: Path, tmp_path: Path
) -> None:
    trainer = PolicyTrainer(config_of(models, zero_stage=0), 4)
    trainer.train_step(make_experience(1, 8), split(8, 2), 50.0)
    now, later = tmp_path / "now", tmp_path / "later"
    for directory in (now, later):
        directory.mkdir()
    trainer.save(now)
    pending: list[Any] = []
    for _ in range(2):  # the second time into memory that is there
        assert waits(cuda, lambda: pending.append(trainer.save(later, async_save=True))) == {"synchronize": 1}
        pending[-1].result(HANG_S)
    saver = trainer.backend._saver
    assert all(buffer.is_pinned() for buffer in saver._buffers.values())
    held = sum(buffer.nbytes for buffer in saver._buffers.values())
    assert held == 12 * sum(parameter.numel() for parameter in trainer.backend.module.parameters())
    for file in now.iterdir():
        assert (later / file.name).read_bytes() == file.read_bytes()


def test_what_is_tried_out_leaves_the_random_state_of_the_gpu(cuda: FakeCuda) -> None:
    torch.cuda.set_device(GPU)
    before = torch.cuda.get_rng_state(GPU)
    with undisturbed(nn.Dropout(), GPU):
        torch.cuda.set_rng_state(before + 1, GPU)
    assert torch.equal(torch.cuda.get_rng_state(GPU), before)


class Optimizer:
    """ZeRO-3's state that `move_optimizer` moves: masters of two groups, AdamW's states, gradients and their bucket."""

    def __init__(self) -> None:
        self.fp32_partitioned_groups_flat = [torch.ones(1000, device=GPU), torch.ones(500, device=GPU)]
        self.optimizer = torch.optim.AdamW(self.fp32_partitioned_groups_flat)
        for group in self.fp32_partitioned_groups_flat:
            moments = {moment: torch.ones_like(group) for moment in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[group] = {**moments, "step": torch.tensor(1.0)}
        self.grad_partitions_flat_buffer = torch.ones(1500, device=GPU)
        self.view = self.grad_partitions_flat_buffer.narrow(0, 10, 20)
        self.ipg_buckets = {torch.float32: SimpleNamespace(buffer=torch.ones(800, device=GPU))}


def test_parked_states_lie_in_pinned_host_memory_and_gradients_nowhere(cuda: FakeCuda) -> None:
    torch.cuda.set_device(GPU)
    optimizer = Optimizer()
    parked = SimpleNamespace(optimizer=optimizer)
    kept = [*optimizer.fp32_partitioned_groups_flat]
    zero.move_optimizer(parked, 3, "host", GPU)
    for master in optimizer.fp32_partitioned_groups_flat:
        state = optimizer.optimizer.state[master]
        for tensor in (master.data, state["exp_avg"].data, state["exp_avg_sq"].data):
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned()
    assert optimizer.grad_partitions_flat_buffer.untyped_storage().nbytes() == 0
    assert optimizer.ipg_buckets[torch.float32].buffer.untyped_storage().nbytes() == 0
    zero.move_optimizer(parked, 3, "device", GPU)
    assert [master is before for master, before in zip(optimizer.fp32_partitioned_groups_flat, kept, strict=True)]
    for master in optimizer.fp32_partitioned_groups_flat:
        state = optimizer.optimizer.state[master]
        assert master.data.is_cuda
        assert state["exp_avg"].is_cuda
        assert float(master.sum()) == master.numel()
    assert not optimizer.grad_partitions_flat_buffer.any()
    optimizer.grad_partitions_flat_buffer.fill_(3.0)
    assert float(optimizer.view.sum()) == 60.0, "DeepSpeed's views of the gradients are still views"


def test_zero2_parks_by_deepspeeds_own_means_and_calls_release_what_they_do_not_need(
    cuda: FakeCuda, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("emptied"))
    config = config_of(models)
    trainer = PolicyTrainer(config, 4)
    trainer.backend.move("host")
    assert trainer.backend._engine.offloaded == [(["hp_params", "optim_states"], True)]
    assert emptied
    trainer.backend.move("device")
    assert trainer.backend._engine.offloaded[-1] == "back"
    config.train.colocate_all = True
    emptied.clear()
    rank = ReferenceWorker(config, RankInfo("reference", 0, 1, 0, "n"), cast(Any, None))
    assert rank.perform(lambda: 5, []) == 5
    assert emptied == ["emptied"]


def test_an_engine_imports_its_attention_kernels_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is a stand-in, whose names are looked for in the installed one's files."""
    home = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))  # type: ignore
    imported = ["vllm", "vllm._custom_ops", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.llm_engine", "vllm.platforms"]
    for name in [*imported, "vllm.vllm_flash_attn"]:
        path = home.joinpath(*name.split(".")[1:])
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name
    assert "def is_cuda(self) -> bool:" in (home / "platforms" / "interface.py").read_text()
    assert "import_kernels()" in (home / "_custom_ops.py").read_text()
    asked: list[str] = []

    class Attention:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.startswith("vllm"):
                asked.append(name)

    for name in imported:
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            monkeypatch.setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Attention(), *sys.meta_path])
    monkeypatch.setattr("slurm_rlhf.engine.vllm.prepare_environment", lambda: asked.append("prepared"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for is_cuda in (False, True):
        platform = SimpleNamespace(is_cuda=lambda is_cuda=is_cuda: is_cuda)
        monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", platform, raising=False)
        import_libraries(Config(), RankInfo("rollout", 2, 4, 2 if not is_cuda else 0, "n"))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    assert asked == ["prepared", "prepared", "vllm.vllm_flash_attn"]
