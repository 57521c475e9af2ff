"""Declares every call of the conductor to a rank: its argument, its result and its deadline.

One class per role. A worker subclasses the class of its role and implements the methods; the conductor names them in
`RoleHandle.call(rank, ActorCalls.logprobs, batch)`. A method has one argument at most: a number, a text or a record. To
add a call: its records here, the method with `@call` in the class of its role, and the implementation in the worker.
The names of methods and fields travel, so that both ends must have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec.structs import asdict

from slurm_rlhf.records import (
    F32,
    I32,
    EngineLoad,
    Experience,
    MemoryPart,
    ParameterSpec,
    Record,
    Sampling,
    SyncConnection,
    SyncReport,
    Trajectory,
)
from slurm_rlhf.wire.codec import call


class DeviceReport(Record):
    """Describes the accelerator of a rank; sizes in bytes."""

    gpu: str = ""  # its name; empty: the rank has none
    total: int = 0
    used: int = 0  # memory that all processes use; without a GPU, that of this process
    attention: str = ""  # the kernel in use; empty: none yet


class StacksAnswer(Record):
    """Says where a rank is in its code, whatever its main thread does."""

    threads: str  # their stacks as faulthandler writes them, the main thread first
    node: str  # load and memory of its node


class StartAnswer(Record):
    note: str = ""  # a line about the model, for the user
    parameters: list[ParameterSpec] | None = None  # the actor's, in layer order


class ForwardBatch(Record):
    """Holds the part of a batch that one rank passes forward, without gradients."""

    experience: Experience
    micro: list[list[int]]  # micro-batches, each a list of rows of `experience`; the same number on every rank


class TrainBatch(Record):
    """Holds the part of a batch that one rank trains on in one optimizer step."""

    experience: Experience
    micro: list[list[int]]  # see ForwardBatch
    denominator: float  # tokens of the whole optimizer step, over all ranks


class TrainAnswer(Record):
    """Says what one optimizer step did on a rank."""

    metrics: dict[str, float]  # sums over this rank's tokens, and `lr` and `grad_norm` of the whole step
    logprobs: F32 | None = None  # [A], from before the step; None if the actor computed them before the update


class PassRequest(Record):
    """Asks a rank to time passes over its part of a batch; they change nothing."""

    experience: Experience
    micro: list[list[int]]  # see ForwardBatch
    backward: bool  # with gradients


class PassAnswer(Record):
    seconds: float  # by the clock, median of three passes
    busy: float  # CPU seconds of each thread, median of the passes
    optimizer: float = 0.0  # bytes a second that AdamW reads and writes; 0: not measured
    link: float = 0.0  # bytes a second of sums over the ranks; 0: not measured


class SamplingRequest(Record):
    """Asks an engine to sample responses that nobody gets, to measure its speed."""

    token_ids: I32  # [P], a prompt; each response gets another rotation of it
    responses: int
    tokens: int  # the most that a response may have


class SelfCheckAnswer(Record):
    """Holds log-probs of the same rows, computed in several ways that must agree, [A] each."""

    first: F32
    again: F32  # a second time
    alone: F32  # every row in a micro-batch of its own
    eval: F32  # computed in eval mode


class SaveRequest(Record):
    path: str  # a directory that all ranks see
    async_save: bool  # copy the state to host memory, and write it while later calls are answered


class SyncGroupRequest(Record):
    """Describes a weight transfer group to a rank that is to join it."""

    name: str
    rank: int  # the actor's ranks come first; of an engine it is that of its leader
    world: int
    actors: int  # how many of `world` are the actor's
    host: str  # name of the node with the store
    port: int
    parameters: list[ParameterSpec]  # all that the actor will send
    backend: str | None = None  # None: sync.backend
    interface: str | None = None  # None: sync.interface

    def described(self) -> dict[str, Any]:
        """Return the set fields by name, without `parameters`; fields that are None are left to the configuration."""
        known = asdict(self)
        return {name: value for name, value in known.items() if name != "parameters" and value is not None}


class Asked(NamedTuple):
    """Asks for one response."""

    number: int  # identifies the request; no other has it at the same time
    prompt: int  # Prompt.index
    sample: int  # 0 .. n-1
    round: int  # seeds the response, with the run's seed
    turn: int  # turns of the episode that came before
    limit: int  # most tokens of the response
    token_ids: I32  # [P]


class PackedPrompts(Record):
    """Packs requests into two arrays; a long list of them would not fit into the header of a message.

    A row is eight numbers: the six of its first request in the order of `Asked`, then how many requests the row stands
    for, whose `number` and `sample` count up, and P. So a prompt travels once for all of its samples.
    """

    rows: I32  # [8 N]
    token_ids: I32  # [sum of P]

    @classmethod
    def pack(cls, asked: Sequence[Asked]) -> PackedPrompts:
        """Pack requests in their order."""
        rows: list[list[int]] = []
        tokens: list[I32] = []
        for one in asked:
            if rows and one.token_ids is tokens[-1]:
                number, prompt, sample, *same, count, _ = rows[-1]
                if [*one[:6]] == [number + count, prompt, sample + count, *same]:
                    rows[-1][6] += 1
                    continue
            rows.append([*one[:6], 1, len(one.token_ids)])
            tokens.append(one.token_ids)
        empty = np.zeros(0, dtype=np.int32)
        return cls(np.array(rows, dtype=np.int32).reshape(-1), np.concatenate([empty, *tokens], dtype=np.int32))

    def __iter__(self) -> Iterator[Asked]:
        end = 0
        for number, prompt, sample, round, turn, limit, count, length in self.rows.reshape(-1, 8).tolist():
            end += length
            token_ids = self.token_ids[end - length : end]
            for more in range(count):
                yield Asked(number + more, prompt, sample + more, round, turn, limit, token_ids)


class GenerateBatch(Record):
    """Asks for responses, perhaps for none: then the call only fetches responses of earlier requests."""

    asked: PackedPrompts
    sampling: Sampling
    run_seed: int
    least: int = 1  # responses in an engine's answer; fewer if no more are to come


class ActorBatch(Record):
    """Asks a rank of the actor for responses, perhaps for none: it takes part in the collectives all the same."""

    batch: GenerateBatch
    version: int  # number of the policy
    last: bool  # no further batch is sampled with the present weights


class GenerateAnswer(Record):
    found: list[Trajectory]
    load: EngineLoad  # work of the engine since its last answer


# The header of a message is bounded (`codec.MAX_HEADER_BYTES`): this is an eighth of it.
_ANSWER_BYTES = 8 << 20
_ANSWER_RESPONSES = 8192  # each has four arrays, which may be frames: half of the frames a message may have
_TOKEN_BYTES = 17  # id, log-prob, mask, and eight bytes of text, twice the usual length
_RESPONSE_BYTES = 256  # without its tokens


def most_in_answer(prompt_tokens: int, response_tokens: int) -> int:
    """Count the responses that fit into one answer, at least 1, by the largest number of tokens of each."""
    size = _RESPONSE_BYTES + 4 * prompt_tokens + _TOKEN_BYTES * response_tokens
    return max(1, min(_ANSWER_RESPONSES, _ANSWER_BYTES // size))


class WakeUpRequest(Record):
    part: MemoryPart  # weights or KV cache


class RankCalls(Protocol):
    """Declares the calls that every rank of every role answers."""

    @call(deadline="forward")  # a rank answers it after the work that it has begun
    def memory(self) -> DeviceReport:
        """Describe this rank's accelerator, and the memory in use."""

    @call(deadline="heartbeat")
    def stacks(self) -> StacksAnswer:
        """Take the stacks of all threads; answered at once, whatever the rank computes."""

    @call(deadline="shutdown")
    def shutdown(self) -> str:
        """Release everything and end the process; the answer is "done"."""


