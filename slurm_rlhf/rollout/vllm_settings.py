"""From the run's configuration to vLLM's: engine arguments, size of the KV cache, model class."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from slurm_rlhf.config.model_directory import check_model_directory, check_tensor_parallel
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError, ModelError
from slurm_rlhf.rollout.vllm_repairs import repair

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
GIB = 1 << 30


def engine_config(config: Config) -> Any:
    """The `VllmConfig` of one engine. Imports vllm.

    Raises ConfigError for a precision or a parallel size that an engine cannot have, ModelError for a model directory
    that is not complete or that vLLM does not accept.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMError
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    path = config.actor.model_name_or_path
    check_model_directory("actor.model_name_or_path", path, tokenizer=True)
    check_tensor_parallel("actor.model_name_or_path", path, config.vllm.tensor_parallel_size)
    on_cpu = current_platform.is_cpu()
    if config.train.colocate_all and not (on_cpu or current_platform.is_sleep_mode_available()):
        raise ConfigError(
            f"train.colocate_all needs vLLM's sleep mode, which it does not have on {current_platform.device_name}: "
            "give the engines accelerators of their own"
        )
    import_model_class(path)
    args = EngineArgs(
        model=path,
        dtype=_dtype(config),
        seed=config.train.seed,
        max_model_len=config.data.max_len,
        max_num_seqs=config.vllm.max_num_seqs,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        # Its ranks are started by torchrun. Alone, a rank takes no notice of torchrun's environment.
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
        # vLLM winds a seeded request's generator back after a part of a prompt; torch's generators for CPUs cannot.
        enable_chunked_prefill=False if on_cpu else None,
        # Of the distribution that was sampled from: after temperature, top-k and top-p.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    try:
        # The context picks vLLM's throughput-minded batch size, the one of its offline `LLM` class.
        vllm_config = args.create_engine_config(UsageContext.LLM_CLASS)
    except (ValueError, OSError, VLLMError) as error:
        raise ModelError(f"vLLM does not accept the model in {path}: {error}") from error
    if on_cpu:
        cache = vllm_config.cache_config
        cache.kv_cache_memory_bytes = min(cache.kv_cache_memory_bytes, _useful_kv_bytes(vllm_config))
    return vllm_config


def import_model_class(path: str) -> None:
    """Register the model's class in vLLM as one that is already imported.

    vLLM otherwise imports it in a child process first, to learn its capabilities without touching CUDA: 10 s the first
    time on a machine. This process runs the model itself, so there is nothing to keep it from.
    """
    from vllm import ModelRegistry

    architectures = json.loads((Path(path) / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    for name in architectures:
        entry = ModelRegistry.models.get(name)
        if entry is not None:
            ModelRegistry.register_model(name, entry.load_model_cls())
        repair(name)


def asynchronous(config: Config, on_cpu: bool) -> bool | None:
    """vLLM's async_scheduling: schedule the next batch while the device computes this one. None: where vLLM can.

    On a GPU the 3 to 5 ms of Python of a step then pass beside its 9 ms of computing. Not with vllm.sync_mode =
    inflight, where the weights change between two steps under requests in flight, and that is to be a point in time.
    On CPUs vLLM has no use for it.
    """
    return False if on_cpu or config.vllm.sync_mode == "inflight" else None


def _dtype(config: Config) -> str:
    wanted = config.ds.param_dtype if config.vllm.dtype == "auto" else config.vllm.dtype
    if wanted not in DTYPES:
        raise ConfigError(f"vllm.dtype is {config.vllm.dtype!r}; valid: auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]


def _useful_kv_bytes(vllm_config: Any) -> int:
    """The KV cache that `max_num_seqs` sequences of full length fill.

    On a CPU the cache is zeroed, page by page, while the engine starts: 2.5 s per GiB that a small model never uses.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    blocks_per_sequence = -(-model.max_model_len // cache.block_size)
    # Keys and values; one block more, because vLLM keeps block 0 for itself.
    block = cache.block_size * 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    blocks = vllm_config.scheduler_config.max_num_seqs * blocks_per_sequence + 1
    return int(blocks * block * model.get_num_layers(parallel))
