"""Hands prompts to engines as they become free, and waits for all of their responses.

Pure functions choose how many responses an engine is asked for at once, may owe, and sends in one answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from slurm_rlhf.errors import RoleDied
from slurm_rlhf.groups.engine_pool import EnginePool
from slurm_rlhf.records import EngineLoad, Prompt, Sampling, Trajectory
from slurm_rlhf.wire.calls import EngineCalls, GenerateAnswer, GenerateBatch, PackedPrompts, PromptTokens
from slurm_rlhf.wire.handles import EngineHandle

Responses = dict[int, list[Trajectory]]
"""Position of a prompt -> its responses so far, in the order in which they were finished."""

POLL_S = 0.2

Answered = Callable[[int, int], None]
"""Gets how many responses have come, and how many tokens were sampled meanwhile; any thread may call it."""


def nobody(responses: int, tokens: int) -> None:
    """Ignore the answer."""


class Sampler(Protocol):
    """Samples responses, whoever computes them: `Dispatcher` with engines, `ActorSampler` with the actor's ranks."""

    run_seed: int
    loads: dict[int, EngineLoad]
    """Work of each engine (or rank of the actor) in the last `run`."""

    def run(
        self, prompts: list[Prompt], sampling: Sampling, version: int, round: int | None = None
    ) -> list[Trajectory]:
        """Sample `sampling.n` responses to each prompt, ordered by (position in `prompts`, sample).

        `version` of the policy seeds them, or `round` where one version samples several. Blocks; a stop may interrupt
        it, and drops everything. Calls have the deadline timeout.generate.
        """
        ...


