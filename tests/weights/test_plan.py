"""The plan of a weight transfer, without processes: every byte once to everybody, and nobody burdened beyond others."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_rlhf.errors import SyncError
from slurm_rlhf.weights.ends import check_match
from slurm_rlhf.weights.routes import Route, cost_of, routes
from slurm_rlhf.weights.transfer_plan import ALIGN, ITEM_SIZE, SyncPlan, TransferLayout, make_plan

PARAMETERS = [
    ["a", [4, 8], "float32"],
    ["b", [], "bf16"],
    ["c", [3], "torch.float16"],
    ["d", [1000], "fp32"],
    ["e", [2], "fp32"],
]
ONE = TransferLayout(("n",), ("n",))
SHARED = (list("xxyyzz"), ["x", *(f"n{i}" for i in range(11))])
LAYOUTS = {
    "one of each": (["x"], ["y"]),
    "one of each on one node": (["x"], ["x"]),
    "6+2 on two nodes": (["x"] * 6 + ["y"] * 6, ["x"] * 2 + ["y"] * 2),
    "6+2 on one node": (["x"] * 6, ["x"] * 2),
    "1 actor, 3 engine nodes": (["x"], ["p", "q", "r"]),
    "2x2 to 2x2": (["x", "x", "y", "y"], ["p", "p", "q", "q"]),
    "2x2 to 4x2": (["x", "x", "y", "y"], [n for n in "pqrs" for _ in range(2)]),
    "TP 4 on one node": (["x"] * 2, ["p"] * 4),
    "one node shared, one not": (["x"] * 3, ["x"] * 4 + ["p"] * 4),
    "uneven": (["x"] * 5 + ["y"], ["x", "p", "p", "p", "q", "y"]),
    "many actors, one engine": (list("abcdefgh"), ["p"]),
    "1 actor, 20 engine nodes": (["x"], [f"n{i}" for i in range(20)]),
    "3x2 to 12 nodes": (list("xxyyzz"), [f"n{i}" for i in range(12)]),
}


def cases(names=tuple(LAYOUTS)):
    shapes = st.lists(
        st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(sorted(ITEM_SIZE))), min_size=1, max_size=12
    )
    given_nodes = st.sampled_from([LAYOUTS[name] for name in names])
    any_nodes = st.tuples(
        st.lists(st.sampled_from("xyz"), min_size=1, max_size=7).map(sorted),
        st.lists(st.sampled_from("wxypq"), min_size=1, max_size=9).map(sorted),
    )
    return st.tuples(
        shapes,
        given_nodes | any_nodes | st.just(SHARED),
        st.integers(0, 3),
        st.integers(64, 9000),
        st.sampled_from([64, 192, 4096]),
    )


def planned(case, chunked: bool = False) -> SyncPlan:
    shapes, (actors, engines), stage, bucket, chunk = case
    described = [[f"p{i}", shape, dtype] for i, (shape, dtype) in enumerate(shapes)]
    return make_plan(described, bucket, TransferLayout(tuple(actors), tuple(engines), stage, chunked), chunk)


def everything(plan: SyncPlan):
    for stream in range(len(plan.streams)):
        for bucket in range(len(plan.buckets)):
            yield stream, bucket


def follow(plan: SyncPlan, stream: int, bucket: int):
    """(giver, taker, route) of every hand-over, as the members will do it: each taker's giver counts it as a taker."""
    for route in routes(plan, bucket, stream):
        for giver, taker in hand_overs(route.owner, route.entries, route.node_ranks):
            yield giver, taker, route


