import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.errors import SyncError
from slurm_rlhf.sync.bucket import fill, verify, view
from slurm_rlhf.sync.checksum import checksum
from slurm_rlhf.sync.plan import make_plan
from slurm_rlhf.sync.push import described, distinct


def _random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


def test_checksum_is_the_weighted_sum_it_says():
    data = _random_bytes(8 * (2 * 4096 + 5))
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, 4097, dtype=np.int64).view(np.uint64) * golden).view(np.int64)
        weights = ((mixed ^ (mixed >> 29)).view(np.uint64) * golden) | np.uint64(1)
        lanes = data.numpy().view(np.uint64)
        body = lanes[:8192].reshape(2, 4096)
        row = np.array([1, 2], dtype=np.uint64)[:, None]
        total = (body * (weights + row)).sum(dtype=np.uint64) + np.uint64(31) * (lanes[8192:] * weights[:5]).sum(
            dtype=np.uint64
        )
    assert checksum(data).item() == np.asarray(total).view(np.int64)


@given(st.integers(2, 9000), st.data())
def test_checksum_sees_a_flipped_bit_a_shift_and_an_exchange(lanes, draw):
    data = _random_bytes(8 * lanes)
    here, there = draw.draw(st.integers(0, lanes - 2)), lanes - 1
    flipped = data.clone()
    flipped[8 * here] ^= 1 << draw.draw(st.integers(0, 7))
    exchanged = data.clone().view(torch.int64)
    exchanged[here], exchanged[there] = exchanged[there].item(), exchanged[here].item()
    changed = [flipped, exchanged.view(torch.uint8), data.roll(8)]
    assert checksum(data).item() not in [checksum(other).item() for other in changed]


def _weights() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        ("fp32", torch.randn(7, 5)),
        ("bf16", torch.randn(33).bfloat16()),
        ("transposed", torch.randn(6, 4).half().T),
        ("scalar", torch.tensor(3.5)),
        ("none", torch.zeros(0, 4)),
    ]


def test_what_is_filled_is_what_is_viewed():
    weights = _weights()
    plan = make_plan(described(weights), 1 << 20)
    buffer = torch.randint(0, 256, (plan.largest,), dtype=torch.uint8)
    fill(buffer, plan.buckets[0], 0, 12, iter(weights))
    verify(buffer, plan.buckets[0], 0, 12)
    for (_, tensor), entry in zip(weights, plan.buckets[0].entries, strict=True):
        got = view(buffer, entry)
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)


def test_a_wrong_byte_and_a_wrong_version_are_named():
    weights = _weights()
    plan = make_plan(described(weights), 1 << 20)
    buffer = torch.zeros(plan.largest, dtype=torch.uint8)
    fill(buffer, plan.buckets[0], 0, 12, iter(weights))
    with pytest.raises(SyncError, match="bucket 0 of policy version 13, got bucket 0 of version 12"):
        verify(buffer, plan.buckets[0], 0, 13)
    buffer[plan.buckets[0].entries[1].offset + 3] += 1
    with pytest.raises(SyncError, match="differs from the sender's in bf16 "):
        verify(buffer, plan.buckets[0], 0, 12)


def test_parameters_that_are_not_the_plan():
    weights = _weights()
    plan = make_plan(described(weights), 1 << 20)
    buffer = torch.zeros(plan.largest, dtype=torch.uint8)
    with pytest.raises(SyncError, match=r"next parameter is bf16 \[33\] bfloat16, the plan says fp32 \[7, 5\] float32"):
        fill(buffer, plan.buckets[0], 0, 1, iter(weights[1:]))
    with pytest.raises(SyncError, match="end before 'scalar'"):
        fill(buffer, plan.buckets[0], 0, 1, iter(weights[:3]))


def test_tied_parameters_are_sent_once_and_reused_memory_is_no_tie():
    embed, other = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)
    named = [("embed", embed), ("other", other), ("head", embed), ("state_dict_head", embed.detach())]
    assert [name for name, _ in distinct(named)] == ["embed", "other"]

    def gathered():
        for number in range(50):
            yield f"p{number}", torch.full((1000,), float(number))  # the allocator hands the same block out again

    assert [float(tensor[0]) for _, tensor in distinct(gathered())] == list(range(50))
