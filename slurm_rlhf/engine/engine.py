"""The seam between ranks and whatever samples: requests, the abstract engine, its backends, its work and its phase."""

from __future__ import annotations

import hashlib
import importlib
import re
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError, SyncError, shortened
from slurm_rlhf.records import (
    I32,
    KV_CACHE,
    WEIGHTS,
    EngineLoad,
    MemoryPart,
    ParameterSpec,
    Record,
    Sampling,
    Trajectory,
    VersionSpan,
    digest,
)
from slurm_rlhf.wire.calls import GenerateBatch

if TYPE_CHECKING:
    from torch import Tensor

    from slurm_rlhf.data.tokenizer import Tokenizer

Shapes = dict[str, tuple[int, ...]]
"""Name of each parameter, as in a model directory of Hugging Face -> its full shape; tied parameters once."""


class GenerateRequest(Record):
    """Asks for one response: n samples of a prompt are n requests, each with a seed of its own."""

    key: str  # unique among the requests that an engine has at one time
    prompt: int  # Prompt.index
    sample: int  # 0 .. n-1
    prompt_ids: I32  # [P], at least one token
    sampling: Sampling  # without `n`, which is not used here
    seed: int  # made by `request_seed`


@dataclass(slots=True)
class ActiveRequest:
    """Holds a request that an engine has taken, and what it has sampled for it so far."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    adapter: Any = None  # adapter that samples the whole response; None: each step has the weights of the engine

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
        ids = np.array(self.tokens, dtype=np.int32)
        return Trajectory(
            prompt=self.request.prompt,
            sample=self.request.sample,
            prompt_ids=np.asarray(self.request.prompt_ids, dtype=np.int32),
            response_ids=ids,
            rollout_logprobs=np.array(self.logprobs, dtype=np.float32),
            action_mask=np.ones(len(self.tokens), dtype=np.bool_),
            finish_reason=finish_reason,
            text=text[: min(ends, default=None)],
            versions=self.spans,
            engine=engine,
            key=self.request.key,
            digests=[digest(ids)],
        )


def request_seed(run_seed: int, prompt: int, sample: int, version: int, turn: int = 0) -> int:
    """Return a seed in [0, 2**63) for turn `turn` of sample `sample` of prompt row `prompt` under policy `version`.

    It depends on what the request is, and not on when it arrives. blake2b over the numbers as 64-bit integers: the
    same in every process and on every machine, and unrelated for neighbours, unlike sums and products of small numbers.
    The top bit is 0 because engines keep seeds in signed 64-bit tensors.
    """
    packed = struct.pack("<4q", run_seed, prompt, sample, version) + (struct.pack("<q", turn) if turn else b"")
    digest = hashlib.blake2b(packed, digest_size=8, person=b"rlhf-request").digest()
    return int.from_bytes(digest, "little") >> 1


def requests_of(batch: GenerateBatch) -> list[GenerateRequest]:
    """Make the requests of a call, in their order."""
    return [
        GenerateRequest(
            str(one.number),
            one.prompt,
            one.sample,
            one.token_ids,
            replace(batch.sampling, max_new_tokens=one.limit),
            request_seed(batch.run_seed, one.prompt, one.sample, one.round, one.turn),
        )
        for one in batch.asked
    ]


# --- the seam --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Status:
    """Describes an engine between two steps."""

    version: int  # policy whose weights are loaded
    unfinished: int  # requests that were added and not returned; 0: `step` need not be called
    sampled: int  # tokens, since the engine was started
    waiting: int  # requests without a place in the batch
    kv_usage: float  # share of the KV cache that is taken, 0 to 1; 0 where it has no fixed size
    attention: str  # kernels of the layers; empty: not known
    prompt_tokens: int = 0  # prompt tokens of all requests since the engine was started
    cached_tokens: int = 0  # those of them whose keys and values were in the prefix cache


class Engine(ABC):
    """Samples responses on one rank; one thread owns it and makes all calls, each between two steps.

    The weights between two steps are those of one policy. No call has a time-out of its own: the conductor watches the
    rank with the deadlines of `config.schema.Timeout`.
    """

    note: str = ""
    """A line about how it samples, for the user."""

    @property
    @abstractmethod
    def status(self) -> Status:
        """Describe the engine as it is after the last call."""

    @abstractmethod
    def add(self, request: GenerateRequest) -> None:
        """Queue a request: first come, first served. Returns at once.

        Called by the rank that takes the conductor's call. Raises RunError for a key that is in use and for a prompt
        that the engine cannot hold.
        """

    @abstractmethod
    def step(self) -> list[Trajectory]:
        """Sample the next token of as many requests as fit; return the responses that are finished by it.

        Called by the rank's loop while `status.unfinished`. Blocks for one forward pass. Same requests in the same
        order, same seeds, same weights: same tokens and bitwise the same log-probs. Raises RunError while the engine is
        asleep or has no whole weights. Whatever it raises, all requests are dropped and their keys are free again.
        """

    @abstractmethod
    def drop(self) -> None:
        """Drop all requests: nothing of them is returned any more, and their keys are free. Returns at once.

        Called where a run stops, or a call has failed.
        """

    @abstractmethod
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load policy `version`; requests in flight continue under it, from the tokens they have.

        Called by the receiver of a weight transfer, or with the parameters of the trainer in the same process.
        `weights`: every parameter of `describe()`, once, in any order, full (unsharded), of any dtype and device. The
        tensors must keep their values until this returns. Blocks while the iterator does, and lets its exceptions
        through. Raises SyncError naming the parameters that are missing, unknown, doubled or of another shape; the
        engine then has parameters of two policies and refuses to step until an update succeeds.
        """

    @abstractmethod
    def describe(self) -> list[ParameterSpec]:
        """Describe the parameters in Hugging Face's names and order, on joining a weight transfer. Returns at once."""

    @abstractmethod
    def sleep(self) -> int:
        """Drop all requests and free weights and KV cache; return how many bytes of the device this has freed.

        Called where others need the accelerator: train.colocate_all, or the trainer in the same process. Blocks. The
        engine refuses to step until `wake` has allocated all parts again and `load` has loaded weights.
        """

    @abstractmethod
    def wake(self, part: MemoryPart) -> None:
        """Allocate "weights", before `load`, or "kv_cache" again. Blocks. Raises RunError if the memory is not free."""

    @abstractmethod
    def close(self) -> None:
        """Free the device and the process groups, at the end of the rank; further calls are errors."""


