"""The rows of an evaluation: all data sets one behind the other, as one job answers them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.controller.evaluation import EvalSet, source_of
from slurm_rlhf.evaluation.responses import ScoredResponse, answer_of
from slurm_rlhf.records import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EvalRows:
    """Numbers the prompts of several data sets, from 0; the number is that of the row in the job's output."""

    sets: list[EvalSet]

    def __len__(self) -> int:
        return sum(len(one.prompts) for one in self.sets)

    def prompts(self) -> list[Prompt]:
        """Return all prompts, with the numbers of their rows."""
        found = [prompt for one in self.sets for prompt in one.prompts]
        return [replace(prompt, index=row) for row, prompt in enumerate(found)]

    def sampling(self, config: Config) -> dict[int, Sampling]:
        """Say how the responses to each row are sampled."""
        each = [how for one in self.sets for how in [one.sampling(config)] * len(one.prompts)]
        return dict(enumerate(each))

    def responses(self, lines: Iterable[dict[str, Any]]) -> list[list[ScoredResponse]]:
        """Make the scored responses of each data set of the lines of the output."""
        places = [(number, prompt) for number, one in enumerate(self.sets) for prompt in one.prompts]
        found: list[list[ScoredResponse]] = [[] for _ in self.sets]
        for line in lines:
            number, prompt = places[line["row"]]
            found[number].append(_scored(self.sets[number], prompt, line))
        return [sorted(each, key=lambda one: (one.index, one.sample)) for each in found]


def _scored(one: EvalSet, prompt: Prompt, line: dict[str, Any]) -> ScoredResponse:
    """Read a line; a row without a response, or without a score, has a score of 0 and says why."""
    response, score, error = line.get("response"), line.get("score"), line.get("error", "")
    return ScoredResponse(
        dataset=one.settings.name,
        index=prompt.index,
        sample=line["sample"],
        source=source_of(one.settings, prompt),
        prompt=prompt.text,
        response=response or "",
        label=prompt.label,
        answer=None if response is None else answer_of(response, one.settings.answer_pattern),
        score=0.0 if score is None else score,
        reward=0.0 if score is None else score,
        prompt_tokens=len(prompt.token_ids),
        response_tokens=line.get("tokens") or 0,
        finish_reason=line.get("finish_reason") or "",
        engine=line.get("engine") or 0,
        error=error,
    )
