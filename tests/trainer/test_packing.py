"""Sequences that are packed into one row, against each alone: hidden states, gradients, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packed_rows import edit_config, make_experience
from random_models import make_model
from tiny_models import make_reward, make_tiny

from slurm_rlhf.config.architectures import PACKED
from slurm_rlhf.config.roles import layout_of
from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import ModelError
from slurm_rlhf.trainer import batch
from slurm_rlhf.trainer.batch import PackedRow, collate
from slurm_rlhf.trainer.models import load_critic, load_policy, load_reward

FP32 = Ds(param_dtype="fp32")
NAMED = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3_moe")
CPU = torch.device("cpu")
LENGTHS = [(3, 9), (12, 1), (1, 30), (7, 0), (5, 44)]
EQUAL = [(3, 9), (2, 4), (6, 6), (3, 3), (0, 0), (5, 7), (4, 2), (12, 1)]
"""Three are read as 11 tokens, three as 5: attention takes equal ones together."""


def each_alone(q, k, v, bounds, scale, window=None, softcap=None):
    """Compute what a kernel for variable lengths does."""
    ends = zip(bounds.tolist(), bounds.tolist()[1:], strict=False)
    parts = [batch._causal(*(t[a:b].transpose(0, 1)[None] for t in (q, k, v)), scale, window, softcap) for a, b in ends]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def test_fewer_keys_than_heads_whatever_the_length() -> None:
    query, key, value = (torch.randn(1, heads, 4, 8) for heads in (4, 2, 2))
    wide = [tensor.repeat_interleave(2, dim=1) for tensor in (key, value)]
    found, wanted = (batch._causal(query, *pair, None, None, None) for pair in ((key, value), wide))
    torch.testing.assert_close(found, wanted)


def take_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaded models use transformers' function for flash attention, which may not ask the device for lengths."""
    from transformers import AttentionInterface
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations import flash_attention as flash

    def kernel(*qkv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window_size=None, softcap=None):
        assert (cu_seqlens_q is cu_seqlens_k, causal, max_seqlen_q) == (True, True, int(cu_seqlens_q.diff().max()))
        return each_alone(*qkv, cu_seqlens_q, softmax_scale, window_size and window_size[0] + 1, softcap)

    kernels = (None, kernel, None, None, None), (utils._lazy_define_process_function(kernel), None)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda name: kernels)
    monkeypatch.setattr(utils, "_is_packed_sequence", None)
    monkeypatch.setattr(flash, "get_target_dtype", lambda query, module: None)
    monkeypatch.setitem(AttentionInterface._global_mapping, batch.ATTENTION_NAME, flash.flash_attention_forward)


@pytest.mark.parametrize(
    ("arch", "lengths"),
    [
        *((name, EQUAL) for name in ("qwen2", "mistral", "gemma2")),
        *(pytest.param(name, LENGTHS, marks=[pytest.mark.full] * (name not in NAMED)) for name in sorted(PACKED)),
    ],
)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, lengths: list[tuple[int, int]]
) -> None:
    policy = load_policy(make_model(tmp_path / "model", arch), FP32, 7, max_len=64)
    exp = make_experience(lengths)
    found, grads = [], []
    for packed, by_name in ((False, False), (True, False), (True, True)):
        if by_name:
            take_flash_attention(monkeypatch)
        parts = [exp] if packed else [exp.select([row]) for row in range(len(exp))]
        batches = [collate(part, CPU, packed=packed) for part in parts]
        logprobs = torch.cat([policy(b.input_ids, b.action_index, b.targets, row=b.row)[0] for b in batches])
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append(logprobs.detach())
        grads.append({name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None})
        policy.zero_grad()
    largest = max(float(grad.norm()) for grad in grads[0].values())
    for logprobs, gradients in zip(found[1:], grads[1:], strict=True):
        torch.testing.assert_close(logprobs, found[0], rtol=0, atol=1e-5)
        for name, grad in grads[0].items():
            assert float((gradients[name] - grad).norm()) <= 1e-5 * max(float(grad.norm()), 1e-2 * largest), name


def test_values_and_scores_are_those_of_each_sequence_alone(tmp_path: Path) -> None:
    path = make_reward(tmp_path / "rm")
    exp = make_experience(LENGTHS)
    for model in (load_critic(path, FP32, 0), load_reward(path, FP32)):
        with torch.no_grad():
            rows, row = (collate(exp, CPU, packed=packed) for packed in (False, True))
            alone, together = (model(each.input_ids, each.action_index, row=each.row) for each in (rows, row))
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_model_with_layers_of_its_own_goes_row_by_row_and_is_refused_if_it_is_forced(tmp_path: Path) -> None:
    mixed = {"num_experts": 1, "mamba_d_state": 4, "attn_layer_offset": 1, "attn_layer_period": 2}
    make_model(tmp_path / "m", "jamba", noisy=False, use_mamba_kernels=False, **mixed)
    assert not layout_of(FP32, str(tmp_path / "m")).packed
    load_policy(tmp_path / "m", FP32, 7)
    for dtype in ("fp32", "bf16"):
        with pytest.raises(ModelError, match=r"packed into one row .* Set ds\.packing_samples = never"):
            load_policy(tmp_path / "m", Ds(param_dtype=dtype, packing_samples="always"), 7)


def test_who_packs(tmp_path: Path) -> None:
    path = str(make_tiny(tmp_path / "m"))
    assert layout_of(FP32, path).packed
    assert layout_of(FP32, path).attention == 1 / (12 * 64)
    assert not layout_of(Ds(packing_samples="never"), path).packed
    for name, packs in {"eager": False, "flex_attention": False, "flash_attention_2": True}.items():
        assert layout_of(Ds(attn_implementation=name), path).packed is packs
    edit_config(Path(path), model_type="unheard_of")
    assert not layout_of(FP32, path).packed


def test_flash_attention_gets_the_lengths_and_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is a stand-in that computes each text by itself; the real one ran on a GPU (docs/cluster.md)."""
    from torch.nn.attention import varlen

    def loop(q, k, v, bounds, same, longest, _, *, scale, window_size, enable_gqa):
        assert (q.dtype, bounds.dtype, bounds is same, enable_gqa) == (torch.bfloat16, torch.int32, True, True)
        assert longest == int(bounds.diff().max())
        return each_alone(q, k, v, bounds, scale, None if window_size[0] < 0 else window_size[0] + 1)

    monkeypatch.setattr(varlen, "varlen_attn", loop)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 12, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    for window in (None, 3, 100):
        flash = batch._flash(q, k, v, bounds, 7, 0.3, window)
        how = {"scaling": 0.3, "sliding_window": window, "packed_row": PackedRow(bounds[None], bounds, (5, 7))}
        plain, _ = batch.attention(torch.nn.Identity(), q, k, v, None, **how)
        torch.testing.assert_close(flash, plain)
