"""train, sft and plan from a TOML file, as far as they go without starting a process."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from config_files import write
from lookalikes import llama_like
from model_configs import NO_WEIGHTS

from slurm_rlhf.cli.main import main
from slurm_rlhf.config.load import load_config
from slurm_rlhf.run.conductor import Inputs


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_JOBID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TOML file in a directory of its own, with the files it names; the working directory is another."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    llama_like(project / "model")
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (project / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (project / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    (project / "prompts.jsonl").write_text("".join(f'{{"input": "{n}+1=", "label": "{n + 1}"}}\n' for n in range(130)))
    (project / "reward.py").write_text(
        "def reward_func(responses, labels):\n    return [float(text) for text in responses]\n"
    )
    toml = project / "small.toml"
    toml.write_text(
        'data.prompt_dataset = "prompts.jsonl"\nactor.model_name_or_path = "model"\nreward.remote_url = "reward.py"\n'
        'sft.dataset = "prompts.jsonl"\nsft.output_dir = "trained"\n'
    )
    return toml


def test_dry_run(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(file), "--actor.num_gpus_per_node=2", "--dry_run", "--vllm.num_engines", "2"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    resolved = tomllib.loads(out)
    assert resolved["run_dir"] == str(tmp_path / "elsewhere" / "runs" / "small")
    assert resolved["actor"]["model_name_or_path"] == str(file.parent / "model")
    assert resolved["actor"]["num_gpus_per_node"] == 2
    assert "# A actor: 2 ranks on 1 node\n" in out
    assert re.search(r"^# E rollout: 2 ranks on 1 node, 2 engines of TP 1$", out, re.MULTILINE)
    assert re.search(r"^# R reference: 1 rank ", out, re.MULTILINE)
    assert list((tmp_path / "elsewhere").iterdir()) == []

    assert "warning" not in out

    again = tmp_path / "again.toml"
    again.write_text(out)
    assert load_config(again, []) == load_config(file, [word for word in words[2:] if word != "--dry_run"])


def test_check_shows_what_a_run_reads(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", str(file), "--data.max_len=1034", "--train.max_steps=3", "--rollout.batch_size=64"]
    words += ["--train.batch_size=64", "--sft.dataset="]
    long = {"input": "1" * 50, "label": "1"}
    with (file.parent / "prompts.jsonl").open("a") as opened:
        opened.write(json.dumps(long) + "\n")
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    sound, *lines = out.splitlines()
    assert sound.startswith("keys, files and model directories are right; reading ")
    assert lines[0].endswith("prompts.jsonl, 1 dropped (longer than 10 tokens)")
    assert lines[1].startswith(
        "steps: 3, each with 64 prompts and 1 responses to each; one pass over the prompts is 2 steps"
    )
    assert lines[2] == "the first prompt, 5 tokens: '0+1='"
    assert lines[3] == "its label: '1'"
    assert lines[4].endswith("as if they were responses: 1, 2, 3, 4")
    assert main([*words[:2], "--dry_run=true"]) == 2


def test_prompts_that_repeat_or_hold_their_answers_are_reported(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` reports both; a run reports those of an evaluation, too: its self-check sees only prompts to train on."""
    llama_like(file.parent / "model", template="{% for m in messages %}{{ m.content }}<|end_of_text|>{% endfor %}")
    (file.parent / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 9)
    asked = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = [{"input": asked, "label": "2"}, {"input": asked[:1], "label": "2"}]
    (file.parent / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data.apply_chat_template=true", "--rollout.batch_size=8", "--train.batch_size=8"]
    words += [f"--eval.dataset={file.parent / 'eval.jsonl'}", "--sft.dataset="]
    assert main(["check", str(file), *words]) == 0
    out = capsys.readouterr().out
    assert "warning: 89 % of the prompts stand in the file once more" in out
    ends = "warning: 50 % of the prompts end with a message of the assistant"
    assert re.search(f"^evaluation [^:]+: {ends}", out, re.MULTILINE)
    notes: list[str] = []
    Inputs.read(load_config(file, words), notes.append).close()
    assert sum(ends in note for note in notes) == 1


@pytest.mark.parametrize("command", [["check"], ["train", "--dry_run"]])
@pytest.mark.parametrize(
    ("name", "text", "stated"),
    [
        ("prompts.jsonl", '{"input": \n', "prompts.jsonl:1: not valid JSON"),
        ("prompts.jsonl", '{"input": "a"}\n', "fewer than rollout.batch_size"),
        ("reward.py", "def (", "reward.py"),
        ("reward.py", "def reward_func(responses, level): return []", "a parameter 'level' that nothing is passed for"),
    ],
)
def test_files_that_a_run_could_not_use_are_reported(
    file: Path, capsys: pytest.CaptureFixture[str], command: list[str], name: str, text: str, stated: str
) -> None:
    (file.parent / name).write_text(text)
    assert main([command[0], str(file), *command[1:]]) == 2
    assert stated in capsys.readouterr().err


def test_check_names_servers_that_are_away(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = "http://127.0.0.1:9"  # the port of `discard`, which nobody serves
    assert main(["check", str(file), f"--reward.remote_url={away}", f"--env.path={away}"]) == 2
    stated = capsys.readouterr().err
    assert f"servers that are not there: reward.remote_url: {away}: ConnectError" in stated
    assert f"; env.path: {away}: ConnectError" in stated


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        (["train", "FILE", "--lr=1"], "did you mean --actor.learning_rate or --critic.learning_rate?"),
        (["train", "FILE", "--critic.lr=1"], "did you mean --critic.learning_rate or --actor.learning_rate?"),
        (["train", "FILE", "--dryrun"], "unknown option --dryrun; did you mean --dry_run?"),
        (["train", "FILE", "--tp=2"], "did you mean --vllm.tensor_parallel_size?"),
        (["train", "FILE", "--sft.dataset=x", "--dry_run"], "is not read by `slurm-rlhf train` (it is a key of `"),
        (["sft", "FILE", "--actor.learning_rate=5"], "rate is not read by `slurm-rlhf sft`: leave it out"),
    ],
)
def test_what_people_write_is_understood_or_called_unread(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], stated: str
) -> None:
    assert main([str(file) if word == "FILE" else word for word in words]) == 2
    assert stated in capsys.readouterr().err


