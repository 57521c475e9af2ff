"""The sbatch files and examples: readable, valid, and what they ask of Slurm."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from model_configs import SHAPES, make_shape
from programs import write_program
from waiting import HANG_S

from slurm_rlhf.cli.main import main
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLES, colocations, running_roles
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.placement.memory import Models, account
from slurm_rlhf.placement.model_shape import shape_of
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.rank_memory import GIB
from slurm_rlhf.placement.topology import Topology, numbered_names, role_sizes

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
NODES = {"ppo_7b": 2, "ppo_7b_1node": 1, "ppo_32b": 16, "grpo_7b": 2, "grpo_32b": 4, "grpo_lora_7b": 1}
ON_A_NODE = dict.fromkeys(NODES, 8) | {"grpo_lora_7b": 1}
MODELS = {name: "32B" if "32b" in name else "7B" for name in NODES}
SMALL_GPUS = ("--actor.num_gpus_per_node=4", "--vllm.num_engines=2", "--vllm.tensor_parallel_size=2")
SMALL_GPUS += ("--vllm.gpu_memory_utilization=0.45", "--train.gradient_checkpointing=full")
GPUS = ("nvidia_h100_80gb_hbm3", "NVIDIA A100-SXM4-80GB", "h200")
FOUR = ("--actor.num_nodes=4", "--critic.num_nodes=4", "--ref.num_nodes=4", "--vllm.num_engines=4")
FOUR_SMALLER = ("--train.max_tokens_per_gpu=8192", "--train.forward_max_tokens_per_gpu=16384")


@pytest.mark.parametrize("name", NODES)
def test_roles_fill_the_nodes_that_the_header_asks_for(name: str) -> None:
    config = load_config(SBATCH / f"{name}.toml", [])
    ranks = place(
        Topology.uniform(numbered_names(NODES[name]), ON_A_NODE[name]), role_sizes(config), colocations(config)
    )
    used = {(share.node, gpu) for shares in ranks.roles.values() for share in shares for gpu in share.gpus}
    assert len(used) == NODES[name] * ON_A_NODE[name]
    assert config.actor.num_nodes == NODES[name]
    header = (SBATCH / f"{name}.sh").read_text()
    assert f"#SBATCH --nodes={NODES[name]}\n" in header
    assert f"#SBATCH --gres=gpu:{ON_A_NODE[name]}\n" in header
    assert "#SBATCH --signal=B:USR1@600\n#SBATCH --requeue\n#SBATCH --open-mode=append\n" in header


def test_four_nodes_by_overrides() -> None:
    text = (SBATCH / "ppo_32b.sh").read_text().replace(" \\\n#    ", "")
    assert f"#   sbatch --nodes=4 sbatch/ppo_32b.sh {' '.join(FOUR + FOUR_SMALLER)}\n" in text
    config = load_config(SBATCH / "ppo_32b.toml", [*FOUR, *FOUR_SMALLER])
    ranks = place(Topology.uniform(numbered_names(4), 8), role_sizes(config), colocations(config))
    assert sum(count for role, count in ranks.worlds.items() if role != "reference") == 32
    assert account(config, models("32B"), int(79.1 * GIB)).fits()


def test_adapters_on_four_gpus_of_40_gb_by_overrides() -> None:
    text = (SBATCH / "grpo_lora_7b.sh").read_text().replace(" \\\n#    ", "")
    assert f"#   sbatch --gres=gpu:4 sbatch/grpo_lora_7b.sh {' '.join(SMALL_GPUS)}   4 x 40 GB\n" in text
    found = account(load_config(SBATCH / "grpo_lora_7b.toml", [*SMALL_GPUS]), models("7B"), int(39.3 * GIB))
    assert found.fits()
    assert found.engine.sequences >= found.wanted


def models(size: str) -> Models:
    return dict.fromkeys(ROLES, shape_of(SHAPES[size]))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", NODES)
def test_memory_is_there_on_common_machines(
    name: str, gpu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` says so, as to a user; engines hold all sequences that come at once, and trainers have a margin."""
    model = make_shape(tmp_path / "model", MODELS[name])
    words = ["plan", str(SBATCH / f"{name}.toml"), f"--actor.model_name_or_path={model}", f"--gpu={gpu}", "--json"]
    assert main([*words, f"--nodes={NODES[name]}", f"--gpus_per_node={ON_A_NODE[name]}"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["fits"]
    assert memory["kv_cache"]["sequences"] >= memory["kv_cache"]["wanted"]
    for row in memory["rows"]:
        assert row["there"] == 0 or row["needed"] < 0.96 * row["there"], row["name"]


@pytest.mark.parametrize("name", NODES)
def test_nothing_but_the_users_files_is_missing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(SBATCH / f"{name}.toml"), "--dry_run"]) == 2
    problems = capsys.readouterr().err
    assert set(re.findall(r"\b(\w+\.\w+): ", problems)) <= {
        *("actor.model_name_or_path", "data.prompt_dataset", "reward.remote_url")
    }
    assert "no such file" in problems


