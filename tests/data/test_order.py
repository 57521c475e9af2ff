"""The order of prompts and its resume."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.data.order import KEYS, PromptOrder
from slurm_rlhf.errors import CheckpointError, DataError


def rest(order: PromptOrder) -> list[list[int]]:
    batches = []
    while (batch := order.next()) is not None:
        batches.append(batch)
    return batches


SIZES = st.integers(1, 40).flatmap(lambda prompts: st.tuples(st.just(prompts), st.integers(1, prompts)))


@given(SIZES, st.integers(1, 3), st.integers(0, 2**32 - 1), st.data())
def test_every_episode_is_a_permutation_and_resumes_anywhere(
    sizes: tuple[int, int], episodes: int, seed: int, data: st.DataObject
) -> None:
    prompts, batch_size = sizes
    order = PromptOrder(prompts, batch_size, episodes, seed, shuffle=data.draw(st.booleans()))
    whole = rest(order)
    assert len(whole) == order.total == prompts // batch_size * episodes
    for episode in range(episodes):
        batches = whole[episode * order.batches_per_episode : (episode + 1) * order.batches_per_episode]
        seen = [position for batch in batches for position in batch]
        assert len(set(seen)) == len(seen) == prompts // batch_size * batch_size
        assert set(seen) <= set(range(prompts))

    stop = data.draw(st.integers(0, len(whole)))
    first, second = replace(order), replace(order)
    for _ in range(stop):
        first.next()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.episode == stop // order.batches_per_episode
    assert rest(second) == whole[stop:]


def test_shuffle_depends_on_seed_and_episode() -> None:
    def episodes(seed: int) -> list[list[int]]:
        return rest(PromptOrder(50, 50, 2, seed))

    first, second = episodes(1)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert episodes(1) == [first, second]
    assert episodes(2)[0] != first
    assert rest(PromptOrder(5, 2, 2, 1, shuffle=False)) == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    "change", [{"prompts": 9}, {"batch_size": 3}, {"seed": 2}, {"shuffle": False}, {"fingerprint": "y"}]
)
def test_other_data_does_not_resume(change: dict[str, object]) -> None:
    order = PromptOrder(10, 2, 1, seed=1, fingerprint="x")
    order.next()
    name, value = next(iter(change.items()))
    with pytest.raises(CheckpointError) as caught:
        replace(order, **change).load_state_dict(order.state_dict())
    told = str(caught.value)
    if name == "fingerprint":
        assert told.startswith("the rows of data.prompt_dataset, or their tokens ")
    else:
        assert told.startswith(f"{KEYS[name]} is {value!r} and was {getattr(order, name)!r} when the checkpoint was")
    assert "restore it, or start a new run in another --run_dir" in told
    replace(order, episodes=5).check(order.state_dict())


def test_more_episodes_may_be_asked_for_on_resume() -> None:
    order = PromptOrder(4, 2, 1, seed=1)
    rest(order)
    longer = replace(order, episodes=2)
    longer.load_state_dict(order.state_dict())
    assert rest(longer) == rest(replace(order, episodes=2))[2:]


def test_prompts_must_fill_a_batch() -> None:
    with pytest.raises(DataError, match=r"holds 4 usable prompts, fewer than rollout\.batch_size = 5: lower it"):
        PromptOrder(4, 5, 1, seed=1)


@given(SIZES, st.data())
def test_places_that_are_given_back_come_first_and_none_is_lost(sizes: tuple[int, int], data: st.DataObject) -> None:
    prompts, batch_size = sizes
    order = PromptOrder(prompts, batch_size, 2, 7)
    end, used = order.total * batch_size, []
    while order.left:
        taken = order.take(data.draw(st.integers(1, 2 * batch_size)))
        kept = data.draw(st.integers(1, len(taken)))
        back = Random(data.draw(st.integers(0, 2**32 - 1))).sample(taken, len(taken) - kept)
        resumed = replace(order)
        resumed.load_state_dict(json.loads(json.dumps(order.state_dict(back))))
        order.give_back(back)
        assert (resumed.place, resumed.again) == (order.place, order.again)
        used += [place for place in taken if place not in back]
        assert order.left == end - len(used)
    assert sorted(used) == list(range(end))
    assert order.take(1) == []
    assert order.next() is None


def test_a_place_is_the_prompt_that_whole_batches_have_there() -> None:
    order = PromptOrder(11, 3, 2, 5)
    whole = rest(replace(order))
    assert [[order.position(3 * batch + at) for at in range(3)] for batch in range(order.total)] == whole
    assert [order.episode_of(place) for place in (0, 8, 9, 17)] == [0, 0, 1, 1]


def test_states_say_no_more_than_those_of_whole_batches_where_that_is_all() -> None:
    order = PromptOrder(10, 2, 1, 1)
    assert order.take(4) == [0, 1, 2, 3]
    plain = order.state_dict()
    assert (plain["taken"], "place" in plain, "again" in plain) == (2, False, False)
    assert order.state_dict([2, 3]) == plain | {"taken": 1}  # nothing between them and the next: they are the next
    assert order.state_dict([1, 2]) == plain | {"taken": 1, "place": 4, "again": [1, 2]}
    order.load_state_dict(order.state_dict([1, 2]))
    assert order.take(3) == [1, 2, 4]
    order.load_state_dict(plain)  # as an earlier version wrote it
    assert order.take(1) == [4]
