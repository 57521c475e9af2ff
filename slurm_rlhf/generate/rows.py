"""Makes prompts of the rows of a job, hands them to engines, and makes the lines of the output from the answers.

Answers and losses of engines come to the one thread that leads the job.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeGuard

from slurm_rlhf.algorithms.registry import load_plugins
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import BadRow, prompts_of
from slurm_rlhf.data.rows import read_rows, require_column
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.engine.engine import request_seed
from slurm_rlhf.errors import CallTimeout, RemoteError, RewardError
from slurm_rlhf.generate.output import JobProgress, OutputLine
from slurm_rlhf.groups.engines import Engines
from slurm_rlhf.records import LOST, EngineLoad, Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.scored import Scoring
from slurm_rlhf.rewards.sources import close_source, reward_source
from slurm_rlhf.sampling.batches import GroupState, PromptGroup, allowance
from slurm_rlhf.sampling.environment import Environments
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.row_queue import RowQueue
from slurm_rlhf.sampling.scheduler import EngineWork, Scheduler
from slurm_rlhf.wire.handles import EngineHandle

log = logging.getLogger(__name__)


PromptsOf = Callable[[Sequence[int]], Iterable[Prompt | BadRow]]
"""Makes the prompts of rows, by their numbers; rows without one may come before others."""


def read_dataset(config: Config, model: Path) -> tuple[int, PromptsOf]:
    """Read generate.dataset: return how many rows it has, and what tokenizes them.

    Raises DataError if no row can be used, ModelError for a missing chat template.
    """
    dataset, data = Path(config.generate.dataset), config.data
    rows = list(read_rows(dataset, config.generate.max_samples, data))
    require_column(rows, data.input_key, dataset)
    tokenizer, longest = Tokenizer.load(model), data.max_len - config.rollout.max_new_tokens
    if data.apply_chat_template:
        tokenizer.chat([{"role": "user", "content": "2+2="}])
    return len(rows), lambda numbers: prompts_of(((n, *rows[n]) for n in numbers), tokenizer, data, longest)


@dataclass(slots=True)
class Scores:
    """Scores the responses that have come at the same time; without a reward function there are no scores."""

    scoring: Scoring | None
    proven: bool = False  # True: the function has scored a response

    @classmethod
    def of(cls, config: Config, printed: Path) -> Scores:
        """Load the function that the configuration names, if it names one. Raises ConfigError, RewardError."""
        load_plugins(config.train.plugins)
        reward = config.reward
        if not (config.env.path or reward.remote_url or reward.function or reward.preset or reward.sources):
            return cls(None)
        source = reward_source(config, printed, print)
        assert source is not None  # `check_generate` refuses a reward model
        return cls(Scoring(source, config.timeout.reward, printed, print))

    def close(self) -> None:
        """End the processes of the reward function."""
        close_source(self.scoring and self.scoring.source)

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory]) -> list[tuple[float | None, str]]:
        """Return the score of each response, or None and the error; `prompts[i]` is the prompt of `trajectories[i]`.

        The responses to one prompt stand together.

        After a failure each row is scored alone, to find the one that the function cannot score. Raises RewardError as
        long as the function has not scored any response.
        """
        if self.scoring is None or not trajectories:
            return [(None, "")] * len(trajectories)
        try:
            answer = self.scoring(prompts, trajectories, 0)
        except RewardError as error:
            pairs = zip(prompts, trajectories, strict=True)
            rows = [list(row) for _, row in itertools.groupby(pairs, key=lambda pair: pair[0].index)]
            if len(rows) > 1:
                return [score for row in rows for score in self([p for p, _ in row], [t for _, t in row])]
            if not self.proven:
                raise
            return [(None, str(error))] * len(trajectories)
        self.proven = True
        # The score is the quality by the task's own measure, if the function returns it.
        values = answer.rewards if answer.scores is None else answer.scores
        return [(float(value), "") if math.isfinite(value) else (None, f"score {value}") for value in values]


VERSION = 0
"""Version of the weights, which do not change; the seed of each request depends on it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Says that an engine has answered a row, or failed it."""

    engine: int
    row: int
    found: list[Trajectory]
    load: EngineLoad  # work of the engine since its last answer
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """Says that an engine is lost, and why."""

    engine: int
    why: str


class RowCalls(Scheduler):
    """Asks the engines that `RowQueue` has chosen; the rows that an engine fails go back to it.

    `ask` and `wait` are for the thread that leads the job; what the loop learns comes to it as news.
    """

    def __init__(
        self, handle: EngineHandle, engines: Engines, seed: int, width: int, environments: Environments | None = None
    ) -> None:
        super().__init__(handle, seed, width, urgent=True)
        self.handle, self.engines = handle, engines
        self.gone: dict[int, str] = {}
        """Engine that is lost -> why."""
        self._news: SimpleQueue[Answered | Gone | BaseException] = SimpleQueue()
        self._episodes = Episodes(self, environments=environments)
        self.close = self._episodes.close
        engines.tell = self._lost

    def _lost(self, text: str, kind: str, engine: int) -> None:
        log.error("%s", text)
        self._news.put(Gone(engine, self.engines.why(engine)))

    def ask_row(self, engine: int, prompt: Prompt, sampling: Sampling) -> None:
        """Have an engine sample the responses to a row; they come as news."""
        self.post(self._begin, engine, PromptGroup(prompt.index, prompt, GroupState(VERSION), sampling, VERSION))

    def wait(self, seconds: float) -> list[Answered | Gone]:
        """Wait for news, at most `seconds`, and return all there is; nothing follows on the `Gone` of an engine.

        Raises EpisodeError where environments have failed.
        """
        found: list[Answered | Gone | BaseException] = []
        try:
            found.append(self._news.get(timeout=seconds))
            while True:
                found.append(self._news.get_nowait())
        except Empty:
            return [each for each in found if self._counts(each)]

    def _counts(self, news: Answered | Gone | BaseException) -> TypeGuard[Answered | Gone]:
        """Keep `gone` up to date; return False for news that no longer matter."""
        if isinstance(news, BaseException):
            raise news
        if news.engine in self.gone:
            return False
        if isinstance(news, Gone):
            self.gone[news.engine] = news.why
            return True
        error = news.error
        return not (error and ": EngineBroken: " in str(error) and self.handle.goes_on_without(news.engine, error))

    # Called on the event loop.

    def advance(self) -> None:
        """Begin nothing: `ask_row` does."""

    def failed(self, error: BaseException) -> None:
        """Tell the thread that leads the job."""
        self._news.put(error)

    def _begin(self, engine: int, group: PromptGroup) -> None:
        self._episodes.attach(self)
        group.work = self._work(engine)
        self._episodes.begin(group, partial(self._end, engine))

    def _end(self, engine: int, group: PromptGroup, error: BaseException | None = None) -> None:
        load = self.loads.pop(engine, EngineLoad())
        self._news.put(Answered(engine, group.place, group.ordered(), load, error))

    def _failed(self, work: EngineWork, error: BaseException) -> None:
        work.lost = True
        del self._works[work.engine]
        for request in work.owed.values():
            request.answer.cancel()  # ends its episode: a row that is tried again has a new one
        for group in {request.group: None for request in work.owed.values()}:
            self._end(work.engine, group, error)


@dataclass(slots=True)
class PendingRows:
    """Knows the prompts that are left, and which of their samples are in the output already."""

    config: Config
    rows: InitVar[Iterable[Prompt | BadRow]]  # those that are not complete yet
    sampling: Mapping[int, Sampling]  # row -> its sampling
    scores: Scores
    written: Set[tuple[int, int]]  # (row, sample) of all lines of the output
    prompts: dict[int, Prompt] = field(default_factory=dict, init=False)  # row -> prompt
    bad: list[BadRow] = field(default_factory=list, init=False)
    queue: RowQueue = field(init=False)

    def __post_init__(self, rows: Iterable[Prompt | BadRow]) -> None:
        for row in rows:
            if isinstance(row, BadRow):
                self.bad.append(row)
            else:
                self.prompts[row.index] = row
        self.queue = RowQueue(deque(sorted(self.prompts)))

    def errors(self, row: int, text: str | None, why: object) -> list[OutputLine]:
        """Make the lines of a row that no engine answers."""
        return [OutputLine(row, sample, text, error=str(why)) for sample in self._missing(row)]

    def _missing(self, row: int) -> list[int]:
        return [sample for sample in range(self.sampling[row].n) if (row, sample) not in self.written]

    def feed(self, ask: Callable[[int, Prompt, Sampling], None], engine: int, engines: int, now: float) -> None:
        """Hand rows to one of `engines` as long as it has room: the rows that it works on at once, and a reserve."""
        n = max(how.n for how in self.sampling.values())
        most = max(1, allowance(self.queue.waiting * n, engines, self.config.vllm.max_num_seqs) // n)
        while self.queue.held(engine) < most and (row := self.queue.take(engine, now)) is not None:
            ask(engine, self.prompts[row], self.sampling[row])

    def take(self, calls: RowCalls, answered: Sequence[Answered], progress: JobProgress) -> list[OutputLine]:
        """Make the lines of the engines' answers, each line once. Raises RewardError."""
        now = time.monotonic()
        lines: list[OutputLine] = []
        found: list[Trajectory] = []
        for news in answered:
            progress.loads.setdefault(news.engine, EngineLoad()).add(news.load)
            if news.error is not None:
                lines += self._failed(calls, news, news.error)
            elif self.queue.finish(news.engine, news.row, now):
                found += [one for one in news.found if (one.prompt, one.sample) not in self.written]
        return lines + self._lines(found)

    def _failed(self, calls: RowCalls, news: Answered, error: BaseException) -> list[OutputLine]:
        """Let other engines try a row, or give it up; give up an engine that was silent for too long."""
        if isinstance(error, RemoteError):
            hopeless, broken = self.queue.fail(news.engine, news.row)
            if broken:
                calls.handle.give_up(news.engine, f"its calls fail one after the other, the last with: {error}")
            return self.errors(news.row, self.prompts[news.row].text, error) if hopeless else []
        if isinstance(error, CallTimeout):
            calls.handle.give_up(news.engine, f"{error} (timeout.generate)")
        return []  # the engine is gone: the news of that takes its rows back

    def _lines(self, found: list[Trajectory]) -> list[OutputLine]:
        found.sort(key=lambda trajectory: (trajectory.prompt, trajectory.sample))
        prompts = [self.prompts[trajectory.prompt] for trajectory in found]
        logprobs, lost = self.config.generate.logprobs, (None, "its environment failed: logs/reward.log")
        scored = zip(found, self.scores(prompts, found), strict=True)
        scores = [lost if one.finish_reason == LOST else score for one, score in scored]
        return [
            OutputLine(
                row=prompt.index,
                sample=trajectory.sample,
                prompt=trajectory.began or prompt.text,
                response=trajectory.text,
                finish_reason=trajectory.finish_reason,
                prompt_tokens=len(trajectory.prompt_ids),
                tokens=len(trajectory.response_ids),
                score=score,
                seed=request_seed(self.config.train.seed, prompt.index, trajectory.sample, VERSION),
                engine=trajectory.engine,
                error=error,
                token_ids=trajectory.response_ids.tolist() if logprobs else None,
                logprobs=trajectory.rollout_logprobs.tolist() if logprobs else None,
            )
            for prompt, trajectory, (score, error) in zip(prompts, found, scores, strict=True)
        ]