@pytest.mark.parametrize("name", NODES)
def test_scripts_are_short_and_clean(name: str) -> None:
    lines = (SBATCH / f"{name}.sh").read_text().splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    assert lines[-1].startswith("exec ")  # nothing between Slurm's signals and the run
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    assert subprocess.run(["shellcheck", str(SBATCH / f"{name}.sh")], capture_output=True, check=False).stdout == b""


def test_a_script_in_slurms_spool_finds_the_checkout_or_says_so(tmp_path: Path) -> None:
    checkout, spool = tmp_path / "checkout", tmp_path / "spool"
    shutil.copytree(SBATCH, checkout / "sbatch", ignore=shutil.ignore_patterns("__pycache__"))
    write_program(checkout / ".venv" / "bin" / "slurm-rlhf", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    spool.mkdir()
    script = shutil.copy(SBATCH / "ppo_32b.sh", spool / "slurm_script")
    words = ["bash", script, "--train.seed=1", "--data.input_template=a b {}"]
    for place_of_submission in (checkout, checkout / "sbatch"):
        environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(place_of_submission)}
        said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        assert said.splitlines() == ["train", str(checkout / "sbatch" / "ppo_32b.toml"), *words[2:]]
    environment |= {"SLURM_JOB_NAME": "second", "ENVIRONMENT": "BATCH"}
    for more, own in (([], [f"--run_dir={checkout}/runs/second"]), (["--run_dir=/x"], [])):
        said = subprocess.run([*words, *more], env=environment, capture_output=True, text=True, check=True).stdout
        assert said.splitlines()[2:] == [*words[2:], *more, *own]  # jobs of one name, as in a chain, are one run
    environment["SLURM_SUBMIT_DIR"] = str(tmp_path)
    lost = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (lost.returncode, lost.stderr) == (
        2,
        f"ppo_32b: no checkout around {tmp_path}. Submit from its top: sbatch sbatch/ppo_32b.sh\n",
    )


@pytest.mark.parametrize("name", [*NODES, "seeds"])
def test_a_script_without_an_environment_says_where_one_is_named(name: str, tmp_path: Path) -> None:
    shutil.copytree(SBATCH, tmp_path / "sbatch", ignore=shutil.ignore_patterns("__pycache__"))
    words = ["bash", str(tmp_path / "sbatch" / f"{name}.sh"), "a.toml", "runs"]
    environment = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    first, second = done.stderr.splitlines()
    assert first.startswith(f"{name}: no slurm-rlhf on ")
    assert first.endswith(f"make it available in 'Your site' of sbatch/{name}.sh")
    assert "bash sbatch/environment.sh --gpu" in second
    assert done.returncode == 127


