"""Define what travels between roles: Prompt -> Trajectory -> Experience.

Arrays are numpy and live on the host: the conductor, which handles all of them, imports no torch.
Shapes: P prompt tokens, R response tokens, N sequences, T = sum(P + R), A = sum(R) over a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
MemoryPart = Literal["weights", "kv_cache"]
"""Parts of an engine's GPU memory, which it frees when it goes to sleep."""

STOP: Final = "stop"
LENGTH: Final = "length"
REPETITION: Final = "repetition"
LOST: Final = "lost"
"""Why a response ended. STOP: by itself (end-of-sequence token, stop string). LENGTH, REPETITION: it was cut off at the
length limit, or because it repeated itself. LOST: its environment failed, and it is not trained on."""


class Record(Struct, forbid_unknown_fields=True):
    """Travels between processes as the map of its fields; a default is copied for each record."""


@dataclass(slots=True)
class Prompt:
    """Holds a row of a prompt data set."""

    index: int  # position of the row in its file, the same in every run
    text: str
    token_ids: I32  # [P]
    label: Any = None  # the column `data.label_key`, handed to the reward function
    row: dict[str, Any] = field(default_factory=dict)  # all columns, as they were read
    input_key: str = ""  # the column of the prompt


class Sampling(Record):
    """Says how responses are sampled; the fields mean what they mean in vLLM."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    max_new_tokens: int = 1024
    stop: list[str] = []
    max_pattern_size: int = 0  # longest pattern in tokens whose repetition ends the response; 0: none does
    min_pattern_size: int = 1
    min_count: int = 2  # times in a row that the pattern must occur


class VersionSpan(Record):
    """Says that policy `version` sampled the response tokens [start, end)."""

    start: int
    end: int
    version: int


class Trajectory(Record):
    """Holds a sampled response."""

    prompt: int  # Prompt.index
    sample: int  # 0 .. n-1
    prompt_ids: I32  # [P]
    response_ids: I32  # [R], with the end-of-sequence token if it was sampled
    rollout_logprobs: F32  # [R], of the sampling distribution (after temperature, top-p, top-k)
    action_mask: Bool  # [R], True where the policy chose the token (False: inserted by a tool)
    finish_reason: str  # STOP, LENGTH, REPETITION or LOST
    text: str
    versions: list[VersionSpan]
    engine: int = 0  # number of the engine that sampled it
    key: str = ""  # name of the request that it answers
    reward: float = 0.0  # by the environment, summed over the turns
    turns: int = 1
    began: str = ""  # the prompt, if an environment wrote it; empty: the prompt is that of the data
    messages: str = ""  # the same prompt as messages, in JSON; empty: the environment gave no messages
    dialogue: str = ""  # with an environment: the messages after the prompt, in JSON; the policy's role is `assistant`
    score: float | None = None  # by the environment, by the task's own measure
    logs: dict[str, float] = {}  # by the environment, to be averaged and logged
    counts: dict[str, int] = {}  # calls of tools, and errors of tools by kind
    digests: list[tuple[int, int]] = []  # `digest` of each turn, computed where the turn was sampled


def digest(token_ids: I32) -> tuple[int, int]:
    """Return the number of tokens and a checksum of them."""
    return len(token_ids), zlib.crc32(token_ids.tobytes())


class EngineLoad(Record):
    """Hold the load of one engine over a stretch of time; engines measure it, and the conductor adds it up."""

    tokens: int = 0  # sampled
    responses: int = 0  # finished
    steps: int = 0
    busy_s: float = 0.0  # with at least one request
    queued_s: float = 0.0  # seconds that requests waited for a place in the batch, summed over requests
    kv_usage: float = 0.0  # highest share of the KV cache in use, 0 to 1
    prompt_tokens: int = 0  # tokens of the prompts of requests that have begun
    cached_tokens: int = 0  # those of them whose keys and values were in the prefix cache

    def add(self, other: EngineLoad) -> None:
        """Add the stretch of time that follows."""
        for name in self.__struct_fields__:
            before, more = getattr(self, name), getattr(other, name)
            setattr(self, name, max(before, more) if name == "kv_usage" else before + more)

    @property
    def tokens_per_s(self) -> float:
        """Return the rate while it had requests; 0 when it had none."""
        return self.tokens / self.busy_s if self.busy_s > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """Return its metrics; `running` and `waiting` are the mean numbers of requests in the batch and before it."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "busy_s": self.busy_s,
            "responses": float(self.responses),
            # A step samples one token of every request in the batch.
            "running": self.tokens / self.steps if self.steps else 0.0,
            "waiting": self.queued_s / self.busy_s if self.busy_s > 0 else 0.0,
            "kv_usage": self.kv_usage,
            **({"prefix_cache": self.cached_tokens / self.prompt_tokens} if self.prompt_tokens else {}),
        }


