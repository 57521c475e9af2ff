"""Which groups are begun and which make up a batch, in simulated runs where groups finish in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rlhf.sampling.batches import GroupState, choose, deadline, first_passing, on_policy_room, room


class Run:
    """Engines and a trainer without clocks: `data` says who finishes when, and when the trainer goes on."""

    def __init__(self, size: int, batch: int, last: int, ahead: int, data: st.DataObject, drops: bool = False) -> None:
        self.size, self.batch, self.last, self.ahead, self.data, self.drops = size, batch, last, ahead, data, drops
        self.version, self.step, self.next = 0, 1, 0
        self.waiting: list[tuple[int, GroupState]] = []
        self.trained: list[tuple[int, int]] = []  # place, step
        self.oldest = 0
        self.most_stale = 0  # groups of a batch that an older policy began

    def begin(self) -> None:
        while room(len(self.waiting), self.version, self.step, self.size, self.batch, self.last, self.ahead) > 0:
            if choose([row[1] for row in self.waiting], self.step, self.size, self.batch) is not None:
                return
            self.waiting.append((self.next, GroupState(self.version)))
            self.next += 1

    def finish(self, straggler: bool) -> None:
        """One group ends: any of them, or any but the one begun first if it straggles."""
        open_ = [row for row in self.waiting if not row[1].finished]
        row = self.data.draw(st.sampled_from(open_[1:] if straggler and len(open_) > 1 else open_))
        if self.drops and self.data.draw(st.booleans()):
            self.waiting.remove(row)
        else:
            row[1].finished = True

    def train(self) -> None:
        """Take a batch, and let others be begun and finish before the engines get the new weights."""
        while (chosen := choose([row[1] for row in self.waiting], self.step, self.size, self.batch)) is None:
            assert any(not row[1].finished for row in self.waiting), "nobody could ever end this wait"
            self.finish(straggler=False)
            self.begin()
        rows = [self.waiting[index] for index in chosen]
        assert chosen == sorted(chosen)
        assert len(rows) == self.batch
        assert all(row[1].finished for row in rows)
        ages = [self.step - 1 - row[1].version for row in rows]
        self.oldest = max([self.oldest, *ages])
        self.most_stale = max(self.most_stale, sum(age > 0 for age in ages))
        self.trained += [(row[0], self.step) for row in rows]
        self.waiting = [row for row in self.waiting if row not in rows]
        self.step += 1
        self.some_finish()
        self.version += 1  # the sync

    def some_finish(self) -> None:
        self.begin()
        for _ in range(self.data.draw(st.integers(0, 2 * self.batch))):
            if all(row[1].finished for row in self.waiting):
                return
            self.finish(straggler=True)
            self.begin()


@pytest.mark.parametrize("drops", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 12), st.data())
def test_no_group_is_older_than_the_bound_and_each_is_trained_on_once(
    drops: bool, size: int, batch: int, ahead: int, data: st.DataObject
) -> None:
    """No more than once where groups are dropped."""
    run = Run(size, batch, 12, ahead, data, drops)
    for _ in range(run.last):
        run.begin()
        run.train()
    assert run.oldest <= size
    assert run.most_stale <= ahead
    places = [place for place, _ in run.trained]
    assert len({*places}) == len(places)
    if not drops:
        assert sorted(places) == list(range(run.last * batch))
        assert run.waiting == []  # nothing is begun that no step is left for


def test_a_straggler_goes_into_a_later_batch_until_its_deadline() -> None:
    """The bound is 2: a group begun under version 0 may be trained on in step 3 at the latest."""
    assert deadline(0, 2) == 3
    groups = [GroupState(0), *(GroupState(0, finished=True) for _ in range(5))]
    assert choose(groups, 1, 2, 2) == [1, 2]
    assert choose([groups[0], *groups[3:]], 2, 2, 2) == [1, 2]
    assert choose([groups[0], groups[5], GroupState(1, finished=True)], 3, 2, 2) is None  # now the batch waits for it
    groups[0].finished = True
    assert choose([groups[0], groups[5], GroupState(1, finished=True)], 3, 2, 2) == [0, 1]


def test_a_batch_leaves_room_for_those_that_the_next_steps_must_take() -> None:
    """Three of one deadline, of which the next step can take two, so one must be in this batch."""
    must = [GroupState(0), GroupState(0), GroupState(0)]
    assert choose([*must, GroupState(1, finished=True), GroupState(1, finished=True)], 2, 2, 2) is None
    must[2].finished = True
    assert choose([*must, GroupState(1, finished=True), GroupState(1, finished=True)], 2, 2, 2) == [2, 3]


@pytest.mark.parametrize(
    ("version", "step", "groups", "ahead", "expected"),
    [
        (0, 1, 0, 9, 8),  # before a batch is taken: size + 1 batches
        (0, 2, 0, 9, 4),  # the first is in training: size batches
        (1, 2, 4, 9, 4),
        (4, 5, 0, 9, 4),  # the last step
        (3, 5, 4, 9, 0),
        (0, 1, 0, 2, 6),  # a share: the batch, and half a one beyond it
        (0, 2, 2, 2, 0),  # in training: what is beyond it
        (1, 2, 2, 2, 4),  # the policy is there: the rest of the batch, and again half a one
        (0, 2, 0, 0, 0),
    ],
)
def test_room(version: int, step: int, groups: int, ahead: int, expected: int) -> None:
    assert room(groups, version, step, 1, 4, 5, ahead) == expected


def test_a_group_that_is_dropped_makes_room_at_once() -> None:
    assert on_policy_room(0, 0, 0, batch=4, at_once=4, most=40) == 4
    assert on_policy_room(0, 3, 4, batch=4, at_once=4, most=40) == 1
    assert on_policy_room(2, 1, 7, batch=4, at_once=6, most=40) == 3
    assert on_policy_room(4, 2, 9, batch=4, at_once=9, most=40) == 0  # enough: nothing more is begun
    assert on_policy_room(0, 1, 39, batch=4, at_once=4, most=40) == 1


def test_the_first_that_pass_in_the_order_of_the_prompts() -> None:
    assert first_passing([True, False, True, None], 2) == [0, 2]
    assert first_passing([None, True, True], 2) is None  # short responses are no reason
    assert first_passing([True, False], 2) is None
    assert first_passing([], 1) is None
