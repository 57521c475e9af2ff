"""`plan` shows a run's memory, and `train` starts nothing that cannot fit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from model_configs import make_shape
from programs import write_program
from tiny_models import make_tiny

from slurm_rlhf.cli.main import main
from slurm_rlhf.cli.plan import check_memory, layout_here
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import of_command
from slurm_rlhf.nodes.environment import role_environment

LARGE = ("--nodes=2", "--gpus_per_node=8")
SBATCH = Path(__file__).resolve().parents[2] / "sbatch"


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    return code, *capsys.readouterr()


@pytest.fixture
def seven(tmp_path: Path) -> str:
    return f"--actor.model_name_or_path={make_shape(tmp_path / '7B', '7B')}"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose nvidia-smi tells of eight GPUs; the file says which."""
    stated = tmp_path / "kind"
    stated.write_text("echo NVIDIA A100-SXM4-40GB, 40960")
    text = (
        "#!/bin/sh\n"
        "case $1 in *compute-apps*) exit 0 ;; esac\n"
        'for i in 0 1 2 3 4 5 6 7; do case $1 in -L) echo "GPU $i: x" ;; '
        f'*) echo "$i, GPU-$i, $(. {stated}), 0, 580.1, Disabled" ;; esac; done\n'
    )
    program = write_program(tmp_path / "bin" / "nvidia-smi", text)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return stated


@pytest.fixture
def run(tmp_path: Path) -> tuple[str, ...]:
    """A complete configuration for one machine, on a tiny model."""
    model = make_tiny(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1="}\n' * 128)
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels, **kwargs):\n    return [0.0]\n")
    (tmp_path / "run.toml").write_text(
        f'run_dir = "{tmp_path / "out"}"\n[data]\nprompt_dataset = "{tmp_path / "prompts.jsonl"}"\nmax_len = 256\n'
        f'[actor]\nmodel_name_or_path = "{model}"\n[reward]\nremote_url = "{tmp_path / "reward.py"}"\n'
        "[rollout]\nmax_new_tokens = 128\n[train]\nbatch_size = 128\n"
    )
    return ("train", str(tmp_path / "run.toml"))


def test_plan_has_a_row_for_every_role(capsys: pytest.CaptureFixture[str], seven: str) -> None:
    code, out, _ = plan(capsys, str(SBATCH / "ppo_7b.toml"), seven, *LARGE, "--gpu=h100")
    assert code == 0
    table = out[out.index("needed") :].splitlines()
    assert "there  Memory of a GPU in GiB (H100: 79.1)" in table[0]
    assert [line.split()[0] for line in table[1:6]] == ["actor", "reference", "together:", "critic", "rollout"]
    assert "KV cache of an engine: " in table[6]
    assert re.search(r"update [\d.]+ s\); it .* A weight transfer is left out: its", " ".join(out.split()))
    assert max(len(line) for line in out.splitlines()) <= 100


def test_a_step_is_predicted_for_the_prompts_of_the_data_set(
    capsys: pytest.CaptureFixture[str], run: tuple[str, ...], tmp_path: Path
) -> None:
    words = (run[1], "--nodes=1", "--gpus_per_node=8", "--gpu=h100", "--mean_response=50")
    for prompts, mean in (("1+1=", 4), ("1+1=" * 20, 80), (None, 128)):  # tokens are characters here
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"input": prompts}) + "\n" if prompts else "no row\n")
        _, out, _ = plan(capsys, *words)
        said = f"for prompts of {mean} and responses of 50 tokens in the mean"
        text = " ".join(out.split())
        assert said in text
        assert re.search(r"Real tokens on an update's critical path, .*: actor \d+\.\d%, critic \d+", text)
        assert text.endswith("The reward is a function's, whose time is not predicted.")


def test_plan_names_the_host_memory_of_parked_states(capsys: pytest.CaptureFixture[str], seven: str) -> None:
    words = (str(SBATCH / "ppo_7b_1node.toml"), seven, "--nodes=1", "--gpus_per_node=8", "--gpu=h100")
    code, out, _ = plan(capsys, *words)
    said = "Host memory: 24.0 GiB for each GPU are pinned: optimizer states (ds.enable_sleep), weights of"
    assert (code, any(line.startswith(said) for line in out.splitlines())) == (0, True)
    code, out, _ = plan(capsys, *words, "--json")
    assert json.loads(out)["memory"]["pinned_host_bytes"] == 24 << 30


