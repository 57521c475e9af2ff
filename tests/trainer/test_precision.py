"""Before the first step actor, reference and critic agree with themselves: no dropout, one way to compute in bf16, and
values in fp32.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import make_model
from safetensors.torch import load_file, save_file
from tiny_models import make_reward, make_tiny
from training_ranks import as_rank, make_config, make_experience, parameters, share, torchrun

from slurm_rlhf.config.schema import Config
from slurm_rlhf.trainer.forward_fixes import FIXED, has_fixed_frequencies

MARKS_OF_FIXTURES = {"ranks": "slow"}

RANKS = 2
STAGES = (0, 2, 3)
CUT = ("phi3", "mixtral")  # frequencies that are fixed after loading; experts in one parameter


# --- what each rank does ---------------------------------------------------------------------------------------------


def first_step(model: Path, world: Any) -> dict[str, torch.Tensor]:
    """Sums of ratio and clip fraction over this rank's actions in one update after one rollout, and their number."""
    from slurm_rlhf.trainer.trainers import PolicyTrainer

    trainer = PolicyTrainer(make_config(model, zero_stage=2), 1)
    exp = make_experience(0)
    part, micro = share(exp, world.rank, world.size, 40)
    part.columns |= trainer.logprobs(part, micro)
    metrics = trainer.train_step(part, micro, float(exp.action_mask.sum()))
    stated = [metrics["ratio"], metrics["clip_fraction"], float(part.action_mask.sum())]
    return {"opt": torch.tensor(stated, dtype=torch.float64)}


def value_head(model: Path, world: Any, stage: int, out: Path) -> dict[str, torch.Tensor]:
    """Values before and after two steps, by the trainer and by its body under an fp32 head of the master's numbers."""
    from slurm_rlhf.trainer.batch import collate
    from slurm_rlhf.trainer.trainers import ValueTrainer

    config = make_config(model, zero_stage=stage, param_dtype="bf16")
    config.critic.learning_rate = 1e-3
    trainer = ValueTrainer(config, 3)
    exp = make_experience(0)
    part, micro = share(exp, world.rank, world.size, 40)
    answers = {"start": trainer.values(exp, [list(range(len(exp)))])["values"]}
    for _ in range(2):
        trainer.train_step(part, micro, float(exp.action_mask.sum()))
    answers["after"] = trainer.values(exp, [list(range(len(exp)))])["values"]

    seen = []
    head = trainer.backend.module.value_head
    hook = head.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    batch = collate(exp, world.device, packed=trainer.layout.packed)
    with torch.no_grad():
        trainer.backend.forward(batch.input_ids, batch.action_index, row=batch.row)
    hook.remove()
    master = torch.zeros(head.weight.ds_numel if stage == 3 else head.weight.numel())
    for fragment in trainer.backend.shards(head, "optimizer"):
        master[fragment.start : fragment.start + fragment.tensors["fp32"].numel()] = fragment.tensors["fp32"]
    torch.distributed.all_reduce(master)
    stored = parameters(trainer)["value_head.weight"]
    answers |= {"master": master, "stored": stored, "expected": seen[0].float() @ master}

    directory = out / f"critic{stage}"
    directory.mkdir(exist_ok=True)
    trainer.save(directory)
    again = ValueTrainer(config, 3)
    again.load(directory)
    answers["resumed"] = again.values(exp, [list(range(len(exp)))])["values"]
    return {f"value{stage}.{name}": torch.as_tensor(numbers) for name, numbers in answers.items()}


def references(config: Config, world: Any, prefix: str, actor: bool = True) -> dict[str, torch.Tensor]:
    """Log-probs of an actor, and of references that are whole and cut over the ranks; of fp16 those of others, too."""
    from slurm_rlhf.trainer.frozen import FrozenPolicy
    from slurm_rlhf.trainer.trainers import PolicyTrainer

    part, micro = share(make_experience(0), world.rank, world.size, 40)
    answers = {"actor": PolicyTrainer(config, 1).logprobs(part, micro)["logprobs"]} if actor else {}
    for stage in (3, 0):
        config.ref.zero_stage = stage
        answers[f"ref{stage}"] = FrozenPolicy(config).logprobs(part, micro)["logprobs"]
    for dtype in ("fp32", "bf16") if config.ds.param_dtype == "fp16" else ():
        config.ds.param_dtype = dtype
        answers[dtype] = FrozenPolicy(config).logprobs(part, micro)["logprobs"]
    return {prefix + name: torch.as_tensor(numbers) for name, numbers in answers.items()}


