"""Requests to an engine: one response each, its seed, what has been sampled for it, and its text."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slurm_rlhf.records import I32, Sampling, Trajectory, VersionSpan

if TYPE_CHECKING:
    from slurm_rlhf.rollout._vllm import StopWatcher

# Enough to show the decoder that it is not at the start of a text, in every tokenizer of vLLM's own detokenizer.
CONTEXT_TOKENS = 5


@dataclass(slots=True)
class GenerateRequest:
    """One response to be sampled: n samples of a prompt are n requests, each with a seed of its own."""

    key: str  # unique among the requests that an engine has at one time
    prompt: int  # Prompt.index
    sample: int  # 0 .. n-1
    prompt_ids: I32  # [P], at least one token
    sampling: Sampling  # without `n`, which is not used here
    seed: int  # of `request_seed`


@dataclass(slots=True)
class ActiveRequest:
    """A request that an engine has taken, and what it has sampled for it so far."""

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

    def finish(self, finish_reason: str, text: str, engine: int) -> Trajectory:
        """Return the finished response. Every token of it was the policy's choice."""
        return Trajectory(
            prompt=self.request.prompt,
            sample=self.request.sample,
            prompt_ids=np.asarray(self.request.prompt_ids, dtype=np.int32),
            response_ids=np.array(self.tokens, dtype=np.int32),
            rollout_logprobs=np.array(self.logprobs, dtype=np.float32),
            action_mask=np.ones(len(self.tokens), dtype=np.bool_),
            finish_reason=finish_reason,
            text=text,
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


def response_text(tokenizer: Any, prompt_ids: list[int], response_ids: list[int], skip_special_tokens: bool) -> str:
    """Decode `response_ids` as what follows the prompt.

    Decoded alone, a response would lose its first space with tokenizers that write it at the start of every word
    (SentencePiece). So it is the text with the prompt's last tokens, without the text of these.
    """
    context = prompt_ids[-CONTEXT_TOKENS:]
    before, whole = tokenizer.decode(
        [context, context + response_ids],
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    if whole.startswith(before):
        return str(whole[len(before) :])
    return str(tokenizer.decode(response_ids, skip_special_tokens=skip_special_tokens))
