"""Sampling with a model of transformers: an engine that computes one batch of requests at a time.

`generate` of transformers prepares the model's inputs and cache; the tokens are chosen here. Each request draws from a
generator of its own, so its tokens depend neither on the rank that computes it nor on its batch. Seeds are those of
other engines; the tokens still differ from vLLM's, which on CPUs makes other random numbers from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TopKLogitsWarper, TopPLogitsWarper

from slurm_rlhf.data.tokenizer import CONTEXT_TOKENS, Tokenizer, end_tokens
from slurm_rlhf.engine._transformers import Texts, decoding_setup, go_on, prefilled, selects_rows
from slurm_rlhf.engine.engine import (
    SAMPLING,
    WAITING,
    ActiveRequest,
    Engine,
    GenerateRequest,
    Readiness,
    Shapes,
    Status,
    checked,
)
from slurm_rlhf.errors import RunError
from slurm_rlhf.records import I32, LENGTH, REPETITION, STOP, WEIGHTS, MemoryPart, ParameterSpec, Sampling, Trajectory

Note = Callable[[int, int | str], None]
"""Gets the number of the token that is being sampled, and how far it is: a layer's number, or a word as SAMPLING."""


class Policy(Protocol):
    """Declares what the engine needs of a policy in this process: its model, and parameters of its own, if any."""

    collective: bool  # every forward pass needs all ranks, so all must run equally many
    shapes: Shapes  # parameters that `Engine.load` fills

    @property
    def model(self) -> Any:
        """Return what takes the steps of `generate`: its output has `logits` [B, 1, V]."""

    def passes(self, layer: Callable[[int], None]) -> AbstractContextManager[None]:
        """Prepare for passes of the model inside the block; if they are collective, each layer calls `layer` first."""

    def release(self) -> int:
        """Free the memory of parameters of its own; return the bytes."""

    def allocate(self) -> None:
        """Allocate that memory again."""


class SampledRow:
    """Samples one response."""

    def __init__(self, request: GenerateRequest | None, device: torch.device) -> None:
        """`request` None: a dummy row, for a rank without requests that has to take part in a collective pass."""
        self.active = None if request is None else ActiveRequest(request)
        self.reason = "" if request is not None else STOP  # why it has ended
        self.generator = torch.Generator(device=device)
        if request is not None:
            self.generator.manual_seed(request.seed)

    def text(self, pad: int) -> I32:
        """Return prompt and response so far; a dummy row has one token, `pad`."""
        if self.active is None:
            return np.array([pad], dtype=np.int32)
        return np.concatenate([self.active.request.prompt_ids, np.array(self.active.tokens, dtype=np.int32)])

    def take(self, token: int, logprob: float, version: int, ends: set[int], tokenizer: Tokenizer) -> None:
        """Append a token of policy `version`, and find out whether the response ends with it.

        Reasons are checked in vLLM's order: an end token, a stop string, the length limit, a repetition.
        """
        assert self.active is not None
        sampling = self.active.request.sampling
        self.active.extend([token], [logprob], version)
        tokens = self.active.tokens
        if token in ends:
            self.reason = STOP
            return
        if sampling.stop and self._stopped(tokenizer):
            self.reason = STOP
        elif len(tokens) >= sampling.max_new_tokens:
            self.reason = LENGTH
        elif repeats(tokens, sampling):
            self.reason = REPETITION

    def _stopped(self, tokenizer: Tokenizer) -> bool:
        """Tell whether the last token has completed a stop string."""
        assert self.active is not None
        sampling, tokens = self.active.request.sampling, self.active.tokens
        longest, size = max(map(len, sampling.stop)), CONTEXT_TOKENS
        # A stop string that ends with the last token lies in the last few tokens; special tokens may have no text.
        while size < len(tokens):
            recent = tokenizer.decode(tokens[-size:])
            if len(recent) > 2 * longest:
                if not any(stop in recent for stop in sampling.stop):
                    return False
                break
            size *= 2
        text = tokenizer.response_text([int(token) for token in self.active.request.prompt_ids], tokens)
        return any(stop in text for stop in sampling.stop)


@dataclass(slots=True)
class SampledBatch:
    """Holds the rows that go through the model together."""

    rows: list[SampledRow]  # rows that the model still computes
    sampling: Sampling
    drops: bool  # rows that have ended are dropped, and equal prompts are computed once
    goes_on: bool = True  # a row of this rank is not finished
    texts: Texts | None = None  # None: keys and values are to be computed anew
    tokens: int = 0  # passes so far


