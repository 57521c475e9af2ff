"""What an engine did while it had requests: measured by the rollout role, added up by the conductor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class EngineLoad:
    """Sums over a stretch of time; `kv_usage` is the highest value in it."""

    tokens: int = 0  # sampled
    responses: int = 0  # finished
    steps: int = 0
    busy_s: float = 0.0  # with at least one request
    queued_s: float = 0.0  # requests waiting for a place in the batch, times how long
    kv_usage: float = 0.0  # share of the KV cache that is taken, 0 to 1

    def add(self, other: EngineLoad) -> None:
        """The stretch that follows."""
        self.tokens += other.tokens
        self.responses += other.responses
        self.steps += other.steps
        self.busy_s += other.busy_s
        self.queued_s += other.queued_s
        self.kv_usage = max(self.kv_usage, other.kv_usage)

    @property
    def tokens_per_s(self) -> float:
        """While it had requests; 0 when it had none."""
        return self.tokens / self.busy_s if self.busy_s > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """tokens_per_s; busy_s; responses; running and waiting, mean requests in the batch and before it; kv_usage."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "busy_s": self.busy_s,
            "responses": float(self.responses),
            # A step samples one token of every request in the batch.
            "running": self.tokens / self.steps if self.steps else 0.0,
            "waiting": self.queued_s / self.busy_s if self.busy_s > 0 else 0.0,
            "kv_usage": self.kv_usage,
        }

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> EngineLoad:
        return cls(**wire)
