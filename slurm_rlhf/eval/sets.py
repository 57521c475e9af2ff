"""Evaluates a run: reads the data sets, samples with the engines, scores, and keeps the results.

Sampling may overlap the actor's training (eval.overlap): it begins when the engines have finished the batch of the next
step and ends before they get that step's weights. So the engines would be idle otherwise, training's batches are
sampled as if there was no evaluation, and the weights are those of the step that is evaluated. Where engines share the
actor's GPUs, or sample for training all the time (inflight), there is no such time, and training waits meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slurm_rlhf.config.evaluation import MEAN, EvalSettings, data_sets
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import DataError
from slurm_rlhf.eval.report import DataSetReport, ScoredResponse, one_line, overall, report_of
from slurm_rlhf.eval.verdicts import warnings as share_warnings
from slurm_rlhf.polling import in_thread
from slurm_rlhf.records import Prompt, Sampling, Trajectory
from slurm_rlhf.rewards.scored import Scoring
from slurm_rlhf.run_directory import write_atomically

Sample = Callable[[list[Prompt], Sampling, int], list[Trajectory]]
"""Samples responses with the weights of a policy version, ordered by (position of the prompt, sample)."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Holds the settings and the prompts of a data set."""

    settings: EvalSettings
    prompts: PromptSet

    @classmethod
    def read(cls, settings: EvalSettings, tokenizer: Tokenizer, config: Config) -> EvalSet:
        """Read a data set. Raises DataError as `PromptSet.load`, and for a column that is missing."""
        longest = config.data.max_len - config.rollout.max_new_tokens
        found = PromptSet.load(settings.path, tokenizer, settings.reading(config.data), longest, settings.max_samples)
        wanted = [("source_key", settings.source_key)] if settings.source_key else []
        wanted += [("label_key", settings.label_key)] if settings.needs_label else []
        for key, column in wanted:
            for prompt in found:
                if column not in prompt.row:
                    raise DataError(
                        f"{settings.path}: row {prompt.index} has no column {column!r} (columns: "
                        f"{', '.join(prompt.row) or 'none'}): fix the row, or set {key} of the data set "
                        f"{settings.name!r} to a column that every row has"
                    )
        return cls(settings, found)

    def sampling(self, config: Config) -> Sampling:
        """Say how its responses are sampled."""
        return Sampling(
            n=self.settings.n_samples_per_prompt,
            temperature=self.settings.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            stop=list(config.rollout.stop),
        )


def read_eval_sets(config: Config, tokenizer: Tokenizer) -> list[EvalSet]:
    """Read all data sets of the configuration; empty: there is nothing to evaluate. Raises as `EvalSet.read`."""
    return [EvalSet.read(settings, tokenizer, config) for settings in data_sets(config)]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Holds the results of one evaluation."""

    reports: list[DataSetReport]

    @property
    def mean(self) -> float:
        """Return the mean score, averaged over the data sets."""
        return overall(self.reports)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step's line: `eval`, and eval/NAME/... for each data set."""
        return {MEAN: self.mean} | {name: value for report in self.reports for name, value in report.metrics().items()}

    def __str__(self) -> str:
        return one_line(self.reports)


@dataclass(slots=True)
class Evaluation:
    """Evaluates, on all data sets, the policy that the engines have."""

    config: Config
    sets: list[EvalSet]
    directory: Path  # takes a file of responses and one of figures for each evaluation
    sample: Sample
    reward: Scoring
    overlapping: Sample | None = None  # samples while the main thread trains; None: not possible, or off
    _begun: Future[list[list[Trajectory]]] | None = field(default=None, init=False)

    def run(self, step: int, version: int) -> Evaluated:
        """Evaluate policy `version`, which `step` steps have trained, while nothing else uses the engines."""
        return self._judge(step, self._sample(self.sample, version))

    def begin(self, version: int) -> None:
        """Start to sample during the training; the engines keep policy `version` until `finish`."""
        assert self.overlapping is not None
        self._begun = in_thread(partial(self._sample, self.overlapping, version), "evaluation")

    def finish(self, step: int) -> Evaluated:
        """Wait for the responses that `begin` has asked for, and score them; the engines' calls have the time-outs."""
        assert self._begun is not None
        begun, self._begun = self._begun, None
        return self._judge(step, begun.result())

    def _sample(self, sample: Sample, version: int) -> list[list[Trajectory]]:
        """Sample the responses to each data set; sets with equal sampling go to the engines together."""
        found: list[list[Trajectory]] = [[] for _ in self.sets]
        left = list(range(len(self.sets)))
        while left:
            how = self.sets[left[0]].sampling(self.config)
            alike = [place for place in left if self.sets[place].sampling(self.config) == how]
            left = [place for place in left if place not in alike]
            responses = sample(numbered([self.sets[place] for place in alike]), how, version)
            for place in alike:
                count = len(self.sets[place].prompts) * how.n
                found[place], responses = responses[:count], responses[count:]
        return found

    def _judge(self, step: int, sampled: Sequence[Sequence[Trajectory]]) -> Evaluated:
        scored = [score(one, list(found), self.reward, step) for one, found in zip(self.sets, sampled, strict=True)]
        return keep(self.config, self.sets, scored, self.directory, f"step_{step:06d}", {"step": step})