class HfEngine(Engine):
    """Implements `Engine` with a model of transformers.

    Requests that come while a batch is sampled wait for the next one, as do those with another `sampling`. Where passes
    are collective, all ranks take equally many steps: a rank without requests takes part, and its status has one
    unfinished request until the last rank has finished, also after `drop`. All ranks get the same `sampling` then.
    """

    def __init__(
        self, policy: Policy, tokenizer: Tokenizer, device: torch.device, number: int, note: Note = lambda *_: None
    ) -> None:
        """Start asleep, without weights. `number` marks trajectories; `note` gets how far a step has come."""
        self._policy = policy
        self._tokenizer, self._ends = tokenizer, end_tokens(tokenizer)
        self._device = device
        self._number = number
        self._note = note
        self._version = 0
        self._ready = Readiness(number)
        self._ready.slept()
        self._queue: list[GenerateRequest] = []
        self._keys: set[str] = set()  # keys of all requests that were not returned
        self._batch: SampledBatch | None = None
        self._context = ExitStack()  # contexts that are left at the end of the batch
        self._sampled = 0

    @property
    def status(self) -> Status:
        unfinished = max(len(self._keys), int(self._batch is not None))
        return Status(self._version, unfinished, self._sampled, len(self._queue), 0.0, "")

    def add(self, request: GenerateRequest) -> None:
        if request.key in self._keys:
            raise RunError(f"engine {self._number}: request key {request.key!r} is in use")
        self._keys.add(request.key)
        self._queue.append(request)

    def step(self) -> list[Trajectory]:
        try:
            self._ready.check()
            return self._step()
        except Exception:
            self._forget()
            raise

    def drop(self) -> None:
        self._queue.clear()
        self._keys.clear()
        if self._batch is not None and self._policy.collective:
            self._batch.goes_on = False
        else:
            self._end()

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._ready.require(WEIGHTS)
        self._ready.updates(version)
        own = dict(self._policy.model.named_parameters())
        with torch.no_grad():
            for name, tensor in checked(weights, self._policy.shapes, version):
                if own[name].data_ptr() != tensor.data_ptr():  # else it is the trainer's own tensor, and new already
                    own[name].copy_(tensor)
        if self._batch is not None:
            self._batch.texts = None  # keys and values are the old policy's
        self._version = version
        self._ready.unusable = ""

    def describe(self) -> list[ParameterSpec]:
        own = dict(self._policy.model.named_parameters())
        dtypes = {name: str(own[name].dtype).removeprefix("torch.") for name in self._policy.shapes}
        return [ParameterSpec(name, list(shape), dtypes[name]) for name, shape in self._policy.shapes.items()]

    def sleep(self) -> int:
        self._forget()
        self._ready.slept()
        return self._policy.release()

    def wake(self, part: MemoryPart) -> None:
        self._ready.wakes(part)
        if part == WEIGHTS:
            self._policy.allocate()
        self._ready.missing.discard(part)

    def close(self) -> None:
        self._forget()

    def _step(self) -> list[Trajectory]:
        if self._batch is None:
            self._begin()
        batch = self._batch
        if batch is None:
            return []
        logits = self._prefill(batch) if batch.texts is None else batch.texts.step()
        batch.tokens += 1
        self._note(batch.tokens, SAMPLING if batch.goes_on else WAITING)
        finished = self._choose(batch, logits) if batch.goes_on else []
        self._note(batch.tokens, WAITING)
        if not go_on(self._policy.model, batch.goes_on, self._policy.collective, self._device):
            self._end()
        return finished

    def _begin(self) -> None:
        """Make a batch of the requests that have the first one's sampling, with any limit; or of a dummy row."""
        if self._queue:
            first = self._queue[0].sampling
            alike = [r for r in self._queue if replace(r.sampling, max_new_tokens=first.max_new_tokens) == first]
            rows = [SampledRow(request, self._device) for request in alike]
            sampling = replace(first, max_new_tokens=max(request.sampling.max_new_tokens for request in alike))
            taken = {request.key for request in alike}
            self._queue = [request for request in self._queue if request.key not in taken]
        elif self._policy.collective:
            rows, sampling = [SampledRow(None, self._device)], Sampling(max_new_tokens=1 << 20)
        else:
            return
        self._batch = batch = SampledBatch(rows, sampling, selects_rows(self._policy.model))
        self._context.enter_context(self._policy.passes(lambda layer: self._note(batch.tokens + 1, layer)))

    def _prefill(self, batch: SampledBatch) -> Tensor:
        """Compute whole texts, and return the logits after their last tokens, fp32 [B, V].

        Equal texts are computed once, if rows of the cache can be copied.
        """
        model, pad = self._policy.model, min(self._ends)
        texts, place = [row.text(pad) for row in batch.rows], None
        if batch.drops:
            texts, each = different_prompts(texts)
            place = torch.tensor(each, device=self._device)
        inputs = padded_left(texts, pad, self._device)
        batch.texts, logits = prefilled(model, inputs, batch.sampling.max_new_tokens, pad, place)
        if batch.tokens == 0:
            self._context.enter_context(decoding_setup(model))
        return logits

    def _choose(self, batch: SampledBatch, logits: Tensor) -> list[Trajectory]:
        """Take the next token of every row, given logits [B, V]; return the responses that have ended by it."""
        finished: list[Trajectory] = []
        logprobs = distribution(logits, batch.sampling)
        chosen = choose(logprobs, batch.rows, batch.sampling.temperature == 0)
        of_chosen = logprobs.gather(-1, chosen[:, None])
        for row, token, logprob in zip(batch.rows, chosen.tolist(), of_chosen[:, 0].tolist(), strict=True):
            if row.active is not None and not row.reason:
                self._sampled += 1
                row.take(token, logprob, self._version, self._ends, self._tokenizer)
                if row.reason:
                    self._keys.discard(row.active.request.key)
                    finished.append(row.active.finish(row.reason, self._tokenizer, self._number))
        kept = going_on([bool(row.reason) for row in batch.rows], batch.drops)
        assert batch.texts is not None
        batch.texts.append(chosen, kept)
        batch.rows = [batch.rows[row] for row in kept] or batch.rows
        batch.goes_on = bool(kept)
        return finished

    def _end(self) -> None:
        self._batch = None
        self._context.close()

    def _forget(self) -> None:
        self._queue.clear()
        self._keys.clear()
        self._end()


