"""Hands groups to engines one at a time; each response comes back by itself, as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from slurm_rlhf.records import EngineLoad, Prompt, Sampling
from slurm_rlhf.sampling.dispatch import Answered, allowance, nobody
from slurm_rlhf.wire.calls import EngineCalls, GenerateAnswer, GenerateBatch, PackedPrompts, PromptTokens
from slurm_rlhf.wire.handles import EngineHandle

Arrived = Callable[[int, "Future[GenerateAnswer]"], None]
"""Gets the engine and its answer, on a thread of the control plane."""


@dataclass(slots=True)
class EngineFeed:
    """Knows how many responses each engine owes, and gives the next group to the one that owes least.

    An answer has one response, so a finished group is known at once and does not wait for a longer one.
    """

    rollout: EngineHandle
    run_seed: int
    max_num_seqs: int  # sequences an engine works on at once
    answered: Answered = nobody
    stream: int = field(default=0, init=False)  # number of the calls' stream; `Dispatcher` counts its own from 1
    loads: dict[int, EngineLoad] = field(default_factory=dict, init=False)
    _owed: dict[int, int] = field(default_factory=dict, init=False)

    def free(self, samples: int) -> int | None:
        """Return the engine that may take a group of `samples` responses; None: all engines have enough to do.

        An engine may owe its width and a reserve, so that it has work until an answer has come and the next group has
        arrived.
        """
        if not self.rollout.ready:
            return None
        engine = min(self.rollout.ready, key=lambda index: self._owed.get(index, 0))
        owed, most = self._owed.get(engine, 0), allowance(samples, 1, self.max_num_seqs)
        return engine if not owed or owed + samples <= most else None

    def ask(self, engine: int, place: int, prompt: Prompt, sampling: Sampling, version: int, arrived: Arrived) -> None:
        """Ask an engine for the responses to a prompt, each with a call of its own; `version` seeds them."""
        self._owed[engine] = self._owed.get(engine, 0) + sampling.n
        asked = PackedPrompts.pack([PromptTokens(place, prompt.index, prompt.token_ids)])
        none = PackedPrompts.pack([])
        for part in range(sampling.n):
            batch = GenerateBatch(none if part else asked, sampling, self.run_seed, version, self.stream, 1)
            call = self.rollout.call(engine, EngineCalls.generate, batch)
            call.add_done_callback(lambda call, engine=engine: arrived(engine, call))  # type: ignore[misc]

    def took(self, engine: int, answer: GenerateAnswer) -> None:
        """Note an answer of an engine."""
        self._owed[engine] = max(0, self._owed.get(engine, 0) - len(answer.found))
        self.loads.setdefault(engine, EngineLoad()).add(answer.load)
        self.answered(len(answer.found), answer.load.tokens)

    def lost(self, engine: int) -> None:
        """Forget the responses that a lost engine owes."""
        self._owed.pop(engine, None)

    def take_loads(self) -> dict[int, EngineLoad]:
        """Return the work of engines since the last call; an engine that answered nothing is not among them."""
        taken, self.loads = self.loads, {}
        return taken

    def forget(self) -> None:
        """Let the engines drop the responses that they still owe."""
        for engine in (engine for engine, owed in self._owed.items() if owed):
            self.rollout.call(engine, EngineCalls.drop)
        self.stream -= 1
        self._owed = {}
