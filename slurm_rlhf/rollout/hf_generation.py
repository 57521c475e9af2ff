"""Sampling with transformers' `generate`: a batch of requests in, trajectories out, as from an engine of vLLM.

`generate` prepares what the model reads and keeps; every choice is made here, so that it is a request's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import Sampling, Trajectory
from slurm_rlhf.rollout._transformers import decoding, selects_rows
from slurm_rlhf.rollout.engine import GenerateRequest
from slurm_rlhf.rollout.hf_sampling import Row, choose, distribution

Told = Callable[[bool, bool], None]
"""Gets, before tokens are chosen and after it, whether they are chosen, and whether all responses have ended."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model's directory says of its tokens."""

    tokenizer: Tokenizer
    ends: frozenset[int]  # tokens that end a response, as vLLM reads them
    pad: int

    @classmethod
    def read(cls, path: str) -> Vocabulary:
        """Read the directory of a model."""
        from transformers import AutoConfig, GenerationConfig

        tokenizer = Tokenizer.load(path)
        if (Path(path) / "generation_config.json").is_file():
            named = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        else:
            named = getattr(AutoConfig.from_pretrained(path, local_files_only=True), "eos_token_id", None)
        ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}
        return cls(tokenizer, frozenset(ends), next(iter(sorted(ends)), 0))


@dataclass(slots=True)
class Batch:
    """The rows of one `generate`, which asks after each of the model's passes for their next tokens."""

    rows: list[Row]  # that the model still computes
    sampling: Sampling
    vocabulary: Vocabulary
    version: int
    told: Told
    dropped: Callable[[], bool]
    drops: bool  # rows that have ended
    tokens: int = 0  # of the longest row

    def choose(self, logits: Tensor) -> tuple[Tensor, list[int]]:
        """Take the next token of every row, given logits [B, V]; answer the tokens, and the rows to go on with."""
        self.tokens += 1
        self.told(False, False)
        logprobs = distribution(logits, self.sampling)
        chosen = choose(logprobs, self.rows, self.sampling.temperature == 0)
        of_chosen = logprobs.gather(-1, chosen[:, None])
        for row, token, logprob in zip(self.rows, chosen.tolist(), of_chosen[:, 0].tolist(), strict=True):
            if not row.reason:
                row.take(token, logprob, self.version, self.vocabulary.ends, self.vocabulary.tokenizer)
        kept = [] if self.dropped() else going_on([bool(row.reason) for row in self.rows], self.drops)
        self.told(True, not kept)
        self.rows = [self.rows[row] for row in kept] or self.rows
        return chosen, kept


def going_on(ended: Sequence[bool], drops: bool) -> list[int]:
    """Choose the rows that go on: none if all have ended; with `drops` those that have not, once a quarter has.

    To drop some costs about as much as a token of theirs: a copy of keys and values.
    """
    if all(ended):
        return []
    some = drops and 4 * sum(ended) >= len(ended)
    return [row for row, over in enumerate(ended) if not (some and over)]


@dataclass(frozen=True, slots=True)
class HfSampler:
    """Samples on one rank. Where `collective` every rank calls `sample` as often, with any number of requests."""

    vocabulary: Vocabulary
    device: torch.device
    number: int  # of the rank: trajectories are marked with it
    collective: bool
    told: Told
    dropped: Callable[[], bool]  # nobody waits for the responses any more

    def sample(self, model: Any, requests: Sequence[GenerateRequest], version: int) -> tuple[list[Trajectory], int]:
        """Sample a response to each request with `model`, of policy `version`; answer them and the steps it took.

        All requests have the same `sampling`. The responses are in their order; none at all if they were dropped.
        """
        if not requests and not self.collective:
            return [], 0
        rows = [Row(request, self.device) for request in requests] or [Row(None, self.device)]
        prompts = [request.prompt_ids for request in requests] or [np.array([self.vocabulary.pad])]
        sampling = requests[0].sampling if requests else Sampling(max_new_tokens=1 << 20)
        batch = Batch(rows, sampling, self.vocabulary, version, self.told, self.dropped, selects_rows(model))
        _generate(model, prompts, batch, self.collective, self.device)
        if not all(row.reason for row in rows):
            return [], batch.tokens
        found = [
            row.active.finish(row.reason, self.vocabulary.tokenizer, self.number)
            for row in rows
            if row.active is not None
        ]
        return found, batch.tokens


def _generate(model: Any, prompts: Sequence[Any], batch: Batch, collective: bool, device: torch.device) -> None:
    """Run `generate` until every row has ended and, where `collective`, every row of every rank.

    Each of several equal prompts is computed once, where rows can be taken from what the model keeps of them.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=batch.sampling.max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=batch.vocabulary.pad,
    )
    place = None
    if batch.drops:
        different, each = different_prompts(prompts)
        prompts, place = different, torch.tensor(each, device=device)
    model.generate(
        **padded_left(prompts, batch.vocabulary.pad, device),
        generation_config=settings,
        custom_generate=decoding(place, batch.choose, collective),
    )


def different_prompts(prompts: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return each of several equal prompts once, and for every prompt which of those it is."""
    names = [np.asarray(prompt, dtype=np.int64).tobytes() for prompt in prompts]
    different = dict(zip(names, prompts, strict=True))
    places = {name: place for place, name in enumerate(different)}
    return list(different.values()), [places[name] for name in names]


def padded_left(prompts: Sequence[Any], pad: int, device: torch.device) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, int64 [B, P]: every prompt ends in the last column."""
    width = max(len(prompt) for prompt in prompts)
    ids = np.full((len(prompts), width), pad, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return {
        name: torch.from_numpy(values).to(device) for name, values in (("input_ids", ids), ("attention_mask", mask))
    }
