"""The interface between the rollout role and any engine that samples, and how an engine's work is measured."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slurm_rlhf.records import EngineLoad, Trajectory
from slurm_rlhf.rollout.request import GenerateRequest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's figures between two steps."""

    sampled: int  # tokens, since it was started
    waiting: int  # requests without a place in the batch
    kv_usage: float  # share of the KV cache that is taken, 0 to 1


class Engine(Protocol):
    """A sampler, owned by one thread: only the step loop of the rollout role calls it.

    The weights between two steps are those of one policy, `version`. None of the calls has a time-out of its own: the
    controller watches them with the deadlines of `config.schema.Timeout`.
    """

    version: int
    """The version of the policy whose weights are loaded."""
    unfinished: int
    """How many requests were added that no `step` has returned; `step` does nothing when it is 0."""
    gauges: Gauges
    """The figures after the last step."""

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

    def describe(self) -> list[list[Any]]:
        """List [name, shape, dtype] of the parameters in Hugging Face's names and order. Returns at once."""

    def close(self) -> None:
        """Free the device and the process groups; requests in flight are dropped. Further calls are errors."""


class Sleeper(Protocol):
    """An engine that shares its accelerator; called between two steps by the thread that owns it. Both calls block."""

    def sleep(self) -> int:
        """Drop all requests and free weights and KV cache; return by how much the device's free bytes grew.

        It refuses to step until `wake_up` has allocated all parts again and `load_weights` has loaded weights.
        """
        ...

    def wake_up(self, part: str) -> None:
        """Allocate "weights", before `load_weights`, or "kv_cache" again. Raises RunError if the memory is not free."""
        ...


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
