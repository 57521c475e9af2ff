"""`slurm-rlhf check` on files of stages and of pipelines: what is read, and what is wrong, before anything starts."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from pipeline_files import BASE, FILE, made
from safetensors.numpy import load_file, save_file
from tiny_models import make_reward

from slurm_rlhf.cli.main import main

REST = """
[[stage]]
name = "rm"
command = "rm"
files = ["base.toml"]
keys = { actor.model_name_or_path = "{sft}", rm.dataset = "pairs.jsonl", rm.batch_size = 10 }

[[stage]]
name = "ppo"
command = "train"
files = ["base.toml", "run.toml"]
keys = { actor.model_name_or_path = "{better}", reward.model_name_or_path = "{rm}" }

[[stage]]
name = "judged"
command = "eval"
files = ["base.toml", "run.toml"]
keys = { model = "{ppo}", reward.remote_url = "reward.py" }
"""
RUN = """
[data]
prompt_dataset = "sums.jsonl"
[actor]
num_gpus_per_node = 1
[critic]
num_gpus_per_node = 1
[ref]
num_gpus_per_node = 1
[rollout]
batch_size = 4
max_new_tokens = 4
[train]
batch_size = 4
[eval]
dataset = "sums.jsonl"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline of sft, dpo, rm, train and eval."""
    monkeypatch.chdir(tmp_path)
    file = made(tmp_path)
    file.write_text(FILE + REST)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "plain.toml").write_text(BASE[: BASE.index("[sft]")])
    (tmp_path / "reward.py").write_text("def reward_func(responses):\n    return [1.0] * len(responses)\n")
    return file


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["check", *words])
    return code, *capsys.readouterr()


def test_a_pipeline_is_checked_before_its_first_stage_has_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = checked(capsys, str(file))
    assert (code, err) == (0, "")
    assert "sft: steps: 2, each with 10 examples\n" in out
    assert f"better: dpo.dataset: 25 examples in {file.parent}/pairs.jsonl\n" in out
    assert "rm: steps: 2, each with 10 examples\n" in out
    assert "ppo: steps: 6, each with 4 prompts" in out
    assert f"judged: evaluation sums: 25 prompts in {file.parent}/sums.jsonl\n" in out
    assert not (file.parent / "out").exists()


def test_problems_of_all_stages_are_reported_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = Path("pairs.jsonl").read_text().splitlines()
    same = {**json.loads(pairs[3]), "rejected": json.loads(pairs[3])["chosen"]}
    Path("pairs.jsonl").write_text("\n".join([*pairs[:3], json.dumps(same), *pairs[4:]]))
    Path("run.toml").write_text(RUN.replace("max_new_tokens = 4", "max_new_tokens = 400"))
    code, _, err = checked(capsys, str(file))
    assert code == 2
    for stage, stated in (
        ("better", f"{file.parent}/pairs.jsonl:4: the chosen answer equals the rejected one: leave the row out"),
        ("rm", f"{file.parent}/pairs.jsonl:4: the chosen answer equals the rejected one: leave the row out"),
        ("ppo", "data.max_len = 16 leaves no room for a prompt, because of rollout.max_new_tokens = 400"),
        ("judged", "data.max_len = 16 leaves no room for a prompt, because of rollout.max_new_tokens = 400"),
    ):
        assert f"{stage}: {stated}" in err


def test_a_file_is_checked_for_the_stages_that_it_names(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ("--sft.output_dir=one", "--dpo.output_dir=two")
    code, out, err = checked(capsys, "base.toml", *outputs)
    assert (code, err) == (0, "")
    assert "sft: sft.dataset: 25 examples in " in out
    assert "dpo: steps: 2, each with 10 examples\n" in out
    many = ("--actor.num_gpus_per_node=3", "--dpo.loss_type=ipo", "--dpo.label_smoothing=0.1")
    code, _, err = checked(capsys, "base.toml", *outputs, *many)
    assert code == 2
    assert err.startswith(
        "slurm-rlhf: error: sft: sft.batch_size = 10 does not divide over 3 ranks: use a multiple of 3"
    )
    assert "\ndpo: 2 problems in the configuration:\n  - dpo.batch_size = 10 does not divide over 3 ranks" in err
    assert "\n  - dpo.label_smoothing = 0.1 has no effect with dpo.loss_type = ipo" in err
    copies = ("--actor.num_gpus_per_node=5", "--ds.zero_stage=3", "--ds.hpz_size=2")
    code, _, err = checked(capsys, "base.toml", *outputs, *copies)
    assert code == 2
    assert err.count("ds.hpz_size = 2 does not divide actor.num_gpus_per_node = 5: change one of them") == 2


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        (["--actor.learning_rate=5"], "--actor.learning_rate is not read by `slurm-rlhf check`: leave it out"),
        (["--sft.batch_size=30"], "25 usable examples, fewer than sft.batch_size = 30: lower it"),
        (["--sft.dataset=chat.jsonl"], "got list: messages need data.apply_chat_template = true"),
        (["--sft.eval_dataset=pairs.jsonl"], "pairs.jsonl:1: no column 'output' (columns: input, chosen, rejected)"),
        (["--actor.model_name_or_path=adapter"], "is a LoRA adapter and no whole model"),
    ],
)
def test_what_a_stage_cannot_use_is_reported(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], stated: str
) -> None:
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    Path("chat.jsonl").write_text('{"input": [{"role": "user", "content": "1+1="}], "output": "2"}\n')
    Path("sft.toml").write_text(BASE[: BASE.index("[dpo]")] + 'output_dir = "one"\n')
    code, _, err = checked(capsys, "sft.toml", *words)
    assert code == 2
    assert stated in err


def test_the_head_that_a_reward_model_starts_from_has_the_size_of_its_states(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = Path("model/model.safetensors")
    tensors = load_file(weights)
    tensors["score.weight"] = tensors["model.norm.weight"][None, :-1].copy()
    save_file(tensors, weights, metadata={"format": "pt"})
    code, _, err = checked(capsys, str(file))
    assert code == 2
    size = tensors["model.norm.weight"].shape[0]
    assert f"score.weight has shape [1, {size - 1}], not [1, {size}]" in err


def test_keys_of_a_file_that_nothing_reads_are_reported(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("base.toml").write_text(BASE + "[critic]\nlearning_rate = 1.0\n")
    code, out, _ = checked(capsys, "base.toml", "--sft.output_dir=one", "--dpo.output_dir=two")
    assert code == 0
    assert out.startswith("note: nothing here reads critic.learning_rate\n")


def test_rewards_that_fail_are_reported_whatever_they_get(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text("def reward_func(responses):\n    return [1.0 / (len(r) - 1) for r in responses]\n")
    Path("sums.jsonl").write_text("".join(json.dumps({"input": "1+1=", "label": "2" * n}) + "\n" for n in (1, 2) * 8))
    words = ("--reward.remote_url=reward.py", "--reward.on_error=skip")
    code, out, err = checked(capsys, "plain.toml", "run.toml", *words)
    assert (code, err) == (0, "")
    assert "warning: step 0: the rewards of 4 of 8 responses failed (4 raised), the first: raised: " in out
    assert "reward.py:2: reward_func raised ZeroDivisionError" in out
    code_words = ("--reward.remote_url=", "--reward.preset=code", "--reward.sandbox=none")
    assert (
        "\nsandbox here: none (a program can read and write"
        in checked(capsys, "plain.toml", "run.toml", *code_words)[1]
    )


ODD_TOOL = """class Odd: pass
class Environment:
    def reset(self, **columns): pass
    def add(self, one: Odd) -> str:
        '''Adds.

        Args:
            one: It.
        '''
