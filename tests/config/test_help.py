"""The schema documents itself."""

from __future__ import annotations

import pytest

from slurm_rlhf.config.key_text import help_text
from slurm_rlhf.config.keys import all_keys, documentation


def test_every_key_is_documented() -> None:
    missing = [name for name in all_keys() if not documentation().get(name)]
    assert missing == []


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_key_is_in_the_help(width: int) -> None:
    text = help_text(width=width)
    for name in all_keys():
        assert f"  --{name} " in text
    assert max(len(line) for line in text.splitlines()) <= max(width, 60)


def test_an_entry() -> None:
    lines = help_text(["algo"], width=100).splitlines()
    assert lines[0] == "algo.advantage:"
    [entry] = [line for line in lines if "algo.advantage.gamma" in line]
    assert entry.split() == ["--algo.advantage.gamma", "NUMBER", "Discount", "per", "token.", "[1.0]"]
    assert not [line for line in lines if "--train." in line]


def test_groups_come_with_their_docstring() -> None:
    assert "timeout: The one table of time-outs, in seconds." in help_text(["timeout"])