# --- rows of a batch --------------------------------------------------------------------------------------------------


def going_on(ended: Sequence[bool], drops: bool) -> list[int]:
    """Choose the rows to keep: none if all have ended, else all; with `drops` the unfinished ones, if a quarter ended.

    Dropping rows copies the keys and values of the others, which costs about as much as one token.
    """
    if all(ended):
        return []
    some = drops and 4 * sum(ended) >= len(ended)
    return [row for row, over in enumerate(ended) if not (some and over)]


def different_prompts(prompts: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct prompts, and the index among them of every prompt."""
    names = [np.asarray(prompt, dtype=np.int64).tobytes() for prompt in prompts]
    different = dict(zip(names, prompts, strict=True))
    places = {name: place for place, name in enumerate(different)}
    return list(different.values()), [places[name] for name in names]


def padded_left(prompts: Sequence[Any], pad: int, device: torch.device) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, int64 [B, P]: every prompt ends in the last column."""
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


# --- choosing tokens --------------------------------------------------------------------------------------------------


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probs of the next token, fp32 [B, V], of softmax(logits / temperature), cut by top-k, then top-p.

    Temperature 0 (greedy): those of softmax(logits), as in other engines.
    """
    scores = logits.float()
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
        if sampling.top_k > 0:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return torch.log_softmax(scores, dim=-1)


def choose(logprobs: Tensor, rows: Sequence[SampledRow], greedy: bool) -> Tensor:
    """Choose a token for each row that has not ended, int64 [B]; `logprobs` [B, V]. For the others it means nothing.

    With noise q from the exponential distribution, argmax(p / q) is a sample of p (the Gumbel-max trick).
    """
    if greedy:
        return logprobs.argmax(dim=-1)
    noise = torch.ones_like(logprobs)
    for row, out in zip(rows, noise, strict=True):
        if not row.reason:
            out.exponential_(generator=row.generator)
    return (logprobs.exp() / noise).argmax(dim=-1)


def repeats(tokens: Sequence[int], sampling: Sampling) -> bool:
    """Tell whether `tokens` end with a pattern that is repeated `sampling.min_count` times in a row."""
    for size in range(max(1, sampling.min_pattern_size), sampling.max_pattern_size + 1):
        length = size * sampling.min_count
        if length > len(tokens):
            return False
        tail = tokens[-length:]
        if tail[size:] == tail[:-size]:
            return True
    return False
