"""Decide in which order prompts are visited: a function of the seed, with a position that checkpoints store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurm_rlhf.errors import CheckpointError, DataError

KEYS = {
    "prompts": "the number of usable prompts in data.prompt_dataset",
    "batch_size": "rollout.batch_size",
    "seed": "train.seed",
    "shuffle": "data.shuffle",
}
"""Field that a checkpoint's order depends on -> what the user calls it."""


@dataclass(slots=True)
class PromptOrder:
    """Hand out batches of positions in a PromptSet.

    Each episode visits the prompts in another permutation, cut into whole batches. The prompts left over at its end
    are skipped in that episode (another permutation skips others): a batch never holds a prompt twice.
    Raises DataError when the prompts do not fill one batch.
    """

    prompts: int
    batch_size: int
    episodes: int
    seed: int
    shuffle: bool = True
    fingerprint: str = ""  # of the PromptSet, so that a run is not resumed on other data
    taken: int = field(default=0, init=False)  # batches handed out

    def __post_init__(self) -> None:
        if self.prompts < self.batch_size:
            raise DataError(
                f"the data set holds {self.prompts} usable prompts, fewer than rollout.batch_size = "
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
    def episode(self) -> int:
        """Number the episode of the next batch, from 0."""
        return self.taken // self.batches_per_episode

    def next(self) -> list[int] | None:
        """Return the positions of the next batch; None after the last episode."""
        if self.taken >= self.total:
            return None
        start = self.taken % self.batches_per_episode * self.batch_size
        order = self._permutation(self.episode)
        self.taken += 1
        return [int(position) for position in order[start : start + self.batch_size]]

    def _permutation(self, episode: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(self.prompts)
        return np.random.default_rng([self.seed, episode]).permutation(self.prompts)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the data it belongs to, ready for JSON."""
        return {"taken": self.taken, **self._identity()}

    def check(self, state: dict[str, Any]) -> None:
        """Check that the order can go on where `state` was saved. The number of episodes may differ.

        Raises CheckpointError when the data, the batch size or the seed differ: the position would mean other prompts.
        """
        for name, now in self._identity().items():
            before = state.get(name)
            if before == now:
                continue
            what = (
                "the rows of data.prompt_dataset, or their tokens (data.input_key, data.input_template, tokenizer), "
                "are others than"
                if name == "fingerprint"
                else f"{KEYS[name]} is {now!r} and was {before!r}"
            )
            raise CheckpointError(
                f"{what} when the checkpoint was written, and its place in the order of prompts would mean other ones: "
                "restore it, or start a new run in another --run_dir"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved. Raises CheckpointError as `check` does."""
        self.check(state)
        self.taken = int(state["taken"])

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("prompts", "batch_size", "seed", "shuffle", "fingerprint")}
