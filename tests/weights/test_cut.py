"""Updates that are cut off, and how fast whole ones are."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shaped_links import Links, available, shaped
from sync_fleet import conducted, loaded, peers_in_roles, sent
from sync_peer import describe, make_weights
from tiny_models import make_tiny
from waiting import scaled, until

from slurm_rlhf.bench.sync import Spec, measure, parameters_of, show
from slurm_rlhf.cli.main import main
from slurm_rlhf.config.model_directory import stored_parameters
from slurm_rlhf.weights.diagnosis import Diagnosis, FailureBoard, Heartbeat, Post, cut, partners, silent
from slurm_rlhf.weights.lead import WeightSync
from slurm_rlhf.weights.rendezvous import Member

MARKS_OF_FIXTURES = {"cluster": "slow"}

SILENCE = float(round(scaled(2.0)))
NODES = ["near", "mid", "far"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Links, WeightSync]]:
    """Two actor ranks, ZeRO-3, on nodes of their own, and an engine on a third."""
    with shaped(NODES, "100mbit") as links, peers_in_roles(2, 1, links, NODES) as roles:
        weights = conducted(roles, links.address("near"), **{"timeout.sync_silence": SILENCE})
        weights.connect(describe(make_weights(0)), [0])
        weights.update(1)
        yield links, weights


class Stated(logging.Handler):
    """Keeps the conductor's message on the first failure; repairs the link at once, so that the update can go on."""

    def __init__(self, repair: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self.repair = repair
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.text:
            self.text = record.getMessage()
            self.repair()


@contextmanager
def cut_soon(damage: Callable[[], None], repair: Callable[[], None]) -> Iterator[Callable[[], str]]:
    """A cut half way in an update; gives what was said of it."""
    stated = Stated(repair)
    timer = threading.Timer(0.4, damage)
    logger = logging.getLogger("slurm_rlhf.weights.lead")
    logger.addHandler(stated)
    timer.start()
    try:
        yield lambda: stated.text
    finally:
        timer.join()
        logger.removeHandler(stated)
        if not stated.text:
            repair()


@pytest.mark.skipif(not available(), reason="network namespaces need root")
def test_a_node_that_is_cut_off_is_named_in_seconds(cluster: tuple[Links, WeightSync]) -> None:
    links, weights = cluster
    with cut_soon(lambda: links.vanish("far"), lambda: links.appear("far")) as outcome:
        metrics = weights.update(2)
    text = outcome()
    far = f"rollout 0 on far (eth0, {links.address('far')})"
    # Whichever of the two gives up first tells the other.
    actors = [f"actor {rank} on {node} (eth0, {links.address(node)})" for rank, node in enumerate(("near", "mid"))]
    assert any(f"{actor} heard nothing from {far} for {SILENCE:g} s" in text for actor in actors)
    assert metrics["perf/sync_group"] == 2
    assert loaded(weights, 0) == sent(2)


@pytest.mark.skipif(not available(), reason="network namespaces need root")
def test_the_leader_that_is_cut_off_blames_its_own_link_and_not_the_others(cluster: tuple[Links, WeightSync]) -> None:
    links, weights = cluster
    with cut_soon(lambda: links.vanish("near"), lambda: links.appear("near")) as outcome:
        weights.update(4)
    text = outcome()
    leader = f"actor 0 on near (eth0, {links.address('near')})"
    assert f"{leader} heard nothing from any other node (far, mid) for {SILENCE:g} s" in text
    assert text.rpartition(": ")[2].startswith("its own link is cut")
    assert loaded(weights, 0) == sent(4)


@pytest.mark.skipif(not available(), reason="network namespaces need root")
def test_a_link_between_two_members_that_the_leader_hears_is_named(cluster: tuple[Links, WeightSync]) -> None:
    links, weights = cluster
    with cut_soon(lambda: links.part("mid", "far"), lambda: links.join("mid", "far")) as outcome:
        weights.update(3)
    text = outcome()
    assert "the link between them is cut" in text
    for node, label in (("mid", "actor 1"), ("far", "rollout 0")):
        assert f"{label} on {node} (eth0, {links.address(node)})" in text
    assert "actor 0" not in text.partition("failed: ")[2]
    assert loaded(weights, 0) == sent(3)


def member(rank: int, node: str, **more: Any) -> Member:
    return Member(rank, f"rank {rank}", node, node, 1, "127.0.0.1", "eth0", "gloo", "", **more)


def test_every_pair_of_nodes_is_watched_and_a_heartbeat_costs_a_datagram_per_node() -> None:
    members = [member(rank, "aabbbbccd"[rank]) for rank in range(9)]
    sends = dict(enumerate(partners(members)))
    assert sends[0] == tuple(range(1, 9))
    assert all(0 in sends[rank] for rank in range(1, 9))
    pairs = {(members[one].node, members[other].node) for one, others in sends.items() for other in others}
    assert pairs >= {(one, other) for one in "abcd" for other in "abcd" if one != other}
    assert all(len(others) <= 4 for rank, others in sends.items() if rank)
    assert sends[5] == (0, 1, 7, 8)
    many = partners([member(rank, str(rank // 8)) for rank in range(8 * 200)])
    assert sum(map(len, many)) < 67 * len(many)
    assert {8 * node + 3 for node in (68, 99, 101, 132)} <= set(many[8 * 100 + 3])


@pytest.mark.slow
def test_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three members is heard and falls silent, one is never heard; a stranger counts as nobody."""
    ends = [Heartbeat("127.0.0.1", scaled(1.0)) for _ in range(3)]
    members = [member(rank, "abc"[rank], heartbeat_port=end.port) for rank, end in enumerate(ends)]
    quiet: list[tuple[int, ...]] = []
    ends[0].start(members, 0, "ours")
    ends[1].start(members, 1, "ours")
    ends[2].start(members, 2, "another run's")
    with ends[0].watched(quiet.append):
        time.sleep(scaled(2.0))
        assert (quiet, ends[0].unheard) == ([], (2,))
        ends[1].close()
        until(lambda: quiet, "the silence")
    assert quiet == [(1,)]
    with ends[0].watched(quiet.append):
        time.sleep(0.1)  # silent before already; it has as long again
    assert quiet == [(1,)]
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("ages", "named"),
    [
        ({1: 0.1, 2: 2.0}, ()),
        ({1: 0.1, 2: 2.1}, (2,)),
        ({1: 1.9, 2: 2.1}, ()),  # cut off together, perhaps: the one heard last will be known soon
        ({1: 2.1, 2: 2.3}, (1, 2)),
        ({1: 0.9, 2: 2.1, 3: 2.4}, (2, 3)),
        ({1: 1.5, 2: 3.1}, (2,)),  # nobody is waited for longer than half of the limit
        ({}, ()),
    ],
)
def test_who_is_silent(ages: dict[int, float], named: tuple[int, ...]) -> None:
    assert silent(ages, 2.0) == named


MEMBERS = [member(rank, "abc"[rank]) for rank in range(3)]
LAST, BROKE = "rank 2 on c (pid 1)", "the connections between the members broke, though all of them are alive"


@pytest.mark.parametrize(
    ("posts", "left", "found"),
    [
        ([Post("no"), None], [2], Diagnosis("rank 1 on b (pid 1): no", refused=True)),
        ([Post(), None], [1, 2], Diagnosis(f"{LAST} died: its connection closed without a message")),
        ([Post(), None], [], Diagnosis(f"no answer from {LAST} within 9 s (timeout.sync)", silent=True)),
        ([Post(lost="reset"), Post(lost="late")], [], Diagnosis(f"{BROKE}: reset")),
        ([Post(), Post()], [], Diagnosis(BROKE)),
        ([Post(quiet=(2,)), Post()], [], Diagnosis(cut({1: (2,)}, {0, 1, 2}, MEMBERS, 5.0), silent=True)),
    ],
)
def test_what_the_survivors_posts_mean(
    monkeypatch: pytest.MonkeyPatch, posts: list[Post | None], left: list[int], found: Diagnosis
) -> None:
    monkeypatch.setattr("slurm_rlhf.wire.timeouts.POST_S", 0.2)
    monkeypatch.setattr("slurm_rlhf.wire.timeouts.POST_CLOSED_S", 0.1)
    store = torch.distributed.HashStore()
    boards = [FailureBoard(store, each, 9.0, 5.0) for each in MEMBERS]
    for board, post in zip(boards[1:], posts, strict=True):
        if post is not None:
            board.post(post.reason, post.quiet, post.lost)
    assert boards[0].judge(MEMBERS, left, ()) == found


def test_what_silences_mean() -> None:
    members = [replace(member(rank, "aabbbbccc"[rank]), label=f"M{rank}") for rank in range(9)]
    where = {rank: f"M{rank} on {members[rank].node} (eth0, 127.0.0.1)" for rank in range(9)}
    for_so_long = "for 15 s (timeout.sync_silence)"
    assert cut({0: (3,), 1: (), 2: (3,)}, {0, 1, 2}, members, 15) == (
        f"{where[0]} heard nothing from {where[3]} {for_so_long}: its link is cut, or it hangs"
    )
    assert cut({0: (), 2: (3,), 3: (2,)}, {0, 2, 3}, members, 15).startswith(
        f"{where[2]} heard nothing from {where[3]} {for_so_long}, though both are alive: the link between them is cut"
    )
    own = cut({0: (2, 3, 4, 5, 6, 7, 8), 1: ()}, {0, 1}, members, 15)
    assert own == f"{where[0]} heard nothing from any other node (b, c) {for_so_long}: its own link is cut"
    whole_node = cut({0: (), 1: (3, 4, 5, 6, 7, 8)}, {0, 1, 2}, members, 15)
    assert f"{where[1]} heard nothing from {' and '.join(where[rank] for rank in range(3, 7))} and 2 more" in whole_node


# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.slow
def test_the_bench_prints_what_it_says(capsys: pytest.CaptureFixture[str], rank: int) -> None:
    words = ["--size=3MB", "--actors=2x1", "--engines=1x2", "--zero=3", "--bucket_mb=1", "--repeats=1", "--json"]
    assert main(["bench", "sync", *words, f"--lora_rank={rank}"]) == 0
    found = json.loads(capsys.readouterr().out)
    given = parameters_of(3_000_000)
    layers = [sum(shape) for name, shape, _ in given if name.startswith("layers.") and len(shape) == 2]
    assert found["bytes"] == 2 * (rank * sum(layers) or sum(math.prod(shape) for _, shape, _ in given))
    size = f"{found['bytes'] / 1e6:.{3 if rank else 0}f} MB"
    assert show(found).splitlines()[0] == f"{size}, actor 2x1 -> engines 1x2, ZeRO-3, gloo"
    assert found["share_of_raw"] == pytest.approx(found["raw_seconds"] / found["seconds"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--size=big", "--size takes a number and a unit, as in 500MB"),
        ("--actors=2", "--actors takes nodes x ranks on each, as in 2x4, got '2'"),
        ("--speed=9", "unknown option 'speed'"),
    ],
)
def test_bad_words(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sync", word]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(900)
def test_loopback_reaches_four_fifths_of_what_gloo_does_with_the_same_bytes(tmp_path: Path) -> None:
    """500 MB of bf16 from one actor rank to two engine ranks, on two nodes and on one."""
    model = make_tiny(tmp_path / "model", hidden=2048, heads=16, kv_heads=2, layers=7, dtype="bf16")
    parameters = [[name, shape, "bfloat16"] for name, shape in stored_parameters(str(model))]
    apart = measure(Spec(parameters, ["actor0"], ["rollout0"] * 2, repeats=7))
    together = measure(Spec(parameters, ["node"], ["node"] * 2, repeats=7))
    for found in (apart, together):
        print(json.dumps(found))
        assert found["bytes"] > 400e6
        assert found["share_of_raw"] >= 0.8
        # Three buckets, and the parameters that are copied out of them: a few at a time, of a few sizes.
        assert found["peak_extra_bytes"] <= 3 * (64 << 20) * 1.01 + 3 * max(2 * math.prod(p[1]) for p in parameters)


@pytest.mark.slow
def test_the_memory_figure_counts_a_parameter_of_many_buckets_on_both_ends() -> None:
    sizes = [4096, 500, 3000, 100, 7000, 1]
    parameters = [["embed", [24000, 1024], "bfloat16"]]
    parameters += [[f"layer.{number}", [rows, 1024], "bfloat16"] for number, rows in enumerate(sizes)]
    found = measure(Spec(parameters, ["actor0"], ["rollout0"], bucket_bytes=1 << 20, repeats=1))
    assert found["peak_extra_bytes"] > 2 * 24000 * 1024
