"""Three real ranks of the actor sample under ZeRO-3, layer by layer: unlike lengths, a stop, and who keeps the others.

The ranks are started as a run starts them, and called as its conductor calls them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_policy import plain_engine, sample
from training_ranks import make_config
from waiting import HANG_S, scaled, until
from warm_runs import WarmRun

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.errors import RunError
from slurm_rlhf.records import LENGTH, STOP, Prompt, Sampling, Trajectory, VersionSpan
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.sampling.batches import GroupState, PromptGroup, responses_of
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.scheduler import ActorWaves
from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.calls import ActorBatch, ActorCalls, Asked, GenerateBatch, PackedPrompts
from slurm_rlhf.wire.handles import ControlServer, RoleHandle, gather

pytestmark = [pytest.mark.slow]

RANKS, SEED, LONGEST = 3, 42, 400
COLLECTIVE_S = scaled(4.0)
LOGPROB = 1e-5

# Rank 1 sits still in the middle of a token, while its heartbeats go on, once the file is there.
PLUGIN = """
import os, time
from pathlib import Path
from slurm_rlhf.engine.hf import HfEngine

choose = HfEngine._choose

def stalling(engine, batch, logits):
    while os.environ["RANK"] == "1" and batch.tokens > 6 and Path({stall!r}).exists():
        time.sleep(0.1)
    return choose(engine, batch, logits)

