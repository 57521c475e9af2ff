"""Jobs that submitit is asked for, and who goes on with a run that has to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import first_on_path, write_program

from slurm_rlhf.cli.commands import commands
from slurm_rlhf.cli.train import submit as submit_command
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config, Slurm
from slurm_rlhf.config.schema_jobs import minutes
from slurm_rlhf.errors import ConfigError, PlacementError, RunError, UserError
from slurm_rlhf.nodes import requeue, submitit_job
from slurm_rlhf.nodes.requeue import PARENT_REQUEUES, ChainContinuation, ParentContinuation, continuation_of
from slurm_rlhf.nodes.submitit_job import TrainJob, slurm_executor, slurm_parameters, submit, wanted_nodes
from slurm_rlhf.wire import timeouts

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
JOB = {"SLURM_JOB_ID": "13", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NAME": "ppo", "SLURM_JOB_END_TIME": "99"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        (" 90\n", 90),
        ("90:30", 91),
        ("1:30:00", 90),
        ("24:00:00", 1440),
        ("3-12", 5040),
        ("1-00:30", 1470),
        ("0-0:1:1", 2),
    ],
)
def test_time_limits_in_slurms_words(text: str, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "0", "1h"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.time"):
        minutes(text)


def test_a_job_asks_for_what_the_configuration_says() -> None:
    words = ["--slurm.partition=gpu", "--slurm.account=me", "--slurm.gpus_per_node=8", "--slurm.exclusive"]
    config = load_config(SBATCH / "ppo_7b.toml", [*words, "--slurm.setup", "module load cuda", "source x"])
    asked = slurm_parameters(config)
    assert asked["slurm_additional_parameters"] == {
        **{"nodes": 2, "ntasks-per-node": 1, "signal": "B:USR2@600", "requeue": True, "gpus-per-node": 8}
    }
    assert (asked["nodes"], asked["slurm_use_srun"], asked["timeout_min"], asked["name"]) == (1, False, 1440, "ppo_7b")
    assert (asked["slurm_partition"], asked["slurm_account"], asked["slurm_exclusive"]) == ("gpu", "me", True)
    assert asked["slurm_setup"] == ["module load cuda", "source x"]
    assert not {"slurm_qos", "slurm_mem", "slurm_dependency"} & asked.keys()
    config.slurm.time = "10"
    with pytest.raises(ConfigError, match=r"slurm\.signal_lead_s = 600 is all of slurm\.time = 10"):
        slurm_parameters(config)


def test_the_whole_script_that_sbatch_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = ["--slurm.partition=gpu", "--slurm.gpus_per_node=8", "--slurm.mem=0", "--slurm.setup", "module load cuda"]
    config = load_config(SBATCH / "ppo_7b.toml", words)
    executor = slurm_executor(config, Path("/runs/a/submitit"))._executor
    command = executor._submitit_command_str.replace(sys.executable, "PYTHON")
    text = executor._make_submission_file_text(command, "uid")
    assert text == (Path(__file__).with_name("golden") / "sbatch_submitit.txt").read_text()


def test_without_slurm_nothing_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RunError, match="Go to a login node, or add --local"):
        slurm_executor(Config(run_dir="/runs/a"), Path("/runs/a"))


@pytest.mark.parametrize("was_there", [False, True])
def test_what_sbatch_refuses_is_said_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], was_there: bool
) -> None:
    run_dir, refuses = tmp_path / "run", "echo 'sbatch: error: invalid partition' >&2\nexit 1"
    first_on_path(monkeypatch, tmp_path / "bin", srun=refuses, sbatch=refuses)
    if was_there:
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").touch()
    monkeypatch.setattr(submitit_job, "check", lambda config: None)
    with pytest.raises(RunError, match=r"sbatch refuses the job: .*invalid partition"):
        submit(Config(run_dir=str(run_dir)))
    assert "invalid partition" not in capfd.readouterr().err  # whoever catches it says it
    assert (run_dir / "metrics.jsonl").exists() is run_dir.exists() is was_there


def test_a_job_inherits_nothing_of_the_one_that_it_is_submitted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM_GPUS_PER_TASK of the allocation around it, which sbatch never clears, would count in the job."""
    notes = f"env >{tmp_path}/variables\nexit 1"
    first_on_path(monkeypatch, tmp_path, srun=notes, sbatch=notes)
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(submitit_job, "check", lambda config: None)
    with pytest.raises(RunError, match="sbatch refuses the job"):
        submit(Config(run_dir=str(tmp_path / "run")))
    given = {line.partition("=")[0] for line in (tmp_path / "variables").read_text().splitlines()}
    assert {name for name in given if name.startswith("SLURM_")} == {"SLURM_CONF"}
    assert os.environ["SLURM_GPUS_PER_TASK"] == "1"


