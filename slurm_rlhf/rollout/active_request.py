"""A request between `add` and its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurm_rlhf.records import Trajectory, VersionSpan
from slurm_rlhf.rollout.request import GenerateRequest


@dataclass(slots=True)
class Flight:
    """What has been sampled for a request so far."""

    request: GenerateRequest
    stops: Any = None  # watches for stop strings, where the request has any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Append what one step of policy `version` sampled; a span ends where the policy changed."""
        self.tokens += tokens
        self.logprobs += logprobs
        end = len(self.tokens)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = end
        else:
            self.spans.append(VersionSpan(end - len(tokens), end, version))

    def land(self, finish_reason: str, text: str, engine: int) -> Trajectory:
        """The finished response. Every token was the policy's choice."""
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
