"""The states of a unit, and the ways between them."""

from __future__ import annotations

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
