"""Handing prompts to engines as they free up, and collecting what they sample."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from slurm_rlhf.control.handles import EngineHandle
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.roles.engines import Engines

POLL_S = 0.2


@dataclass(slots=True)
class Generation:
    """Generates with all engines of the rollout role.

    Prompts travel in small chunks. Each engine holds enough of them to stay busy and gets the next chunk when one
    comes back, so a slow engine takes fewer prompts. With `deterministic`, prompt i goes to engine i modulo their
    number, all at once: the batch composition inside an engine, and with it the last bit of its log-probs, then no
    longer depends on timing.
    """

    rollout: EngineHandle
    run_seed: int
    max_num_seqs: int  # sequences an engine works on at once
    deterministic: bool
    engines: Engines | None = None  # who brings in engines that start late; None: all are ready

    def run(self, prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        """`sampling.n` trajectories per prompt, ordered by (position in `prompts`, sample)."""
        answers = (
            self._fixed(prompts, sampling, version) if self.deterministic else self._stream(prompts, sampling, version)
        )
        trajectories: list[Trajectory] = []
        for position in range(len(prompts)):
            trajectories += sorted(answers[position], key=lambda t: t.sample)
        return trajectories

    def _fixed(self, prompts: list[Prompt], sampling: Sampling, version: int) -> dict[int, list[Trajectory]]:
        ready = self.rollout.ready
        calls = [
            self._call(engine, list(range(place, len(prompts), len(ready))), prompts, sampling, version)
            for place, engine in enumerate(ready)
        ]
        answers: dict[int, list[Trajectory]] = {}
        for call in calls:
            answers.update(_by_position(call.result()))
        return answers

    def _stream(self, prompts: list[Prompt], sampling: Sampling, version: int) -> dict[int, list[Trajectory]]:
        # An eighth of an engine's width per chunk: little waits for a chunk's last sequence, few messages are sent.
        chunk = max(1, self.max_num_seqs // (8 * sampling.n))
        # A quarter more than the engine can run keeps its waiting queue filled until the next chunk arrives.
        depth = max(2, -(-5 * self.max_num_seqs // (4 * chunk * sampling.n)))
        left = deque(range(len(prompts)))
        pending: dict[Future[Any], int] = {}
        answers: dict[int, list[Trajectory]] = {}

        def feed(engine: int) -> None:
            positions = [left.popleft() for _ in range(min(chunk, len(left)))]
            if positions:
                pending[self._call(engine, positions, prompts, sampling, version)] = engine

        def fill(engines: list[int]) -> None:
            for _ in range(depth):
                for engine in engines:
                    feed(engine)

        fill(self.rollout.ready)
        while pending:
            done, _ = wait(pending, self._look_around(bool(left)), return_when=FIRST_COMPLETED)
            if left and self.engines is not None:
                fill(self.engines.admit(version))
            for call in done:
                engine = pending.pop(call)
                answers.update(_by_position(call.result()))
                feed(engine)
        return answers

    def _look_around(self, worthwhile: bool) -> float | None:
        """Seconds to wait for an answer before looking for engines that have become ready."""
        return POLL_S if worthwhile and self.engines is not None and self.engines.coming else None

    def _call(
        self, engine: int, positions: list[int], prompts: list[Prompt], sampling: Sampling, version: int
    ) -> Future[Any]:
        chosen = [[i, prompts[i].index, prompts[i].token_ids] for i in positions]
        return self.rollout.call(
            engine, "generate", prompts=chosen, sampling=sampling.to_wire(), run_seed=self.run_seed, version=version
        )


def _by_position(answer: list[Any]) -> dict[int, list[Trajectory]]:
    """A call's answer, [[position, [trajectory, ...]], ...], as a dictionary."""
    return {position: [Trajectory.from_wire(t) for t in wires] for position, wires in answer}
