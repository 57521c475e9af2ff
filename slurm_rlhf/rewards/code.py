"""Score code by the unit tests of its row, for reward.preset = code: each program runs in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rlhf.errors import RewardError
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.sandbox.box import chosen
from slurm_rlhf.sandbox.code_tests import Test, read_tests, share_passed

TESTS = "tests"
"""Column of the row that holds its tests; where there is none the label does."""


class CodeReward:
    """Gives the share of its row's tests that a response passes."""

    def __init__(self, sandbox: str) -> None:
        """Find the kind of sandbox. Raises ConfigError where the node has none."""
        self._kind = chosen(sandbox)

    def about(self) -> tuple[str, bool]:
        """Return its name in messages, and whether a reward may be None."""
        return "reward.preset = code", False

    def answer(self, items: Sequence[Item], step: int) -> dict[str, list[float]]:
        """Return rewards and scores. Raises RewardError for a row without tests, OSError where the sandbox fails."""
        found = [share_passed(item["response"], tests_of(item), self._kind) for item in items]
        return {"rewards": found, "scores": found}


def tests_of(item: Item) -> list[Test]:
    """Read the tests of an item's row. Raises RewardError."""
    value = item["row"].get(TESTS, item["label"])
    if value is None:
        raise RewardError(
            f"reward.preset = code: the row has neither a column {TESTS!r} nor a label (columns: "
            f"{', '.join(item['row'])}): bring its tests, or name their column in data.label_key"
        )
    return read_tests(value)
