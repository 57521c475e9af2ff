"""Models as they are loaded, and every architecture's log-probs against those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_rows import edit_config, make_experience
from random_models import ARCHITECTURES, ORIGINAL, make_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch.utils._python_dispatch import TorchDispatchMode
from training_ranks import make_config
from waiting import HANG_S

from slurm_rlhf.config.roles import layout_of
from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.engine._transformers import as_saved, skeleton
from slurm_rlhf.errors import ModelError
from slurm_rlhf.records import Experience
from slurm_rlhf.stages.kinds import SftTrainer
from slurm_rlhf.trainer.batch import collate, per_action
from slurm_rlhf.trainer.export import save_hf
from slurm_rlhf.trainer.forward_fixes import RANDOM
from slurm_rlhf.trainer.frozen import FrozenPolicy
from slurm_rlhf.trainer.models import PolicyModule, _compare_logits, load_critic, load_policy
from slurm_rlhf.trainer.trainers import PolicyTrainer

FP32 = Ds(param_dtype="fp32")
CPU = torch.device("cpu")


EXPERIENCE = make_experience([(3, 9), (12, 1), (1, 30), (7, 0), (5, 5)])
MICRO = [[2, 0], [4], [1, 3]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for arch in ("qwen2", "llama"):
        make_tiny(root / arch, arch, tied=arch != "llama")
    return root


def test_values_of_padded_micro_batches_equal_an_unpadded_forward(models: Path) -> None:
    critic = load_critic(models / "qwen2", FP32, seed=1)

    def values(exp: Experience, micro: list[list[int]]) -> np.ndarray:
        return per_action(exp, micro, CPU, lambda batch: critic(batch.input_ids, batch.action_index))

    alone = [values(EXPERIENCE.select([index]), [[0]]) for index in range(len(EXPERIENCE))]
    np.testing.assert_allclose(values(EXPERIENCE, MICRO), np.concatenate(alone), rtol=0, atol=1e-6)


ZERO_3 = """
import sys
from pathlib import Path
from training_ranks import make_config
from waiting import HANG_S
from slurm_rlhf.stages.kinds import SftTrainer

