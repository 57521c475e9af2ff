"""The private parts of vLLM that this package uses, written for vllm 0.32.0.

exceptions.py VLLMError
sampling_params.py RepetitionDetectionParams
sampling_params.py SamplingParams.repetition_detection
platforms/__init__.py current_platform
platforms/interface.py Platform.is_sleep_mode_available(self)
platforms/interface.py Platform.dist_backend
usage/usage_lib.py UsageContext.LLM_CLASS
engine/arg_utils.py EngineArgs.create_engine_config(self, usage_context)
model_executor/models/registry.py _LazyRegisteredModel.load_model_cls(self)
model_executor/models/bloom.py get_act_fn
config/model.py ModelConfig.get_num_kv_heads(self, parallel_config)
config/model.py ModelConfig.get_head_size(self)
config/model.py ModelConfig.get_num_layers(self, parallel_config)
config/compilation.py CompilationConfig.static_forward_context
v1/attention/backends/flash_attn.py FlashAttentionImpl.alibi_slopes
inputs/engine.py tokens_input(prompt_token_ids, *, cache_salt)
v1/engine/__init__.py EngineCoreRequest.external_req_id
v1/engine/__init__.py EngineCoreOutput.request_id
v1/engine/__init__.py EngineCoreOutput.new_token_ids
v1/engine/__init__.py EngineCoreOutput.new_logprobs
v1/engine/__init__.py EngineCoreOutput.finish_reason
v1/engine/__init__.py EngineCoreOutput.prefill_stats
v1/metrics/stats.py PrefillStats.num_prompt_tokens
v1/metrics/stats.py PrefillStats.num_cached_tokens
v1/engine/llm_engine.py LLMEngine.__init__(self, vllm_config, executor_class, log_stats)
v1/engine/llm_engine.py LLMEngine.engine_core
v1/engine/llm_engine.py LLMEngine.model_executor
v1/engine/llm_engine.py LLMEngine.input_processor
v1/engine/llm_engine.py LLMEngine.get_supported_tasks(self)
v1/engine/input_processor.py InputProcessor.process_inputs(self, request_id, prompt, params, supported_tasks, *, lora_request)
v1/engine/detokenizer.py IncrementalDetokenizer.from_new_request(cls, tokenizer, request)
v1/engine/core_client.py InprocClient.get_output(self)
v1/engine/core_client.py InprocClient.add_request(self, request)
v1/engine/core_client.py InprocClient.abort_requests(self, request_ids)
v1/engine/core_client.py InprocClient.reset_prefix_cache(self, reset_running_requests)
v1/engine/core_client.py InprocClient.shutdown(self)
v1/engine/core.py EngineCore.batch_queue
v1/engine/core.py EngineCore.scheduler
v1/core/sched/interface.py PauseState.PAUSED_ALL
v1/core/sched/interface.py SchedulerInterface.pause_state
v1/core/sched/interface.py SchedulerInterface.set_pause_state(self, pause_state)
v1/core/sched/interface.py SchedulerInterface.get_request_counts(self)
v1/core/sched/scheduler.py Scheduler.kv_cache_manager
v1/core/sched/output.py SchedulerOutput.num_scheduled_tokens
v1/core/kv_cache_manager.py KVCacheManager.usage
v1/executor/abstract.py Executor.get_class(vllm_config)
v1/executor/uniproc_executor.py UniProcExecutor.driver_worker
v1/executor/uniproc_executor.py UniProcExecutor.execute_model(self, scheduler_output, non_block)
v1/executor/uniproc_executor.py ExecutorWithExternalLauncher._init_executor(self)
v1/executor/uniproc_executor.py ExecutorWithExternalLauncher._distributed_args(self)
v1/worker/gpu_worker.py Worker.model_runner
v1/worker/gpu_model_runner.py GPUModelRunner.get_model(self)
distributed/parallel_state.py get_tp_group()
distributed/parallel_state.py GroupCoordinator.mq_broadcaster
distributed/device_communicators/shm_broadcast.py MessageQueue.buffer
distributed/device_communicators/shm_broadcast.py ShmRingBuffer.is_creator
distributed/device_communicators/shm_broadcast.py ShmRingBuffer.shared_memory
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import Sampling


def import_vllm() -> None:
    """Import what an engine starts with, after `prepare_environment`. No GPU is touched."""
    import vllm._custom_ops  # loads its kernels
    import vllm.v1.engine.llm_engine

    if platform().is_cuda():
        with suppress(ImportError):  # not built for this GPU: vLLM takes another kernel and logs it
            import vllm.vllm_flash_attn  # noqa: F401


def platform() -> Any:
    """Return vLLM's platform: what it knows of this machine's devices."""
    from vllm.platforms import current_platform

    return current_platform


def can_sleep() -> bool:
    """Return whether engines on this machine accept `sleep`; on a CPU they accept it, but keep their memory."""
    return bool(platform().is_cpu() or platform().is_sleep_mode_available())


def process_group_backend() -> str:
    """Return the backend of torch's process groups on this platform."""
    return str(platform().dist_backend)


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors with which vLLM refuses a model, a configuration or a request."""
    from vllm.exceptions import VLLMError

    return (ValueError, OSError, VLLMError)


# --- configuration ---------------------------------------------------------------------------------------------------


def vllm_config(arguments: Any) -> Any:
    """Make the `VllmConfig` of some `EngineArgs`. Raises one of `refusals`."""
    from vllm.usage.usage_lib import UsageContext

    # The context picks vLLM's throughput-minded batch size, the one of its offline `LLM` class.
    return arguments.create_engine_config(UsageContext.LLM_CLASS)


def useful_kv_bytes(config: Any) -> int:
    """Return the size of the KV cache that `max_num_seqs` sequences of full length fill."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    blocks_per_sequence = -(-model.max_model_len // cache.block_size)
    # Keys and values; one block more, because vLLM keeps block 0 for itself.
    block = cache.block_size * 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    blocks = config.scheduler_config.max_num_seqs * blocks_per_sequence + 1
    return int(blocks * block * model.get_num_layers(parallel))


