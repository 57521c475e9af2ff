"""Decide in which order prompts are visited: a function of the seed, with a position that checkpoints store.

A *place* counts the prompts of all episodes, from 0, in the order in which they are visited. Which prompt is at a place
is a function of the seed, so a checkpoint stores places only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slurm_rlhf.errors import CheckpointError, DataError


class OrderKeys(NamedTuple):
    """Name the configuration keys that determine an order, and the key of the run's directory, for error messages."""

    dataset: str = "data.prompt_dataset"
    batch_size: str = "rollout.batch_size"
    directory: str = "run_dir"


@dataclass(slots=True)
class PromptOrder:
    """Hand out positions in a PromptSet, a batch or a place at a time.

    Each episode visits the prompts in another permutation, cut into whole batches. The prompts left over at its end
    are skipped in that episode (another permutation skips others): a batch that begins with an episode's batch never
    holds a prompt twice. Raises DataError when the prompts do not fill one batch.
    """

    prompts: int
    batch_size: int
    episodes: int
    seed: int
    shuffle: bool = True
    fingerprint: str = ""  # hash of the PromptSet, so that a run is not resumed on other data
    keys: OrderKeys = field(default_factory=OrderKeys)
    place: int = field(default=0, init=False)  # the next one that was never handed out
    again: list[int] = field(default_factory=list, init=False)  # handed out, given back; they come first, in order

    def __post_init__(self) -> None:
        if self.prompts < self.batch_size:
            raise DataError(
                f"the data set holds {self.prompts} usable prompts, fewer than {self.keys.batch_size} = "
                f"{self.batch_size}: lower it or bring more prompts"
            )

    @property
    def batches_per_episode(self) -> int:
        return self.prompts // self.batch_size

    @property
    def total(self) -> int:
        """Count the batches of all episodes."""
        return self.batches_per_episode * self.episodes

    @property
    def left(self) -> int:
        """Count the places that are left to hand out."""
        return len(self.again) + max(0, self.total * self.batch_size - self.place)

    def episode_of(self, place: int) -> int:
        """Number the episode of a place, from 0."""
        return place // (self.batches_per_episode * self.batch_size)

    def next(self) -> list[int] | None:
        """Return the positions of the next batch; None after the last episode, and when less than a batch is left."""
        if self.left < self.batch_size:
            return None
        return [self.position(place) for place in self.take(self.batch_size)]

    def take(self, count: int) -> list[int]:
        """Hand out the next `count` places, fewer if fewer are left."""
        places, self.again = self.again[:count], self.again[count:]
        fresh = min(count - len(places), self.left) if not self.again else 0
        self.place += fresh
        return [*places, *range(self.place - fresh, self.place)]

    def give_back(self, places: Iterable[int]) -> None:
        """Take back places whose prompts were not trained on: they are handed out again, before all others."""
        self.again = sorted({*self.again, *places})
        while self.again and self.again[-1] == self.place - 1:
            self.place = self.again.pop()

    def position(self, place: int) -> int:
        """Return the position in the PromptSet of the prompt at a place."""
        drawn = _permutation(self.prompts, self.seed, self.episode_of(place), self.shuffle)
        return int(drawn[place % (self.batches_per_episode * self.batch_size)])

    def state_dict(self, owed: Iterable[int] = ()) -> dict[str, Any]:
        """Return the position in the order and the data it belongs to, ready for JSON.

        `owed`: places that were handed out and that a resumed run must hand out again. `taken` counts the batches that
        are done; if that does not determine the state, `place` and `again` are stored, too.
        """
        copy = PromptOrder(self.prompts, self.batch_size, self.episodes, self.seed)
        copy.place, copy.again = self.place, list(self.again)
        copy.give_back(owed)
        taken = (copy.place - len(copy.again)) // self.batch_size
        exact = {} if copy.place == taken * self.batch_size else {"place": copy.place, "again": copy.again}
        return {"taken": taken, **exact, **self._identity()}

    def check(self, state: dict[str, Any]) -> None:
        """Check that the order can go on where `state` was saved. The number of episodes may differ.

        Raises CheckpointError when the data, the batch size or the seed differ: the position would mean other prompts.
        """
        dataset, batch_size, directory = self.keys
        called = {
            **{"prompts": f"the number of usable prompts in {dataset}", "batch_size": batch_size},
            **{"seed": "train.seed", "shuffle": "data.shuffle"},
        }
        for name, now in self._identity().items():
            before = state.get(name)
            if before == now:
                continue
            what = (
                f"the rows of {dataset}, or their tokens (data.input_key, data.input_template, tokenizer), are others "
                "than"
                if name == "fingerprint"
                else f"{called[name]} is {now!r} and was {before!r}"
            )
            raise CheckpointError(
                f"{what} when the checkpoint was written, and its place in the order of prompts would mean other ones: "
                f"restore it, or start a new run in another --{directory}"
            )

    def rewind(self) -> None:
        """Go back to the first place."""
        self.place, self.again = 0, []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved. Raises CheckpointError as `check` does."""
        self.check(state)
        self.place = int(state.get("place", int(state["taken"]) * self.batch_size))
        self.again = [int(place) for place in state.get("again", [])]

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("prompts", "batch_size", "seed", "shuffle", "fingerprint")}


@lru_cache(maxsize=2)
def _permutation(prompts: int, seed: int, episode: int, shuffle: bool) -> NDArray[np.int64]:
    return np.random.default_rng([seed, episode]).permutation(prompts) if shuffle else np.arange(prompts)
