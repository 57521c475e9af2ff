"""GSM8K's reward: 1 if the last number of the response is the answer, 0 if not."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward_func(responses: list[str], labels: list[str], finish_reasons: list[str]) -> dict[str, object]:
    """A response that was cut off has no answer, whatever number it ends with."""
    right = [
        float(reason != "length" and answer(response) == answer(label))
        for response, label, reason in zip(responses, labels, finish_reasons, strict=True)
    ]
    has_number = [float(answer(response) is not None) for response in responses]
    return {"rewards": right, "scores": right, "extra_logs": {"has_number": has_number}}


def answer(text: str) -> float | None:
    """Return the last number in `text`, after `####` if that is there; None: it has none."""
    numbers = NUMBER.findall(text.rpartition("####")[2])
    return float(numbers[-1].replace(",", "")) if numbers else None
