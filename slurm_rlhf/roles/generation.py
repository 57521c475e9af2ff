"""Handing prompts to engines as they free up, and collecting what they sample."""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.control.handles import RoleHandle
from slurm_rlhf.observe.engine_load import EngineLoad
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.roles.portions import allowance, portion


@dataclass(slots=True)
class Generation:
    """Generates with all engines of the rollout role.

    Prompts travel in small portions. Each engine holds enough of them to stay busy and gets the next when one comes
    back, so a slow engine takes fewer prompts. With `deterministic`, prompt i goes to engine i modulo their
    number, all at once: the batch composition inside an engine, and with it the last bit of its log-probs, then no
    longer depends on timing.
    """

    rollout: RoleHandle
    run_seed: int
    max_num_seqs: int  # sequences an engine works on at once
    deterministic: bool
    loads: dict[int, EngineLoad] = field(default_factory=dict, init=False)  # engine -> what it did in the last `run`

    def run(self, prompts: list[Prompt], sampling: Sampling, version: int) -> list[Trajectory]:
        """`sampling.n` trajectories per prompt, ordered by (position in `prompts`, sample)."""
        self.loads = {engine: EngineLoad() for engine in range(self.rollout.world)}
        answers = (
            self._fixed(prompts, sampling, version) if self.deterministic else self._stream(prompts, sampling, version)
        )
        trajectories: list[Trajectory] = []
        for position in range(len(prompts)):
            trajectories += sorted(answers[position], key=lambda t: t.sample)
        return trajectories

    def _fixed(self, prompts: list[Prompt], sampling: Sampling, version: int) -> dict[int, list[Trajectory]]:
        engines = min(self.rollout.world, len(prompts))
        calls = [
            self._call(engine, list(range(engine, len(prompts), engines)), prompts, sampling, version)
            for engine in range(engines)
        ]
        answers: dict[int, list[Trajectory]] = {}
        for engine, call in enumerate(calls):
            answers.update(self._take(engine, call.result()))
        return answers

    def _stream(self, prompts: list[Prompt], sampling: Sampling, version: int) -> dict[int, list[Trajectory]]:
        engines = self.rollout.world
        width = max(1, self.max_num_seqs // sampling.n)
        left = deque(range(len(prompts)))
        held = [0] * engines
        pending: dict[Future[Any], tuple[int, int]] = {}  # call -> engine, how many prompts
        answers: dict[int, list[Trajectory]] = {}

        def feed(engine: int) -> bool:
            """Hand out one portion, if the engine may hold it."""
            if not left or held[engine] >= allowance(len(left), engines, width):
                return False
            count = min(portion(len(left), engines, width), len(left))
            call = self._call(engine, [left.popleft() for _ in range(count)], prompts, sampling, version)
            pending[call] = (engine, count)
            held[engine] += count
            return True

        while sum(feed(engine) for engine in range(engines)):
            pass  # in turn, so that all engines begin with as much
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for call in done:
                engine, count = pending.pop(call)
                held[engine] -= count
                answers.update(self._take(engine, call.result()))
                while feed(engine):
                    pass  # several small portions may fit where a large one was
        return answers

    def _call(
        self, engine: int, positions: list[int], prompts: list[Prompt], sampling: Sampling, version: int
    ) -> Future[Any]:
        chosen = [[i, prompts[i].index, prompts[i].token_ids] for i in positions]
        return self.rollout.call(
            engine, "generate", prompts=chosen, sampling=sampling.to_wire(), run_seed=self.run_seed, version=version
        )

    def _take(self, engine: int, answer: dict[str, Any]) -> dict[int, list[Trajectory]]:
        """Position -> trajectories of a call's answer."""
        self.loads[engine].add(EngineLoad.from_wire(answer["load"]))
        return {position: [Trajectory.from_wire(t) for t in wires] for position, wires in answer["found"]}