def import_model_class(architecture: str) -> None:
    """Register the class of `architecture` (as config.json names it) as one that is imported, and mend it.

    vLLM otherwise imports it in a child process first, to learn its capabilities without touching CUDA: 10 s the first
    time on a machine. This process is going to run the model and touches CUDA anyway.
    """
    from vllm import ModelRegistry

    entry = ModelRegistry.models.get(architecture)
    if entry is not None:
        ModelRegistry.register_model(architecture, entry.load_model_cls())
    if architecture == "BloomForCausalLM":
        _mend_bloom()


def _mend_bloom() -> None:
    """Give BLOOM the tanh form of GELU, as in transformers; vLLM's exact one is off by 5e-4 in log-probs."""
    from vllm.model_executor.models import bloom

    get_act_fn = bloom.get_act_fn
    bloom.get_act_fn = lambda name, **kwargs: get_act_fn("gelu_pytorch_tanh" if name == "gelu" else name, **kwargs)


# --- engine ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SampledTokens:
    """Holds what one batch has sampled for one request."""

    name: str
    tokens: list[int]
    logprobs: list[float] | None  # None: no token was sampled
    finish_reason: str  # "stop", "length", "repetition", ...; empty: it goes on
    prompt: int = 0  # tokens of the prompt, counted with its first sampled token; 0 with later ones
    cached: int = 0  # prompt tokens whose keys and values were in the prefix cache


StopWatcher = Callable[[SampledTokens], bool]
"""Takes the next tokens of a request; returns whether a stop string has appeared."""


def _stop_watcher(tokenizer: Any, core_request: Any) -> StopWatcher:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    found = IncrementalDetokenizer.from_new_request(tokenizer, core_request)
    return lambda sampled: bool(found.update(sampled.tokens, sampled.finish_reason == "stop"))


