"""vLLM's V1 engine in this process, stepped by its owner."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError, RunError
from slurm_rlhf.records import KV_CACHE, LENGTH, REPETITION, STOP, WEIGHTS, MemoryPart, ParameterSpec, Trajectory
from slurm_rlhf.rollout._transformers import as_saved
from slurm_rlhf.rollout._vllm import EngineCore, Sampled, refusals, reload_weights
from slurm_rlhf.rollout.engine import ActiveRequest, Gauges, GenerateRequest
from slurm_rlhf.rollout.expected_weights import check_loaded, checked, parameter_shapes, skeleton
from slurm_rlhf.rollout.sleep import DeviceMemory
from slurm_rlhf.rollout.vllm_settings import engine_config


class VllmEngine:
    """Implements `engine.Engine` on vLLM's engine; `prepare_environment` comes first.

    `response_ids` are the tokens as sampled. The end-of-sequence token is among them if it was sampled, and so are the
    tokens of a stop string, the last of them whole even where the stop string ends inside it: the policy is trained on
    what it chose. `text` ends with the stop string, so that a reward function sees it, and has nothing after it.

    Requests in flight when the weights change keep their tokens; their KV cache is computed anew under the new
    weights, so that every log-prob is that of its version given the whole text before it.

    With vLLM's asynchronous scheduling (`vllm_settings.asynchronous`) a batch is on its way to the device while the one
    before it is read. So between two steps there is a batch in flight. `_flush` waits for it before the weights change,
    before the engine sleeps, and as soon as the engine has no requests. What was sampled in it is of the old policy and
    is returned by the next step.

    The engine has a default process group of its own: here of one rank, made through a file of its own, in `tp_engine`
    of its TP ranks. torchrun's RANK and WORLD_SIZE have no effect, and engines start, fail and restart alone.
    """

    _executor: Any = None
    """Another class of executor than vLLM's choice."""

    def __init__(self, config: Config, engine: int = 0, version: int = 0) -> None:
        """Load the actor's model directory as policy `version`; trajectories are marked with the number `engine`.

        Raises ConfigError or ModelError if vLLM cannot run this model with this configuration.
        """
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RuntimeError("call slurm_rlhf.rollout.vllm_settings.prepare_environment before making an engine")
        self.version = version
        self._index = engine
        self._path = config.actor.model_name_or_path
        self._config = engine_config(config)
        # Before the engine: where vLLM runs the classes of transformers, they can be made within an engine only.
        self._skeleton = skeleton(self._path)
        self._shapes = parameter_shapes(self._skeleton)
        # The engine collects garbage five times while it starts; the imports left none, and looking takes 0.3 s a time.
        gc.freeze()
        try:
            self._core = EngineCore(self._config, self._executor)
        except refusals() as error:
            raise ModelError(f"vLLM cannot start on the model in {self._path}: {error}") from error
        self._active: dict[str, ActiveRequest] = {}  # by vLLM's request id
        self._keys: set[str] = set()  # of those
        self._added = 0
        self._finished: list[Trajectory] = []  # by a flush, and not returned yet
        self._unusable = ""  # why the weights must not be used
        self._memory = DeviceMemory(self._core.llm, config.vllm.gpu_memory_utilization)
        self._tokens_sampled = 0

    @property
    def unfinished(self) -> int:
        """Count the requests that were added and not yet returned."""
        return len(self._active) + len(self._finished)

    @property
    def gauges(self) -> Gauges:
        """See `Engine.gauges`."""
        waiting, kv_usage = self._core.load()
        return Gauges(self._tokens_sampled, waiting, kv_usage)

    @property
    def attention(self) -> str:
        """Name the attention backends of the engine's layers, as vLLM names them."""
        return self._core.attention()

    def add(self, request: GenerateRequest) -> None:
        """See `Engine.add`."""
        if request.key in self._keys:
            raise RunError(f"engine {self._index}: request key {request.key!r} is in use")
        prompt_ids = [int(token) for token in request.prompt_ids]
        # Never given twice, as in vLLM's own engine: a batch in flight may still have a request that has ended, and
        # what it samples for it would go to the next one of that name. Counted and not random: the same on all TP
        # ranks, so those that the leader refuses, of which the others never hear, do not count.
        name = f"{request.key}#{self._added}"
        try:
            stops = self._core.add(name, request.key, prompt_ids, request.sampling, request.seed)
        except refusals() as error:
            raise RunError(
                f"engine {self._index} refuses request {request.key!r} (prompt {request.prompt}, {len(prompt_ids)} "
                f"tokens): {error}"
            ) from error
        self._added += 1
        self._active[name] = ActiveRequest(request, stops)
        self._keys.add(request.key)

    def step(self) -> list[Trajectory]:
        """See `Engine.step`."""
        try:
            self._memory.require(WEIGHTS, KV_CACHE)
            if self._unusable:
                raise RunError(f"engine {self._index} has no usable weights: {self._unusable}")
            return self._step()
        except Exception:
            self.drop()
            raise

    def drop(self) -> None:
        """See `Engine.drop`."""
        self._forget()

    def _forget(self) -> None:
        names = list(self._active)
        # First, so that the keys are free even if vLLM is too broken to abort anything.
        self._active.clear()
        self._keys.clear()
        self._finished.clear()
        self._core.abort_all(names)

    def _step(self) -> list[Trajectory]:
        if self._active:
            self._read(self._core.run_batch())
        if not self._active:
            self._flush()
        finished, self._finished = self._finished, []
        return finished

    def _read(self, batch: list[Sampled]) -> None:
        """Add what one batch has sampled to the requests, and finish those that have ended."""
        cut = []
        for sampled in batch:
            active = self._active.get(sampled.name)
            if active is None:  # it was dropped
                continue
            reason = sampled.finish_reason
            self._tokens_sampled += len(sampled.tokens)
            self._sampled(active.request.key, sampled.tokens)
            if sampled.logprobs is not None:
                active.extend(sampled.tokens, sampled.logprobs, self.version)
            if active.stops is not None and active.stops.stops(sampled):
                if not reason:
                    cut.append(sampled.name)
                reason = STOP
            if reason:
                del self._active[sampled.name]
                self._keys.discard(active.request.key)
                self._finished.append(self._finish(active, reason))
        self._core.abort(cut)

    def _flush(self) -> None:
        """Read the batches in flight and start no other."""
        self._core.finish_batches(self._read)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine.load_weights`."""
        self._memory.require(WEIGHTS)
        self._flush()
        self._unusable = f"the update to policy version {version} failed, and weights of two policies are mixed"
        model = self._core.model()
        complete = checked(weights, self._shapes, version)
        check_loaded(model, reload_weights(model, self._config, as_saved(self._skeleton, complete)))
        self._core.drop_caches()  # they are the old policy's
        self.version = version
        self._unusable = ""

    def describe(self) -> list[ParameterSpec]:
        """See `Engine.describe`."""
        dtype = str(self._config.model_config.dtype).removeprefix("torch.")
        return [ParameterSpec(name, list(shape), dtype) for name, shape in self._shapes.items()]

    def sleep(self) -> int:
        """See `Engine.sleep`."""
        self._forget()
        self._unusable = "it has slept, and no update came since"
        return self._memory.release()

    def wake_up(self, part: MemoryPart) -> None:
        """See `Engine.wake_up`."""
        self._memory.allocate(part)

    def close(self) -> None:
        """See `Engine.close`."""
        self._active.clear()
        self._core.close()

    def _sampled(self, key: str, tokens: list[int]) -> None:
        """Note the next tokens of a request."""

    def _finish(self, active: ActiveRequest, reason: str) -> Trajectory:
        request = active.request
        if reason not in (STOP, LENGTH, REPETITION):
            raise RunError(f"engine {self._index}: vLLM ended request {request.key!r} with {reason!r}")
        return active.finish(reason, self._core.tokenizer, self._index)
