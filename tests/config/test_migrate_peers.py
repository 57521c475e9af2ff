"""`slurm-rlhf migrate verl` and `trl`: scripts in the shapes of theirs become files that break no rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_rlhf.cli import main as cli
from slurm_rlhf.cli.commands import commands
from slurm_rlhf.config.keys import all_keys, get, peers
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.migrate import Dictionary, Translation, translate
from slurm_rlhf.config.rules import key_problems, rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

READ = {name: one.keys for name, one in commands().items()}

VERL = r"""
set -x
NODES=${NODES:-2}
ROOT=${ROOT:-"$HOME/data"}
answer=$((1024 * 2))
budget=$(((1024 + answer) * 2 / 1))
files="['$ROOT/a/train.parquet', '$ROOT/b/train.parquet']"
LORA=(
    actor_rollout_ref.model.lora_rank=32
    actor_rollout_ref.model.lora_alpha=64
)
python3 -m verl.trainer.main_ppo --config-path=config \
    algorithm.adv_estimator=grpo \  # the estimator
    algorithm.kl_ctrl.kl_coef=0.5 \
    data.train_files="$files" \
    data.val_files="['$HOME/a/test.parquet','$HOME/b/test.parquet']" \
    data.max_prompt_length=1024 data.max_response_length=${answer} data.train_batch_size=64 \
    actor_rollout_ref.model.path=org/model \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    +actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 \
    "${LORA[@]}" data.image_key=images \
    trainer.logger='["console","wandb"]' trainer.nnodes=$NODES trainer.n_gpus_per_node=$GPUS \
    trainer.save_freq=-1 trainer.test_freq=5 trainer.nonsense=$((2 + $none)) $@
