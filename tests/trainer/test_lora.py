"""Adapters in training: gradients against float64, the base model with them, what is written and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import make_model
from safetensors.torch import load_file
from tiny_models import make_tiny
from torch.func import functional_call
from training_ranks import make_config, make_experience, train

from slurm_rlhf.algorithms.lora import is_adapter
from slurm_rlhf.config.schema import Ds
from slurm_rlhf.errors import CheckpointError, ModelError
from slurm_rlhf.trainer.export import export
from slurm_rlhf.trainer.lora import adapted_layers, attach, base_model
from slurm_rlhf.trainer.models import load_policy

ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3")
RANK, ALPHA = 3, 6.0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_are_those_of_w_plus_b_a_in_float64(tmp_path: Path, arch: str) -> None:
    policy = load_policy(make_model(tmp_path / "model", arch), Ds(param_dtype="fp32"), 64, max_len=64)
    model, plain = policy.model, load_policy(tmp_path / "model", Ds(param_dtype="fp32"), 64, max_len=64).model
    attach(model, RANK, ALPHA, ["all-linear"], seed=5)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in adapted_layers(model).values():  # B is not zero
            layer.lora_B.weight.copy_(0.1 * torch.randn(layer.lora_B.weight.shape, generator=generator))
    ids = torch.arange(3, 23)[None]
    weights = torch.linspace(-1, 1, 19, dtype=torch.float64)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logprobs = logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return (logprobs * weights).sum()

    ours = loss(model(input_ids=ids, use_cache=False).logits)
    ours.backward()

    leaves = {name: p.detach().double().requires_grad_(is_adapter(name)) for name, p in model.named_parameters()}
    merged = {name: value for name, value in leaves.items() if not is_adapter(name)}
    for name in adapted_layers(model):
        a, b = (leaves[f"{name}.lora_{side}.weight"] for side in "AB")
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + ALPHA / RANK * b @ a
    expected = loss(functional_call(plain.double(), merged, kwargs={"input_ids": ids, "use_cache": False}).logits)
    expected.backward()

    assert float(ours.detach()) == pytest.approx(float(expected.detach()), abs=1e-4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in leaves if is_adapter(name)}
    largest = max(float(leaves[name].grad.norm()) for name in trained)  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        if name in trained:
            wanted = leaves[name].grad
            gap = float((parameter.grad.double() - wanted).norm())
            assert gap <= 1e-5 * max(float(wanted.norm()), 1e-2 * largest), name


def test_targets_are_layers_by_the_last_part_of_their_names(tmp_path: Path) -> None:
    load = load_policy(make_tiny(tmp_path / "model"), Ds(param_dtype="fp32"), 64).model
    attach(load, 2, 1.0, ["q_proj", "up_proj"])
    assert {name.rpartition(".")[2] for name in adapted_layers(load)} == {"q_proj", "up_proj"}
    assert len(adapted_layers(load)) == 2 * load.config.num_hidden_layers


@pytest.mark.parametrize(
    ("arch", "targets", "message"),
    [
        ("qwen2", ["q_proj", "qproj"], "no linear layers named qproj; it has down_proj, gate_proj, k_proj, "),
        ("gpt2", ["all-linear"], "has no layers of the class Linear"),
        ("falcon", ["query_key_value"], "has no layers of the class Linear"),
        ("qwen3_moe", ["all-linear"], "has experts, for which there are no adapters here"),
    ],
)
def test_what_has_no_adapters_is_named(tmp_path: Path, arch: str, targets: list[str], message: str) -> None:
    model = load_policy(make_model(tmp_path / "model", arch), Ds(param_dtype="fp32"), 64, max_len=64).model
    with pytest.raises(ModelError, match=message):
        attach(model, 2, 1.0, targets)


@pytest.mark.slow
@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("ds", [{"zero_stage": 0}, {"zero_stage": 3, "param_dtype": "bf16"}], ids=["plain", "zero3"])
def test_the_policy_learns_and_the_base_stays(
    tmp_path: Path, ds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported model is W + (alpha / r) B A, from the run and from its checkpoint, with PEFT's files."""
    from slurm_rlhf.trainer.trainers import PolicyTrainer

    base = make_tiny(tmp_path / "model")
    config = make_config(base, **ds)
    config.lora.rank, config.lora.alpha, config.actor.learning_rate = RANK, ALPHA, 1e-2
    config.train.full_determinism, config.actor.gradient_checkpointing_enable = False, True
    monkeypatch.setenv("LOCAL_RANK", "0")  # DeepSpeed reads it
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # ZeRO-3 leaves its own there
    trainer = PolicyTrainer(config, 3)
    exp = make_experience(9)
    micro = [[*range(len(exp))]]
    before = trainer.logprobs(exp, micro)["logprobs"]
    train(trainer, range(3), 40)
    after = trainer.logprobs(exp, micro)["logprobs"]
    with base_model(trainer.backend.module):
        assert np.array_equal(trainer.logprobs(exp, micro)["logprobs"], before)
    assert np.abs(after - before).max() > 1e-3

    described = {one.name: one.shape for one in trainer.describe()}
    assert [*map(is_adapter, described)] == [True] * (2 * 7 * 2)
    assert {*trainer.local_parameters()} == {*described}

    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint").result()
    trainer.export_hf(tmp_path / "of_run")
    export(tmp_path / "checkpoint", base, tmp_path / "of_checkpoint", "fp32")
    adapter = load_file(tmp_path / "of_checkpoint" / "adapter" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in adapter} == {*described}
    settings = json.loads((tmp_path / "of_run" / "adapter" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", RANK, ALPHA)
    own, found = load_file(base / "model.safetensors"), load_file(tmp_path / "of_checkpoint" / "model.safetensors")
    assert own.keys() == found.keys()
    for name in own:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        update = torch.zeros(())
        if f"{layer}.lora_A.weight" in adapter:
            update = ALPHA / RANK * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
            assert float(update.abs().max()) > 0
        torch.testing.assert_close(found[name], own[name].float() + update, rtol=0, atol=1e-6)
    config.lora.rank = RANK + 1
    with pytest.raises(CheckpointError, match=r"with its lora\.rank and lora\.target_modules"):
        PolicyTrainer(config, 3).load(tmp_path / "checkpoint")
    from deepspeed import comm

    # DeepSpeed keeps a copy of the group that its own function alone forgets.
    (comm if ds["zero_stage"] else torch.distributed).destroy_process_group()