def test_nodes_are_as_few_as_hold_the_roles() -> None:
    config = Config()
    config.actor.num_gpus_per_node, config.vllm.num_engines, config.slurm.gpus_per_node = 4, 8, 8
    assert wanted_nodes(config) == 2  # 4 + 1 + 1 + 8
    config.vllm.num_engines = 2
    assert wanted_nodes(config) == 1  # 4 + 1 + 1 + 2
    config.actor.num_gpus_per_node = 9
    with pytest.raises(PlacementError, match=r"actor.num_gpus_per_node = 9"):
        wanted_nodes(config)


def test_a_chain_cancels_its_own_waiting_jobs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with other arguments or another script is another run's, and one that waits for something else stays."""
    shown = f"  Command=/x/chain.sh --run_dir=/r/$(test $3 = 17 && echo other || echo run)\n  WorkDir={tmp_path}\n"
    programs = {
        "scancel": f'echo "$@" >>{tmp_path}/calls',
        "squeue": "printf '15 singleton(unfulfilled)\\n16 (null)\\n17 singleton\\n18 singleton\\n19 singleton\\n'",
        "scontrol": f'test $1 = write && echo "run_dir=/r/$(test $3 = 19 && echo other)" || echo "{shown}"',
    }
    first_on_path(monkeypatch, tmp_path, **programs)
    assert not isinstance(continuation_of(Slurm(), tmp_path, JOB), ChainContinuation)
    array = {**JOB, "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}
    for environ, which in ((JOB, "15, 18"), (array, "12")):
        found = continuation_of(Slurm(chain=True), tmp_path, environ)
        assert found.go_on().text == "the next job of the chain goes on"
        assert found.end_time() == 99.0
        assert found.finished() == f"the jobs that waited to go on with this run are cancelled: {which}"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["--state=PENDING 15 18", "--state=PENDING 12"]
    write_program(tmp_path / "scontrol", f"#!/bin/sh\n{AWAY}\n")  # no two jobs are known to be the same run
    assert continuation_of(Slurm(chain=True), tmp_path, JOB).finished() == ""


AWAY = "echo 'scontrol: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
BACK = f'test "$1 $(grep -c requeue calls)" = "requeue 3" || {{ {AWAY}; }}'
"""A controller that is back at the third attempt."""


@pytest.mark.parametrize(
    ("scontrol", "end_s", "stated", "holds", "calls"),
    [
        (BACK, 3600, "job 13 is requeued", True, 3),
        (AWAY, 70, "could not be requeued (scontrol: error: Unable to contact", False, 0),
        ("echo 'Requested operation is presently disabled' >&2; exit 1", 3600, "presently disabled); submit", False, 3),
        (None, 3600, "No such file or directory: 'scontrol'); submit the same command to go on", False, 0),
    ],
)
def test_a_requeue_is_tried_again_while_the_controller_is_away(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scontrol: str | None,
    end_s: float,
    stated: str,
    holds: bool,
    calls: int,
) -> None:
    """Attempts end a minute before the job does, whatever is done to the clock meanwhile.

    What Slurm refuses, or a machine without its commands, is no reason to wait.
    """
    monkeypatch.setattr(requeue, "_AGAIN_S", 0.01)
    monkeypatch.setattr(timeouts, "REQUEUE_END_S", 67.0)
    monkeypatch.setattr(timeouts, "REQUEUED_KILL_S", 0.0)
    monkeypatch.chdir(tmp_path)
    if scontrol is not None:
        write_program(tmp_path / "scontrol", f'#!/bin/sh\nPATH=/usr/bin:/bin\necho "$@" >>calls\n{scontrol}\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    ends = int(time.time() + end_s)
    found = continuation_of(Slurm(), tmp_path, {**JOB, "SLURM_JOB_END_TIME": str(ends)})
    assert found.end_time() == ends
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 7200)
    arranged = found.go_on()
    assert (stated in arranged.text, arranged.sure) == (True, holds), arranged
    assert right() < ends - 60
    if calls:
        assert len((tmp_path / "calls").read_text().splitlines()) == calls


def test_a_parent_is_reported_by_its_signal(tmp_path: Path) -> None:
    stated: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: stated.append(number))
    try:
        found = continuation_of(Slurm(), tmp_path, {**JOB, PARENT_REQUEUES: str(int(signal.SIGUSR2))})
        assert isinstance(found, ParentContinuation)
        ParentContinuation(signal.SIGUSR2, os.getpid()).go_on()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert stated == [signal.SIGUSR2]