"""


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [
        ("reward.remote_url", "def reward_func(\n", "1: cannot be imported: SyntaxError"),
        ("reward.remote_url", "def reward_func(responses):\n    return [1.0]\n", " returned 1 rewards for 2 responses"),
        ("reward.remote_url", "def reward_func(responses):\n    1 / 0\n", "2: reward_func raised ZeroDivisionError"),
        ("reward.remote_url", "import os\nos._exit(3)\n", " its process ended with status 3"),
        ("reward.remote_url", "import time\ntime.sleep(99)\n", " raise timeout.connect"),
        ("env.path", "import no_such_module\n", "1: cannot be imported: ModuleNotFoundError"),
        ("env.path", "import os\nos._exit(3)\n", " its process ended with status 3"),
        ("env.path", ODD_TOOL, "4: the tool Environment.add cannot be described to the policy: type <class"),
    ],
)
def test_code_that_cannot_be_used_is_one_line_on_the_terminal_of_all_processes(
    file: Path, capfd: pytest.CaptureFixture[str], key: str, code: str, said: str
) -> None:
    Path("bad.py").write_text(code)
    words = [f"--{key}=bad.py", *(["--timeout.connect=1"] if "sleep" in code else [])]
    capfd.readouterr()
    status, out, err = checked(capfd, "plain.toml", "run.toml", *words)
    assert (status, err.count("\n")) == (2, 1), err
    assert f"{Path('bad.py').absolute()}:" in err
    assert said in err
    assert "Traceback" not in out
    assert "ZeroDivision" not in said or "the first prompt, " in out  # findings before it are shown as they come


class _Page(BaseHTTPRequestHandler):
    """Answers all with a page for people."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("key", ["reward.remote_url", "env.path"])