def numbered(sets: Sequence[EvalSet]) -> list[Prompt]:
    """Return the prompts of data sets that go to the engines together, with indexes that are unique over all of them.

    Rows of two files may have the same number, and engines know a request, and its seed, by the number of its prompt.
    """
    found: list[Prompt] = []
    behind = 0
    for one in sets:
        found += [replace(prompt, index=behind + prompt.index) for prompt in one.prompts]
        behind += 1 + max(prompt.index for prompt in one.prompts)
    return found


def score(one: EvalSet, found: list[Trajectory], reward: Scoring, step: int) -> list[ScoredResponse]:
    """Score the responses to one data set, which are in (prompt, sample) order. Raises as `Scoring`."""
    owners = [prompt for prompt in one.prompts for _ in range(one.settings.n_samples_per_prompt)]
    rewards = reward(owners, found, step)
    scores = rewards.rewards if rewards.scores is None else rewards.scores
    return [
        scored_response(
            one.settings,
            prompt,
            {
                "sample": response.sample,
                "prompt": response.began,
                "response": response.text,
                "score": float(scores[place]),
                "reward": float(rewards.rewards[place]),
                "prompt_tokens": len(response.prompt_ids),
                "tokens": len(response.response_ids),
                "finish_reason": response.finish_reason,
                "engine": response.engine,
            },
        )
        for place, (prompt, response) in enumerate(zip(owners, found, strict=True))
    ]


def scored_response(settings: EvalSettings, prompt: Prompt, line: Mapping[str, Any]) -> ScoredResponse:
    """Read a line as `slurm-rlhf generate` writes it; without a response or a score the score is 0.

    `error` has the reason then.
    """
    response, score = line.get("response"), line.get("score") or 0.0
    return ScoredResponse(
        dataset=settings.name,
        index=prompt.index,
        sample=line["sample"],
        source=str(prompt.row.get(settings.source_key, "")) if settings.source_key else "",
        prompt=line.get("prompt") or prompt.text,
        response=response or "",
        label=prompt.label,
        answer=None if response is None else answer_of(response, settings.answer_pattern),
        score=score,
        reward=line.get("reward", score),
        prompt_tokens=line.get("prompt_tokens") or len(prompt.token_ids),
        response_tokens=line.get("tokens") or 0,
        finish_reason=line.get("finish_reason") or "",
        engine=line.get("engine") or 0,
        error=line.get("error", ""),
    )


def answer_of(response: str, pattern: str) -> str | None:
    """Find the answer that a response gives, to compare it with others.

    The last match of the regular expression `pattern`, its group if it has one; None where it matches nowhere. Without
    a pattern the whole response. Blanks around it do not count.
    """
    if not pattern:
        return response.strip()
    found = list(re.finditer(pattern, response, re.DOTALL))
    if not found:
        return None
    last = found[-1]
    return (last.group(1) if last.re.groups else last.group()).strip()


def write_responses(path: Path, responses: Iterable[ScoredResponse]) -> None:
    """Replace `path` by one JSON object a line, in one step. Raises OSError, and leaves an earlier file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # One line at a time: the text of a whole evaluation may be larger than the memory that is left.
    lines = (json.dumps(asdict(response), ensure_ascii=False) + "\n" for response in responses)
    write_atomically(path, lines, errors="replace")


def keep(
    config: Config,
    sets: Sequence[EvalSet],
    scored: Sequence[Sequence[ScoredResponse]],
    directory: Path,
    name: str,
    about: dict[str, Any],
) -> Evaluated:
    """Write `name`.jsonl with all responses and `name`.json with all figures, and `about` before them.

    Raises OSError; the files of an earlier evaluation by that name are whole then.
    """
    reports = [report_of(one.settings, found, config.train.seed) for one, found in zip(sets, scored, strict=True)]
    write_responses(directory / f"{name}.jsonl", (response for found in scored for response in found))
    figures = {**about, MEAN: overall(reports), "datasets": [asdict(report) for report in reports]}
    text = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    # A label may hold half a surrogate pair, which no file can.
    write_atomically(directory / f"{name}.json", text.encode("utf-8", "replace").decode())
    return Evaluated(reports)


def answered(evaluation: list[EvalSet]) -> list[str]:
    """Warn of data sets whose prompts hold their answers; the self-check does so for training prompts."""
    shares = {one.settings.name: one.prompts.answered / len(one.prompts) for one in evaluation}
    return [
        f"evaluation {name}: {message}"
        for name, share in shares.items()
        for message in share_warnings({"prompts_answered": share}, ("prompts_answered",))
    ]