SftTrainer(make_config(Path(sys.argv[1]), zero_stage=3), 10)
"""


@pytest.mark.parametrize(("trainer", "dtype"), [(SftTrainer, "fp32"), (PolicyTrainer, "bf16"), (PolicyTrainer, "fp32")])
def test_a_head_of_more_than_one_layer_is_refused(tmp_path: Path, trainer: Any, dtype: str) -> None:
    """The output embeddings are the last of its layers, and would be trained without the others."""
    make_model(tmp_path, "modernbert-decoder", noisy=False, bos_token_id=1, cls_token_id=1, sep_token_id=1)
    made = trainer.__new__(trainer)
    made.config = make_config(tmp_path, param_dtype=dtype)
    stated = "logits of ModernBertDecoderForCausalLM are not those of its body and its"
    with pytest.raises(ModelError, match=stated):
        made._load(made.config.ds)
    if trainer is SftTrainer:  # it is refused where ZeRO-3 has cut the parameters, too
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", ZERO_3, str(tmp_path)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert stated in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("dtype", "most"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_logits_of_another_head_are_refused_from_a_bound_on(models: Path, dtype: str, most: float) -> None:
    """A bias b on one of V tokens, all about as likely, changes log-probs by 2 b / V in the mean."""
    policy = load_policy(models / "qwen2", Ds(param_dtype=dtype), 4)
    forward = policy.head.forward
    for off, refused in ((0.3 * most, False), (4 * most, True)):

        def biased(hidden: torch.Tensor, *rest: Any, off: float = off) -> Any:
            logits = forward(hidden, *rest)
            return logits + off * logits.shape[-1] * (torch.arange(logits.shape[-1]) == 0) / 2

        policy.head.forward = biased  # type: ignore[method-assign]
        with pytest.raises(ModelError, match="are not those") if refused else nullcontext():
            _compare_logits(policy, "it")


def test_critic_head_depends_on_the_seed_alone(models: Path) -> None:
    first, again, other = (load_critic(models / "qwen2", FP32, seed).value_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std().item() == pytest.approx(1 / 65, rel=0.3)


def test_collate_points_at_the_token_before_each_action() -> None:
    exp = make_experience([(2, 3), (4, 1)])
    batch = collate(exp, CPU)
    assert batch.input_ids.tolist() == [exp.token_ids[:4].tolist(), exp.token_ids[5:9].tolist()]
    assert batch.action_index.tolist() == [1, 2, 3, 4 + 3]
    assert batch.targets.tolist() == exp.token_ids[[2, 3, 4, 9]].tolist()
    whole = collate(exp, CPU, read=np.array([4, 0]))
    assert whole.input_ids.tolist() == [exp.token_ids[:5].tolist(), exp.token_ids[5:].tolist()]
    assert whole.action_index.tolist() == [4, 5 + 0]
    row = collate(exp, CPU, packed=True)
    assert row.input_ids.tolist() == [[*exp.token_ids[:4], *exp.token_ids[5:9]]]
    assert (row.action_index.tolist(), row.targets.tolist()) == ([1, 2, 3, 4 + 3], batch.targets.tolist())
    assert (row.row.position_ids.tolist(), row.row.bounds.tolist()) == ([[0, 1, 2, 3, 0, 1, 2, 3]], [0, 4, 8])
    with pytest.raises(ValueError, match="sequence 1 has a response but no prompt"):
        collate(make_experience([(2, 3), (0, 1)]), CPU)


class Operators(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function.overloadpacket)] += 1
        return function(*args, **(kwargs or {}))


def test_gradient_checkpointing_changes_nothing_but_memory(models: Path) -> None:
    batch = collate(EXPERIENCE, CPU)
    grads = []
    counts = {}
    for how in ("off", "full", "selective"):
        policy = load_policy(models / "qwen2", FP32, 8, how)
        calls = []
        policy.model.model.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with Operators() as operators:
            policy(batch.input_ids, batch.action_index, batch.targets)[0].sum().backward()
        assert len(calls) == 1 + (how != "off")
        grads.append([p.grad for p in policy.parameters()])
        counts[how] = operators.seen
    for others in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], others, strict=True))
    products = {how: seen["aten.mm"] + seen["aten.addmm"] for how, seen in counts.items()}
    assert products["off"] == products["selective"] < products["full"]
    # Norms take means, and are computed again by both.
    assert counts["off"]["aten.mean"] < counts["selective"]["aten.mean"] == counts["full"]["aten.mean"]


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_export_loads_with_transformers_and_keeps_tied_embeddings_tied(models: Path, tmp_path: Path, arch: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tied = arch == "qwen2"
    policy = load_policy(models / arch, FP32, 100)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    out = tmp_path / "final"
    # The second replaces the first; rank 1 writes nothing.
    for rank, where in ((0, out), (0, out), (1, tmp_path / "other")):
        save_hf(policy.model, policy.model.named_parameters(), models / arch, where, rank)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]

    with safe_open(out / "model.safetensors", "pt") as weights:
        assert ("lm_head.weight" in weights.keys()) is not tied  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.float32
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    ids = torch.arange(2, 60)[None]
    assert torch.equal(loaded(ids).logits, policy.model(ids).logits)
    assert AutoTokenizer.from_pretrained(out)("12+3=")["input_ids"] == [3, 4, 12, 5, 15]
    assert (out / "generation_config.json").read_bytes() == (models / arch / "generation_config.json").read_bytes()


def test_unusable_directories_are_model_errors(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load_policy(tmp_path / "nowhere", FP32, 100)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_policy(tmp_path / "empty", FP32, 100)
    (tmp_path / "empty" / "config.json").write_bytes((models / "qwen2" / "config.json").read_bytes())
    with pytest.raises(ModelError, match="no weights"):
        load_critic(tmp_path / "empty", FP32, 0)
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="is not a safetensors file"):
        load_policy(tmp_path / "empty", FP32, 100)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(path, FP32, 100)


# --- architectures ----------------------------------------------------------------------------------------------------


MAX_LEN = 64
TEMPERATURE = 0.8
RAGGED = make_experience([(3, 9), (12, 1), (1, 30), (7, 0), (5, 44)])


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


def ours(policy: PolicyModule, exp: Experience = RAGGED, packed: bool = False) -> torch.Tensor:
    batch = collate(exp, torch.device("cpu"), packed=packed)
    with torch.no_grad():
        return policy(batch.input_ids, batch.action_index, batch.targets, TEMPERATURE, row=batch.row)[0]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_log_probs_in_train_mode_and_saved_weights_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    path = make_model(tmp_path / "model", arch)
    written = json.loads((path / "config.json").read_text())
    policy = load_policy(path, FP32, 7, max_len=MAX_LEN)
    assert policy.training
    first, again = ours(policy), ours(policy)
    assert torch.equal(first, again), "something is random"
    difference = float((first.double() - plain(path, RAGGED)).abs().max())
    assert difference < 1e-5
    if layout_of(FP32, str(path)).packed:
        torch.testing.assert_close(ours(policy, packed=True).double(), plain(path, RAGGED), rtol=0, atol=1e-5)
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
    assert policy.head.head_math.cap == 3.0
    expected = plain(tmp_path / "model", RAGGED)
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
    by_layer = {"full_attention": dynamic, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    for arch, rope in (("llama", dynamic), ("gemma3_text", by_layer)):
        path = make_model(tmp_path / arch, arch, max_position_embeddings=MAX_LEN, rope_parameters=rope)
        policy = load_policy(path, FP32, 7, max_len=MAX_LEN)
        assert float((ours(policy).double() - plain(path, RAGGED)).abs().max()) < 1e-5
        with pytest.raises(ModelError, match=r"lower data\.max_len = 65 to 64"):
            load_policy(path, FP32, 7, max_len=MAX_LEN + 1)

    path = make_model(tmp_path / "longrope", "phi3")
    short, *long = (load_policy(path, FP32, 7, max_len=length).model for length in (ORIGINAL, MAX_LEN, 0))
    one, other, third = (dict(model.named_buffers())["model.rotary_emb.inv_freq"] for model in (short, *long))
    assert torch.equal(other, third)
    assert not torch.equal(one, other)
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
