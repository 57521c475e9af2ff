"""`slurm-rlhf migrate`: scripts and commands of OpenRLHF as files of keys here."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import write
from hypothesis import given
from hypothesis import strategies as st

from slurm_rlhf.cli import main as cli
from slurm_rlhf.cli.commands import commands
from slurm_rlhf.config.keys import all_keys, changed, get, peers
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.migrate import translate
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

PROGRAM = "openrlhf.cli.train_ppo_ray"
SCRIPT = r"""
set -x
# the usual example
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"working_dir": "/openrlhf"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \
   --colocate_all_models \
   --pretrain /models/llama --remote_rm_url /code/reward.py \
   --micro_train_batch_size 8 --train_batch_size 128 --rollout_batch_size 1024 \
   --n_samples_per_prompt 8 --advantage_estimator group_norm \
   --zero_stage 3 --actor_learning_rate 5e-7 --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \
   --eps_clip_low_high 0.2 0.28 --save_steps -1 --prompt_data $DATA --use_wandb token --flash_attn --no_such_flag 3 \
   2>&1 | tee log
"""


def migrated(directory: Path, capsys: pytest.CaptureFixture[str], script: str) -> tuple[Config, str, str]:
    assert cli.main(["migrate", "openrlhf", str(write(directory, script, "run.sh"))]) == 0
    out, err = capsys.readouterr()
    return load_config(write(directory, out)), out, err


def test_a_whole_script_becomes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out, err = migrated(tmp_path, capsys, SCRIPT)
    assert capsys.readouterr().err == ""
    expected = {
        "ref.num_gpus_per_node": 8,
        "vllm.tensor_parallel_size": 2,
        "train.colocate_all": True,
        "actor.model_name_or_path": "/models/llama",
        "reward.remote_url": "/code/reward.py",
        "rollout.batch_size": 1024,
        "algo.advantage.estimator": "group_norm",
        "actor.learning_rate": 5e-7,
        "algo.kl.use_loss": True,
        "actor.eps_clip_low_high": [0.2, 0.28],
        "ckpt.save_steps": 0,
    }
    assert {name: get(config, name) for name in expected} == expected
    left = out.split("# Left out:")[1]
    assert "--micro_train_batch_size 8: OpenRLHF's micro_train_batch_size is no key here: micro-batches are" in left
    assert "--prompt_data $DATA: the script does not have its value; set data.prompt_dataset yourself" in left
    assert "--no_such_flag 3: unknown; near it: " in left
    assert "tee" not in out
    assert "learning_rate = 5e-07  # --actor_learning_rate" in out
    assert "lr_warmup_ratio = 0.03  # OpenRLHF's default" in out
    assert config.actor.lr_warmup_ratio == 0.03
    assert "batch_size = 1024  # --rollout_batch_size" in out
    assert " flags translated; the others are at the end" in err


ARRAYS = r"""
#!/bin/bash
HERE="$(dirname "$0")"
NAME="tiny"
readonly MODEL="/models/${NAME}"   # a comment
MODEL_ARGS=(
   --actor.model_name_or_path ${MODEL}
   # --reward.model_name_or_path ${OTHER}
   --data.prompt_dataset "/data/${NAME}/prompts.jsonl"
)
SIZES=( --actor.num_gpus_per_node 2 --critic.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --train.colocate_all )
ENGINE=( ${SIZES[@]} --vllm.num_engines 2 --vllm.sync_backend nccl --vllm.gpu_memory_utilization 0.7 )
ENGINE+=(
   --reward.remote_url ${HERE}/reward.py
   --train.seed ${SEED:-7}
)
ray job submit --runtime-env-json='{"env_vars": {"A": "(b)"}}' -- python3 -m openrlhf.cli.train_ppo_ray \
   ${MODEL_ARGS[@]} "${ENGINE[@]}" 2>&1 | tee --append log
"""
STAGE = r"""
read -r -d '' commands <<EOF
openrlhf.cli.train_{stage} \
   --model.model_name_or_path /models/base \
   --data.dataset /data/rows.jsonl --ckpt.output_dir /out/{stage} \
   --adam.lr=4e-6 --train.batch_size 256 --ckpt.save_steps -1 --ds.zero_stage 3 \
   --rollout.batch_size 4 --optim adam --eval.dataset /data/held_out.jsonl --eval.steps -1
EOF
if [[ ${{1}} != "slurm" ]]; then
    deepspeed --module $commands
