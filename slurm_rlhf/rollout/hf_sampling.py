"""Choosing tokens from logits, one request at a time: distribution, random numbers, and what ends a response.

A request draws from a generator of its own, seeded as it would be in vLLM: which rank computes it, in which batch, has
no part in what it draws. The tokens are not vLLM's, which on CPUs makes other random numbers of the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slurm_rlhf.data.tokenizer import CONTEXT_TOKENS, Tokenizer
from slurm_rlhf.records import LENGTH, REPETITION, STOP, Sampling
from slurm_rlhf.rollout.engine import ActiveRequest, GenerateRequest


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probs of the next token, fp32 [B, V], of softmax(logits / temperature), cut by top-k, then top-p.

    Temperature 0 (greedy): those of softmax(logits), as in vLLM.
    """
    scores = logits.float()
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
        if 0 < sampling.top_k < scores.shape[-1]:
            least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if sampling.top_p < 1:
            scores = _nucleus(scores, sampling.top_p)
    return torch.log_softmax(scores, dim=-1)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep the fewest tokens whose probabilities add up to `top_p`. Source: Holtzman et al. (2020)."""
    ordered, order = scores.sort(dim=-1)
    below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    below[:, -1] = False  # the likeliest always stays
    return scores.masked_fill(below.scatter(-1, order, below), -torch.inf)


class Row:
    """A response in the making."""

    def __init__(self, request: GenerateRequest | None, device: torch.device) -> None:
        """`request` None: nobody's, which takes its place in a batch where every rank needs one."""
        self.active = None if request is None else ActiveRequest(request)
        self.reason = "" if request is not None else STOP  # why it has ended
        self._generator = torch.Generator(device=device)
        if request is not None:
            self._generator.manual_seed(request.seed)

    def noise(self, out: Tensor) -> None:
        """Fill `out` [V] with exponentially distributed numbers."""
        out.exponential_(generator=self._generator)

    def take(self, token: int, logprob: float, version: int, ends: frozenset[int], tokenizer: Tokenizer) -> None:
        """Append a token of policy `version`, and find out whether the response ends with it.

        The order is vLLM's: an end token, the limit of length, a repetition, and a stop string before the latter two.
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
        # Where the string ends with the last token, it lies in the last few; special tokens may have no text.
        while size < len(tokens):
            recent = tokenizer.decode(tokens[-size:])
            if len(recent) > 2 * longest:
                if not any(stop in recent for stop in sampling.stop):
                    return False
                break
            size *= 2
        text = tokenizer.response_text([int(token) for token in self.active.request.prompt_ids], tokens)
        return any(stop in text for stop in sampling.stop)


def choose(logprobs: Tensor, rows: Sequence[Row], greedy: bool) -> Tensor:
    """Choose a token for each row that has not ended, int64 [B]; `logprobs` [B, V]. For the others it means nothing.

    With noise q from the exponential distribution, argmax(p / q) is a sample of p (the Gumbel-max trick).
    """
    if greedy:
        return logprobs.argmax(dim=-1)
    noise = torch.ones_like(logprobs)
    for row, out in zip(rows, noise, strict=True):
        if not row.reason:
            row.noise(out)
    return (logprobs.exp() / noise).argmax(dim=-1)


def repeats(tokens: Sequence[int], sampling: Sampling) -> bool:
    """Tell whether `tokens` end with a pattern that stands there `sampling.min_count` times, one after the other."""
    for size in range(max(1, sampling.min_pattern_size), sampling.max_pattern_size + 1):
        length = size * sampling.min_count
        if length > len(tokens):
            return False
        tail = tokens[-length:]
        if tail[size:] == tail[:-size]:
            return True
    return False