def test_a_file_with_a_byte_order_mark_is_read(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert main(["train", str(file), "--dry_run"]) == 0


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    overview = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == overview
    assert main(["help", "status"]) == 0
    assert capsys.readouterr().out.startswith("usage: slurm-rlhf status RUN")


def test_dry_run_warns_of_a_model_that_was_never_compared(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "model" / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    assert main(["train", str(file), "--dry_run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\n# warning: actor.model_name_or_path: " in out
    tomllib.loads(out)


def test_dry_run_without_reference_and_elsewhere(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "--dry-run", "--algo.kl.init_coef=0", "--run_dir=here"]) == 0
    out = capsys.readouterr().out
    assert "R reference" not in out
    assert tomllib.loads(out)["run_dir"] == str(Path("here").absolute())


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--actor.learning_rat=1"], "did you mean --actor.learning_rate?"),
        (["--train.seed=x"], "--train.seed takes a whole number, got 'x'"),
        (["--actor.model_name_or_path=nowhere"], "actor.model_name_or_path: no such directory: "),
        (["--train.max_tokens_per_gpu=0"], "train.max_tokens_per_gpu must be at least 1, got 0"),
    ],
)
def test_bad_input(file: Path, capsys: pytest.CaptureFixture[str], command: str, words: list[str], named: str) -> None:
    assert main([command, str(file), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slurm-rlhf: error: ")
    assert named in err
    assert "Traceback" not in err


def test_train_checks_before_it_starts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "--train.batch_size=100"]) == 2
    assert "do not divide into optimizer steps of train.batch_size = 100" in capsys.readouterr().err
    (file.parent / "model" / "tokenizer.json").unlink()
    assert main(["train", str(file)]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_train_hands_over_to_the_conductor(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("slurm_rlhf.run.conductor.lead_run", lambda *arguments: seen.extend(arguments) or 0)
    assert main(["train", str(file), "--actor.num_gpus_per_node=2"]) == 0
    config, ranks, _, node, _ = seen
    assert config.actor.num_gpus_per_node == ranks.world("actor") == 2
    assert [share.node for share in ranks.roles["rollout"]] == [node]


def test_plan_needs_sizes_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path, "[actor]\nnum_nodes = 2\nnum_gpus_per_node = 5\n[vllm]\nnum_engines = 2\ntensor_parallel_size = 2\n"
    )
    assert main(["plan", str(file), "--vllm.num_nodes=2"]) == 0
    out = capsys.readouterr().out
    assert "sbatch --nodes=2" in out
    assert re.search(r"^node1 .*\bA4\b", out, re.MULTILINE)
    assert re.search(r"^node2 .*\bA9\b", out, re.MULTILINE)
    assert "A actor: 10 ranks on 2 nodes" in out


def test_inside_an_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "[actor]\nnum_nodes = 2\nnum_gpus_per_node = 4\n[critic]\nnum_gpus_per_node = 2\n")
    job = {"JOB_ID": "7", "JOB_NODELIST": "gpu[07-08]", "JOB_NUM_NODES": "2", "JOB_CPUS_PER_NODE": "64(x2)"}
    for name, value in (job | {"GPUS_PER_NODE": "8", "GPUS_ON_NODE": "8"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert main(["plan", str(file)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^node +gpu0 .*gpu7$", out, re.MULTILINE)
    assert re.search(r"^gpu08 ", out, re.MULTILINE)
    assert "of 16 GPUs used" in out


def test_plan_for_nodes_that_somebody_thinks_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seed's case: 6 actor and 2 rollout ranks on each of two nodes."""
    file = write(
        tmp_path,
        "[actor]\nnum_nodes = 2\nnum_gpus_per_node = 4\n[critic]\nnum_nodes = 2\nnum_gpus_per_node = 2\n"
        "[vllm]\nnum_engines = 2\ntensor_parallel_size = 2\nnum_nodes = 2\n[algo.kl]\ninit_coef = 0.0\n",
    )
    assert main(["plan", str(file), "--nodelist", "gpu[08-09]", "--gpus_per_node=8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [node["name"] for node in plan["nodes"]] == ["gpu08", "gpu09"]
    assert plan["world"] == {"actor": 8, "critic": 4, "rollout": 4}
    assert [share["gpus"] for share in plan["roles"]["actor"]] == [[0, 1, 2, 3]] * 2
    assert [(group["node"], group["gpus"]) for group in plan["tp_groups"]] == [("gpu08", [6, 7]), ("gpu09", [6, 7])]
    assert main(["plan", str(file), "--nodes=16", "--gpus_per_node", "8"]) == 0
    assert re.search(r"^node +gpu0 .*gpu7$", capsys.readouterr().out, re.MULTILINE)
    assert main(["plan", str(file), "--nodes=16"]) == 2
    assert "--gpus_per_node goes with" in capsys.readouterr().err


def test_plan_for_unlike_nodes_is_that_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path,
        "[actor]\nnum_nodes = 2\nnum_gpus_per_node = 6\n[critic]\nnum_gpus_per_node = 4\n"
        "[vllm]\nnum_engines = 2\ntensor_parallel_size = 4\n[algo.kl]\ninit_coef = 0.0\n",
    )
    for gpus in ("6,6,4,4,4", "6(x2),4(x3)"):
        words = ["plan", str(file), "--nodelist=r01c[01-03],fat-[1-2]", f"--gpus_per_node={gpus}", "--json"]
        assert main(words) == 0
        plan = json.loads(capsys.readouterr().out)
        assert [(node["name"], node["gpus"]) for node in plan["nodes"]] == [
            *(("fat-1", 6), ("fat-2", 6)),  # Slurm sorts them
            *((f"r01c0{number}", 4) for number in (1, 2, 3)),
        ]
        assert [share["node"] for share in plan["roles"]["actor"]] == ["fat-1", "fat-2"]
    for gpus, stated in (("6,4", "2 counts for 5 nodes"), ("0", "every node needs a GPU"), ("x", "got 'x' for fat-1")):
        assert main(["plan", str(file), "--nodelist=r01c[01-03],fat-[1-2]", f"--gpus_per_node={gpus}"]) == 2
        assert stated in capsys.readouterr().err


def _store_model(directory: Path, shapes: dict[str, list[int]]) -> None:
    """The header of a safetensors file is all that `plan` may read."""
    header = json.dumps(
        {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())


def test_plan_shows_what_a_weight_transfer_costs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {f"model.layers.{layer}.mlp.weight": [5000, 5000] for layer in range(10)}
    _store_model(file.parent / "model", {"lm_head.weight": [1000, 5000], **shapes})
    words = [
        *("plan", str(file), "--actor.num_nodes=2", "--actor.num_gpus_per_node=6", "--vllm.num_engines=4"),
        *("--vllm.num_nodes=2", "--critic.num_nodes=2", "--ref.num_nodes=2", "--nodes=2", "--gpus_per_node=10"),
    ]
    assert main([*words, "--json", "--ds.zero_stage=3", "--network_gbits=8"]) == 0
    transfer = json.loads(capsys.readouterr().out)["transfer"]
    payload = 2 * (10 * 5000 * 5000 + 1000 * 5000)
    assert transfer["bytes"] == payload
    assert transfer["buckets"] == 2  # each at most 256 MiB, as between GPUs
    assert len(transfer["sent"]) == 12 + 4
    for link in transfer["links"].values():  # each node holds half and gets the other half
        assert link == {"out": pytest.approx(payload / 2, rel=1e-3), "into": pytest.approx(payload / 2, rel=1e-3)}
    assert transfer["seconds"] == pytest.approx(payload / 2 / 1e9, rel=1e-3)

    assert main([*words, "--ds.zero_stage=2"]) == 0  # every node has the whole model already
    out = capsys.readouterr().out
    assert "weight transfer: 510 MB in 2 buckets, about" in out
    assert re.search(r"^  an engine rank receives 510 MB and forwards 255 MB$", out, re.MULTILINE)
    assert len(re.findall(": 0 B out, 0 B in", out)) == 2


def test_plan_without_shapes_shows_no_transfer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file)]) == 0
    assert "weight transfer" not in capsys.readouterr().out
    assert main(["plan", str(file), "--network_gbits=fast"]) == 2
    assert "--network_gbits takes a number of at least 0.001, got 'fast'" in capsys.readouterr().err