def test_plan_in_json(capsys: pytest.CaptureFixture[str], seven: str) -> None:
    words = (str(SBATCH / "ppo_7b.toml"), seven, *LARGE, "--json")
    code, out, _ = plan(capsys, *words, "--gpu_memory_gb=80")
    memory = json.loads(out)["memory"]
    assert (code, memory["known"], memory["fits"]) == (0, True, True)
    rows = {row["name"]: row for row in memory["rows"]}
    assert rows["critic"]["needed"] == sum(size for _, size in rows["critic"]["terms"]) < rows["critic"]["there"]
    assert rows["actor"]["there"] == 0  # others share it
    assert memory["kv_cache"]["sequences"] > memory["kv_cache"]["wanted"] == 192
    code, out, _ = plan(capsys, *words)
    assert (code, json.loads(out)["memory"]["known"]) == (0, False)


def test_plan_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str], seven: str) -> None:
    code, out, err = plan(capsys, str(SBATCH / "ppo_7b.toml"), seven, *LARGE, "--gpu=a100_40gb")
    assert code == 2
    assert out.count("DOES NOT FIT") == 2
    assert "this run does not fit its GPUs, A100 40GB with 39.3 GiB:" in err
    assert "critic: 52.9 GiB are needed, most of them for activations 13.7" in err
    assert "Traceback" not in err
    assert max(len(line) for line in err.splitlines()) <= 100
    assert err.count("what helps: ") == 2


def test_the_share_of_an_engine_that_fits_is_named(capsys: pytest.CaptureFixture[str], seven: str) -> None:
    words = (str(SBATCH / "ppo_7b.toml"), seven, *LARGE, "--gpu=h100")
    code, _, err = plan(capsys, *words, "--vllm.gpu_memory_utilization=0.99")
    assert code == 2
    (share,) = re.findall(r"lower vllm\.gpu_memory_utilization to (0\.\d+) \(now 0\.99\)", " ".join(err.split()))
    assert plan(capsys, *words, f"--vllm.gpu_memory_utilization={share}")[0] == 0
    assert plan(capsys, *words, f"--vllm.gpu_memory_utilization={float(share) + 0.01}")[0] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "memory: unknown: there are no GPUs here; to estimate it for a machine with GPUs, add"),
        (("--gpu=a100",), "a100 is taken for A100 80GB; where it has 40 GB, say --train.gpu_memory_gb=40."),
    ],
)
def test_plan_says_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], seven: str, words: tuple[str, ...], said: str
) -> None:
    code, out, err = plan(capsys, str(SBATCH / "ppo_7b.toml"), seven, *LARGE, *words)
    assert (code, err) == (0, "")
    assert said in out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "alien"}, "model_type 'alien' has no known memory model"),
        ({"quantization_config": {"quant_method": "awq"}}, "holds quantised weights (quantization_config, awq)"),
    ],
)
def test_plan_on_a_model_it_does_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    model = make_shape(tmp_path / "odd", "7B", **changes)
    words = (str(SBATCH / "ppo_7b.toml"), f"--actor.model_name_or_path={model}", *LARGE, "--gpu=h100")
    code, out, err = plan(capsys, *words)
    assert (code, err) == (0, "")
    assert said in " ".join(out.split())


def test_engines_that_do_not_divide_the_model(capsys: pytest.CaptureFixture[str], seven: str) -> None:
    words = (str(SBATCH / "ppo_7b.toml"), seven, *LARGE, "--gpu=h100", "--vllm.tensor_parallel_size=3")
    code, _, err = plan(capsys, *words, "--critic.num_gpus_per_node=1")
    assert code == 2
    assert "vllm.tensor_parallel_size = 3 does not divide the model" in err
    assert "Valid sizes: 1, 2, 4" in err