@lru_cache(maxsize=4096)
def hand_overs(owner: int, *way) -> list[tuple[int, int]]:
    """(giver, taker) of a chunk's hand-overs. Many chunks go the same way: it is followed once."""
    route = Route(owner, 0, 1, 0, *way)
    takers = {rank for ranks in route.node_ranks for rank in ranks}
    reached, waiting, found = {owner}, [owner], []
    while waiting:
        giver = waiting.pop()
        for taker in route.takers(giver):
            assert taker not in reached, "a chunk comes twice"
            assert route.giver(taker) == giver
            reached.add(taker)
            waiting.append(taker)
            found.append((giver, taker))
    assert reached - {owner} == takers, "a chunk does not come"
    return found


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_byte_reaches_every_engine_rank_once(case):
    plan = planned(case)
    takers = range(len(plan.layout.actors), plan.layout.world)
    # The buffer of a bucket is the same for all ranks of a stream: who has all of each has every byte of it once.
    carried = [[np.zeros(p.nbytes, dtype=np.int32) for p in plan.parameters] for _ in plan.streams]
    owned = Counter()
    for stream, bucket in everything(plan):
        parts = plan.parts(bucket, stream)
        chunks = {rank: [] for rank in takers}
        for _, taker, route in follow(plan, stream, bucket):
            chunks[taker].append((route.low, route.high))
        covered = {rank: sorted(found) for rank, found in chunks.items() if found}
        assert {plan.layout.node(rank) for rank in covered} == set(plan.streams[stream].nodes)
        assert [*covered] == [rank for rank in takers if plan.stream_to(rank) == stream]
        for found in covered.values():
            assert found[0][0] == 0
            assert [high for _, high in found[:-1]] == [low for low, _ in found[1:]]
            assert found[-1][1] == plan.nbytes(bucket, stream)
        for part in parts:
            for piece in part.pieces:
                carried[stream][piece.span.parameter][piece.span.low : piece.span.high] += 1
                owned[part.owner, piece.span.parameter] += piece.span.nbytes
    assert {plan.stream_to(rank) for rank in takers} == set(range(len(plan.streams)))
    assert all((times == 1).all() for found in carried for times in found)
    if plan.layout.zero_stage == 3:
        for (owner, index), nbytes in owned.items():
            parameter = plan.parameters[index]
            shard = -(-parameter.numel // len(plan.layout.actors))
            mine = max(0, min(parameter.numel, (owner + 1) * shard) - owner * shard)
            assert nbytes == mine * ITEM_SIZE[parameter.dtype], "a rank sends what is not its shard"


@settings(max_examples=60, deadline=None)
@given(cases())
def test_buckets_hold_their_limit_and_their_order(case):
    plan, limit = planned(case), case[3]
    spans = [span for bucket in plan.buckets for span in bucket]
    assert [span.parameter for span in spans] == sorted(span.parameter for span in spans)
    for stream, bucket in everything(plan):
        assert sum(span.nbytes for span in plan.buckets[bucket]) <= limit
        end = 0
        for part in plan.parts(bucket, stream):
            assert part.start == end
            end = part.start + 8 * (2 + len(part.pieces))
            for piece in part.pieces:
                assert piece.offset >= end
                assert piece.offset % ALIGN == 0
                end = piece.offset + piece.span.nbytes
            assert end <= part.start + part.nbytes
            end = part.start + part.nbytes


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(20, 60))
def test_nobody_sends_more_than_a_fair_share_and_a_bucket(case, layers):
    """A model of many buckets, cut by ZeRO or whole: owners send equal parts to each node, which takes them once."""
    (_, nodes, stage, _, _) = case
    described = [[f"p{i}", [24, 32], "bf16"] for i in range(layers)]
    plan = make_plan(described, 4096, TransferLayout(tuple(nodes[0]), tuple(nodes[1]), stage), 256)
    sent, into = Counter(), Counter()
    total = Counter()
    for stream, bucket in everything(plan):
        total[stream] += plan.nbytes(bucket, stream)
        for giver, taker, route in follow(plan, stream, bucket):
            if giver == route.owner:
                sent[stream, giver] += route.high - route.low
            if plan.layout.node(giver) != plan.layout.node(taker):
                into[stream, plan.layout.node(taker)] += route.high - route.low
    for (stream, _), nbytes in into.items():
        assert nbytes <= total[stream], "a node takes a byte over the network twice"
    for (stream, rank), nbytes in sent.items():
        taking = plan.streams[stream]
        share = len(taking.nodes) * total[stream] / len(taking.owners)
        assert nbytes <= share + 4096 * len(taking.nodes), (rank, nbytes, share)


def test_a_node_with_both_roles_is_served_without_the_network_unless_the_model_is_cut():
    nodes = (("x",) * 6 + ("y",) * 6, ("x",) * 2 + ("y",) * 2)
    for stage, crossing in ((2, False), (3, True)):
        plan = make_plan([["p", [1000, 100], "bf16"]], 1 << 16, TransferLayout(*nodes, stage))
        edges = [edge for where in everything(plan) for edge in follow(plan, *where)]
        assert any(plan.layout.node(giver) != plan.layout.node(taker) for giver, taker, _ in edges) == crossing


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_account_is_what_the_routes_add_up_to(name, zero):
    layout = TransferLayout(*map(tuple, LAYOUTS[name]), zero)
    plan = make_plan([[f"p{i}", [500, 101], "bf16"] for i in range(20)], 1 << 19, layout, 1 << 12)
    sent, out, into = Counter(), Counter(), Counter()
    for where in everything(plan):
        for giver, taker, route in follow(plan, *where):
            sent[giver] += route.high - route.low
            if layout.node(giver) != layout.node(taker):
                out[layout.node(giver)] += route.high - route.low
                into[layout.node(taker)] += route.high - route.low
    found = cost_of(plan)
    for counted, stated in ((sent, found.sent), (out, found.out), (into, found.into)):
        for key in {*counted, *stated}:
            assert counted[key] == pytest.approx(stated[key], rel=0.1, abs=plan.payload / 50), key
    busiest = max([*found.out.values(), *found.into.values(), 0])
    assert found.seconds(network=1e6, inside=1e12) == pytest.approx(busiest / 1e6, abs=1e-3)