def main(request: dict[str, Any]) -> None:
    models, out = Path(request["models"]), Path(request["out"])
    from slurm_rlhf.trainer.distributed import join_world

    world = join_world(60.0, 60.0)
    answers = first_step(models / "opt", world)
    for arch in CUT:
        bf16 = make_config(models / arch, param_dtype="bf16", zero_stage=2)
        answers |= references(bf16, world, f"{arch}.", actor=False)
    fp16 = make_config(models / "qwen2", zero_stage=3, param_dtype="fp16", fp32_lm_head=True)
    answers |= references(fp16, world, "fp16.")
    # Stage 0 last: DeepSpeed's autocast, once it was in use, changes how later engines add up gradients.
    for stage in reversed(STAGES):
        answers |= value_head(models / "qwen2", world, stage, out)
    answers |= references(make_config(models / "qwen2", zero_stage=0, param_dtype="bf16"), world, "")
    save_file(answers, out / f"rank{world.rank}.safetensors")


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("models")
    make_tiny(path / "qwen2")
    for arch in ("opt", *CUT):
        make_model(path / arch, arch)
    torchrun(RANKS, program=__file__, models=str(path), out=str(path))
    return [load_file(path / f"rank{rank}.safetensors") for rank in range(RANKS)]


def test_opt_has_ratio_one_in_the_first_step(ranks: list[dict[str, torch.Tensor]]) -> None:
    for answers in ranks:
        ratio, clipped, actions = answers["opt"].tolist()
        assert (ratio, clipped) == (actions, 0.0)
        assert actions > 10


@pytest.mark.parametrize("kind", ["ref0", "ref3"])
def test_actor_and_reference_are_equal_before_the_first_step_at_stage_0_in_bf16(
    ranks: list[dict[str, torch.Tensor]], kind: str
) -> None:
    for answers in ranks:
        assert torch.equal(answers["actor"], answers[kind])


@pytest.mark.parametrize("kind", ["ref0", "ref3"])
def test_actor_and_reference_are_equal_before_the_first_step_in_fp16_with_an_fp32_head(
    ranks: list[dict[str, torch.Tensor]], kind: str
) -> None:
    for answers in ranks:
        torch.testing.assert_close(answers[f"fp16.{kind}"], answers["fp16.actor"], rtol=0, atol=1e-6)
        off, off_in_bf16 = ((answers[f"fp16.{name}"] - answers["fp16.fp32"]).abs().mean() for name in ("actor", "bf16"))
        assert 0.0 < off < off_in_bf16 / 4


@pytest.mark.parametrize("arch", CUT)
def test_models_that_are_cut_by_zero3_give_what_whole_ones_give(
    ranks: list[dict[str, torch.Tensor]], arch: str
) -> None:
    for answers in ranks:
        torch.testing.assert_close(answers[f"{arch}.ref3"], answers[f"{arch}.ref0"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_values_of_a_bf16_critic_are_those_of_the_fp32_master_of_its_head(
    ranks: list[dict[str, torch.Tensor]], stage: int
) -> None:
    for answers in ranks:
        stated = {name.partition(".")[2]: t for name, t in answers.items() if name.startswith(f"value{stage}.")}
        torch.testing.assert_close(stated["after"], stated["expected"], rtol=0, atol=1e-6)
        assert torch.equal(stated["resumed"], stated["after"])
        rounded = stated["after"].bfloat16().float()
        assert (rounded != stated["after"]).float().mean() > 0.9, "values are multiples of a step of bf16"
        assert (stated["after"] - stated["start"]).abs().max() > 1e-3
        if stage:
            assert not torch.equal(stated["master"], stated["stored"].flatten())


def test_scores_of_a_bf16_reward_model_are_computed_with_the_fp32_head_of_its_file(tmp_path: Path) -> None:
    from slurm_rlhf.trainer.batch import collate
    from slurm_rlhf.trainer.frozen import RewardModel, last_token
    from slurm_rlhf.trainer.models import _action_states

    path = make_reward(tmp_path / "rm", "v_head.summary")
    config = make_config(path, param_dtype="bf16")
    config.reward.model_name_or_path = str(path)
    exp = make_experience(0)
    model = RewardModel(config)
    scores = model.score(exp, [list(range(len(exp)))])
    weights = load_file(path / "model.safetensors")
    batch = collate(exp, torch.device("cpu"), packed=model.layout.packed, read=last_token(exp))
    with torch.no_grad():
        hidden = _action_states(model.model._module.model, batch.input_ids, batch.action_index, batch.row).float()
    expected = hidden @ weights["v_head.summary.weight"][0].float() + weights["v_head.summary.bias"].float()
    np.testing.assert_allclose(scores, expected.numpy(), rtol=0, atol=1e-6)
    assert hidden.bfloat16().float().equal(hidden)


if __name__ == "__main__":
    as_rank(main)


def test_one_fixed_rotary_embedding_among_others_counts() -> None:
    parts = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])
    assert not has_fixed_frequencies(parts)
    parts[1].rope_type = FIXED
    assert has_fixed_frequencies(parts)
    parts[1].rope_type = {"full_attention": "default", "sliding_attention": FIXED}
    assert has_fixed_frequencies(parts)
