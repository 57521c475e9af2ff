"""Makes prompts of the rows of a job, hands them to engines, and makes the lines of the output from the answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slurm_rlhf.algorithms.registry import load_plugins
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import CHUNK, Row, encode_up_to, prompt_text, read_rows, require_column
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.engine.engine import request_seed
from slurm_rlhf.errors import CallTimeout, DataError, ModelError, RemoteError, RewardError
from slurm_rlhf.generate.output import JobProgress, OutputLine
from slurm_rlhf.generate.row_calls import VERSION, Answered, RowCalls
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.function import RewardFunction, Rewards
from slurm_rlhf.rewards.model import Scoring
from slurm_rlhf.sampling.group_rules import allowance
from slurm_rlhf.sampling.row_queue import RowQueue


@dataclass(frozen=True, slots=True)
class BadRow:
    """Says why a row has no prompt for an engine."""

    index: int
    why: str
    text: str | None = None


@dataclass(slots=True)
class PromptRows:
    """Tokenizes rows of the file when they are needed."""

    config: Config
    tokenizer: Tokenizer
    rows: list[Row]

    @classmethod
    def read(cls, config: Config, model: Path) -> PromptRows:
        """Read the file. Raises DataError if no row can be used, ModelError for a missing chat template."""
        dataset = Path(config.generate.dataset)
        rows = read_rows(dataset, config.generate.max_samples)
        require_column(rows, config.data.input_key, dataset)
        tokenizer = Tokenizer.load(model)
        if config.data.apply_chat_template:
            tokenizer.chat([{"role": "user", "content": "2+2="}])
        return cls(config, tokenizer, rows)

    def __len__(self) -> int:
        return len(self.rows)

    def prompts(self, numbers: Sequence[int]) -> Iterator[Prompt | BadRow]:
        """Yield the prompts of rows, in the order of `numbers`."""
        for begin in range(0, len(numbers), CHUNK):
            yield from self._chunk(numbers[begin : begin + CHUNK])

    def _chunk(self, numbers: Sequence[int]) -> list[Prompt | BadRow]:
        texts = {number: self._text(number) for number in numbers}
        good = {number: text for number, text in texts.items() if isinstance(text, str)}
        data, longest = self.config.data, self.config.data.max_len - self.config.rollout.max_new_tokens
        encoded = encode_up_to([*good.values()], self.tokenizer, data, longest)
        ids = dict(zip(good, encoded, strict=True))
        return [
            text if isinstance(text, BadRow) else self._prompt(number, text, ids[number], longest)
            for number, text in texts.items()
        ]

    def _text(self, number: int) -> str | BadRow:
        row, where = self.rows[number], f"row {number}"
        if isinstance(row, DataError):
            return BadRow(number, str(row))
        try:
            return prompt_text(row, where, self.tokenizer, self.config.data)
        except (DataError, ModelError) as error:
            return BadRow(number, str(error))

    def _prompt(self, number: int, text: str, ids: list[int] | str, longest: int) -> Prompt | BadRow:
        if isinstance(ids, str):
            return BadRow(number, f"row {number}: {ids}", text)
        if len(ids) > longest:
            return BadRow(
                number,
                f"row {number}: the prompt is longer than {longest} tokens, and with rollout.max_new_tokens = "
                f"{self.config.rollout.max_new_tokens} it does not fit into data.max_len = {self.config.data.max_len}",
                text,
            )
        row = self.rows[number]
        assert not isinstance(row, DataError)
        return Prompt(number, text, np.asarray(ids, dtype=np.int32), row.get(self.config.data.label_key), row)


@dataclass(slots=True)
class Scores:
    """Scores the responses that have come at the same time; without a reward function there are no scores."""

    scoring: Scoring | None
    proven: bool = False  # True: the function has scored a response

    @classmethod
    def of(cls, config: Config, printed: Path) -> Scores:
        """Load the function that the configuration names, if it names one. Raises ConfigError, RewardError."""
        load_plugins(config.train.plugins)
        if not config.reward.remote_url and not config.reward.function:
            return cls(None)
        return cls(Scoring(RewardFunction.of(config.reward), config.timeout.reward, printed))

    def __call__(self, prompts: list[Prompt], trajectories: list[Trajectory]) -> list[tuple[float | None, str]]:
        """Return the score of each response, or None and the error; `prompts[i]` is the prompt of `trajectories[i]`.

        After a failure each row is scored alone, to find the one that the function cannot score. Raises RewardError as
        long as the function has not scored any response.
        """
        if self.scoring is None or not trajectories:
            return [(None, "")] * len(trajectories)
        try:
            return self._score(prompts, trajectories)
        except RewardError as error:
            if len({prompt.index for prompt in prompts}) == 1:
                if not self.proven:
                    raise
                return [(None, str(error))] * len(trajectories)
        found: list[tuple[float | None, str]] = [(None, "")] * len(trajectories)
        for row in dict.fromkeys(prompt.index for prompt in prompts):
            places = [place for place, prompt in enumerate(prompts) if prompt.index == row]
            alone = self([prompts[place] for place in places], [trajectories[place] for place in places])
            for place, score in zip(places, alone, strict=True):
                found[place] = score
        return found

    def _score(self, prompts: list[Prompt], trajectories: list[Trajectory]) -> list[tuple[float | None, str]]:
        assert self.scoring is not None
        answer: Rewards = self.scoring(prompts, trajectories, 0)
        self.proven = True
        # The score is the quality by the task's own measure, if the function returns it.
        values = answer.rewards if answer.scores is None else answer.scores
        return [(float(value), "") if math.isfinite(value) else (None, f"score {value}") for value in values]


@dataclass(slots=True)
class PendingRows:
    """Knows the prompts that are left, and which of their samples are in the output already."""

    prompts: dict[int, Prompt]  # row -> prompt
    bad: list[BadRow]
    sampling: Sampling
    seed: int
    width: int  # number of sequences that an engine works on at once
    scores: Scores
    logprobs: bool
    written: set[tuple[int, int]]  # (row, sample)
    own: Mapping[int, Sampling] = field(default_factory=dict)  # row -> its sampling, if that is not `sampling`
    queue: RowQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = RowQueue.of(sorted(self.prompts))

    @classmethod
    def of(cls, rows: Iterable[Prompt | BadRow], **settings: object) -> PendingRows:
        """Sort the rows that are not complete yet into prompts and bad rows."""
        prompts, bad = {}, []
        for row in rows:
            if isinstance(row, BadRow):
                bad.append(row)
            else:
                prompts[row.index] = row
        return cls(prompts, bad, **settings)  # type: ignore[arg-type]

    def refuse_bad_rows(self) -> list[OutputLine]:
        """Make the lines of the bad rows, which no engine gets."""
        return [line for row in self.bad for line in self._errors(row.index, row.text, row.why)]

    def _errors(self, row: int, text: str | None, why: str) -> list[OutputLine]:
        return [OutputLine(row, sample, text, error=why) for sample in self._missing(row)]

    def _missing(self, row: int) -> list[int]:
        return [sample for sample in range(self._how(row).n) if (row, sample) not in self.written]

    def _how(self, row: int) -> Sampling:
        return self.own.get(row, self.sampling)

    def feed(self, ask: Callable[[int, Prompt, Sampling], None], engine: int, engines: int, now: float) -> None:
        """Hand rows to one of `engines` as long as it has room: the rows that it works on at once, and a reserve."""
        n = max((how.n for how in self.own.values()), default=self.sampling.n)
        most = max(1, allowance(self.queue.waiting * n, engines, self.width) // n)
        while self.queue.held(engine) < most and (row := self.queue.take(engine, now)) is not None:
            ask(engine, self.prompts[row], self._how(row))

    def take(self, calls: RowCalls, answered: Sequence[Answered], progress: JobProgress) -> list[OutputLine]:
        """Make the lines of the engines' answers, each line once. Raises RewardError."""
        now = time.monotonic()
        lines: list[OutputLine] = []
        found: list[Trajectory] = []
        for news in answered:
            progress.took(news.engine, news.load)
            if news.error is not None:
                lines += self._failed(calls, news, news.error)
            elif self.queue.finish(news.engine, news.row, now):
                found += [one for one in news.found if (one.prompt, one.sample) not in self.written]
        lines += self._lines(found)
        self.written.update((line.row, line.sample) for line in lines)
        for row in {line.row for line in lines}:
            if not self._missing(row):
                self.prompts.pop(row, None)
        return lines

    def _failed(self, calls: RowCalls, news: Answered, error: BaseException) -> list[OutputLine]:
        """Let other engines try a row, or give it up; give up an engine that was silent for too long."""
        if isinstance(error, RemoteError):
            hopeless, broken = self.queue.fail(news.engine, news.row)
            if broken:
                calls.handle.give_up(news.engine, f"its calls fail one after the other, the last with: {error}")
            return self._errors(news.row, self.prompts[news.row].text, str(error)) if hopeless else []
        if isinstance(error, CallTimeout):
            calls.handle.give_up(news.engine, f"{error} (timeout.generate)")
        return []  # the engine is gone: the news of that takes its rows back

    def _lines(self, found: list[Trajectory]) -> list[OutputLine]:
        found.sort(key=lambda trajectory: (trajectory.prompt, trajectory.sample))
        prompts = [self.prompts[trajectory.prompt] for trajectory in found]
        scores = self.scores(prompts, found)
        return [
            self._line(prompt, trajectory, *score)
            for prompt, trajectory, score in zip(prompts, found, scores, strict=True)
        ]

    def _line(self, prompt: Prompt, trajectory: Trajectory, score: float | None, error: str) -> OutputLine:
        return OutputLine(
            row=prompt.index,
            sample=trajectory.sample,
            prompt=prompt.text,
            response=trajectory.text,
            finish_reason=trajectory.finish_reason,
            prompt_tokens=len(trajectory.prompt_ids),
            tokens=len(trajectory.response_ids),
            score=score,
            seed=request_seed(self.seed, prompt.index, trajectory.sample, VERSION),
            engine=trajectory.engine,
            error=error,
            token_ids=trajectory.response_ids.tolist() if self.logprobs else None,
            logprobs=trajectory.rollout_logprobs.tolist() if self.logprobs else None,
        )
