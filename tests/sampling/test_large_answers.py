"""An engine that has sampled more than a message may hold answers in parts: all of it arrives, in its order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampled_responses import response
from waiting import HANG_S

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.engine.engine import Status
from slurm_rlhf.ranks.engine_leader import EngineLeader
from slurm_rlhf.ranks.rank_process import serve
from slurm_rlhf.ranks.worker import RankInfo
from slurm_rlhf.records import LENGTH, Prompt, Sampling, Trajectory
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.scheduler import Scheduler, Waves
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.calls import Asked, GenerateBatch, PackedPrompts, RankCalls, most_in_answer
from slurm_rlhf.wire.client import ControlClient
from slurm_rlhf.wire.codec import MAX_HEADER_BYTES, encode
from slurm_rlhf.wire.handles import ControlServer, EngineHandle

TOKENS, SAMPLES, PROMPTS = 1000, 8, 512
TEXT = "x" * 8 * TOKENS


class Scripted:
    """Finishes a few hundred responses a step, the last that were asked for first."""

    status = Status(0, 0, 0, 0, 0.0, "")

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.orders: list[list[tuple[int, int]]] = []

    def add(self, request: Any) -> None:
        self.asked.append(request)

    def step(self) -> list[Trajectory]:
        self.orders.append([(request.prompt, request.sample) for request in self.asked])
        landed, self.asked = self.asked[-300:], self.asked[:-300]
        return [answer(request.prompt, request.sample, request.key) for request in reversed(landed)]

    def close(self) -> None:
        pass


def answer(prompt: int, sample: int, key: object) -> Trajectory:
    made = response(prompt, TEXT, sample, TOKENS, np.full(10, prompt, dtype=np.int32), LENGTH, key=str(key))
    made.response_ids[:] = sample
    return made


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False], ids=["fixed", "streamed"])
def test_more_than_a_message_holds_comes_in_parts(tmp_path: Path, deterministic: bool) -> None:
    one = len(encode(answer(0, 0, 0))[0])
    assert one * PROMPTS * SAMPLES > MAX_HEADER_BYTES, "the test must ask for more than one message holds"
    engine = Scripted()
    with ControlServer(RunKeys.create(tmp_path / "keys.json")) as server:
        client = ControlClient(server.endpoint(), RunKeys.load(tmp_path / "keys.json"), "rollout", 0, 1)
        client.connect(HANG_S)
        role = EngineLeader(Config(), RankInfo("rollout", 0, 1, 0, "n"), client)
        role.engine = engine
        thread = threading.Thread(target=serve, args=(client, role), daemon=True)
        thread.start()
        handle = EngineHandle(server, "rollout", 1, 1, Timeout(generate=30.0))
        prompts = [Prompt(100 + i, "", np.full(10, i, dtype=np.int32)) for i in range(PROMPTS)]
        width = PROMPTS * SAMPLES * 16
        episodes = Episodes((Waves if deterministic else Scheduler)(handle, 1, width))
        found = episodes.sample(prompts, Sampling(n=SAMPLES, max_new_tokens=TOKENS), 0)
        assert handle.ask(0, RankCalls.shutdown).result(HANG_S) == "done"
        thread.join(HANG_S)
        client.close()
    assert [(t.prompt, t.sample) for t in found] == [(100 + i, s) for i in range(PROMPTS) for s in range(SAMPLES)]
    assert all(t.text == TEXT and int(t.response_ids[-1]) == t.sample for t in found)
    # All requests are the engine's before its first step: what it computes does not depend on when messages come, and
    # it is busy from the beginning. Streamed, that is so where it is the only engine and has room for all.
    assert engine.orders[0] == [(100 + i, s) for i in range(PROMPTS) for s in range(SAMPLES)]


@pytest.mark.parametrize("tokens", [1, 100, 1000, 32_000])
def test_an_answer_fits_into_a_message(tokens: int) -> None:
    # Text of 40 bytes a token would still fit.
    most = most_in_answer(4 * tokens, tokens)
    assert most == 1 or most * (16 * tokens + 9 * tokens + 40 * tokens + 200) < MAX_HEADER_BYTES
    assert most_in_answer(10, tokens) >= 8, "small batches are answered at once"


def test_one_request_with_very_many_prompts_has_a_small_header() -> None:
    """A prompt with its samples is one row; what does not follow on begins another one."""
    token_ids = np.arange(500, dtype=np.int32)
    asked = [
        Asked(8 * i + k, 2 * i, k, i % 3, 0, 9, ids)
        for i, ids in enumerate(token_ids[: 499 + i % 2] for i in range(35_000))
        for k in (0, 1)
    ]
    packed = PackedPrompts.pack([*asked, asked[-1]])
    assert len(packed.rows) == 8 * 35_001
    frames = encode(GenerateBatch(packed, Sampling(), 1))
    assert sum(map(len, frames)) > MAX_HEADER_BYTES > 1000 * len(frames[0])
    unpacked = list(packed)
    assert [one[:6] for one in unpacked] == [one[:6] for one in [*asked, asked[-1]]]
    for sent, arrived in zip(asked[-3:], unpacked[-4:], strict=False):
        assert sent.token_ids.tolist() == arrived.token_ids.tolist()
    assert list(PackedPrompts.pack([])) == []