HfEngine._choose = stalling
"""


def settings(directory: Path, model: Path) -> Config:
    config = make_config(model, zero_stage=3)
    config.run_dir = str(directory)
    config.rollout.engine, config.rollout.hf_gather, config.rollout.hf_max_num_seqs = "hf", "layer", 2
    config.data.max_len = 512
    config.actor.num_gpus_per_node = RANKS
    config.train.full_determinism = False
    config.timeout.collective = COLLECTIVE_S
    plugin = directory.parent / "stalls.py"
    plugin.write_text(PLUGIN.format(stall=str(directory.parent / "stall")))
    config.train.plugins = [str(plugin)]
    return config


@pytest.fixture(scope="module")
def actor(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleHandle[Any]]:
    root = tmp_path_factory.mktemp("actor") / "run"
    config, directory = settings(root, model), RunDirectory(root)
    directory.make()
    directory.config.write_text(dump_toml(config))
    server = ControlServer(RunKeys.create(directory.keys), heartbeat_interval=0.2, heartbeat_limit=60.0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    rank = ["-m", "slurm_rlhf.ranks.rank_process", "--role=actor", f"--run_dir={root}"]
    rank += [f"--endpoint={server.endpoint()}", "--first_rank=0", f"--world={RANKS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = WarmRun([*torchrun, *rank], environment | {"GLOO_SOCKET_IFNAME": "lo"})
    try:
        peers = server.wait_for("actor", RANKS, HANG_S)
        handle: RoleHandle[Any] = RoleHandle(server, "actor", RANKS, config.timeout)
        notes = [answer.note for answer in gather(handle.start_all(ActorCalls.start, 3))]
        assert all("layer by layer" in note for note in notes)
        yield handle
    finally:
        for peer in server.peers("actor"):
            os.kill(peer.pid, signal.SIGKILL)
        process.kill()
        process.wait(HANG_S)
        server.close()
    assert peers


def prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(7)
    return [Prompt(index, "", rng.integers(2, 69, rng.integers(1, 12)).astype(np.int32)) for index in range(count)]


def batch(rows: list[Prompt], sampling: Sampling) -> ActorBatch:
    most = sampling.max_new_tokens
    asked = [Asked(place, row.index, 0, 0, 0, most, row.token_ids) for place, row in enumerate(rows)]
    return ActorBatch(GenerateBatch(PackedPrompts.pack(asked), sampling, SEED), 0, True)


def plain(model: Path, rows: list[Prompt], sampling: Sampling) -> list[Trajectory]:
    """The same requests in this process, with transformers alone, one at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from slurm_rlhf.engine.engine import GenerateRequest, request_seed

    alone = plain_engine(model, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    found = []
    for row in rows:
        for number in range(sampling.n):
            seed = request_seed(SEED, row.index, number, 0)
            request = GenerateRequest("alone", row.index, number, row.token_ids, sampling, seed)
            found += sample(alone, [request])[0]
    return found


def test_ranks_with_unlike_lengths_and_an_early_stop_do_not_wait_for_ever(actor: RoleHandle[Any], model: Path) -> None:
    rows = [prompt for prompt in prompts(12) if len(plain(model, [prompt], Sampling(max_new_tokens=64))[0].text) > 60]
    (early,) = plain(model, rows[2:3], Sampling(max_new_tokens=64))
    stop = next(letter for letter in early.text[8:] if letter not in early.text[:8])
    lengths = [
        (batch(rows[:1], Sampling(max_new_tokens=1)), [1], LENGTH),
        (batch(rows[1:2], Sampling(max_new_tokens=17)), [17], LENGTH),
        (batch(rows[2:4], Sampling(max_new_tokens=64)), [64, 64], LENGTH),
    ]
    found = gather(actor.start_each(ActorCalls.generate, [asked for asked, _, _ in lengths]))
    for answer, (_, wanted, reason) in zip(found, lengths, strict=True):
        assert [len(one.response_ids) for one in answer.found] == wanted
        assert {one.finish_reason for one in answer.found} == {reason}
    # An early stop on one rank, nothing at all to do on another, and the limit on the third.
    asked = [
        batch(rows[2:3], Sampling(max_new_tokens=64, stop=[stop])),
        batch([], Sampling(max_new_tokens=64)),
        batch(rows[2:3], Sampling(max_new_tokens=64)),
    ]
    stopped, none, whole = (answer.found for answer in gather(actor.start_each(ActorCalls.generate, asked)))
    assert none == []
    assert stopped[0].finish_reason == STOP
    assert stopped[0].text == early.text[: early.text.index(stop) + 1]
    assert whole[0].text == early.text


def test_responses_are_those_of_plain_transformers_whichever_rank_samples_them(
    actor: RoleHandle[Any], model: Path
) -> None:
    """Seven prompts, two samples each, at most two at a time on three ranks: three rounds of unlike sizes.

    The round seeds them, and does not pass for the version of the policy.
    """
    sampling, rows = Sampling(n=2, temperature=0.7, max_new_tokens=24), prompts(7)
    groups = [PromptGroup(place, row, GroupState(5), sampling, 0) for place, row in enumerate(rows)]
    loads = Episodes(ActorWaves(actor, SEED, 2)).finish(groups)
    found, wanted = responses_of(groups), plain(model, rows, sampling)
    assert [(one.prompt, one.sample) for one in found] == [(p, s) for p in range(7) for s in range(2)]
    for one, other in zip(found, wanted, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, atol=LOGPROB)
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.versions == [VersionSpan(0, len(one.response_ids), 5)]
    assert {one.engine for one in found} == {0, 1, 2}
    assert sum(load.responses for load in loads.values()) == 14
    assert sum(load.tokens for load in loads.values()) == sum(len(one.response_ids) for one in found)


def test_what_is_dropped_ends_within_a_token(actor: RoleHandle[Any]) -> None:
    long = batch(prompts(3), Sampling(max_new_tokens=LONGEST, temperature=2.0))
    calls = [call for _ in range(3) for call in actor.start_all(ActorCalls.generate, long)]
    tokens = re.compile(r"token (\d+)")
    until(lambda: max(map(int, tokens.findall(" ".join(actor.phases().values()))), default=0) >= 5, "token 5")
    gather(actor.start_all(ActorCalls.drop))
    assert all(call.done() for call in calls)  # the later ones too, which had not begun
    assert all(not answer.found for answer in gather(calls))
    assert gather(actor.start_all(ActorCalls.generate, batch(prompts(1), Sampling(max_new_tokens=2))))[0].found


def test_a_rank_that_stops_in_the_middle_of_a_response_is_named_within_seconds(
    actor: RoleHandle[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Last: it breaks the ranks' process group."""
    run_dir = Path(next(iter(tmp_path_factory.getbasetemp().glob("actor*"))))
    result: list[BaseException] = []

    def sample() -> None:
        try:
            Episodes(ActorWaves(actor, SEED, 2)).sample(prompts(6), Sampling(max_new_tokens=LONGEST), 0)
        except RunError as error:
            result.append(error)

    thread = threading.Thread(target=sample)
    (run_dir / "stall").touch()
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    stated = str(result[0])
    assert "actor rank 1 on " in stated
    assert "is behind, in 'generate: batch" in stated
    assert "token 7, sampling'" in stated
    assert "actor rank 0 on" not in stated.partition("First to give up")[0]
    assert "actor rank 2 on" not in stated.partition("First to give up")[0]
    assert f"timeout.collective = {COLLECTIVE_S:g} s" in stated