@pytest.mark.parametrize("name", NODES)
def test_the_examples_for_a_site_work_as_they_stand_there(name: str, tmp_path: Path) -> None:
    """A site with modules, one with a venv or conda, one with containers."""
    text = (SBATCH / f"{name}.sh").read_text()
    examples = dict(re.findall(r"^# A (site with modules|venv, or conda|container): +(.+)$", text, re.MULTILINE))
    assert set(examples) == {"site with modules", "venv, or conda", "container"}
    option = re.search(r"options=\((--slurm\.container=\S+)\)", examples["container"])
    load_config(SBATCH / f"{name}.toml", [option[1], "--slurm.container_runtime=pyxis"])
    assert "--slurm.container_runtime=pyxis" in text

    activate = tmp_path / "rlhf" / "bin" / "activate"
    write_program(activate.parent / "slurm-rlhf", '#!/bin/sh\nprintf "%s\\n" "$LOADED" "$@"\n')
    activate.write_text(f"PATH={activate.parent}:$PATH\n")
    hooks = [
        "module() { export LOADED=$*; }",
        examples["site with modules"],
        examples["venv, or conda"].partition(",")[0].replace("~", str(tmp_path)),
    ]
    edited = text.replace("command=slurm-rlhf\n", "\n".join([*hooks, "command=slurm-rlhf\n"]), 1)
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch" / f"{name}.toml").touch()
    script = tmp_path / "sbatch" / f"{name}.sh"
    script.write_text(edited.replace("options=()", option[0], 1))
    said = subprocess.run(["bash", str(script), "--train.seed=1"], capture_output=True, text=True, check=True).stdout
    toml = str(tmp_path / "sbatch" / f"{name}.toml")
    assert said.splitlines() == ["load python/3.11 cuda/13.0", "train", toml, option[1], "--train.seed=1"]


# --- sbatch gsm8k -----------------------------------------------------------------------------------------------------


SMALL = {**SHAPES["7B"], "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}  # fmt: skip
"""Sizes of Qwen2.5-0.5B, from its config.json."""


@pytest.mark.parametrize(
    ("response", "label", "reason", "right"),
    [
        ("4 + 5 = 9.\n#### 9", "9", "stop", 1.0),
        ("The answer is $1,234.50.", "1234.5", "stop", 1.0),
        ("#### -3", "-3", "stop", 1.0),
        ("9 apples, then 4 more", "9", "stop", 0.0),
        ("#### 9", "9", "length", 0.0),
        ("none", "9", "stop", 0.0),
        ("", "9", "stop", 0.0),
        ("#### 9 and nothing else", "9", "stop", 1.0),
    ],
)
def test_the_reward(response: str, label: str, reason: str, right: float) -> None:
    answer = runpy.run_path(str(SBATCH / "gsm8k_reward.py"))["reward_func"]([response], [label], [reason])
    assert answer["rewards"] == answer["scores"] == [right]


def test_the_data_of_the_hub_becomes_prompts(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for part, count in (("train", 3), ("test", 2)):
        rows = [{"question": f" {n} and 1? ", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(count)]
        (tmp_path / "main" / f"{part}-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(SBATCH / "gsm8k_data.py"), str(tmp_path)]
    for _ in range(2):  # again over what it has written
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert f"{tmp_path}/train.jsonl: 3 prompts" in done.stdout
    first, *_ = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert first == {"input": "0 and 1? Think step by step, and end with the answer behind ####.", "label": "1"}


def test_without_data_it_says_what_to_download(tmp_path: Path) -> None:
    command = [sys.executable, str(SBATCH / "gsm8k_data.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 1
    assert "download openai/gsm8k into it" in done.stderr


def test_it_fits_one_gpu_of_24_gb() -> None:
    config = load_config(SBATCH / "gsm8k.toml")
    assert list(rule_problems(config)) == []
    assert [role.ranks(config) for role in running_roles(config)] == [1, 1]
    found = account(config, dict.fromkeys(ROLES, shape_of(SMALL)), int(23.5 * GIB))
    assert max(row.needed for row in found.rows) < 23.5 * GIB