class StartCalls(RankCalls, Protocol):
    """Declares the calls of every role that has a model."""

    @call(deadline="start")
    def start(self, total_steps: int) -> StartAnswer:
        """Load the model: the first call of a rank. `total_steps`: optimizer steps of the whole run."""


class LogprobCalls(StartCalls, Protocol):
    """Declares the calls of the roles that have a policy."""

    @call(deadline="forward")
    def logprobs(self, batch: ForwardBatch) -> F32:
        """Compute the log-probs of the response tokens at the rollout temperature, [A]."""


class TrainerCalls(StartCalls, Protocol):
    """Declares the calls of the roles that are trained."""

    @call(deadline="train_step")
    def train_step(self, batch: TrainBatch) -> TrainAnswer:
        """Take one optimizer step."""

    @call(deadline="train_step")
    def measure(self, request: PassRequest) -> PassAnswer:
        """Measure passes of the model; before the first step."""

    @call(deadline="checkpoint")
    def save(self, request: SaveRequest) -> None:
        """Write the state for an exact resume."""

    @call(deadline="checkpoint")
    def written(self) -> Future[None]:
        """Answer once the state that `save` has copied is written, whatever else the rank does; raises its errors."""

    @call(deadline="checkpoint")
    def finish_save(self) -> None:
        """Block the rank until the state that `save` has copied is written, or writing it has failed."""

    @call(deadline="checkpoint")
    def load(self, directory: str) -> None:
        """Continue from what `save` wrote."""

    @call(deadline="sync")
    def sleep(self) -> None:
        """Keep the optimizer's states in host memory until `wake_up`."""

    @call(deadline="sync")
    def wake_up(self) -> None:
        """Bring the optimizer's states back."""


