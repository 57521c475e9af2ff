"""Log-probs of every architecture in train mode, in padded micro-batches, against plain transformers in eval mode.

All dropout and noise is on in the models' config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_rows import edit_config, make_experience
from random_models import ARCHITECTURES, ORIGINAL, make_model
from safetensors.torch import load_file

from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.engine._transformers import as_saved, skeleton
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import Experience
from slurm_rlhf.trainer.batch import collate
from slurm_rlhf.trainer.export import save_hf
from slurm_rlhf.trainer.forward_fixes import RANDOM
from slurm_rlhf.trainer.models import PolicyModule, load_critic, load_policy
from slurm_rlhf.trainer.trainers import FrozenPolicy

FP32 = Ds(param_dtype="fp32")
MAX_LEN = 64
TEMPERATURE = 0.8
EXPERIENCE = make_experience([(3, 9), (12, 1), (1, 30), (7, 0), (5, 44)])


def plain(path: Path, exp: Experience) -> torch.Tensor:
    """Row by row, without padding before the end; rows are as long as the run's longest, which longrope goes by."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    expected = []
    for index in range(len(exp)):
        one = exp.select([index])
        prompt, length = int(one.prompt_lens[0]), int(one.lengths[0])
        ids = torch.full((1, MAX_LEN), 5)
        ids[0, :length] = torch.from_numpy(one.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = (model(input_ids=ids, use_cache=False).logits[0].double() / TEMPERATURE).log_softmax(-1)
        positions = torch.arange(prompt, length)
        expected.append(logprobs[positions - 1, ids[0, positions]])
    return torch.cat(expected)


def ours(policy: PolicyModule, exp: Experience = EXPERIENCE) -> torch.Tensor:
    batch = collate(exp, torch.device("cpu"))
    with torch.no_grad():
        return policy(batch.input_ids, batch.action_index, batch.targets, TEMPERATURE)[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_log_probs_in_train_mode_and_saved_weights_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    path = make_model(tmp_path / "model", arch)
    written = json.loads((path / "config.json").read_text())
    policy = load_policy(path, FP32, 7, max_len=MAX_LEN)
    assert policy.training
    first, again = ours(policy), ours(policy)
    assert torch.equal(first, again), "something is random"
    difference = float((first.double() - plain(path, EXPERIENCE)).abs().max())
    print(f"{arch}: {difference:.1e}")
    assert difference < 1e-5
    assert torch.equal(ours(policy.eval()), first)

    saved = load_file(path / "model.safetensors")
    sent = dict(as_saved(skeleton(str(path)), policy.model.named_parameters()))
    assert sent.keys() == saved.keys() - dict(policy.model.named_buffers()).keys()  # which training does not change
    assert all(torch.equal(sent[name], saved[name]) for name in sent)
    save_hf(policy.model, policy.model.named_parameters(), path, tmp_path / "out", rank=0)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == saved.keys()
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {n: v for n, v in exported.items() if RANDOM.search(n)} == {
        n: v for n, v in written.items() if RANDOM.search(n) and n in exported
    }


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SMALL, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 69, "final_logit_softcapping": 3.0}


def test_the_soft_cap_of_a_text_model_inside_another_is_applied(tmp_path: Path) -> None:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = {**TEXT, "initializer_range": 0.2, "hidden_size_per_layer_input": 0, "sliding_window": 16}
    config = Gemma4Config(text_config={**text, "layer_types": ["sliding_attention", "full_attention"]})
    torch.manual_seed(0)
    Gemma4ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    policy = load_policy(tmp_path / "model", FP32, 7)
    assert policy.head.head_math is not None
    assert policy.head.head_math.cap == 3.0
    expected = plain(tmp_path / "model", EXPERIENCE)
    torch.testing.assert_close(ours(policy).double(), expected, rtol=0, atol=1e-5)
    without = ours(PolicyModule(policy.model, 7)).double()
    assert (without - expected).abs().max() > 0.1, "the cap makes no difference here"


def test_a_soft_cap_that_the_model_around_ignores_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    config = Gemma3Config(text_config=TEXT, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"final_logit_softcapping = 3\.0.*how a gemma3 does it is not known"):
        load_policy(tmp_path / "model", FP32, 7)


@pytest.mark.parametrize("max_len", [ORIGINAL, MAX_LEN])
def test_longrope_has_ratio_one_at_learning_rate_0_alone_and_among_longer_mates(tmp_path: Path, max_len: int) -> None:
    """Whether the run allows texts beyond the original length decides, and not what is in a micro-batch."""
    config = Config(ds=FP32)
    config.actor.model_name_or_path = str(make_model(tmp_path / "model", "phi3"))
    config.data.max_len = max_len
    policy = FrozenPolicy(config)
    rows = make_experience([(3, 9), (5, max_len - 5)])
    alone, among = (policy.logprobs(rows, micro)["logprobs"] for micro in ([[0], [1]], [[0, 1]]))
    np.testing.assert_allclose(np.exp(among - alone), 1.0, rtol=0, atol=1e-5)
    critic = load_critic(tmp_path / "model", FP32, 0, max_len=max_len)
    states = []
    for exp in (rows, rows.select([0])):
        batch = collate(exp, torch.device("cpu"))
        with torch.no_grad():
            states.append(critic(batch.input_ids, batch.action_index)[:9])
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)


def test_rotary_embeddings_that_cannot_be_fixed_are_refused(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    path = make_model(tmp_path / "dynamic", "llama", max_position_embeddings=MAX_LEN, rope_parameters=dynamic)
    policy = load_policy(path, FP32, 7, max_len=MAX_LEN)
    assert float((ours(policy).double() - plain(path, EXPERIENCE)).abs().max()) < 1e-5
    with pytest.raises(ModelError, match=r"lower data\.max_len = 65 to 64"):
        load_policy(path, FP32, 7, max_len=MAX_LEN + 1)

    path = make_model(tmp_path / "longrope", "phi3")
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    edit_config(path, rope_parameters={**rope, "attention_factor": 2.0})
    with pytest.raises(ModelError, match=r"scales by 2 in transformers and by 1\.\d+ in vLLM"):
        load_policy(path, FP32, 7, max_len=MAX_LEN)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("qwen2", {"final_logit_softcapping": 30.0}),
        ("llama", {"logit_scale": 0.5}),
        ("mistral", {"logits_scaling": 8.0}),
        ("qwen3", {"logits_soft_cap": 30.0}),
    ],
)
def test_head_math_that_a_model_is_not_known_for_is_refused(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    path = make_model(tmp_path / "model", arch)
    edit_config(path, **changes)
    with pytest.raises(ModelError, match=next(iter(changes))):
        load_policy(path, FP32, 7)


def test_recurrent_gemma_has_its_soft_cap(tmp_path: Path) -> None:
    from transformers import RecurrentGemmaConfig

    from slurm_rlhf.trainer.logprobs import head_math

    assert head_math(RecurrentGemmaConfig(logits_soft_cap=30.0), "x").cap == 30.0