def test_a_server_that_a_run_would_wait_for_is_reported(
    file: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        status, _, err = checked(capsys, "plain.toml", "run.toml", f"--{key}={url}")
        server.shutdown()
    assert status == 2
    assert err.startswith(f"slurm-rlhf: error: {url} answered what is no JSON: '<html>': a run would wait")


def test_an_environment_that_cannot_begin_is_reported_with_row_and_line(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """class Environment:
    def reset(self, row):
        return {"a": "?"}[row["input"]]
    def step(self, messages):
        return None, 1.0, True
"""
    Path("game.py").write_text(code)
    words = ("plain.toml", "run.toml", "--env.path=game.py")
    capfd.readouterr()
    status, _, err = checked(capfd, *words)
    assert status == 2
    assert err.startswith("slurm-rlhf: error: data.prompt_dataset, row 0: ")
    assert f"{Path('game.py').absolute()}:3: Environment.reset raised KeyError: " in err
    assert "Traceback" not in err
    Path("game.py").write_text(code.replace('[row["input"]]', '.get("b")'))
    status, out, _ = checked(capfd, *words)
    assert (status, out.splitlines()[-1][-13:]) == (0, "(1 in all): 1")


def test_a_reward_with_an_environment_is_called_with_an_episode_as_a_run_has_it(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """class Environment:
    def reset(self, row):
        return [{"role": "system", "content": "rules"}, {"role": "user", "content": row["input"]}]
    def step(self, messages):
        return "again", 0.25, len(messages) > 3
"""
    Path("game.py").write_text(code)
    words = ("plain.toml", "run.toml", "--env.path=game.py", "--reward.remote_url=grade.py")
    worth = "[(p[1]['role'] == 'user') + (c[1]['content'] == 'again') for p, c in zip(prompts, completions)]"
    graded = "def reward_func(prompts, completions, **kwargs):\n    return "
    Path("grade.py").write_text(graded + worth)
    capfd.readouterr()
    Path("two.toml").write_text("reward.sources = [{name='a', model=true}, {name='b', remote_url='grade.py'}]")
    model = f"--reward.model_name_or_path={make_reward('judge')}"
    for given in (words, ("two.toml", *words[:3], model)):  # all sources but the model, which takes ranks
        status, out, err = checked(capfd, *given)
        assert (status, out.splitlines()[-1][-15:]) == (0, "(2 in all): 2.5"), err
    Path("grade.py").write_text(f"{graded}['good'] * len(prompts)")
    status, _, err = checked(capfd, *words)
    assert (status, "grade.py: reward_func returned 'good' (str) at index 0" in err) == (2, True), err
    status, out, _ = checked(capfd, *words, "--reward.on_error=skip")  # a run goes on with the other rows
    assert (status, "warning: the episode of the first row" in out) == (0, True)
    Path("game.py").write_text(code.replace("0.25", "int(messages[9])"))
    status, out, _ = checked(capfd, *words)  # an episode that is lost ends no run
    assert (status, "Environment.step raised IndexError" in out.splitlines()[-1]) == (0, True)
