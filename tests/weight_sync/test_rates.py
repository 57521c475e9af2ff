"""Updates between processes whose plan follows other rates from one update to the next, and from group to group."""

from __future__ import annotations

import pytest
from sync_fleet import Fleet

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("zero", [0, 3])
def test_members_change_to_what_rank_0_advises_and_every_byte_arrives(fleet: Fleet, zero: int) -> None:
    sender = fleet.sender(3, actors=2, zero=zero, nodes="abpqq", rates=[])
    assert sender.plan.layout.rates == ()
    sender.group.advise = lambda reports: (1e9, 1e8)
    fleet.update(sender, 1)
    assert [duty.copies for duty in sender.plan.streams[0].duties] == [2, 2]
    for version in (2, 3):
        fleet.update(sender, version)
        fast, slow = sender.plan.streams[0].duties
        assert sender.plan.layout.rates == (1e9, 1e8)
        assert (fast.weight > 5 * slow.weight) == (zero == 0)
        assert slow.copies == 1  # the other node gets it from an engine node


def test_the_next_group_begins_with_the_rates_of_the_last(fleet: Fleet) -> None:
    sender = fleet.sender(2, actors=2, nodes="abpq", rates=[2e9, 1e9])
    assert sender.plan.layout.rates == (2e9, 1e9)
    fleet.update(sender, 1)