def test_buckets_keep_whole_parameters_and_cut_large_ones():
    plan = make_plan(PARAMETERS, 256, ONE)
    held = [[(plan.parameters[s.parameter].name, s.low, s.high) for s in bucket] for bucket in plan.buckets]
    assert held[0] == [("a", 0, 128), ("b", 0, 2), ("c", 0, 6)]
    assert held[1] == [("d", 0, 256)]
    assert held[-1] == [("d", 3840, 4000), ("e", 0, 8)]
    assert plan.described == [
        ["a", [4, 8], "float32"],
        ["b", [], "bfloat16"],
        ["c", [3], "float16"],
        ["d", [1000], "float32"],
        ["e", [2], "float32"],
    ]
    assert plan.fingerprint() == make_plan(PARAMETERS, 256, ONE).fingerprint()
    assert plan.fingerprint() != make_plan(PARAMETERS, 320, ONE).fingerprint()


def test_what_cannot_be_planned():
    with pytest.raises(SyncError, match=r"int8.*valid: float32, bfloat16, float16"):
        make_plan([["a", [1], "int8"]], 100, ONE)


def test_two_architectures_are_kept_apart_by_name():
    sent = [["same", [2], "bf16"], ["shape", [2, 3], "fp32"], ["extra", [1], "fp32"]]
    expected = [["same", [2], "fp32"], ["shape", [3, 2], "fp32"], ["wanted", [1], "fp32"]]
    check_match(sent[:1], expected[:1], "actor 0", "rollout 1")  # fp32 holds every bf16
    with pytest.raises(SyncError) as caught:
        check_match(sent, expected, "actor 0", "rollout 1")
    text = str(caught.value)
    assert "extra: only actor 0 has it" in text
    assert "wanted: only rollout 1 has it" in text
    assert "shape: [2, 3] at actor 0, [3, 2] at rollout 1" in text
    assert "same" not in text.replace("the same", "")


@pytest.mark.parametrize(("sent", "kept"), [("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "bf16")])
def test_a_dtype_that_would_be_rounded_is_refused(sent, kept):
    with pytest.raises(SyncError, match=r"(?s)rollout 1 cannot hold .* actor 0 .*p: .* at actor 0, .*vllm.dtype"):
        check_match([["p", [2], sent]], [["p", [2], kept]], "actor 0", "rollout 1")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_chunks_of_what_lies_apart_are_pieces_of_their_owner_and_nothing_overlaps(monkeypatch, case):
    """A parameter lies in the buffer as it is, whoever owns which piece of it."""
    monkeypatch.setattr("slurm_rlhf.weights.transfer_plan._APART", 64)
    plan = planned(case, chunked=True)
    for stream, bucket in everything(plan):
        parts = plan.parts(bucket, stream)
        held = np.zeros(plan.nbytes(bucket, stream), dtype=np.int32)
        for route in routes(plan, bucket, stream):
            held[route.low : route.high] += 1 + route.owner
        distance = {}
        for part in parts:
            ranges = [(piece.offset, piece.offset + piece.span.nbytes) for piece in part.apart]
            for low, high in [(part.start, part.start + part.nbytes), *ranges]:
                assert (held[low:high] == 1 + part.owner).all()
                held[low:high] = -1  # no other range may have any of it
            for piece in part.apart:
                at = distance.setdefault(piece.span.parameter, piece.offset - piece.span.low)
                assert piece.offset - piece.span.low == at
            for piece in part.pieces:
                assert piece.apart or part.start < piece.offset <= part.start + part.nbytes - piece.span.nbytes
        assert (held <= 0).all()  # padding at most is left


def test_small_shards_of_many_parameters_are_one_chunk():
    """A message for each would cost more than the copy: of 12 parameters of 128 KiB, each rank owns 32 KiB."""
    layout = TransferLayout(("x", "x", "y", "y"), tuple("pqrs"), 3, chunked=True)
    plan = make_plan([[f"w{i}", [256, 256], "bfloat16"] for i in range(12)], 16 << 20, layout)
    assert [route.owner for route in routes(plan, 0, 0)] == [0, 1, 2, 3]
    assert not any(part.apart for part in plan.parts(0, 0))