def backend(config: Config) -> Any:
    """Return the module that rollout.engine names. If its engines run in ranks of their own, it has three functions.

    `prepare_environment()` sets the variables that the library reads while it is imported, so it is called first.
    Raises RuntimeError if the library was imported without them. `import_library()` imports what an engine starts with
    and touches no GPU. `make_engine(config, number)` starts an engine on one rank, with the weights in the actor's
    model directory as policy 0; its trajectories are marked with `number`. Raises ConfigError or ModelError if the
    library cannot run this model with this configuration.
    """
    return importlib.import_module(f"slurm_rlhf.engine.{config.rollout.engine}")


class Readiness:
    """Keeps whether an engine may sample: the parts that it has freed, and why its weights must not be used."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.missing: set[str] = set()
        self.unusable = ""

    def check(self) -> None:
        """Raise RunError unless the engine may sample."""
        self.require(WEIGHTS, KV_CACHE)
        if self.unusable:
            raise RunError(f"engine {self._number} has no usable weights: {self.unusable}")

    def require(self, *parts: str) -> None:
        """Raise RunError unless the engine has these parts."""
        asleep = [part for part in parts if part in self.missing]
        if asleep:
            raise RunError(f"the engine is asleep: it has freed its {' and '.join(asleep)}; call `wake` first")

    def slept(self) -> None:
        """Note that the engine has freed all parts."""
        self.missing = {WEIGHTS, KV_CACHE}
        self.unusable = "it has slept, and no update came since"

    def wakes(self, part: MemoryPart) -> None:
        """Raise RunError if the engine has the part already."""
        if part not in self.missing:
            raise RunError(f"the engine has its {part} already; parts that it lacks: {sorted(self.missing)}")

    def updates(self, version: int) -> None:
        """Note that an update begins; the weights are usable once `unusable` is empty again."""
        self.unusable = f"the update to policy version {version} failed, and weights of two policies are mixed"


def checked(weights: Iterable[tuple[str, Tensor]], shapes: Shapes, version: int) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, checked: loaders of libraries skip, repeat or broadcast without an error.

    Raises SyncError at the first parameter that is unknown, doubled or of another shape, and at the end for those that
    are missing.
    """
    missing = dict(shapes)
    for name, tensor in weights:
        if name not in shapes:
            raise SyncError(
                f"policy version {version}: the engine has no parameter {name!r} (shape {tuple(tensor.shape)}). Actor "
                f"and engines must start from the same model directory; known: {shortened(shapes)}"
            )
        if name not in missing:
            raise SyncError(f"policy version {version}: parameter {name!r} was sent twice")
        expected = missing.pop(name)
        if tuple(tensor.shape) != expected:
            raise SyncError(
                f"policy version {version}: parameter {name!r} has shape {tuple(tensor.shape)}, the engine's has "
                f"{expected}. Send full (unsharded) parameters of the same model"
            )
        yield name, tensor
    if missing:
        raise SyncError(
            f"policy version {version}: {len(missing)} of {len(shapes)} parameters were not sent: {shortened(missing)}"
        )