def test_one_run_for_each_seed(tmp_path: Path) -> None:
    write_program(tmp_path / ".venv" / "bin" / "slurm-rlhf", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": "3"}
    words = ["bash", str(SBATCH / "seeds.sh"), "my run.toml", "/runs/a b", "--actor.learning_rate=1e-6"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    own = ["train", "my run.toml", "--train.seed=3", "--run_dir=/runs/a b/seed_3", words[-1]]
    assert said.splitlines() == [*own, "--slurm.chain=false"]  # otherwise the first to finish would cancel the others
    for bad, environ in ((words[:3], environment), (words, {"PATH": os.environ["PATH"]})):
        done = subprocess.run(bad, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "--array=" in done.stderr


@pytest.mark.parametrize("end", ["exit 143", "kill $$"])
def test_the_result_of_a_cancelled_job_names_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Stated to save and leave, the conductor ends with 128 + SIGTERM, or of the signal, and may say nothing."""
    monkeypatch.setattr(submitit_job, "bound_to_parent", lambda words, number: ["sh", "-c", end])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RunError, match=r"train was cancelled \(SIGTERM\):\n\(it said nothing\)$"):
            TrainJob("run.toml", str(tmp_path), {})()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_cannot_run_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitit_job, "slurm_executor", lambda config, folder: pytest.fail("it was submitted"))
    with pytest.raises(UserError):
        submit(Config(run_dir=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match=r"sft\.output_dir is not set"):
        submit(Config(), command="sft")
    with pytest.raises(ConfigError, match=r"command takes one of train, sft, rm, dpo, got 'eval'"):
        submit(Config(), command="eval")
    words = [str(SBATCH / "sft.toml"), "--command=stf"]
    with pytest.raises(ConfigError, match=r"--command takes one of train, sft, rm, dpo, got 'stf'\nusage: "):
        submit_command(commands()["submit"].read(words))
    with pytest.raises(ConfigError, match=r"--vllm\.num_engines is not read by `slurm-rlhf sft`"):
        submit_command(commands()["submit"].read([words[0], "--command=sft", "--vllm.num_engines=2"]))
    with pytest.raises(ConfigError, match=r"--sft\.batch_size is not read by `slurm-rlhf train` \(it is a key of"):
        submit_command(commands()["submit"].read([words[0], "--sft.batch_size=2"]))


def test_a_stage_is_a_command_on_the_actors_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_on_path(monkeypatch, tmp_path, srun="", sbatch="cp $1 $0.given 2>/dev/null; echo Submitted batch job 7")
    monkeypatch.setattr(submitit_job, "check_stage", lambda config, command: None)
    config = load_config(SBATCH / "sft.toml", [f"--rm.output_dir={tmp_path / 'scorer'}", "--slurm.gpus_per_node=8"])
    job = submit(config, command="rm")
    script = (tmp_path / "sbatch.given").read_text()
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --job-name=scorer.run\n" in script
    assert job.paths.folder.parent == tmp_path / "scorer.run" / "submitit"
    again = job.submission().function.checkpoint().function
    assert (again.command, again.run_dir) == ("rm", str(tmp_path / "scorer.run"))
    assert load_config(again.config).rm.output_dir == str(tmp_path / "scorer")
