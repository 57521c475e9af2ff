"""Checkpoints that are written during the steps; test_trainers.py compares them with those of a save that waits."""

from __future__ import annotations

import threading

import pytest
import torch
from waiting import HANG_S

from slurm_rlhf.trainer.optimizer_state import AsyncSave, Fragment

CPU = torch.device("cpu")


def fragment(value: float) -> Fragment:
    return Fragment("p", 3, {"fp32": torch.full((4,), value)})


def test_it_writes_a_copy_and_the_next_one_waits() -> None:
    saves, free = AsyncSave(), threading.Event()
    live, seen = fragment(1.0), []

    def write(copies: list[Fragment]) -> None:
        assert free.wait(HANG_S)
        seen.append((copies[0].start, copies[0].tensors["fp32"].tolist()))

    first = saves.begin([live], CPU, write)
    live.tensors["fp32"].fill_(2.0)
    assert not first.done()
    threading.Timer(0.05, free.set).start()
    saves.begin([live], CPU, write)
    assert seen[0] == (3, [1.0] * 4)
    saves.wait()
    assert seen[1:] == [(3, [2.0] * 4)]
    assert sum(held.nbytes for held in saves._buffers.values()) == 16  # one copy, however often it saves


def test_what_goes_wrong_is_reported_and_the_next_one_works() -> None:
    def fail(copies: list[Fragment]) -> None:
        raise OSError("No space left on device")

    saves, seen = AsyncSave(), []
    failed = saves.begin([fragment(1.0)], CPU, fail)
    with pytest.raises(OSError, match="No space left"):
        failed.result(HANG_S)
    saves.begin([fragment(2.0)], CPU, seen.extend).result(HANG_S)
    assert len(seen) == 1
