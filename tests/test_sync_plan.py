import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.errors import SyncError
from slurm_rlhf.sync.plan import ALIGN, SyncPlan, check_match, make_plan

PARAMETERS = [
    ["a", [4, 8], "float32"],
    ["b", [], "bf16"],
    ["c", [3], "torch.float16"],
    ["d", [1000], "fp32"],
    ["e", [2], "fp32"],
]


def test_buckets_keep_the_order_and_the_size():
    plan = make_plan(PARAMETERS, 256)
    assert [[e.name for e in bucket.entries] for bucket in plan.buckets] == [["a", "b", "c"], ["d"], ["e"]]
    assert [e.nbytes for bucket in plan.buckets for e in bucket.entries] == [128, 2, 6, 4000, 8]
    assert plan.largest == plan.buckets[1].nbytes >= 4000
    assert plan.described == [
        ["a", [4, 8], "float32"],
        ["b", [], "bfloat16"],
        ["c", [3], "float16"],
        ["d", [1000], "float32"],
        ["e", [2], "float32"],
    ]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 50), max_size=3), st.sampled_from(["fp32", "bf16", "fp16"])), min_size=1
    ),
    st.integers(1, 5000),
)
def test_every_byte_has_one_place(shapes, size):
    described = [[f"p{i}", shape, dtype] for i, (shape, dtype) in enumerate(shapes)]
    plan = make_plan(described, size)
    assert SyncPlan.from_wire(plan.to_wire()) == plan
    assert [e.name for bucket in plan.buckets for e in bucket.entries] == [name for name, *_ in described]
    for bucket in plan.buckets:
        end = 8 * (2 + len(bucket.entries))
        for entry in bucket.entries:
            assert entry.offset >= end
            assert entry.offset % ALIGN == 0
            end = entry.offset + entry.nbytes
        assert end <= bucket.nbytes
        assert len(bucket.entries) == 1 or sum(e.nbytes for e in bucket.entries) <= size


def test_what_cannot_be_planned():
    with pytest.raises(SyncError, match="'a' twice"):
        make_plan([["a", [1], "fp32"], ["a", [1], "fp32"]], 100)
    with pytest.raises(SyncError, match=r"int8.*valid: float32, bfloat16, float16"):
        make_plan([["a", [1], "int8"]], 100)
    with pytest.raises(SyncError, match="empty"):
        make_plan([], 100)


def test_two_architectures_are_told_apart_by_name():
    sent = [["same", [2], "fp32"], ["shape", [2, 3], "fp32"], ["extra", [1], "fp32"]]
    expected = [["same", [2], "bf16"], ["shape", [3, 2], "fp32"], ["wanted", [1], "fp32"]]
    check_match(sent[:1], expected[:1], "actor 0", "rollout 1")  # dtypes may differ
    with pytest.raises(SyncError) as caught:
        check_match(sent, expected, "actor 0", "rollout 1")
    text = str(caught.value)
    assert "extra: only actor 0 has it" in text
    assert "wanted: only rollout 1 has it" in text
    assert "shape: [2, 3] at actor 0, [3, 2] at rollout 1" in text
    assert "same" not in text.replace("the same", "")