class ParameterSpec(NamedTuple):
    """Describes a parameter of a model to weight transfers."""

    name: str
    shape: list[int]
    dtype: str


class SyncConnection(Record):
    """Describes how a member of a weight transfer group is connected."""

    backend: str
    interface: str
    address: str
    node: str
    mbits: int = 0  # speed of the interface in Mbit/s; 0: not known, or nothing goes over it


class SyncReport(Record):
    """Says how a weight update ended at one member."""

    broken: str = ""  # why it was cut off, so that a new group may help; empty: it succeeded
    silent: bool = False  # True if it was cut off because a member was silent
    nbytes: int = 0  # bytes of the parameters, all ranks together
    seconds: float = 0.0
    checksum_s: float = 0.0


class Experience(Record):
    """Packs N sequences without padding, in (prompt, sample) order.

    `columns` holds one float per response token: `rollout_logprobs`, `logprobs` (the actor's, before the
    update), `ref_logprobs`, `values`, `advantages`, `returns`, `correction`; whichever are known so far.
    """

    prompt_lens: I32  # [N]
    response_lens: I32  # [N]
    token_ids: I32  # [T], each sequence's prompt, then its response
    action_mask: Bool  # [A]
    rewards: F32  # [N], one number per response, before clipping and KL
    columns: dict[str, F32] = {}  # name -> [A]
    finish_reasons: list[str] = []  # [N], as in Trajectory; empty for data that no engine sampled

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> I32:
        """Return the tokens of each sequence, [N]."""
        return self.prompt_lens + self.response_lens

    @property
    def token_offsets(self) -> NDArray[np.int64]:
        """Return where each sequence starts in `token_ids`, [N + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @property
    def action_offsets(self) -> NDArray[np.int64]:
        """Return where each response starts in `action_mask` and the columns, [N + 1]."""
        return np.concatenate([[0], np.cumsum(self.response_lens, dtype=np.int64)])

    def actions_of(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return where the response tokens of the sequences `indices` are in the columns, in that order."""
        return _within(self.action_offsets, np.asarray(indices, dtype=np.int64))

    def select(self, indices: list[int]) -> Experience:
        """Select the sequences `indices`, in that order."""
        where = np.asarray(indices, dtype=np.int64)
        tokens, actions = _within(self.token_offsets, where), self.actions_of(indices)
        return Experience(
            self.prompt_lens[where],
            self.response_lens[where],
            self.token_ids[tokens],
            self.action_mask[actions],
            self.rewards[where],
            {name: column[actions] for name, column in self.columns.items()},
            [self.finish_reasons[i] for i in indices] if self.finish_reasons else [],
        )


def joined(parts: Sequence[Experience]) -> Experience:
    """Lay experience without columns end to end."""
    fields = ("prompt_lens", "response_lens", "token_ids", "action_mask", "rewards")
    return Experience(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))


def _within(offsets: NDArray[np.int64], where: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions offsets[i] .. offsets[i + 1] - 1 for each i of `where`."""
    lengths = offsets[where + 1] - offsets[where]
    ends = np.cumsum(lengths)
    return np.repeat(offsets[where] - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def packed(sequences: Sequence[Any], rewards: Sequence[float]) -> Experience:
    """Pack sequences, each with prompt_ids, response_ids and action_mask, and their rewards, into one Experience."""
    parts = [part for one in sequences for part in (one.prompt_ids, one.response_ids)]
    return Experience(
        np.array([len(part) for part in parts[::2]], dtype=np.int32),
        np.array([len(part) for part in parts[1::2]], dtype=np.int32),
        np.concatenate([np.zeros(0), *parts], dtype=np.int32, casting="unsafe"),
        np.concatenate([np.zeros(0), *(one.action_mask for one in sequences)], dtype=np.bool_, casting="unsafe"),
        np.array(rewards, dtype=np.float32),
    )


def pack(trajectories: list[Trajectory], rewards: list[float]) -> Experience:
    """Pack trajectories and their rewards, which have the same order, into one Experience."""
    found, logprobs = packed(trajectories, rewards), (t.rollout_logprobs for t in trajectories)
    found.columns["rollout_logprobs"] = np.concatenate([np.zeros(0), *logprobs]).astype(np.float32)
    found.finish_reasons = [t.finish_reason for t in trajectories]
    return found
