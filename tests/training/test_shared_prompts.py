"""Responses behind one prompt: log-probs and gradients of separate rows, only where that is less work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_rows import edit_config
from tiny_models import make_tiny
from training_ranks import make_config

from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import Experience
from slurm_rlhf.training import trainers
from slurm_rlhf.training.batch import collate
from slurm_rlhf.training.models import PolicyModule, load_policy
from slurm_rlhf.training.shared_prompts import (
    Layout,
    attention_mask,
    check_equal,
    check_model,
    level,
    one_row,
    plain,
    probe,
    share,
)

CPU = torch.device("cpu")
FP32 = Ds(param_dtype="fp32")


def grouped(groups: list[tuple[int, list[int]]], seed: int = 0) -> Experience:
    """Make groups of responses, (prompt length, response lengths), and shuffle them."""
    dice = np.random.default_rng(seed)
    prompts, responses, tokens = [], [], []
    for prompt, lengths in groups:
        head = dice.integers(1, 60, prompt)
        for length in lengths:
            prompts.append(prompt)
            responses.append(length)
            tokens += [head, dice.integers(1, 60, length)]
    actions = sum(responses)
    made = Experience(
        np.array(prompts, np.int32),
        np.array(responses, np.int32),
        np.concatenate(tokens).astype(np.int32),
        np.ones(actions, np.bool_),
        np.zeros(len(prompts), np.float32),
    )
    return made.select([int(row) for row in dice.permutation(len(made))])


GROUPS = [(6, [3, 1, 2, 3]), (9, [4, 0, 2]), (4, [1])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for arch in ("qwen2", "llama", "mistral"):
        make_tiny(root / arch, arch)
    return root


def passed(policy: PolicyModule, exp: Experience, layout: Layout | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and the gradient of a sum of them with weights."""
    batch = collate(exp, CPU, layout)
    logprobs, _ = policy(batch.input_ids, batch.action_index, batch.targets, 0.8, **batch.rows)
    policy.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
@pytest.mark.parametrize(("hidden", "rows"), [(15, [3, 5]), (64, [8])])
def test_log_probs_and_gradients_are_those_of_separate_rows(
    models: Path, arch: str, hidden: int, rows: list[int]
) -> None:
    policy, exp = load_policy(models / arch, FP32, 4), grouped(GROUPS)
    layout = share(exp, hidden)
    assert layout is not None
    assert sorted(len(row) for row in layout.rows) == rows
    for found, expected in zip(passed(policy, exp, layout), passed(policy, exp, None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def test_a_response_sees_its_prompt_and_itself_alone() -> None:
    exp = probe()
    mask = attention_mask(exp, one_row(exp))[0, 0]
    # p p p | a | b b | q q | c, each response but for its last token
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]
    batch = collate(exp, CPU, one_row(exp))
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 0, 1, 2]]
    assert batch.action_index.tolist() == [2, 3, 2, 4, 5, 7, 8]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=9)), max_size=5),
    st.sampled_from([1, 8, 64, 4096]),
    st.integers(0, 9),
)
def test_it_is_done_only_where_it_is_less_work(groups: list[tuple[int, list[int]]], hidden: int, seed: int) -> None:
    exp = grouped([(1, [1]), *groups], seed)
    layout = share(exp, hidden)
    if layout is None:
        return
    assert layout.cost(hidden, masked=True) < plain(exp).cost(hidden, masked=False)
    assert sorted(member for row in layout.rows for member in row) == list(range(len(exp)))
    batch = collate(exp, CPU, layout)
    flat = batch.input_ids.flatten()
    for number in range(len(exp)):  # every token stands where its row says
        first, prompt = int(exp.token_offsets[number]), int(exp.prompt_lens[number])
        row = int(layout.row[number]) * layout.width
        at = row + int(layout.prompt[number])
        ids = torch.from_numpy(exp.token_ids[first : first + int(exp.lengths[number])].astype(np.int64))
        start = row + int(layout.start[number])
        assert flat[at : at + prompt].equal(ids[:prompt])
        read = max(len(ids) - prompt - 1, 0)
        assert flat[start : start + read].equal(ids[prompt : prompt + read])


@pytest.mark.parametrize(
    ("groups", "rows"),
    [
        ([(100, [5] * 8)], 1),
        ([(5, [2000] * 8)], None),  # attention between the responses would cost more than eight short prompts
        ([(8, [4]), (8, [4])], None),
        ([(100, [60] * 8), *[(100, [5])] * 50], None),  # fifty rows would be padded to the length of the one
    ],
)
def test_when_it_is_done(groups: list[tuple[int, list[int]]], rows: int | None) -> None:
    layout = share(grouped(groups), hidden=64)
    assert (layout and len(layout.rows)) == rows


def test_prompts_share_rows_until_little_is_padding() -> None:
    dice = np.random.default_rng(5)
    groups = [(int(dice.integers(8, 15)), [int(n) for n in dice.integers(2, 7, 8)]) for _ in range(16)]
    exp = grouped(groups)
    layout = share(exp, hidden=128)
    assert layout is not None
    tokens = sum(prompt + sum(lengths) - len(lengths) for prompt, lengths in groups)
    assert tokens > 0.95 * len(layout.rows) * layout.width
    assert layout.width <= 128
    assert tokens < 0.85 * 16 * max(prompt + sum(lengths) - len(lengths) for prompt, lengths in groups)  # a row each


@given(st.lists(st.integers(1, 99), min_size=1, max_size=20), st.integers(1, 9))
def test_rows_are_about_equally_long(lengths: list[int], count: int) -> None:
    rows = level(lengths, count)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    longest = max(sum(lengths[place] for place in row) for row in rows)
    assert count * longest <= sum(lengths) + (count - 1) * max(lengths)  # of any list scheduling: Graham, 1966


def test_a_model_with_a_window_is_refused(models: Path, tmp_path: Path) -> None:
    policy = load_policy(models / "qwen2", FP32, 4)
    check_model(policy.model, 64, "it")
    edit_config(models / "mistral", sliding_window=16)
    with pytest.raises(ModelError, match=r"train\.share_prompts: it has a window of 16 tokens"):
        check_model(load_policy(models / "mistral", FP32, 4).model, 64, "it")


def test_a_model_that_mixes_the_responses_of_a_row_is_refused() -> None:
    same = torch.tensor([-1.0, -2.0])
    check_equal(same, same + 1e-5, half=False, path="it")
    for other in (same + 0.01, torch.tensor([-1.0, float("nan")])):
        with pytest.raises(ModelError, match=r"train\.share_prompts: it gives log-probs that differ by"):
            check_equal(same, other, half=False, path="it")


@pytest.mark.usefixtures("own_environment")
def test_a_trainer_looks_whether_responses_of_a_row_are_apart(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(alone: torch.Tensor, together: torch.Tensor, half: bool, path: str) -> None:
        assert not half
        torch.testing.assert_close(alone, together, atol=1e-5, rtol=0)
        raise ModelError(f"{path} mixes them")

    config = make_config(models / "qwen2")
    config.train.share_prompts = True
    monkeypatch.setattr(trainers, "check_equal", refuse)
    with pytest.raises(ModelError, match="mixes them"):
        trainers.PolicyTrainer(config, 10)