@pytest.mark.parametrize("flag", [(), ("--dry_run",)])
def test_train_refuses_before_anything_starts(
    capsys: pytest.CaptureFixture[str], gpus: Path, run: tuple[str, ...], tmp_path: Path, flag: tuple[str, ...]
) -> None:
    code = main([*run, *flag, "--train.max_tokens_per_gpu=300000000", "--train.gradient_checkpointing=off"])
    out, err = capsys.readouterr()
    assert code == 2
    assert "this run does not fit its GPUs, A100 40GB with 39.3 GiB:\n  actor: " in err
    assert "activations" in err
    assert "lower train.max_tokens_per_gpu (now 300000000)" in " ".join(err.split())
    assert ("DOES NOT FIT" in out) == bool(flag)
    assert not (tmp_path / "out").exists()


def test_train_counts_the_smallest_of_unlike_gpus(
    capsys: pytest.CaptureFixture[str], gpus: Path, run: tuple[str, ...]
) -> None:
    gpus.write_text("echo NVIDIA A100-SXM4-$((40 + i % 2 * 40))GB, $((40960 + i % 2 * 40960))")
    assert main([*run, "--dry_run"]) == 0
    assert "(A100 40GB: 39.3)" in capsys.readouterr().out
    gpus.write_text("echo Some Card, 24576")
    assert main([*run, "--dry_run"]) == 0
    assert "(Some Card of 24 GB: 23.6)" in capsys.readouterr().out


def test_without_gpus_a_run_is_not_measured_by_them(
    capsys: pytest.CaptureFixture[str], run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([*run, "--dry_run", "--train.max_tokens_per_gpu=300000000"]) == 0
    assert "# memory: unknown: there are no GPUs here" in capsys.readouterr().out


def test_submit_refuses_what_it_is_reported_the_gpus_of(
    capsys: pytest.CaptureFixture[str], run: tuple[str, ...], tmp_path: Path
) -> None:
    words = ["submit", *run[1:], "--train.max_tokens_per_gpu=300000000", "--train.gpu=h100"]
    assert main(words) == 2
    assert "this run does not fit its GPUs, H100 with 79.1 GiB" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_stage_has_the_memory_of_what_it_trains(capsys: pytest.CaptureFixture[str], seven: str) -> None:
    needed = {}
    for stage in ("sft", "rm"):
        words = ("--actor.num_nodes=1", "--nodes=1", "--gpus_per_node=8", "--gpu=h100", f"--command={stage}")
        code, out, _ = plan(capsys, str(SBATCH / "sft.toml"), seven, *words, "--json")
        (row,) = json.loads(out)["memory"]["rows"]
        needed[stage] = dict(row["terms"])
        assert (code, row["name"], "KV cache" in needed[stage]) == (0, "actor", False)
    assert needed["rm"]["parameters"] < needed["sft"]["parameters"]
    assert "logits" not in needed["rm"]
    code, out, _ = plan(capsys, str(SBATCH / "sft.toml"), seven, *words)
    assert (code, "samples" in out) == (0, False)


def test_a_stage_is_refused_before_it_starts_where_it_does_not_fit(
    capsys: pytest.CaptureFixture[str], gpus: Path, run: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "examples.jsonl").write_text('{"input": "1+1=", "output": "2"}\n' * 64)
    keys = (run[1], f"--sft.dataset={tmp_path / 'examples.jsonl'}", f"--sft.output_dir={tmp_path / 'out'}")
    large = (*keys, "--train.max_tokens_per_gpu=300000000", "--train.gradient_checkpointing=off")
    for command in (["sft"], ["check"], ["submit", "--command=sft", "--train.gpu=a100_40gb"]):
        assert main([command[0], *large, *command[1:]]) == 2
        err = capsys.readouterr().err
        assert "this run does not fit its GPUs, A100 40GB with 39.3 GiB:\n  actor: " in err, command
    config = load_config([Path(run[1])], [*keys[1:], "--train.max_tokens_per_gpu=8000000"])
    ranks = layout_here(of_command(config, "sft"))
    assert check_memory(config, ranks, "sft").train.gradient_checkpointing == "full"
    assert role_environment(config, ranks, 1)["actor"][ranks.used_nodes[0]]["PYTORCH_ALLOC_CONF"]