class EngineCore:
    """vLLM's engine in this process, below `LLMEngine.step`.

    The bookkeeping of text and log-probs in that method costs a third of a small model's step.
    """

    def __init__(self, config: Any, executor: Any = None) -> None:
        """Start the engine; `executor`: another class than vLLM's choice. Raises one of `refusals`."""
        from transformers import PreTrainedTokenizerFast
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor.abstract import Executor

        self.config = config
        self.llm = LLMEngine(config, executor or Executor.get_class(config), log_stats=False)
        # vLLM loads tokenizers with transformers, which takes the byte-level ones of some models for SentencePiece.
        self.tokenizer = Tokenizer.load(config.model_config.tokenizer)
        self._stop_tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer.backend)
        self.client = self.llm.engine_core
        self._core = self.client.engine_core
        self._tasks = self.llm.get_supported_tasks()

    def add(
        self,
        name: str,
        key: str,
        prompt_ids: list[int],
        sampling: Sampling,
        seed: int,
        adapter: Any = None,
        salt: str | None = None,
    ) -> StopWatcher | None:
        """Queue a request; return its stop watcher if it has stop strings. Raises one of `refusals`.

        The request reuses cached keys and values of requests with the same `adapter` and `salt` only.
        """
        from vllm.inputs import tokens_input

        params = _sampling_params(sampling, seed)
        request = self.llm.input_processor.process_inputs(
            name, tokens_input(prompt_ids, cache_salt=salt), params, self._tasks, lora_request=adapter
        )
        request.external_req_id = key
        watcher = _stop_watcher(self._stop_tokenizer, request) if sampling.stop else None
        self.client.add_request(request)
        return watcher

    def run_batch(self) -> list[SampledTokens]:
        """Run one batch, or wait for the oldest one in flight; return what it has sampled."""
        return [
            SampledTokens(
                output.request_id,
                output.new_token_ids,
                output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs is not None else None,
                str(output.finish_reason) if output.finish_reason is not None else "",
                *((stats.num_prompt_tokens, stats.num_cached_tokens) if (stats := output.prefill_stats) else ()),
            )
            for output in self.client.get_output().outputs
        ]

    def finish_batches(self, read: Callable[[list[SampledTokens]], object]) -> None:
        """Wait for the batches in flight and pass the tokens of each to `read`; start no new batch."""
        from vllm.v1.core.sched.interface import PauseState

        if not self._core.batch_queue:
            return
        scheduler = self._core.scheduler
        before = scheduler.pause_state
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            # A call may run an empty batch first, which tells the model runner the requests that have ended.
            while self._core.batch_queue:
                read(self.run_batch())
        finally:
            scheduler.set_pause_state(before)

    def abort(self, names: list[str]) -> None:
        """Abort requests; the scheduler ignores what a batch in flight still samples for them."""
        self.client.abort_requests(names)

    def abort_all(self, names: list[str]) -> None:
        """End all requests and the batches in flight, after a failure too; raises nothing."""
        with suppress(Exception):
            self.abort(names)
        while self._core.batch_queue:
            # After a failed step the batches queued after it fail, too; each attempt takes one out of the queue.
            with suppress(Exception):
                self.finish_batches(len)

    def before_each_batch(self, call: Callable[[dict[str, int]], None]) -> None:
        """Call `call` with the number of scheduled tokens of each request before each batch of a `tp_executor`."""
        self.llm.model_executor.before_batch = call

    def drop_caches(self) -> None:
        """Drop all keys and values, of finished prompts and of requests in flight, which compute theirs anew."""
        self.client.reset_prefix_cache(reset_running_requests=True)

    def model(self) -> Any:
        """Return the module with the weights."""
        return self.llm.model_executor.driver_worker.model_runner.get_model()

    def load(self) -> tuple[int, float]:
        """Return (requests that wait for a place in the batch, share of the KV cache that is taken)."""
        _, waiting = self._core.scheduler.get_request_counts()
        return waiting, self._core.scheduler.kv_cache_manager.usage

    def attention(self) -> str:
        """Return vLLM's names of the attention backends that its layers have."""
        layers = self.config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
        return ", ".join(sorted(backends))

    def has_slopes(self) -> bool:
        """Return whether attention has ALiBi's slopes: neither parameters nor buffers, they sleep with the weights."""
        layers = self.config.compilation_config.static_forward_context.values()
        return any(getattr(getattr(layer, "impl", None), "alibi_slopes", None) is not None for layer in layers)

    def close(self) -> None:
        """Free the device and the process groups."""
        self.client.shutdown()


def _sampling_params(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams

    repetition = None
    if sampling.max_pattern_size:
        repetition = RepetitionDetectionParams(sampling.max_pattern_size, sampling.min_pattern_size, sampling.min_count)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        seed=seed,
        logprobs=0,  # the sampled token's only
        detokenize=bool(sampling.stop),
        repetition_detection=repetition,
        skip_clone=True,  # made for this request alone
    )


def tp_executor(identity: str, started: Callable[[], object]) -> Any:
    """Return vLLM's executor class for TP ranks that another program started, for several engines on a node.

    `identity` names the engine's shared memory. vLLM names it after the TP ranks alone: two engines that start on one
    node then share it, and what a killed engine left keeps all later ones from starting. `started` is called once every
    rank has opened the shared memory. `before_batch`, once it is set, gets the number of scheduled tokens of each
    request before the model runs on them.
    """
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class TpExecutor(ExecutorWithExternalLauncher):
        before_batch: Callable[[dict[str, int]], None] | None = None

        def _init_executor(self) -> None:
            super()._init_executor()
            # All have opened their queue, psm_*: a creator that is killed would leave its name behind.
            if (queue := get_tp_group().mq_broadcaster) is not None and queue.buffer.is_creator:
                queue.buffer.shared_memory.unlink()
                queue.buffer.is_creator = False
            started()

        def _distributed_args(self) -> tuple[str, int, int]:
            _, rank, local_rank = super()._distributed_args()
            return f"env://:{identity}", rank, local_rank

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            if self.before_batch is not None:
                self.before_batch(scheduler_output.num_scheduled_tokens)
            return super().execute_model(scheduler_output, non_block)

    return TpExecutor
