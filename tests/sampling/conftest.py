"""End the loops of episodes that the tests of this folder leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from waiting import HANG_S

from slurm_rlhf.sampling.episodes import Episodes


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the loops of all episodes that a test has made."""
    made: list[Episodes] = []
    begin = Episodes.__init__

    def noted(self: Episodes, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(Episodes, "__init__", noted)
    yield
    for episodes in made:
        episodes.close()
        episodes._thread.join(HANG_S)
