"""Reports the progress of a job: a line now and then, and the contents of summary.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.generate.output import OutputCounts
from slurm_rlhf.observe.progress import duration
from slurm_rlhf.placement.rank_map import TpGroup
from slurm_rlhf.records import EngineLoad

LINE_S = 10.0
_SHOWN = 8  # most engines in a line


@dataclass(slots=True)
class JobProgress:
    """Counts the work of this start of a job."""

    total: int  # number of responses of all rows of this job
    groups: dict[int, TpGroup]
    began: float  # time of the start, by the clock that all calls use
    before: int = 0  # number of responses that earlier starts have written
    refused: int = 0  # number of error lines of bad rows, written by this start
    loads: dict[int, EngineLoad] = field(default_factory=dict)
    since: float | None = None  # time when the first engine was ready
    _last: float = 0.0

    def works(self, now: float) -> None:
        """Note that an engine is ready."""
        self.since = self.since or now

    def took(self, engine: int, load: EngineLoad) -> None:
        """Add the work of an engine since its last answer."""
        self.loads.setdefault(engine, EngineLoad()).add(load)

    def due(self, now: float) -> bool:
        """Tell whether a line is due; then the next one is due `LINE_S` later."""
        if now - self._last < LINE_S:
            return False
        self._last = now
        return True

    def left_s(self, done: int, now: float) -> float | None:
        """Estimate the seconds until the end by the speed of this start so far; None: not known yet."""
        new = done - self.before - self.refused
        if self.since is None or new <= 0 or now <= self.since:
            return None
        return (self.total - done) * (now - self.since) / new

    def line(self, counts: OutputCounts, ready: int, now: float) -> str:
        """Write `120 of 500 responses (24 %), 2 engines, 830 tokens/s (0: 410, 1: 420), 3 min left`."""
        done = len(counts.done)
        parts = [f"{done} of {self.total} responses ({done / max(self.total, 1):.0%})".replace("%", " %")]
        parts.append(f"{ready} of {len(self.groups)} engines")
        rates = {engine: load.tokens_per_s for engine, load in sorted(self.loads.items())}
        if rates:
            shown = ", ".join(f"{engine}: {rate:.0f}" for engine, rate in list(rates.items())[:_SHOWN])
            more = ", ..." if len(rates) > _SHOWN else ""
            parts.append(f"{sum(rates.values()):.0f} tokens/s ({shown}{more})")
        if counts.errors:
            parts.append(f"{counts.errors} errors")
        left = self.left_s(done, now)
        if left is not None and done < self.total:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def summary(
        self, status: str, counts: OutputCounts, lost: dict[int, str], now: float, **more: Any
    ) -> dict[str, Any]:
        """Return summary.json for the job so far; figures of engines cover this start only."""
        engines = [
            {
                "engine": engine,
                "node": group.node,
                "gpus": list(group.gpus),
                "tokens": self.loads.get(engine, EngineLoad()).tokens,
                "responses": self.loads.get(engine, EngineLoad()).responses,
                "tokens_per_s": round(self.loads.get(engine, EngineLoad()).tokens_per_s, 1),
                "lost": lost.get(engine, ""),
            }
            for engine, group in sorted(self.groups.items())
        ]
        tokens = sum(load.tokens for load in self.loads.values())
        return {
            "status": status,
            "responses": len(counts.done),
            "total_responses": self.total,
            "before": self.before,
            "errors": counts.errors,
            "tokens": counts.tokens,
            "finish_reasons": dict(counts.finish_reasons),
            "score": counts.score_sum / counts.scored if counts.scored else None,
            "wall_s": round(now - self.began, 3),
            "tokens_per_s": round(tokens / max(now - (self.since or self.began), 1e-9), 1) if tokens else 0.0,
            "engines": engines,
            **more,
        }