@dataclass(slots=True)
class Dispatcher:
    """Implements `Sampler` with all engines of the rollout role.

    Prompts travel in small chunks. Each engine holds enough of them to stay busy and gets the next when one comes
    back, so a slow engine takes fewer prompts. With `deterministic`, prompt i goes to engine i modulo their
    number, all at once: the batch composition inside an engine, and with it the last bit of its log-probs, then no
    longer depends on timing.

    Responses that a lost engine has finished are kept; its other prompts go to other engines. The seeds are the
    requests' own, so the responses are the same.
    """

    rollout: EngineHandle
    run_seed: int
    max_num_seqs: int  # sequences an engine works on at once
    deterministic: bool
    pool: EnginePool | None = None  # admits engines that start late; None: all are ready, or others do so
    rescue: Callable[[], Sequence[int]] | None = None  # admits an engine if none is left, and returns it
    answered: Answered = nobody
    loads: dict[int, EngineLoad] = field(default_factory=dict, init=False)  # engine -> its work in the last `run`
    runs: int = field(default=0, init=False)  # number of runs so far

    def run(
        self, prompts: list[Prompt], sampling: Sampling, version: int, round: int | None = None
    ) -> list[Trajectory]:
        self.runs += 1
        round = version if round is None else round
        self.loads = {engine: EngineLoad() for engine in self.rollout.ready}
        found = self._fixed(prompts, sampling, round) if self.deterministic else self._stream(prompts, sampling, round)
        trajectories: list[Trajectory] = []
        for position in range(len(prompts)):
            trajectories += sorted(found[position], key=lambda t: t.sample)
        return trajectories

    def _fixed(self, prompts: list[Prompt], sampling: Sampling, version: int) -> Responses:
        """Cut the prompts into one part for each engine of the run, and give each engine its own.

        The part of a lost engine goes to one that has done its own. So an engine always works on a whole part, and the
        last bit of the log-probs does not depend on which engine it is.
        """
        width = min(self.rollout.world, len(prompts))
        parts = {place: list(range(place, len(prompts), width)) for place in range(width)}
        waiting, working = list(parts), dict[int, int]()  # parts; engine -> part
        pending: dict[Future[GenerateAnswer], int] = {}  # call -> engine
        found: Responses = {}
        while waiting or pending:
            if not pending:
                self._await_engine()
            for engine in [engine for engine in self.rollout.ready if engine not in working]:
                part = next((part for part in waiting if part == engine or part not in self.rollout.ready), None)
                if part is not None:
                    waiting.remove(part)
                    working[engine] = part
                    # The whole part, though some of it may be there: log-probs depend on the rest of a batch.
                    pending |= dict.fromkeys(self._ask(engine, parts[part], prompts, sampling, version), engine)
            done, _ = wait(pending, POLL_S if waiting else None, FIRST_COMPLETED)
            for call in done:
                if (engine := pending.pop(call, -1)) < 0:
                    continue  # another call has shown that its engine was lost
                if not self._take(engine, call, found):
                    waiting.append(working.pop(engine))
                    pending = {other: owner for other, owner in pending.items() if owner != engine}
                elif engine not in pending.values():
                    del working[engine]
        return found

    def _stream(self, prompts: list[Prompt], sampling: Sampling, version: int) -> Responses:
        width, n = self.max_num_seqs, sampling.n
        left = deque(range(len(prompts)))
        held = [0] * self.rollout.world  # responses that each engine owes
        given: dict[int, list[int]] = {}  # engine -> positions that it was given
        pending: dict[Future[GenerateAnswer], tuple[int, int]] = {}  # call -> engine, how many responses
        found: Responses = {}
        begun = set(self.rollout.ready)

        def feed(engine: int) -> bool:
            """Hand out one chunk, if the engine may hold it."""
            ready = len(self.rollout.ready)
            if not left or engine not in self.rollout.ready:
                return False
            count = min(max(1, chunk(len(left) * n, ready, width) // n), len(left))
            room = allowance(len(left) * n, ready, width) - held[engine]
            if self.rollout.world == 1 and len(left) * n <= room:
                count = len(left)  # there is no other engine: in one message, so that one batch begins with all of it
            if held[engine] and room < count * n:
                return False
            positions = [left.popleft() for _ in range(count)]
            given.setdefault(engine, []).extend(positions)
            for call, responses in self._ask(engine, positions, prompts, sampling, version).items():
                pending[call] = (engine, responses)
            held[engine] += count * n
            return True

        def fill(engines: list[int]) -> None:
            while sum(feed(engine) for engine in engines):
                pass  # one chunk at a time, so that all of them begin with equally many

        def lose(engine: int) -> None:
            """Take back the prompts that a lost engine has not finished."""
            left.extendleft(reversed(unfinished(given.pop(engine, []), found, n)))
            for call in [call for call, (owner, _) in pending.items() if owner == engine]:
                del pending[call]
            held[engine] = 0
            begun.discard(engine)
            fill(self.rollout.ready)

        while pending or left:
            if not pending:
                self._await_engine()
                fill(self.rollout.ready)
            done, _ = wait(pending, self._poll_s(bool(left)), return_when=FIRST_COMPLETED)
            if left and self.pool is not None:
                self.pool.admit(version)
            late = [engine for engine in self.rollout.ready if engine not in begun]
            begun.update(late)
            fill(late)
            for call in done:
                if call not in pending:
                    continue  # another call has shown that its engine was lost
                engine, count = pending.pop(call)
                if not self._take(engine, call, found):
                    lose(engine)
                    continue
                held[engine] -= count
                fill([engine])  # several small chunks may fit where a large one was
        return found

    def _await_engine(self) -> None:
        """Wait for an engine if all were lost. Raises RoleDied, and the error that has ended the run meanwhile."""
        while not self.rollout.ready:
            if self.rescue is None:
                raise RoleDied("no engine is left, and while the actor trains (eval.overlap) none can get its weights")
            if not self.rescue():
                time.sleep(POLL_S)

    def _poll_s(self, more: bool) -> float | None:
        """Choose how many seconds to wait for an answer before looking for engines that have become ready."""
        return POLL_S if more and self.pool is not None and self.pool.coming else None

    def _ask(
        self, engine: int, positions: list[int], prompts: list[Prompt], sampling: Sampling, version: int
    ) -> dict[Future[GenerateAnswer], int]:
        """Hand prompts to an engine; return the calls that bring the responses, and how many each brings.

        The first call has the prompts. The others have none: they exist to be answered, because one answer with all
        responses could be larger than a message may be, and would come only when the last response is finished.
        """
        asked = PackedPrompts.pack([PromptTokens(i, prompts[i].index, prompts[i].token_ids) for i in positions])
        longest = max(len(prompts[i].token_ids) for i in positions)
        most = max(1, self.max_num_seqs // _CHUNKS_PER_WIDTH)
        counts = [
            min(most, whole - begun)
            for whole in answer_sizes(len(positions) * sampling.n, longest, sampling.max_new_tokens)
            for begun in range(0, whole, most)
        ]
        none = PackedPrompts.pack([])
        calls = {}
        for part, count in enumerate(counts):
            batch = GenerateBatch(none if part else asked, sampling, self.run_seed, version, self.runs, count)
            calls[self.rollout.call(engine, EngineCalls.generate, batch)] = count
        return calls

    def _take(self, engine: int, call: Future[GenerateAnswer], found: Responses) -> bool:
        """Take the answer to a call; False: its engine is lost, and the run goes on without it."""
        error = call.exception()
        if error is not None and self.rollout.goes_on_without(engine, error):
            return False
        answer = call.result()
        self.loads.setdefault(engine, EngineLoad()).add(answer.load)
        self.answered(len(answer.found), answer.load.tokens)
        for position, trajectory in answer.found:
            known = found.setdefault(position, [])
            # A prompt whose engine was lost is sampled once more as a whole; responses that are there are kept.
            if trajectory.sample not in [other.sample for other in known]:
                known.append(trajectory)
        return True


def unfinished(positions: Sequence[int], found: Responses, samples: int) -> list[int]:
    """List the positions that have fewer than `samples` responses."""
    return [position for position in positions if len(found.get(position, ())) < samples]


# A slow engine must not hold prompts that others could have started: when the last prompt is handed out, every engine
# should hold only prompts that it works on. So the chunks, and the reserve that an engine holds beyond its width,
# shrink with the number of prompts that are left. Source: Polychronopoulos and Kuck, Guided Self-Scheduling (1987).

# An answer brings a chunk: smaller chunks show sooner that places are free.
_CHUNKS_PER_WIDTH = 8
# The reserve, a quarter of the width: one chunk that is finished but not answered, and one that travels.
_RESERVE = 4
# Reserve and chunk together are at most a sixth of an engine's share of what is left. So an engine that is up to six
# times slower than its peers has begun everything it holds when they take the last prompt.
_LAST_CHUNKS = 12


def chunk(left: int, engines: int, width: int) -> int:
    """Count the responses to hand to an engine at once, at least 1.

    left: responses that no engine was asked for; width: responses that an engine works on at once.
    """
    return max(1, min(width // _CHUNKS_PER_WIDTH, left // (_LAST_CHUNKS * engines)))


def allowance(left: int, engines: int, width: int) -> int:
    """Count the responses that an engine may owe: its width, and perhaps a reserve."""
    reserve = -(-width // _RESERVE)
    return width + (reserve if engines == 1 else min(reserve, left // (_LAST_CHUNKS * engines)))


# The header of a message is bounded (`codec.MAX_HEADER_BYTES`): this is an eighth of it.
_ANSWER_BYTES = 8 << 20
_ANSWER_RESPONSES = 8192  # each has four arrays, which may be frames: half of the frames a message may have
_TOKEN_BYTES = 17  # id, log-prob, mask, and eight bytes of text, twice the usual length
_RESPONSE_BYTES = 256  # without its tokens


def answer_sizes(responses: int, prompt_tokens: int, response_tokens: int) -> list[int]:
    """Split `responses` into answers that each fit into a message.

    prompt_tokens, response_tokens: largest lengths.
    """
    size = _RESPONSE_BYTES + 4 * prompt_tokens + _TOKEN_BYTES * response_tokens
    most = max(1, min(_ANSWER_RESPONSES, _ANSWER_BYTES // size))
    return [min(most, responses - begun) for begun in range(0, responses, most)]
