"""`sbatch sbatch/ppo_32b.sh` on four nodes with a tiny model: the undisturbed run that others are compared with."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slurm_cluster import CHECKOUT, ENDLESS, PLACES, Cluster, said
from training_runs import metrics, saved, steps, summary, timeless, workspace

STEPS = 12
TEMPLATE = "--data.input_template=1 + {}"
"""An argument with blanks."""
TINY = (
    *("--actor.num_gpus_per_node=1", "--critic.num_nodes=1", "--critic.num_gpus_per_node=1", "--ref.num_nodes=1"),
    *("--actor.learning_rate=1e-3", "--critic.learning_rate=1e-3", "--train.full_determinism=true"),
    *("--data.apply_chat_template=false", "--data.max_len=64", "--rollout.batch_size=8"),
    *("--ds.param_dtype=fp32", "--ds.grad_comm_dtype=fp32"),  # gradients that two ranks sum in bf16 are 1e-5 off
    *("--rollout.n_samples_per_prompt=4", "--rollout.max_new_tokens=8", "--train.batch_size=16"),
    *("--vllm.max_num_seqs=16", "--ckpt.save_steps=0", f"--eval.steps={STEPS}", TEMPLATE),
    *("--ref.num_gpus_per_node=1", "--train.colocate_actor_ref=false", "--vllm.tensor_parallel_size=1"),
    *("--vllm.sync_mode=drain", "--algo.advantage.lambd=0.95"),
)
HELD = range(22_000, 32_768)
"""Ports below those that the kernel hands out, which a stranger holds on the first node."""
TAKEN = f"""
import contextlib, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (len({HELD!r}) + 100,) * 2)
held = []
for port in {HELD!r}:
    with contextlib.suppress(OSError):
        held.append(socket.create_server(("", port)))
print("held", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Calm:
    """A run that was left alone, stopped by a file after it had saved for another one."""

    job: int
    run_dir: Path
    work: Path
    held: range  # ports of its first node that were taken when it started
    start_s: float  # seconds to its first step
    saved_at: int  # the step after which it saved

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of its command line, but for those of places and of the length."""
        return tiny(self.work)

    @property
    def metrics(self) -> list[str]:
        """Metrics of the first `STEPS` steps, without times."""
        return timeless(metrics(self.run_dir)[:STEPS])


def tiny(work: Path) -> tuple[str, ...]:
    """Overrides that make of ppo_32b.toml a run of the model, data and reward function in `work`."""
    return (
        *(f"--actor.model_name_or_path={work / 'model'}", f"--data.prompt_dataset={work / 'prompts.jsonl'}"),
        *(f"--reward.remote_url={work / 'reward.py'}", f"--eval.dataset={work / 'eval.jsonl'}", *TINY),
    )


@cache
def calm_run(slurm: Cluster) -> Calm:
    """The run, made when it is asked for the first time; it is the same for all test modules.

    Somebody holds thousands of ports of its first node. A save file must not end it, a stop file must.
    """
    run_dir, work = slurm.shared / "large", workspace(slurm.shared / "calm").parent
    job = slurm.sbatch(
        *("--hold", "--nodes=4", f"--output={run_dir}.log", "sbatch/ppo_32b.sh", f"--run_dir={run_dir}"),
        *(*PLACES, *ENDLESS, *tiny(work)),
        cwd=CHECKOUT,
    )
    taken = [str(slurm.script), "exec", "gpu001", "python3", "-c", TAKEN]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(taken, env=slurm.environment, text=True, **pipes) as holder:  # it ends with its stdin
        assert holder.stdout.readline() == "held\n"
        slurm.run("scontrol", "release", str(job))
        slurm.wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", "start")
        start_s = slurm.wait_until(lambda: steps(run_dir) >= 1, "first step")
    (run_dir / "save").touch()
    slurm.wait_until(lambda: saved(run_dir) != [], "checkpoint")
    at = saved(run_dir)[0]
    assert not (run_dir / "save").exists()
    slurm.wait_until(lambda: steps(run_dir) >= max(STEPS, at + 2), f"step {STEPS}")
    (run_dir / "stop").touch()
    assert slurm.wait_over(job) == ("COMPLETED", 0), said(run_dir)
    assert "stopped by a file named stop in the run directory; saved at step" in said(run_dir)
    assert summary(run_dir)["status"] == "stopped"
    assert saved(run_dir) == [at, summary(run_dir)["steps"]]
    assert slurm.job(job)["Restarts"] == "0"
    assert not slurm.run("squeue", "-h").strip()
    return Calm(job, run_dir, work, HELD, start_s, at)
