"""What the engines did in a step: as metrics, and in words where one is far below its peers."""

from __future__ import annotations

from slurm_rlhf.observe.engine_load import STEPS, EngineLoad, Stragglers


class EngineWatch:
    """`nodes[engine]`: where an engine runs."""

    def __init__(self, nodes: list[str]) -> None:
        self._nodes = nodes
        self._stragglers = Stragglers()

    def step(self, number: int, loads: dict[int, EngineLoad]) -> tuple[dict[str, float], list[str]]:
        """Metrics `perf/engine/<index>/<name>`, and what the user should be told; `loads` as of this step's rollout."""
        measured = {
            f"perf/engine/{engine}/{name}": value
            for engine, load in loads.items()
            for name, value in load.metrics().items()
        }
        rates = {engine: load.tokens_per_s for engine, load in loads.items()}
        fresh, back = self._stragglers.step(rates)
        notes = [
            f"step {number}: engine {engine} on {self._nodes[engine]} is far below its peers for {STEPS} steps: "
            f"{rates[engine]:.0f} tokens/s, the others' median is {peers:.0f} (perf/engine/{engine}/tokens_per_s). "
            f"Look at what else runs on {self._nodes[engine]}, and at where the engine's GPUs are: slurm-rlhf plan"
            for engine, peers in fresh.items()
        ]
        notes += [
            f"step {number}: engine {engine} on {self._nodes[engine]} is back among its peers, "
            f"{rates[engine]:.0f} tokens/s"
            for engine in back
        ]
        return measured, notes
