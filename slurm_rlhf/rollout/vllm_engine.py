"""vLLM's V1 engine in this process, stepped by its owner. `environment.prepare_environment` comes first."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError, RunError
from slurm_rlhf.records import KV_CACHE, WEIGHTS, Sampling, Trajectory
from slurm_rlhf.rollout.active_request import Flight
from slurm_rlhf.rollout.engine import Gauges
from slurm_rlhf.rollout.parameters import checked, parameter_shapes
from slurm_rlhf.rollout.request import GenerateRequest
from slurm_rlhf.rollout.saved_names import as_saved, skeleton
from slurm_rlhf.rollout.sleep import DeviceMemory
from slurm_rlhf.rollout.text import response_text
from slurm_rlhf.rollout.vllm_reload import reload_weights
from slurm_rlhf.rollout.vllm_settings import engine_config


class VllmEngine:
    """Implements `engine.Engine` and `sleep.Sleeper` on vLLM's `LLMEngine`.

    `response_ids` are the tokens as sampled. The end-of-sequence token is among them if it was sampled, and so are the
    tokens of a stop string, the last of them whole even where the stop string ends inside it: what the policy chose is
    what it is trained on. `text` ends with the stop string, so that a reward function sees it, and not behind it.

    Requests in flight when the weights change keep their tokens; their KV cache is computed anew under the new
    weights, so that every log-prob is that of its version given the whole text before it.

    With vLLM's asynchronous scheduling (`vllm_settings.asynchronous`) a batch is on its way to the device while the one
    before it is read. "Between two steps" then holds a batch in flight, which `_flush` brings home: before the weights
    change, before the engine sleeps, and as soon as it has no requests. What was sampled in it is of the old policy and
    is handed out by the next step.

    The engine has a default process group of its own: here of one rank, made through a file of its own, in
    `tp_engine` of its TP ranks. torchrun's RANK and WORLD_SIZE play no part, and engines start, fail and restart alone.
    """

    def __init__(self, config: Config, engine: int = 0, version: int = 0) -> None:
        """Load the actor's model directory as policy `version`; `engine` is what trajectories are marked with.

        Raises ConfigError or ModelError when vLLM cannot run this model with this configuration.
        """
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError("call slurm_rlhf.rollout.environment.prepare_environment before making an engine")
        from vllm.exceptions import VLLMError
        from vllm.v1.engine.llm_engine import LLMEngine

        self.version = version
        self._index = engine
        self._path = config.actor.model_name_or_path
        self._config = engine_config(config)
        # Before the engine: where vLLM runs the classes of transformers, they can be made within an engine only.
        self._skeleton = skeleton(self._path)
        self._shapes = parameter_shapes(self._skeleton)
        # The engine collects garbage five times while it starts; what the imports left is none and takes 0.3 s each.
        gc.freeze()
        try:
            self._llm = LLMEngine(self._config, self._executor_class(), log_stats=False)
        except (ValueError, OSError, VLLMError) as error:
            raise ModelError(f"vLLM cannot start on the model in {self._path}: {error}") from error
        # Below `LLMEngine.step`: its own bookkeeping of text and log-probs costs a third of a small model's step.
        self._core = self._llm.engine_core
        self._tasks = self._llm.get_supported_tasks()
        self._tokenizer = self._llm.get_tokenizer()
        self._flights: dict[str, Flight] = {}  # by vLLM's request id
        self._keys: set[str] = set()  # of those
        self._added = 0
        self._landed: list[Trajectory] = []  # by a flush, and not handed out yet
        self._mixture = ""
        self._memory = DeviceMemory(self._llm, config.vllm.gpu_memory_utilization)
        self._tokens_sampled = 0

    @property
    def unfinished(self) -> int:
        """Requests added and not yet finished."""
        return len(self._flights) + len(self._landed)

    @property
    def gauges(self) -> Gauges:
        """See `Engine.gauges`."""
        scheduler = self._core.engine_core.scheduler
        _, waiting = scheduler.get_request_counts()
        return Gauges(self._tokens_sampled, waiting, scheduler.kv_cache_manager.usage)

    @property
    def attention(self) -> str:
        """vLLM's names of the attention backends that its layers have."""
        layers = self._config.compilation_config.static_forward_context.values()
        return ", ".join(sorted({layer.get_attn_backend().get_name() for layer in layers if _attends(layer)}))

    def add(self, request: GenerateRequest) -> None:
        """See `Engine.add`."""
        from vllm.exceptions import VLLMError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if request.key in self._keys:
            raise RunError(f"engine {self._index}: request key {request.key!r} is in use")
        prompt_ids = [int(token) for token in request.prompt_ids]
        # Never given twice, as in vLLM's own engine: a batch in flight may still hold a request that has ended, and
        # what it samples for it would go to the next one of that name. Counted and not drawn: the same on all TP ranks,
        # so those that the leader refuses, of which the others never hear, do not count.
        name = f"{request.key}#{self._added}"
        try:
            core_request = self._llm.input_processor.process_inputs(
                name,
                tokens_input(prompt_ids),
                _sampling_params(request.sampling, request.seed),
                self._tasks,
            )
        except (ValueError, VLLMError) as error:
            raise RunError(
                f"engine {self._index} refuses request {request.key!r} (prompt {request.prompt}, {len(prompt_ids)} "
                f"tokens): {error}"
            ) from error
        core_request.external_req_id = request.key
        stops = None
        if request.sampling.stop:
            stops = IncrementalDetokenizer.from_new_request(self._tokenizer, core_request)
        self._core.add_request(core_request)
        self._added += 1
        self._flights[name] = Flight(request, stops)
        self._keys.add(request.key)

    def step(self) -> list[Trajectory]:
        """See `Engine.step`."""
        try:
            self._check_usable()
            return self._step()
        except Exception:
            self.drop()
            raise

    def drop(self) -> None:
        """Forget all requests: nothing of them comes any more, and their keys are free."""
        self._forget()

    def _step(self) -> list[Trajectory]:
        if self._flights:
            self._read(self._core.get_output().outputs)
        if not self._flights:
            self._flush()
        landed, self._landed = self._landed, []
        return landed

    def _read(self, outputs: list[Any]) -> None:
        """What one batch has sampled."""
        from vllm.v1.engine import FinishReason

        cut = []
        for output in outputs:
            flight = self._flights[output.request_id]
            reason = output.finish_reason
            tokens = output.new_token_ids
            self._tokens_sampled += len(tokens)
            self._sampled(flight.request.key, tokens)
            if output.new_logprobs is not None:
                flight.extend(tokens, output.new_logprobs.logprobs[:, 0].tolist(), self.version)
            if flight.stops is not None and flight.stops.update(tokens, reason is FinishReason.STOP):
                if reason is None:
                    cut.append(output.request_id)
                reason = FinishReason.STOP
            if reason is not None:
                del self._flights[output.request_id]
                self._keys.discard(flight.request.key)
                self._landed.append(self._land(flight, str(reason)))
        # A batch in flight may hold them: the scheduler passes over what comes for a request that it has no more.
        self._core.abort_requests(cut)

    def _flush(self) -> None:
        """Read the batches in flight and start no other. Without asynchronous scheduling there are none."""
        from vllm.v1.core.sched.interface import PauseState

        core = self._core.engine_core
        if not core.batch_queue:
            return
        before = core.scheduler.pause_state
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            # A turn may first tell the model runner, by an empty batch, which requests have ended.
            while core.batch_queue:
                self._read(self._core.get_output().outputs)
        finally:
            core.scheduler.set_pause_state(before)

    def _forget(self) -> None:
        self._core.abort_requests(list(self._flights))
        self._flights.clear()
        self._keys.clear()
        self._landed.clear()
        while self._core.engine_core.batch_queue:
            # After a failed step the batches behind it fail, too; each attempt takes one out of the queue.
            with suppress(Exception):
                self._flush()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine.load_weights`."""
        self._memory.require(WEIGHTS)
        self._flush()
        self._mixture = f"the update to policy version {version} failed, and weights of two policies are mixed"
        model = self._llm.model_executor.driver_worker.model_runner.get_model()
        wanted = checked(weights, self._shapes, version)
        reload_weights(model, self._config, as_saved(self._skeleton, wanted))
        # The cached keys and values are the old policy's: of finished prompts, and of requests in flight.
        self._core.reset_prefix_cache(reset_running_requests=True)
        self.version = version
        self._mixture = ""

    def describe(self) -> list[list[Any]]:
        """See `Engine.describe`."""
        dtype = str(self._config.model_config.dtype).removeprefix("torch.")
        return [[name, list(shape), dtype] for name, shape in self._shapes.items()]

    def sleep(self) -> int:
        """See `Sleeper.sleep`."""
        self._forget()
        self._mixture = "it has slept, and no update came since"
        return self._memory.give_up()

    def wake_up(self, part: str) -> None:
        """See `Sleeper.wake_up`."""
        self._memory.take_back(part)

    def close(self) -> None:
        """See `Engine.close`."""
        self._flights.clear()
        self._core.shutdown()

    def _executor_class(self) -> Any:
        from vllm.v1.executor.abstract import Executor

        return Executor.get_class(self._config)

    def _check_usable(self) -> None:
        self._memory.require(WEIGHTS, KV_CACHE)
        if self._mixture:
            raise RunError(f"engine {self._index} has no usable weights: {self._mixture}")

    def _sampled(self, key: str, tokens: list[int]) -> None:
        """A request got its next tokens."""

    def _land(self, flight: Flight, reason: str) -> Trajectory:
        if reason not in ("stop", "length"):
            raise RunError(f"engine {self._index}: vLLM ended request {flight.request.key!r} with {reason!r}")
        if flight.stops is not None:
            text = flight.stops.output_text
        else:
            prompt_ids = [int(token) for token in flight.request.prompt_ids]
            text = response_text(
                self._tokenizer, prompt_ids, flight.tokens, flight.request.sampling.skip_special_tokens
            )
        return flight.land(reason, text, self._index)


def _attends(layer: Any) -> bool:
    return hasattr(layer, "get_attn_backend")


def _sampling_params(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=sampling.skip_special_tokens,
        seed=seed,
        logprobs=0,  # of the sampled token only
        detokenize=bool(sampling.stop),
        skip_clone=True,  # made for this request alone
    )
