"""The states of a unit, and the ways between them."""

from __future__ import annotations

import pytest

from slurm_rlhf.groups.restarts import Unit

ENGINE = Unit("rollout", ("n1",))


def test_a_lost_unit_takes_no_part_and_its_next_life_knows_nothing_of_the_loss_but_its_time() -> None:
    up = ENGINE.up(version=3)
    lost = up.lost("killed", 5.0, silent=True)
    again = lost.again(9.0, "n2")
    assert (up.state, up.version, up.gone) == ("up", 3, False)
    assert (lost.state, lost.version, lost.why, lost.silent, lost.gone) == ("lost", None, "killed", True, True)
    assert (again.state, again.life, again.node, again.began, again.lost_at) == ("starting", 1, "n2", 9.0, 5.0)
    assert not again.asked


@pytest.mark.parametrize("silent", [True, False])
def test_no_unit_comes_back_without_a_new_start_and_none_that_has_ended_comes_back(silent: bool) -> None:
    lost = ENGINE.lost("killed", 1.0, silent)
    with pytest.raises(ValueError, match="rollout on n1 cannot be up: it is lost"):
        lost.up()
    with pytest.raises(ValueError, match="cannot be lost: it is lost"):
        lost.lost("again", 2.0)
    with pytest.raises(ValueError, match="cannot be starting: it is up"):
        ENGINE.up().again(1.0, "n1")
    ended = lost.ended("no more")
    assert (ended.why, ended.gone) == ("no more", True)
    with pytest.raises(ValueError, match="cannot be starting: it is ended"):
        ended.again(2.0, "n1")
