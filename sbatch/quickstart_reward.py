"""The quickstart's reward: 1 for the right sum, 0 for any other text."""

from __future__ import annotations

from typing import Any


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> dict[str, list[float]]:
    """A query is a prompt with its response, a label the right answer; accuracy is the mean of `scores`."""
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    right = [float(answer == label) for answer, label in zip(answers, labels, strict=True)]
    return {"rewards": right, "scores": right}