"""


def written(found: Translation, directory: Path) -> Config:
    """Return the configuration that the file of a translation is, which breaks no rule."""
    (directory / "run.toml").write_text(found.toml(), encoding="utf-8")
    config = load_config(directory / "run.toml")
    problems = rule_problems if found.command == "train" else key_problems
    assert list(problems(config)) == []
    return config


def values(found: Translation, directory: Path, *names: str) -> list[Any]:
    config = written(found, directory)
    return [get(config, name) for name in names]


def test_a_script_of_verl_becomes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    assert cli.main(["migrate", "verl", str(tmp_path / "run.sh")]) == 0
    out = capsys.readouterr().out
    found = translate(VERL, READ, "verl")
    assert found.toml() == out
    config = written(found, tmp_path)
    expected = {
        "algo.advantage.estimator": "group_norm",
        "data.prompt_dataset": f"{Path.home()}/data/a/train.parquet,{Path.home()}/data/b/train.parquet",
        "data.max_len": 3072,
        "data.input_key": "prompt",
        "data.map": ["label=reward_model.ground_truth"],
        "rollout.max_new_tokens": 2048,
        "rollout.batch_size": 64,
        "train.batch_size": 16 * 8,  # verl counts prompts
        "train.max_tokens_per_gpu": 6144,
        "actor.learning_rate": 2e-6,
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.dual_clip": 3.0,  # a default of verl's
        "actor.weight_decay": 0.01,
        "algo.kl.init_coef": 0.002,  # and not that of the reward's penalty, which is off
        "algo.kl.estimator": "k3",
        "lora.rank": 32,
        "actor.num_nodes": 2,
        "actor.num_gpus_per_node": 8,  # a default, since the script does not have $GPUS
        "ref.num_gpus_per_node": 8,
        "vllm.num_engines": 4,
        "train.colocate_all": True,
        "reward.preset": "math",
        "logger.use": ["wandb"],
        "ckpt.save_steps": 0,
    }
    assert {name: get(config, name) for name in expected} == expected
    assert config.eval.dataset == f"{Path.home()}/a/test.parquet,{Path.home()}/b/test.parquet"
    assert "dual_clip = 3.0  # verl's default" in out
    left = out.split("# Left out:")[1]
    assert "trainer.n_gpus_per_node $GPUS: the script does not have its value; set actor.num_gpus_per_node you" in left
    assert (
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size 2: there is no Megatron: ds.zero_stage = 3" in left
    )
    assert "+actor_rollout_ref.actor.fsdp_config.model_dtype bfloat16: ds.zero_stage = 3 cuts models" in left
    assert "actor_rollout_ref.rollout.name sglang: rollout.engine takes one of vllm, hf, got 'sglang'" in left
    assert "data.image_key images: models see text only" in left
    assert "trainer.nonsense $((2+$none)): nothing here takes its value" in left
    assert "#   columns are verl's: prompt (messages), reward_model.ground_truth; reward.preset = math is" in left
    assert "$@" not in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("algorithm.adv_estimator=gae", {"algo.kl.init_coef": 0.0, "train.batch_size": 256, "vllm.num_engines": 4}),
        ("algorithm.use_kl_in_reward=True", {"algo.kl.init_coef": 0.001, "algo.kl.estimator": "k1"}),
        ("reward_model.enable=True reward_model.model.path=/rm", {"reward.model_name_or_path": "/rm"}),
        ("reward_model.model.path=/rm", {"reward.model_name_or_path": "", "reward.preset": "math"}),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=sapo +actor_rollout_ref.actor.policy_loss.tau_neg=1.1 "
            "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2",
            {"actor.sapo_temperature_neg": 1.1},
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv actor_rollout_ref.actor.clip_ratio_c=10 "
            "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2",
            {"actor.policy_loss_type": "dppo_tv", "actor.dual_clip": 0.0},  # named at the end
        ),
        ("custom_reward_function.path=/f.py", {"reward.remote_url": "/f.py", "reward.preset": ""}),
        (
            "algorithm.rollout_correction.rollout_is=token",
            {"algo.correction.preset": "tis", "algo.correction.level": ""},
        ),
        ("actor_rollout_ref.actor.use_dynamic_bsz=False", {"train.max_tokens_per_gpu": 16384}),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
            {"reward.overlong_buffer_len": 128},
        ),
        (
            "distillation.enabled=True distillation.teacher_models.teacher_model.model_path=/t "
            "distillation.distillation_loss.use_task_rewards=False",
            {"algo.distill.model_name_or_path": "/t", "reward.preset": ""},
        ),
        (
            "algorithm.norm_adv_by_std_in_grpo=False algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2",
            {"algo.advantage.no_std_norm": True},
        ),
    ],
)
def test_what_verls_names_say_together(words: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = translate(f"python3 verl/trainer/main_ppo.py {words}", READ, "verl")
    assert values(found, tmp_path, *expected) == list(expected.values())


GRPO = '''
"""Train it."""
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

raise SystemExit("a script that is read and not run")
NAME = "org/model"
samples = 4
parser.add_argument("--top-temperature", type=float, default=0.9)
args = parse()

def main():
    training_args = GRPOConfig(
        output_dir=f"{NAME}-grpo",
        num_generations=samples,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        max_completion_length=256,
        learning_rate=args.learning_rate,
        beta=0.04,
        loss_type="dr_grpo",
        scale_rewards=False,
        epsilon_high=0.28,
        use_vllm=True,
        vllm_mode="colocate",
        logging_steps=1,
        report_to="none",
        made_up=3,
        temperature=args.top_temperature,
    )
    training_args.max_steps = 7
    trainer = GRPOTrainer(
        model=NAME,
        args=training_args,
        reward_funcs=[accuracy_reward],
        train_dataset=load_dataset("org/rows", split="train"),
        peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"]),
        tools=[tool],
    )
'''


def test_a_python_script_of_trl_is_read_and_not_run(tmp_path: Path) -> None:
    found = translate(GRPO, READ, "trl")
    config = written(found, tmp_path)
    expected = {
        "actor.model_name_or_path": "org/model",
        "run_dir": str(tmp_path / "org/model-grpo"),
        "data.prompt_dataset": str(tmp_path / "org/rows"),
        "algo.advantage.estimator": "group_norm",
        "algo.advantage.no_std_norm": True,
        "rollout.n_samples_per_prompt": 4,
        "rollout.temperature": 0.9,  # the default of the script's own option
        "rollout.batch_size": 4,  # 2 examples x 8 steps, 4 responses to a prompt
        "train.batch_size": 16,
        "train.max_steps": 7,
        "data.max_len": 768,
        "actor.learning_rate": 1e-6,  # a default of TRL's, since the script does not have it
        "actor.lr_scheduler": "linear",
        "actor.adam_betas": [0.9, 0.999],
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "algo.kl.init_coef": 0.04,
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        "algo.correction.level": "sequence",
        "algo.correction.mode": "mask",
        "algo.correction.thresholds": [0.0, 3.0],
        "lora.rank": 16,
        "lora.alpha": 8.0,  # peft's default
        "lora.target_modules": ["q_proj", "v_proj"],
        "rollout.engine": "vllm",
        "train.colocate_all": True,
        "reward.preset": "math",
    }
    assert {name: get(config, name) for name in expected} == expected
    left = "\n".join(found.left_out)
    assert (
        "learning_rate ${args.learning_rate}: the script does not have its value; set actor.learning_rate you" in left
    )
    assert "tools tool: env.path names a file with the environment" in left
    assert "logging_steps 1: every step is logged" in left
    assert "made_up 3: unknown; near it" in left


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"use_vllm": "False"}, {"rollout.engine": "hf", "algo.correction.level": ""}),
        (
            {"loss_type": "'cispo'", "epsilon_high": "5.0"},
            {"actor.policy_loss_type": "cispo", "actor.eps_clip_low_high": [1.0, 4.0]},
        ),
        (
            {"importance_sampling_level": "'sequence'", "epsilon": "3e-4"},
            {"actor.policy_loss_type": "gspo", "actor.eps_clip_low_high": [3e-4, 3e-4]},
        ),
        ({"beta": "0.0"}, {"algo.kl.init_coef": 0.0, "algo.kl.use_loss": False}),
        ({"generation_batch_size": "64"}, {"rollout.batch_size": 8, "train.batch_size": 8}),
        ({"generation_batch_size": "'many'"}, {"rollout.batch_size": 128}),  # no number: the default stays
        ({"vllm_importance_sampling_correction": "False"}, {"algo.correction.preset": "none"}),
    ],
)
def test_what_trls_names_say_together(more: dict[str, str], expected: dict[str, Any], tmp_path: Path) -> None:
    arguments = ", ".join(f"{name}={value}" for name, value in {"use_vllm": "True", **more}.items())
    found = translate(f"from trl import GRPOConfig\nconfig = GRPOConfig({arguments})", READ, "trl")
    assert values(found, tmp_path, *expected) == list(expected.values())


HEADER = '''
"""
It's a script.
accelerate launch \\
    --config_file zero3.yaml examples/mine.py \\
    --model_name_or_path org/model --dataset_name org/rows --max_length 4096 --packing --use_peft \\
    --lora_target_modules "q_proj", "v_proj"
