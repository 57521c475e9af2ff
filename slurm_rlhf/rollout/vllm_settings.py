"""vLLM's settings for a run: environment variables, and engine arguments from the run's configuration."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from slurm_rlhf.config.model_directory import check_model_directory, check_tensor_parallel, read_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, ModelError
from slurm_rlhf.rollout._vllm import can_sleep, import_model_class, platform, refusals, useful_kv_bytes, vllm_config

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
GIB = 1 << 30


def vllm_environment(has_gpu: bool) -> dict[str, str]:
    """Return the environment variables that vLLM reads while it is imported; the worker sets them, not the user."""
    variables = {
        # The engine is in the worker's process, where the worker owns the step loop and can change weights.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if not has_gpu:
        # Every rank would bind its threads to the first cores of the node and starve the others there.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # One small function, the rank of the sampled token, is compiled with g++ at the first step: 3 to 17 s.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def prepare_environment() -> None:
    """Set the variables of `vllm_environment` in this process, before anything imports vllm.

    A VLLM_LOGGING_LEVEL that is already set is left alone; otherwise vLLM logs warnings and errors only.
    Raises RuntimeError if vllm is imported already, because it would not see them.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("prepare_environment must run before the first import of vllm in this process")
    import torch

    os.environ.update(vllm_environment(torch.cuda.is_available()))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def engine_config(config: Config) -> Any:
    """Make the `VllmConfig` of one engine. Imports vllm.

    Raises ConfigError for a precision or a parallel size that an engine cannot have, ModelError for a model directory
    that is not complete or that vLLM does not accept.
    """
    from vllm import EngineArgs

    path = config.actor.model_name_or_path
    check_model_directory("actor.model_name_or_path", path, tokenizer=True)
    check_tensor_parallel("actor.model_name_or_path", path, config.vllm.tensor_parallel_size)
    on_cpu = platform().is_cpu()
    if config.train.colocate_all and not can_sleep():
        raise ConfigError(
            f"train.colocate_all needs vLLM's sleep mode, which it does not have on {platform().device_name}: "
            "give the engines accelerators of their own"
        )
    for architecture in read_config("actor.model_name_or_path", Path(path)).get("architectures") or []:
        import_model_class(architecture)
    args = EngineArgs(
        model=path,
        dtype=_dtype(config),
        # vLLM's own switch for training by reinforcement: `ModelConfig.head_dtype`.
        hf_overrides={"head_dtype": "float32"} if config.ds.fp32_lm_head else {},
        seed=config.train.seed,
        max_model_len=config.data.max_len,
        max_num_seqs=config.vllm.max_num_seqs,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        # Its ranks are started by torchrun. A rank alone ignores torchrun's environment.
        distributed_executor_backend="external_launcher" if config.vllm.tensor_parallel_size > 1 else None,
        distributed_timeout_seconds=math.ceil(config.timeout.collective),
        cpu_distributed_timeout_seconds=math.ceil(config.timeout.collective),
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        kv_cache_memory_bytes=int(config.vllm.cpu_kvcache_gib * GIB) if on_cpu else None,
        enable_prefix_caching=config.vllm.enable_prefix_caching,
        enforce_eager=on_cpu or config.vllm.enforce_eager,
        # On CPUs vLLM refuses the option and takes the calls.
        enable_sleep_mode=config.train.colocate_all and not on_cpu,
        async_scheduling=asynchronous(config, on_cpu),
        scheduling_policy="fcfs",
        # vLLM sets a seeded request's generator back after a part of a prompt; torch's for CPUs cannot do that.
        enable_chunked_prefill=False if on_cpu else None,
        # Of the distribution that was sampled from: after temperature, top-k and top-p.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    try:
        made = vllm_config(args)
    except refusals() as error:
        raise ModelError(f"vLLM does not accept the model in {path}: {error}") from error
    if on_cpu:
        # The cache is zeroed, page by page, while the engine starts: 2.5 s per GiB that a small model never uses.
        cache = made.cache_config
        cache.kv_cache_memory_bytes = min(cache.kv_cache_memory_bytes, useful_kv_bytes(made))
    return made


def asynchronous(config: Config, on_cpu: bool) -> bool | None:
    """Return vLLM's async_scheduling: schedule the next batch while the device computes this one. None: if it can.

    On a GPU the 3 to 5 ms of Python of a step then overlap its 9 ms of computing. Not with vllm.sync_mode =
    inflight, where the weights change between two steps under requests in flight, and no batch may have both.
    On CPUs vLLM has no use for it.
    """
    return False if on_cpu or config.vllm.sync_mode == "inflight" else None


def _dtype(config: Config) -> str:
    wanted = config.ds.param_dtype if config.vllm.dtype == "auto" else config.vllm.dtype
    if wanted not in DTYPES:
        raise ConfigError(f"vllm.dtype is {config.vllm.dtype!r}; valid: auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]
