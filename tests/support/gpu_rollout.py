"""Stand-ins for what vLLM is on a GPU, and what of it runs in the process that has vLLM (`rollout_engine`)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from gpu_signatures import check_signature
from rollout_engine import config

MIB = 1 << 20
WANTED = (
    "async_scheduling",
    "enforce_eager",
    "enable_sleep_mode",
    "kv_cache_memory_bytes",
    "enable_chunked_prefill",
    "gpu_memory_utilization",
)
"""Engine arguments that depend on the platform."""


class Llm:
    """vLLM's engine, as far as its memory goes: 20 MiB of weights and 40 of KV cache on the current GPU."""

    def __init__(self) -> None:
        self._sizes = {"weights": 20 * MIB, "kv_cache": 40 * MIB}
        self._held = {part: self._take(part) for part in self._sizes}
        self._levels: list[int] = []

    def _take(self, part: str) -> torch.Tensor:
        return torch.empty(self._sizes[part], dtype=torch.uint8, device="cuda")

    def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        self._levels.append(level)
        self._held.clear()

    def wake_up(self, tags: list[str] | None = None) -> bool:
        for part in tags or self._sizes:
            assert part not in self._held
            self._held[part] = self._take(part)
        return len(self._held) == len(self._sizes)


class Platform:
    """vLLM's, on a machine with GPUs."""

    device_name = "cuda"
    sleeps = True

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True

    def is_sleep_mode_available(self) -> bool:
        return self.sleeps


def signatures() -> list[str]:
    """Check stand-ins, and what the code uses of vLLM on GPUs alone, against the installed vLLM; list the latter."""
    from vllm.platforms.interface import Platform as Real
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First
    from vllm.v1.worker.gpu_worker import Worker

    def model(self: Any) -> Any: ...

    def sleep(self: Any, level: int = 1) -> None: ...

    def wake_up(self: Any, tags: list[str] | None = None) -> None: ...

    check_signature(LLMEngine.sleep, Llm.sleep, "LLMEngine.sleep")
    check_signature(LLMEngine.wake_up, Llm.wake_up, "LLMEngine.wake_up")
    for name in ("is_cpu", "is_cuda", "is_sleep_mode_available"):
        assert callable(getattr(Real, name)), name
    assert "device_name" in Real.__annotations__
    checked = []
    for owner, name, ours in (
        (First, "get_model", model),
        (Second, "get_model", model),
        (Worker, "sleep", sleep),
        (Worker, "wake_up", wake_up),
    ):
        check_signature(getattr(owner, name), ours, f"{owner.__name__}.{name}")
        checked.append(f"{owner.__name__}.{name}")
    return checked


def asynchronous() -> list[bool]:
    """Whether vLLM schedules ahead by itself with the executors of engines of one rank and of several."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from slurm_rlhf.engine._vllm import tp_executor

    return [made.supports_async_scheduling() for made in (UniProcExecutor, tp_executor("x", int))]


def sampling_limits() -> tuple[float, str]:
    """vLLM's lowest temperature, and what it says of 2.1."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMError
    from vllm.sampling_params import _MAX_TEMP

    try:
        SamplingParams(temperature=2.1)
    except VLLMError as error:
        return _MAX_TEMP, str(error)
    return _MAX_TEMP, ""


def arguments(path: Path, sleeps: bool = True, **changes: Any) -> dict[str, Any] | str:
    """The engine arguments on a GPU, with `changes` of the configuration; or the error."""
    import vllm.model_executor.models.qwen2  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs

    from slurm_rlhf.config.keys import put
    from slurm_rlhf.engine.vllm import engine_config
    from slurm_rlhf.errors import ConfigError

    made = config(path)
    for name, value in changes.items():
        put(made, name.replace("__", "."), value)
    seen: list[EngineArgs] = []

    def create(self: EngineArgs, usage_context: Any = None, headless: bool = False) -> Any:
        seen.append(self)
        return SimpleNamespace()

    check_signature(EngineArgs.create_engine_config, create, "EngineArgs.create_engine_config")
    platform = Platform()
    platform.sleeps = sleeps
    with ExitStack() as stack:
        stack.enter_context(mock.patch("vllm.platforms.current_platform", platform))
        stack.enter_context(mock.patch.object(EngineArgs, "create_engine_config", create))
        try:
            engine_config(made)
        except ConfigError as error:
            return str(error)
    passes = seen[0].compilation_config.pass_config
    return {name: getattr(seen[0], name) for name in WANTED} | {"fuse_allreduce_rms": passes.fuse_allreduce_rms}


def unpacked_on_a_gpu() -> int:
    """Count the modules that were looked at around a reload: none, weights are used as they are loaded."""
    # While vLLM imports, its platform is the real one.
    import vllm.model_executor.layers.vocab_parallel_embedding  # noqa: F401

    from slurm_rlhf.engine import _vllm_updates

    looked = []
    model = SimpleNamespace(modules=lambda: looked.append(1) or [])
    with mock.patch("vllm.platforms.current_platform", Platform()):
        _vllm_updates._repack_tied_heads(model)
        _vllm_updates._unpack_experts(model)
    return len(looked)


def imports() -> list[str]:
    """List modules that are imported ahead on a GPU: vLLM's engine, and flash attention, which this build lacks."""
    import builtins

    from slurm_rlhf.engine._vllm import import_vllm

    usual, asked = builtins.__import__, []

    def watching(name: str, *arguments: Any, **named: Any) -> Any:
        asked.append(name)
        return usual(name, *arguments, **named)

    with (
        mock.patch("vllm.platforms.current_platform", Platform()),
        mock.patch.object(builtins, "__import__", watching),
    ):
        import_vllm()
    return [name for name in asked if name.startswith("vllm.v1.engine.llm_engine") or "flash_attn" in name]
