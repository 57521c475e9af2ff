"""Environments that fail in every way, many at once: each costs its own episode, and no process is left."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from played_episodes import FAULTS, FAULTY, FAULTY_EXECUTOR, played
from random_models import tiny_tokenizer
from waiting import scaled, until
from worker_pids import pids_of

from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import EpisodeError
from slurm_rlhf.records import LOST, STOP, Trajectory
from slurm_rlhf.sampling.environment import Environments

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(directory)
    return Tokenizer.load(directory)


def made(tmp_path: Path, tokenizer: Tokenizer, code: str = FAULTY, **settings: Any) -> Environments:
    config = Config()
    (tmp_path / "game.py").write_text(code)
    config.env.path, config.data.apply_chat_template = str(tmp_path / "game.py"), False
    config.env.workers = settings.get("workers", 3)
    config.rollout.max_new_tokens, config.data.max_len = 8, 200
    config.timeout.environment = settings.get("deadline", 60.0)
    return Environments(config, tokenizer)


def play(environments: Environments, faults: list[str]) -> list[Trajectory]:
    try:
        found = played(environments, faults)
        until(lambda: not any(worker.leases for worker in environments.host._pool._workers), "the last lease's end")
        return found
    finally:
        pids = pids_of(environments.host._pool)
        environments.close()
        assert pids
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_each_failure_costs_its_own_episode(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Those whose process another one has ended begin anew, here more often than three times."""
    faults = list(FAULTS) * 6
    found = play(made(tmp_path, tokenizer), faults)
    wanted = Counter("" if fault == "" else LOST for fault in faults)
    assert Counter(LOST if one.finish_reason == LOST else "" for one in found) == wanted
    for one, fault in zip(found, faults, strict=True):
        assert (one.finish_reason == LOST) == bool(fault)
        assert one.action_mask.any() != bool(fault)
        if not fault:
            assert (one.reward, one.turns, len(one.response_ids)) == (3.0, 3, 5)


def test_one_that_hangs_is_lost_after_its_deadline(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = play(made(tmp_path, tokenizer, deadline=scaled(1.0)), ["hangs", "", "", "", "", ""])
    assert [one.finish_reason for one in found] == [LOST, *[STOP] * 5]


def test_an_executor_that_fails_costs_its_own_episode(tmp_path: Path, tokenizer: Tokenizer) -> None:
    faults = ["hangs", "", "reset", "", "raises", "", "nothing", ""]
    environments = made(tmp_path, tokenizer, FAULTY_EXECUTOR, workers=1, deadline=scaled(3.0))
    found = play(environments, faults)
    assert [one.finish_reason == LOST for one in found] == [bool(fault) for fault in faults]
    assert environments.lost == 4
    for one in found:
        if one.finish_reason != LOST:
            assert (one.reward, one.turns, one.action_mask.tolist()) == (3.0, 3, [True, False, True, False, True])
            assert [each["role"] for each in json.loads(one.dialogue)] == ["assistant", "user"] * 2 + ["assistant"]


def test_an_episode_does_not_begin_anew_for_ever(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(EpisodeError, match=r"\d+ of \d+ episodes are lost"):
        play(made(tmp_path, tokenizer), ["kills"] * 40)
