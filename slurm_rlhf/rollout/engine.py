"""The seam between the rollout role and whatever samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slurm_rlhf.records import Trajectory
from slurm_rlhf.rollout.request import GenerateRequest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gauges:
    """What an engine shows between two steps."""

    sampled: int  # tokens, since it was started
    waiting: int  # requests without a place in the batch
    kv_usage: float  # share of the KV cache that is taken, 0 to 1


class Engine(Protocol):
    """One sampler, owned by one thread: the rollout role's step loop calls all of it and nobody else does.

    The weights between two steps are those of one policy, `version`. None of the calls has a time-out of its own: the
    role's caller watches them with the deadlines of `config.schema.Timeout`.
    """

    version: int
    """Of the policy whose weights are loaded."""
    unfinished: int
    """Requests that were added and that no `step` has handed out; `step` does nothing when it is 0."""
    gauges: Gauges
    """As of the last step."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request: first come, first served. Returns at once.

        Raises RunError for a key that is in use and for a prompt that the engine cannot hold.
        """

    def step(self) -> list[Trajectory]:
        """Sample the next token of as many requests as fit; the requests that finished by it.

        Blocks for one forward pass. Same requests in the same order, same seeds, same weights: same tokens and bitwise
        the same log-probs. Raises RunError after a failed `load_weights` that no successful one has followed. Whatever
        it raises, all requests are dropped then and their keys are free.
        """

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over policy `version`; requests in flight go on under it, from the tokens they have.

        `weights`: every parameter of `describe()`, once, in any order, full (unsharded), of any dtype and device. The
        tensors must keep their values until this returns. Blocks while the iterator does, and lets its exceptions
        through. Raises SyncError naming the parameters that are missing, unknown, doubled or of another shape; the
        engine then holds a mixture and refuses to step until an update succeeds.
        """

    def describe(self) -> list[list[Any]]:
        """[[name, shape, dtype], ...] of the parameters in Hugging Face's names and order. Returns at once."""

    def close(self) -> None:
        """Free the device and the process groups; requests in flight are dropped. Further calls are errors."""
