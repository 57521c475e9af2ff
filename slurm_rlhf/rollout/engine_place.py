"""Which part of which engine a rank of the rollout role is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Engine e of size `tp` consists of the rollout ranks e * tp .. e * tp + tp - 1, all of them on one node."""

    engine: int
    tp_rank: int  # 0: the leader, to whom alone the conductor talks
    tp: int
    node: str

    @classmethod
    def of(cls, rank: int, tp: int, node: str) -> EnginePlace:
        """The place of rollout rank `rank`."""
        return cls(rank // tp, rank % tp, tp, node)

    @property
    def followers(self) -> set[int]:
        """TP ranks of all but the leader."""
        return set(range(1, self.tp))

    def rank(self, tp_rank: int) -> int:
        """The rollout rank that has TP rank `tp_rank` of this engine."""
        return self.engine * self.tp + tp_rank

    def __str__(self) -> str:
        ranks = f"{self.rank(0)} to {self.rank(self.tp - 1)}" if self.tp > 1 else str(self.rank(0))
        return f"engine {self.engine} (rollout rank{'s' if self.tp > 1 else ''} {ranks} on {self.node})"