"""
from trl import {0}, TrlParser
parser = TrlParser((ScriptArguments, {0}, ModelConfig))
'''


def test_flags_in_the_docstring_of_a_script(tmp_path: Path) -> None:
    found = translate(HEADER.format("SFTConfig"), READ, "trl")
    names = ("sft.dataset", "sft.learning_rate", "data.max_len", "lora.rank", "lora.target_modules", "data.output_key")
    dataset, *others = values(found, tmp_path, *names)
    assert dataset.endswith("org/rows")
    assert others == [2e-5, 4096, 16, ["q_proj", "v_proj"], "completion"]
    assert "--packing: ds.packing_samples lays examples end to end, and none sees its neighbours" in found.left_out


@pytest.mark.parametrize(
    ("line", "command", "expected"),
    [
        ("trl sft", "sft", {"sft.learning_rate": 2e-5, "sft.batch_size": 8, "data.max_len": 1024}),
        ("python trl/scripts/sft.py", "sft", {"sft.max_epochs": 3, "sft.lr_scheduler": "linear"}),
        ("trl sft --report_to wandb --run_name a", "sft", {"logger.use": ["wandb"], "logger.run_name": "a"}),
        (
            "accelerate launch --num_processes 4 trl/scripts/dpo.py",
            "dpo",
            {"dpo.batch_size": 32, "dpo.loss_type": "dpo", "actor.num_gpus_per_node": 4},
        ),
        ("python -m trl.scripts.kto", "dpo", {"dpo.loss_type": "kto", "dpo.learning_rate": 1e-6}),
        ("python examples/scripts/reward_modeling.py", "rm", {"rm.learning_rate": 1e-4}),
        ("trl grpo --use_vllm --num-generations 2", "train", {"rollout.n_samples_per_prompt": 2}),
        (
            "trl rloo",
            "train",
            {"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.05, "rollout.n_samples_per_prompt": 2},
        ),
    ],
)
def test_command_lines_of_trl(line: str, command: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = translate(f"{line} --model_name_or_path org/model --seed 3 --logging_steps 5", READ, "trl")
    assert found.command == command
    assert values(found, tmp_path, *expected, "train.seed") == [*expected.values(), 3]
    assert "--logging_steps 5: every step is logged" in found.left_out


@pytest.mark.parametrize(
    ("peer", "script", "why"),
    [
        ("verl", "python3 -m verl.trainer.main_other a.b=1", "no command of verl in it"),
        ("verl", "python3 -m openrlhf.cli.train_sft --pretrain a", "no command of verl in it"),
        ("verl", "python3 -m verl.trainer.main_ppo", "no flag in the command"),
        ("trl", "accelerate launch mine.py --num_generations 8", "no command of TRL in it"),
        ("trl", "docker run --rm -it image bash", "no command of TRL in it"),
        ("trl", "from trl import XPOConfig\nXPOConfig(beta=1)", "this has none"),
        ("trl", "from trl import SFTConfig, DPOConfig\nSFTConfig()\nDPOConfig()", "this has SFTConfig and DPOConfig"),
        ("trl", "from trl import SFTConfig\nclass Mine(SFTConfig): pass\nMine(a=1)", "this has Mine"),
        ("trl", "from trl import SFTConfig\nSFTConfig(a=1, 2)", "the script cannot be read as Python"),
        ("trl", "from trl import SFTConfig\nparse(SFTConfig)", "SFTConfig is made from the command line"),
    ],
)
def test_a_script_that_is_not_known_is_refused(
    peer: str, script: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=why):
        translate(script, READ, peer)
    (tmp_path / "script").write_text(script)
    assert cli.main(["migrate", peer, str(tmp_path / "script")]) == 2
    assert capsys.readouterr().out == ""


def test_engines_wider_than_a_node_and_a_batch_that_does_not_divide_are_changed_and_said(tmp_path: Path) -> None:
    """Without the change all sizes of the run were left out, or the engines no longer shared the trainer's GPUs."""
    script = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=3 trainer.n_gpus_per_node=8 "
        "data.train_batch_size=192 actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=16"
    )
    found = translate(script, READ, "verl")
    names = ("vllm.tensor_parallel_size", "vllm.num_engines", "train.batch_size", "actor.num_nodes", "ref.zero_stage")
    assert values(found, tmp_path, *names, "train.colocate_all") == [8, 3, 240, 3, 3, True]
    engines, batch = (line for line in found.left_out if ", was " in line)
    assert engines.startswith("vllm.tensor_parallel_size = 8, was 16: an engine is a TP group inside one node")
    assert batch == "train.batch_size = 240, was 320: that does not divide over 24 ranks"


@pytest.mark.parametrize("peer", sorted(peers()))
def test_the_tables_of_a_peer(peer: str) -> None:
    """Every row leads to a key, and every other name in a row is one of the peer's."""
    for program in peers()[peer]["programs"]:
        book = Dictionary(peer, program)
        assert {key for key in [*book.keys.values(), *book.constants, *book.together] if key not in all_keys()} == set()
        names = {*book.keys, *book.instead, *(all_keys() if peer == "openrlhf" else ())}
        for part in (book.values, book.needs, book.defaults):
            assert part.keys() - names == set()
        for name, value in book.constants.items():
            assert isinstance(value, type(all_keys()[name].default)), name
        said = {**dict.fromkeys(book.needs.values(), True), **book.defaults}
        line = " ".join(
            f"'{name}={value}'" if peer == "verl" else f"--{name}='{value}'" for name, value in said.items()
        )
        found = translate(f"{peers()[peer]['module']}{program} {line}", READ, peer)
        assert [sentence for sentence in found.left_out if " takes " in sentence] == []