fi
"""


def test_arrays_and_variables_of_a_script_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out, _ = migrated(tmp_path, capsys, ARRAYS)
    assert config.actor.model_name_or_path == "/models/tiny"
    assert config.data.prompt_dataset == "/data/tiny/prompts.jsonl"
    assert (config.vllm.num_engines, config.vllm.gpu_memory_utilization, config.train.seed) == (2, 0.7, 7)
    left = out.split("# Left out:")[1]
    assert (
        "--reward.remote_url ${HERE}/reward.py: the script does not have its value; set reward.remote_url yourself"
        in left
    )
    assert config.ref.zero_stage == 0  # ARRAYS leave the stage at 2
    assert translate(ARRAYS.replace("SIZES=(", "SIZES=( --ds.zero_stage 3")).values["ref.zero_stage"] == 3
    # The configuration that it writes breaks no rule: NCCL refuses two ranks on one GPU.
    assert '--vllm.sync_backend "nccl": train.colocate_all puts actor and engines on the same GPUs' in left
    assert list(rule_problems(config)) == []
    assert "append" not in out
    assert "${OTHER}" not in out


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_stage_goes_to_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str) -> None:
    config, out, err = migrated(tmp_path, capsys, STAGE.format(stage=stage))
    assert f"The file is for `slurm-rlhf {stage}`" in err
    keys = get(config, stage)
    assert (keys.dataset, keys.output_dir) == ("/data/rows.jsonl", f"/out/{stage}")
    assert (keys.learning_rate, keys.batch_size, keys.save_steps) == (4e-6, 256, 0)
    assert (keys.eval_dataset, keys.eval_steps) == ("/data/held_out.jsonl", 0)
    assert "learning_rate = 4e-06  # --adam.lr" in out
    assert f"--rollout.batch_size 4: `slurm-rlhf {stage}` does not read rollout.batch_size" in out
    assert "--optim adam: AdamW is the only optimizer" in out
    assert "lr_warmup_ratio = 0.03  # OpenRLHF's default" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train_ppo_ray --enable_vllm_is_correction", ["token", "clip", [0.5, 5.0]]),
        ("train_ppo_ray --vllm_is_correction_type seq-mask-tis", ["", "", []]),
        (
            "train_ppo_ray --algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis "
            "--algo.advantage.is_correction_threshold 0.9 1.1",
            ["geometric", "mask", [0.9, 1.1]],
        ),
        (
            "train_ppo_ray --enable_vllm_is_correction --vllm_is_correction_type icepop",
            ["token", "mask", [0.5, 5.0]],
        ),
    ],
)
def test_the_correction_for_engines_has_its_rule(words: str, expected: list[object]) -> None:
    found = translate(f"python3 -m openrlhf.cli.{words} --pretrain a")
    config = changed(Config(), found.values)
    assert [config.algo.correction.level, config.algo.correction.mode, config.algo.correction.thresholds] == expected
    assert config.ckpt.save_steps == 0
    assert list(rule_problems(config)) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train_sft", {"data.input_template": "User: {}\nAssistant: ", "sft.save_steps": 0}),
        ("train_sft --data.apply_chat_template", {"data.input_template": ""}),
        (
            "train_dpo --model.ipo_enable",
            {"dpo.loss_type": "ipo", "data.input_template": "", "dpo.output_dir": "./ckpt"},
        ),
    ],
)
def test_what_stages_of_openrlhf_do_unasked(words: str, expected: dict[str, object]) -> None:
    read = {name: one.keys for name, one in commands().items()}
    found = translate(f"deepspeed --module openrlhf.cli.{words} --model.model_name_or_path a", read)
    assert {name: get(changed(Config(), found.values), name) for name in expected} == expected


def test_a_command_in_quotes_is_found() -> None:
    found = translate(f'srun bash -c "pip install x && python3 -m {PROGRAM} --pretrain a --max_len 64" &>> log')
    said = {name: value for name, value in found.values.items() if name not in found.defaults}
    assert said == {"actor.model_name_or_path": "a", "data.max_len": 64, "rollout.max_new_tokens": 32}


@pytest.mark.parametrize(
    "script",
    [
        "docker run --rm -it -v $HOME:/root image bash",
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet --x.y=1",
        "accelerate launch grpo.py --num_generations 8",
        "python3 -m openrlhf.cli.train_other --pretrain a",
    ],
)
def test_a_script_that_is_not_known_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match=r"no command of OpenRLHF in it: migrate reads scripts that call"):
        translate(script)


def test_values_that_are_called_otherwise_here_are_translated() -> None:
    found = translate(f"python3 -m {PROGRAM} --lr_scheduler cosine_with_min_lr --save_steps -1")
    assert found.values["actor.lr_scheduler"] == "cosine"
    assert found.values["ckpt.save_steps"] == 0
    assert found.left_out == peers()["openrlhf"]["notes"]


def test_a_key_that_is_said_twice_keeps_the_first() -> None:
    found = translate("--pretrain a --actor.model_name_or_path b")
    assert found.values["actor.model_name_or_path"] == "a"
    assert found.left_out[0] == "--actor.model_name_or_path b: --pretrain says actor.model_name_or_path already"


def test_a_secret_of_the_script_does_not_get_into_the_file() -> None:
    found = translate("--pretrain a --use_wandb 0123 --logger.wandb.key=4567")
    assert [line.partition(":")[0] for line in found.left_out[:2]] == ["--use_wandb ...", "--logger.wandb.key ..."]


def test_a_value_of_another_kind_is_left_out_with_the_reason() -> None:
    found = translate("--train.seed many")
    assert "train.seed" not in found.values
    assert "train.seed takes" in found.left_out[0]


@pytest.mark.parametrize("command", ["", "python3 -m openrlhf.cli.train_ppo_ray", "'unclosed"])
def test_what_is_no_command_is_refused(command: str) -> None:
    with pytest.raises(ConfigError):
        translate(command)


@pytest.mark.parametrize("words", [[], ["nemo", "x --y"], ["verl"], ["openrlhf"], ["openrlhf", "missing.sh"]])
def test_wrong_words_show_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", *words]) == 2
    assert "usage: slurm-rlhf migrate openrlhf|verl|trl" in capsys.readouterr().err


@given(st.lists(st.sampled_from(["--pretrain", "--use_kl_loss", "--", "--x.y=1", "a b", "$X", "-1", "|", "é", "0.5"])))
def test_any_words_give_a_file_that_loads_or_one_error(words: list[str]) -> None:
    try:
        found = translate(" ".join(f"'{word}'" if " " in word else word for word in words))
    except ConfigError:
        return
    assert set(found.values) <= set(all_keys())
    assert found.toml().endswith("\n")
