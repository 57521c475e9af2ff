"""Score code by the unit tests of its row, for reward.preset = code: each program runs in a sandbox."""

from __future__ import annotations

from collections.abc import Callable

from slurm_rlhf.errors import RewardError
from slurm_rlhf.rewards.items import Item
from slurm_rlhf.sandbox.box import chosen
from slurm_rlhf.sandbox.code_tests import Test, read_tests, share_passed

TESTS = "tests"
"""Column of the row that holds its tests; where there is none the label does."""


def code_score(sandbox: str) -> Callable[[Item], float]:
    """Find the kind of sandbox, and return what gives a response the share of its row's tests that it passes.

    Raises ConfigError where this node has no such sandbox. The function raises RewardError for a row without tests, and
    OSError where the sandbox does not start.
    """
    kind = chosen(sandbox)
    return lambda item: share_passed(item["response"], tests_of(item), kind)


def tests_of(item: Item) -> list[Test]:
    """Read the tests of an item's row. Raises RewardError."""
    value = item["row"].get(TESTS, item["label"])
    if value is None:
        raise RewardError(
            f"reward.preset = code: the row has neither a column {TESTS!r} nor a label (columns: "
            f"{', '.join(item['row'])}): bring its tests, or name their column in data.label_key"
        )
    return read_tests(value)
