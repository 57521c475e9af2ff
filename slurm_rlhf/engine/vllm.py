"""vLLM's V1 engine in this process, stepped by its owner; its environment and arguments."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_rlhf.algorithms.lora import adapter_shapes, target_layers
from slurm_rlhf.config.model_directory import check_model_directory, check_tensor_parallel, read_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.engine import _vllm
from slurm_rlhf.engine._transformers import as_saved, parameter_shapes, skeleton
from slurm_rlhf.engine._vllm_updates import Adapters, adapter_rank, reload_weights
from slurm_rlhf.engine.engine import ActiveRequest, Engine, GenerateRequest, Readiness, Status, checked
from slurm_rlhf.errors import ConfigError, ModelError, RunError, SyncError, shortened
from slurm_rlhf.placement.rank_memory import policies_at_once
from slurm_rlhf.records import LENGTH, REPETITION, STOP, WEIGHTS, MemoryPart, ParameterSpec, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

KEEP, DISCARD = 1, 2
"""vLLM's sleep levels: 1 keeps the weights in host memory, because an update brings adapters only, or no ALiBi slopes;
2 drops them, because an update brings all weights."""


class DeviceMemory(Readiness):
    """Frees and allocates the memory of one vLLM engine. On CPUs vLLM takes the same calls and keeps its memory."""

    def __init__(self, llm: Any, share: float, number: int = 0, level: int = DISCARD) -> None:
        """Watch `llm`, of engine `number` with enable_sleep_mode; `share`: its gpu_memory_utilization."""
        super().__init__(number)
        self._llm = llm
        self._share = share
        self._level = level

    def release(self) -> int:
        """See `Engine.sleep`."""
        before = _free_bytes()
        self.slept()
        self._llm.sleep(level=self._level)
        return max(0, _free_bytes() - before)

    def allocate(self, part: MemoryPart) -> None:
        """See `Engine.wake`."""
        self.wakes(part)
        try:
            self._llm.wake_up(tags=[part])
        except Exception as error:
            raise RunError(
                f"the engine cannot allocate its {part} again: {error}. With train.colocate_all it needs "
                f"vllm.gpu_memory_utilization = {self._share:g} of the GPU, next to all that other roles keep there: "
                f"lower it, or set ds.enable_sleep = true or a higher ds.zero_stage"
            ) from error
        self.missing.discard(part)


def _free_bytes() -> int:
    """Return the free bytes of the current GPU; 0 without one."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def vllm_environment(has_gpu: bool) -> dict[str, str]:
    """Return the environment variables that vLLM reads while it is imported; the worker sets them, not the user."""
    variables = {
        # The engine is in the worker's process, where the worker owns the step loop and can change weights.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # On Hopper TP ranks would compile FlashInfer's all-reduce at their first one, or die there without nvcc.
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }
    if not has_gpu:
        # Otherwise every rank binds its threads to the first cores of the node, where they starve each other.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # One small function, the rank of the sampled token, is compiled with g++ at the first step: 3 to 17 s.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def prepare_environment() -> None:
    """Set the variables of `vllm_environment` in this process; see `engine.backend`.

    A VLLM_LOGGING_LEVEL that is already set is left alone; otherwise vLLM logs warnings and errors only.
    """
    import torch

    variables = vllm_environment(torch.cuda.is_available())
    if "vllm" in sys.modules and not variables.items() <= os.environ.items():
        raise RuntimeError("prepare_environment must run before the first import of vllm in this process")
    os.environ.update(variables)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def engine_config(config: Config) -> Any:
    """Make the `VllmConfig` of one engine. Imports vllm.

    Raises ConfigError for a parallel size that an engine cannot have, ModelError for a model directory
    that is not complete or that vLLM does not accept.
    """
    from vllm import EngineArgs

    path = config.actor.model_name_or_path
    check_model_directory("actor.model_name_or_path", path, tokenizer=True)
    check_tensor_parallel("actor.model_name_or_path", path, config.vllm.tensor_parallel_size)
    on_cpu = _vllm.platform().is_cpu()
    if config.train.colocate_all and not _vllm.can_sleep():
        raise ConfigError(
            f"train.colocate_all needs vLLM's sleep mode, which it does not have on {_vllm.platform().device_name}: "
            "give the engines accelerators of their own"
        )
    for architecture in read_config("actor.model_name_or_path", Path(path)).get("architectures") or []:
        _vllm.import_model_class(architecture)
    dtype = DTYPES[config.ds.param_dtype if config.vllm.dtype == "auto" else config.vllm.dtype]
    if dtype == "float32":
        if config.lora.rank and not on_cpu:
            raise ConfigError("lora.rank needs ds.param_dtype = bf16 or fp16: vLLM's adapters on GPUs know no fp32")
        # Triton's attention would multiply in TF32, which has the 10 bits of fp16: 3e-3 nats from the actor (H200).
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    args = EngineArgs(
        model=path,
        dtype=dtype,
        # vLLM's own switch for reinforcement learning: `ModelConfig.head_dtype`.
        hf_overrides={"head_dtype": "float32"} if config.ds.fp32_lm_head else {},
        seed=config.train.seed,
        max_model_len=config.data.max_len,
        max_num_seqs=config.vllm.max_num_seqs,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        # torchrun starts the ranks of an engine. An engine of one rank ignores torchrun's variables.
        distributed_executor_backend="external_launcher" if config.vllm.tensor_parallel_size > 1 else None,
        distributed_timeout_seconds=math.ceil(config.timeout.collective),
        cpu_distributed_timeout_seconds=math.ceil(config.timeout.collective),
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        kv_cache_memory_bytes=int(config.vllm.cpu_kvcache_gib * (1 << 30)) if on_cpu else None,
        enable_prefix_caching=config.vllm.enable_prefix_caching,
        enforce_eager=on_cpu or config.vllm.enforce_eager,
        # An adapter for each policy version that responses in flight may have.
        enable_lora=config.lora.rank > 0,
        max_lora_rank=adapter_rank(config.lora.rank),
        max_loras=policies_at_once(config),
        # On CPUs vLLM refuses this option, but accepts `sleep` and `wake_up`.
        enable_sleep_mode=config.train.colocate_all and not on_cpu,
        # The next batch is scheduled while the device computes this one: on a GPU the 3 to 5 ms of Python of a step
        # overlap its 9 ms of computing. None: vLLM's own rules decide. On CPUs it gains nothing.
        async_scheduling=False if on_cpu else None,
        scheduling_policy="fcfs",
        # After a chunk of a prompt vLLM resets the request's seeded generator; torch's CPU generators have no offset.
        enable_chunked_prefill=False if on_cpu else None,
        # FlashInfer's all-reduce again (see `vllm_environment`), here as part of compiled layers.
        compilation_config={"pass_config": {"fuse_allreduce_rms": False}},
        # Log-probs of the distribution that was sampled from: after temperature, top-k and top-p.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    try:
        made = _vllm.vllm_config(args)
    except _vllm.refusals() as error:
        raise ModelError(f"vLLM does not accept the model in {path}: {error}") from error
    if on_cpu:
        # The cache is zeroed, page by page, while the engine starts: 2.5 s per GiB that a small model never uses.
        cache = made.cache_config
        cache.kv_cache_memory_bytes = min(cache.kv_cache_memory_bytes, _vllm.useful_kv_bytes(made))
    return made


import_library = _vllm.import_vllm

# --- engine ---------------------------------------------------------------------------------------------------------


class VllmEngine(Engine):
    """Implements `Engine` on vLLM's engine; `prepare_environment` comes first.

    `response_ids` are the tokens as sampled. The end-of-sequence token is among them if it was sampled, and so are the
    tokens of a stop string, the last of them whole even where the stop string ends inside it: the policy is trained on
    what it chose. `text` ends with the stop string, so that a reward function sees it, and has nothing after it.

    Requests in flight when the weights change keep their tokens; their KV cache is computed anew under the new
    weights, so that every log-prob is that of its version given the whole text before it. With lora.rank an update is
    an adapter, and requests in flight end under the one with which they began; with vllm.keep_kv_cache they go on from
    the keys and values that they have.

    With vLLM's asynchronous scheduling a batch is on its way to the device while the one before it is read. So between
    two steps there is a batch in flight. `finish_batches` waits for it before the weights change, before the engine
    sleeps, and as soon as the engine has no requests. What was sampled in it is of the old policy and is returned by
    the next step.

    Each engine has a default process group of its own: of one rank, which vLLM makes, or of its TP ranks, which
    `tp_engine` makes. torchrun's RANK and WORLD_SIZE have no effect, and engines start, fail and restart alone.
    """

    _executor: Any = None
    """Class of executor; None: vLLM's choice."""

    def __init__(self, config: Config, number: int = 0) -> None:
        """See `engine.backend`."""
        self._version = 0
        self._number = number
        self._path = config.actor.model_name_or_path
        self._config = engine_config(config)
        # Before the engine starts: if vLLM runs this model's transformers class, later only an engine can make it.
        self._skeleton = skeleton(self._path)
        lora = config.lora
        layers = target_layers(self._skeleton, lora.target_modules) if lora.rank else {}
        self._shapes = adapter_shapes(layers, lora.rank) or parameter_shapes(self._skeleton)
        # The engine collects garbage five times while it starts; the imports left none, and looking takes 0.3 s a time.
        gc.freeze()
        try:
            self._core = _vllm.EngineCore(self._config, self._executor)
        except _vllm.refusals() as error:
            raise ModelError(f"vLLM cannot start on the model in {self._path}: {error}") from error
        self._adapters: Adapters | None = None
        if lora.rank:
            self._adapters = Adapters(self._core.llm, lora.rank, lora.alpha, lora.target_modules)
            if lost := self._adapters.unsupported(layers):
                raise ModelError(
                    f"{self._path}: vLLM has no adapters for {shortened(lost)}: leave them out of lora.target_modules"
                )
        self._active: dict[str, ActiveRequest] = {}  # vLLM's request id -> request
        self._stops: dict[str, _vllm.StopWatcher] = {}  # likewise, where a request has stop strings
        self._keys: set[str] = set()  # keys of the active requests
        self._added = 0
        self._loads = 0
        self._keeps_cache = config.vllm.keep_kv_cache or lora.rank > 0
        self._finished: list[Trajectory] = []  # responses that a flush has finished, not returned yet
        share, kept = config.vllm.gpu_memory_utilization, lora.rank or self._core.has_slopes()
        self._ready = DeviceMemory(self._core.llm, share, number, KEEP if kept else DISCARD)
        self._tokens_sampled = self._prompt_tokens = self._cached_tokens = 0
        self._attention = self._core.attention()
        if self._config.scheduler_config.async_scheduling:
            self.note = "engines schedule each batch while the one before it is computed (asynchronous scheduling)"

    @property
    def status(self) -> Status:
        waiting, kv_usage = self._core.load()
        unfinished = len(self._active) + len(self._finished)
        prompts = self._prompt_tokens, self._cached_tokens
        return Status(self._version, unfinished, self._tokens_sampled, waiting, kv_usage, self._attention, *prompts)

    def add(self, request: GenerateRequest) -> None:
        if request.key in self._keys:
            raise RunError(f"engine {self._number}: request key {request.key!r} is in use")
        prompt_ids = [int(token) for token in request.prompt_ids]
        # A name is never used twice: a batch in flight may still have a request that has ended, and its tokens would
        # go to the next request of that name. The number is the same on all TP ranks: it counts no request that vLLM
        # refuses, because the leader does not pass these on.
        name = f"{request.key}#{self._added}"
        adapter = self._adapters.current if self._adapters else None
        used = adapter.request if adapter else None
        # Marks keys and values of requests that begin now, where those of an older policy may still be cached.
        salt = str(self._loads) if self._keeps_cache else None
        try:
            stops = self._core.add(name, request.key, prompt_ids, request.sampling, request.seed, used, salt)
        except _vllm.refusals() as error:
            raise RunError(
                f"engine {self._number} refuses request {request.key!r} (prompt {request.prompt}, {len(prompt_ids)} "
                f"tokens): {error}"
            ) from error
        self._added += 1
        self._active[name] = ActiveRequest(request, adapter=adapter)
        if stops is not None:
            self._stops[name] = stops
        self._keys.add(request.key)

    def step(self) -> list[Trajectory]:
        try:
            self._ready.check()
            return self._step()
        except Exception:
            self.drop()
            raise

    def drop(self) -> None:
        names = list(self._active)
        # First, so that the keys are free even if vLLM is too broken to abort anything.
        self._active.clear()
        self._stops.clear()
        self._keys.clear()
        self._finished.clear()
        self._core.abort_all(names)

    def _step(self) -> list[Trajectory]:
        if self._active:
            self._read(self._core.run_batch())
        if not self._active:
            self._core.finish_batches(self._read)
        finished, self._finished = self._finished, []
        return finished

    def _read(self, batch: list[_vllm.SampledTokens]) -> None:
        """Add what one batch has sampled to the requests, and finish those that have ended."""
        cut = []
        for sampled in batch:
            active = self._active.get(sampled.name)
            if active is None:  # it was dropped
                continue
            reason = sampled.finish_reason
            self._tokens_sampled += len(sampled.tokens)
            self._prompt_tokens += sampled.prompt
            self._cached_tokens += sampled.cached
            self._sampled(active.request.key, sampled.tokens)
            if sampled.logprobs is not None:
                version = active.adapter.version if active.adapter else self._version
                active.extend(sampled.tokens, sampled.logprobs, version)
            stops = self._stops.get(sampled.name)
            if stops is not None and stops(sampled):
                if not reason:
                    cut.append(sampled.name)
                reason = STOP
            if reason:
                del self._active[sampled.name]
                self._stops.pop(sampled.name, None)
                self._keys.discard(active.request.key)
                if reason not in (STOP, LENGTH, REPETITION):
                    key = active.request.key
                    raise RunError(f"engine {self._number}: vLLM ended request {key!r} with {reason!r}")
                self._finished.append(active.finish(reason, self._core.tokenizer, self._number))
        self._core.abort(cut)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._ready.require(WEIGHTS)
        self._core.finish_batches(self._read)
        self._ready.updates(version)
        complete = checked(weights, self._shapes, version)
        if self._adapters:
            self._adapters.load(version, dict(complete), {active.adapter for active in self._active.values()})
        else:
            model = self._core.model()
            check_loaded(model, reload_weights(model, self._config, as_saved(self._skeleton, complete)))
        self._loads += 1
        if not (self._keeps_cache and self._active):
            self._core.drop_caches()  # keys and values of the old policy are no use any more
        self._version = version
        self._ready.unusable = ""

    def describe(self) -> list[ParameterSpec]:
        dtype = str(self._config.model_config.dtype).removeprefix("torch.")
        return [ParameterSpec(name, list(shape), dtype) for name, shape in self._shapes.items()]

    def sleep(self) -> int:
        VllmEngine.drop(self)  # not the leader's `drop`, which calls the other ranks: they sleep, too
        return self._ready.release()

    def wake(self, part: MemoryPart) -> None:
        self._ready.allocate(part)

    def close(self) -> None:
        self._active.clear()
        self._core.close()

    def _sampled(self, key: str, tokens: list[int]) -> None:
        """Note the next tokens of a request."""


make_engine = VllmEngine


def check_loaded(model: Any, loaded: set[str] | None) -> None:
    """Raise SyncError unless every parameter of vLLM's `model` is in `loaded`, the names that its loader reports.

    Its loaders ignore names that they do not know. Tied parameters have one name. None: the loader reports nothing.
    """
    missing = [name for name, _ in model.named_parameters() if name not in loaded] if loaded is not None else []
    if missing:
        raise SyncError(
            f"vLLM's {type(model).__name__} was sent all parameters of the policy and has not loaded {len(missing)} "
            f"of its own, which keep their old values: {shortened(missing)}. This architecture cannot be trained yet."
        )