class SyncCalls(Protocol):
    """Declares the calls of the members of a weight transfer group."""

    @call(deadline="sync")
    def sync_join(self, request: SyncGroupRequest) -> SyncConnection:
        """Leave the weight transfer group there was and join a new one."""


class ActorCalls(TrainerCalls, LogprobCalls, SyncCalls, Protocol):
    """Declares the calls of the policy in training."""

    @call(deadline="forward")
    def reference_logprobs(self, batch: ForwardBatch) -> F32:
        """Compute log-probs as `logprobs` does, of the policy without its adapter (lora.rank)."""

    @call(deadline="forward")
    def self_check(self, batch: ForwardBatch) -> SelfCheckAnswer:
        """Compute the log-probs of a few sequences in several ways."""

    @call(deadline="checkpoint")
    def export(self, directory: str) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory, which all ranks see."""

    @call(deadline="generate")
    def generate(self, batch: ActorBatch) -> GenerateAnswer:
        """Sample responses (rollout.engine = hf). Every rank gets the same number of these calls, in the same order."""

    @call(deadline="generate")
    def drop(self) -> None:
        """End sampling, also in earlier calls, whose answers then have no responses."""

    @call(deadline="sync")
    def sync_listen(self, host: str) -> int:
        """Open the store where the members of a weight transfer group meet, and return its port; rank 0 only.

        `host`: this node, as the other members know it.
        """

    @call(deadline="heartbeat")
    def sync_abort(self) -> None:
        """Abort forming the weight transfer group; answered at once, whatever the rank does."""

    @call(deadline="sync")
    def sync_push(self, version: int) -> SyncReport:
        """Send this rank's share of the weights as policy `version`."""


class CriticCalls(TrainerCalls, Protocol):
    """Declares the calls of the value model in training."""

    @call(deadline="forward")
    def values(self, batch: ForwardBatch) -> F32:
        """Compute the value of the state before each response token, [A]."""


class ReferenceCalls(LogprobCalls, Protocol):
    """Declares the calls of the frozen policy that the KL penalty compares with."""


class RewardCalls(StartCalls, Protocol):
    """Declares the calls of the reward model."""

    @call(deadline="forward")
    def score(self, batch: ForwardBatch) -> F32:
        """Score each sequence, [N]."""


class EngineCalls(StartCalls, SyncCalls, Protocol):
    """Declares the calls of an inference engine, which its first rank takes."""

    @call(deadline="generate")
    def generate(self, batch: GenerateBatch) -> Future[GenerateAnswer]:
        """Sample responses; answered when `batch.least` of all requested ones are finished, or none is left."""

    @call(deadline="generate")
    def measure(self, request: SamplingRequest) -> EngineLoad:
        """Sample while nothing else is asked for, and say how fast that was."""

    @call(deadline="sync")
    def drop(self) -> None:
        """Drop all requests: nobody waits for their responses any more, and their calls fail."""

    @call(deadline="sync")
    def sync_receive(self, version: int) -> SyncReport:
        """Receive the weights of policy `version`."""

    @call(deadline="sync")
    def sleep(self) -> int:
        """Drop all requests and free the engine's memory; return the bytes that became free on its GPU."""

    @call(deadline="sync")
    def wake_up(self, request: WakeUpRequest) -> None:
        """Take back a part of the engine's memory."""
