"""The interface between the rollout role and any engine that samples: requests, the engine, and measuring its work."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slurm_rlhf.records import I32, EngineLoad, MemoryPart, ParameterSpec, Record, Sampling, Trajectory, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

    from slurm_rlhf.data.tokenizer import Tokenizer
    from slurm_rlhf.rollout._vllm import StopWatcher


class GenerateRequest(Record):
    """Asks for one response: n samples of a prompt are n requests, each with a seed of its own."""

    key: str  # unique among the requests that an engine has at one time
    prompt: int  # Prompt.index
    sample: int  # 0 .. n-1
    prompt_ids: I32  # [P], at least one token
    sampling: Sampling  # without `n`, which is not used here
    seed: int  # of `request_seed`


@dataclass(slots=True)
class ActiveRequest:
    """Holds a request that an engine has taken, and what it has sampled for it so far."""

    request: GenerateRequest
    stops: StopWatcher | None = None  # where the request has stop strings
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Append what one step of policy `version` has sampled; a span ends where the policy changes."""
        self.tokens += tokens
        self.logprobs += logprobs
        end = len(self.tokens)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = end
        else:
            self.spans.append(VersionSpan(end - len(tokens), end, version))

    def finish(self, finish_reason: str, tokenizer: Tokenizer, engine: int) -> Trajectory:
        """Return the finished response. Every token of it was the policy's choice; a stop string ends its text."""
        text = tokenizer.response_text([int(token) for token in self.request.prompt_ids], self.tokens)
        ends = [text.index(stop) + len(stop) for stop in self.request.sampling.stop if stop in text]
        return Trajectory(
            prompt=self.request.prompt,
            sample=self.request.sample,
            prompt_ids=np.asarray(self.request.prompt_ids, dtype=np.int32),
            response_ids=np.array(self.tokens, dtype=np.int32),
            rollout_logprobs=np.array(self.logprobs, dtype=np.float32),
            action_mask=np.ones(len(self.tokens), dtype=np.bool_),
            finish_reason=finish_reason,
            text=text[: min(ends, default=None)],
            versions=self.spans,
            engine=engine,
        )


def request_seed(run_seed: int, prompt: int, sample: int, version: int) -> int:
    """Return a seed in [0, 2**63) for sample `sample` of prompt row `prompt` under policy `version`.

    It depends on what the request is, and not on when it arrives. blake2b over the four numbers as 64-bit integers: the
    same in every process and on every machine, and unrelated for neighbours, unlike sums and products of small numbers.
    The top bit is 0 because engines keep seeds in signed 64-bit tensors.
    """
    packed = struct.pack("<4q", run_seed, prompt, sample, version)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"rlhf-request").digest()
    return int.from_bytes(digest, "little") >> 1


# --- engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gauges:
    """Holds the figures of an engine between two steps."""

    sampled: int  # tokens, since it was started
    waiting: int  # requests without a place in the batch
    kv_usage: float  # share of the KV cache that is taken, 0 to 1


class Engine(Protocol):
    """Samples responses, and is owned by one thread: only the step loop of the rollout role calls it.

    The weights between two steps are those of one policy, `version`. None of the calls has a time-out of its own: the
    controller watches them with the deadlines of `config.schema.Timeout`.
    """

    version: int
    """The version of the policy whose weights are loaded."""

    @property
    def unfinished(self) -> int:
        """Count the requests that were added and that no `step` has returned; `step` does nothing when it is 0."""

    @property
    def gauges(self) -> Gauges:
        """Return the figures after the last step."""

    @property
    def attention(self) -> str:
        """Name the attention kernels of the layers."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request: first come, first served. Returns at once.

        Raises RunError for a key that is in use and for a prompt that the engine cannot hold.
        """

    def step(self) -> list[Trajectory]:
        """Sample the next token of as many requests as fit; return the responses that are finished by it.

        Blocks for one forward pass. Same requests in the same order, same seeds, same weights: same tokens and bitwise
        the same log-probs. Raises RunError after a failed `load_weights` that no successful one has followed. Whatever
        it raises, all requests are dropped and their keys are free again.
        """

    def drop(self) -> None:
        """Drop all requests: nothing of them is returned any more, and their keys are free again."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load policy `version`; requests in flight continue under it, from the tokens they have.

        `weights`: every parameter of `describe()`, once, in any order, full (unsharded), of any dtype and device. The
        tensors must keep their values until this returns. Blocks while the iterator does, and lets its exceptions
        through. Raises SyncError naming the parameters that are missing, unknown, doubled or of another shape; the
        engine then has parameters of two policies and refuses to step until an update succeeds.
        """

    def describe(self) -> list[ParameterSpec]:
        """Describe the parameters in Hugging Face's names and order. Returns at once."""

    def sleep(self) -> int:
        """Drop all requests and free weights and KV cache; return how many bytes of the device this has freed.

        Called between two steps, where other roles share the accelerator (train.colocate_all). Blocks. It refuses to
        step until `wake_up` has allocated all parts again and `load_weights` has loaded weights.
        """

    def wake_up(self, part: MemoryPart) -> None:
        """Allocate "weights", before `load_weights`, or "kv_cache" again. Raises RunError if the memory is not free."""

    def close(self) -> None:
        """Free the device and the process groups; requests in flight are dropped. Further calls are errors."""


class Meter:
    """Measures what an engine does while it has requests; called around every step.

    The time between two steps counts, too.
    """

    def __init__(self) -> None:
        self._load = EngineLoad()
        self._since: float | None = None  # up to here is counted; None: no requests
        self._sampled = 0

    def begin(self) -> None:
        """Note that a step is about to start."""
        if self._since is None:
            self._since = time.monotonic()

    def stepped(self, gauges: Gauges, finished: int) -> None:
        """Note that a step is over, in which so many responses were `finished`."""
        assert self._since is not None
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._load.add(
            EngineLoad(
                tokens=gauges.sampled - self._sampled,
                responses=finished,
                steps=1,
                busy_s=seconds,
                queued_s=gauges.waiting * seconds,
                kv_usage=gauges.kv_usage,
            )
        )
        self._sampled = gauges.sampled

    def rest(self) -> None:
        """Note that no requests are left."""
        self._since = None

    def take(self) -> EngineLoad:
        """Return everything since the last call."""
        taken, self._load = self._load, EngineLoad()
        return taken