class Meter:
    """Measures what an engine does while it has requests; called around every step.

    The time between two steps counts, too.
    """

    def __init__(self) -> None:
        self._load = EngineLoad()
        self._since: float | None = None  # time up to which work is counted; None: no requests
        self._sampled = self._prompt = self._cached = 0

    def begin(self) -> None:
        """Note that a step is about to start."""
        if self._since is None:
            self._since = time.monotonic()

    def stepped(self, status: Status, finished: int) -> None:
        """Note that a step is over, in which so many responses were `finished`."""
        assert self._since is not None
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._load.add(
            EngineLoad(
                tokens=status.sampled - self._sampled,
                responses=finished,
                steps=1,
                busy_s=seconds,
                queued_s=status.waiting * seconds,
                kv_usage=status.kv_usage,
                prompt_tokens=status.prompt_tokens - self._prompt,
                cached_tokens=status.cached_tokens - self._cached,
            )
        )
        self._sampled, self._prompt, self._cached = status.sampled, status.prompt_tokens, status.cached_tokens

    def rest(self) -> None:
        """Note that no requests are left."""
        self._since = None

    def take(self) -> EngineLoad:
        """Return everything since the last call."""
        taken, self._load = self._load, EngineLoad()
        return taken


# --- how far a rank has come in sampling ------------------------------------------------------------------------------

# Ranks that sample together wait for each other in every step. When one of them stops, the others' collectives run into
# their deadline, and all of them report that; only how far each had come shows which one it was.
GATHERING, SAMPLING, WAITING = "gathering parameters", "sampling", "waiting for the other ranks"

_PLACES = {GATHERING: -1, SAMPLING: 1 << 20, WAITING: 1 << 21}  # a layer's place is its number
_PHASE = re.compile(r"generate: batch (\d+), token (\d+), (?:layer (\d+)|(.+))")


def phase_of(batch: int, token: int, place: int | str) -> str:
    """Write a phase: `place` is the number of a layer, or one of the words above."""
    return f"generate: batch {batch}, token {token}, {f'layer {place}' if isinstance(place, int) else place}"


def behind(phases: Mapping[int, str]) -> list[int]:
    """List the ranks that have come less far than another; `phases`: rank -> its phase. Empty: nobody is behind.

    A rank in another phase than these has not begun.
    """
    reached = {rank: _reached(phase) for rank, phase in phases.items()}
    furthest = max(reached.values(), default=(0, 0, 0))
    least = min(reached.values(), default=furthest)
    return sorted(rank for rank, place in reached.items() if place == least != furthest)


def _reached(phase: str) -> tuple[int, int, int]:
    match = _PHASE.fullmatch(phase)
    if match is None:
        return (0, 0, 0)
    batch, token, layer, word = match.groups()
    return int(batch), int(token), int(layer) if layer else _PLACES.get(word, 0)
