"""The texts of a new run's files: a commented TOML file, a reward function, a batch script. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """Holds what `slurm-rlhf init` knows."""

    name: str  # the run's name, also for its files and its job
    model: str  # directory
    prompts: str  # JSONL file
    nodes: int = 1
    gpus: int = 0  # GPUs of a node; 0: CPUs
    tensor_parallel_size: int = 1
    partition: str = ""
    time: str = ""
    account: str = ""
    modules: tuple[str, ...] = ()  # modules that the batch script may load

    @property
    def slots(self) -> int:
        """Count the accelerators of the run; without GPUs, one process per role."""
        return max(self.nodes * self.gpus, 1)


def toml(start: Start) -> str:
    """Write the configuration: GRPO, all roles in turns on all GPUs, which fits any number of them."""
    colocated = start.gpus > 0
    prompts = math.ceil(64 / start.slots) * start.slots  # the first number from 64 on that divides over the ranks
    lines = [
        "# A run of slurm_rlhf. Every key and what it means: slurm-rlhf docs keys. What is not here has its default.",
        f"#   slurm-rlhf check {start.name}.toml     reads all that is named here, and starts nothing",
        "",
        "[data]",
        f'prompt_dataset = "{start.prompts}"  # {{"input": "...", "label": "..."}} in each line',
        "apply_chat_template = true  # the input is a user's message; false: text as it is",
        "max_len = 2048  # tokens of prompt and response",
        "",
        "[actor]",
        f'model_name_or_path = "{start.model}"  # a Hugging Face directory with its tokenizer',
        f"num_nodes = {start.nodes}",
        f"num_gpus_per_node = {max(start.gpus, 1)}",
        "learning_rate = 1e-6",
        "gradient_checkpointing_enable = true  # less memory, a third more computing",
        "",
        "[vllm]",
        f"num_engines = {start.slots // start.tensor_parallel_size}",
        f"tensor_parallel_size = {start.tensor_parallel_size}  # GPUs of an engine, on one node",
        *(["gpu_memory_utilization = 0.5  # the trainer lies beside the engine"] if colocated else []),
        "",
        "[reward]",
        f'remote_url = "{start.name}_reward.py"',
        "",
        "[rollout]",
        f"batch_size = {prompts}  # prompts of a step",
        "n_samples_per_prompt = 8  # responses to each: the mean of a group is the baseline",
        "max_new_tokens = 1024",
        "",
        "[algo.advantage]",
        'estimator = "group_norm"  # GRPO; gae is PPO with a critic: slurm-rlhf docs algorithms',
        "",
        "[algo.kl]",
        "init_coef = 0  # above 0: a KL penalty, and a reference model",
        "",
        "[ds]",
        f"zero_stage = {3 if start.slots > 1 else 2}",
        *([] if colocated else ['param_dtype = "fp32"  # on CPUs']),
        "",
        "[train]",
        f"batch_size = {prompts * 4}  # responses of an optimizer step: two steps for each set of responses",
        *(["colocate_all = true  # engines and trainers share the GPUs, in turns"] if colocated else []),
        "",
        "[ckpt]",
        "save_steps = 20",
        "",
        "# [eval]",
        '# dataset = "eval.jsonl"',
        "# steps = 20",
    ]
    return "\n".join(lines) + "\n"


def reward() -> str:
    """Write a reward function that runs as it is: 1 for a response that has the label in it."""
    return '''"""The reward: how good each response is. `slurm-rlhf docs data_and_reward` says what it may ask for."""


def reward_func(responses, labels):
    """Takes lists with an entry per response; `labels` is the column `label` of the prompts."""
    right = [float(label is not None and str(label) in response) for response, label in zip(responses, labels)]
    return {"rewards": right, "scores": right}
'''


def script(start: Start) -> str:
    """Write the batch script: the job saves and requeues itself before its time is up."""
    headers = {
        "job-name": start.name,
        "nodes": str(start.nodes),
        "ntasks-per-node": "1",
        "gres": f"gpu:{start.gpus}" if start.gpus else "",
        "exclusive": None,
        "mem": "0",
        "time": start.time or "24:00:00",
        "signal": "B:USR1@600",
        "requeue": None,
        "open-mode": "append",
        "output": "%x.%j.log",
        "partition": start.partition,
        "account": start.account,
    }
    lines = [f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in headers.items() if value != ""]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *lines,
            "# Ten minutes before its time is up the run saves and requeues itself, and goes on from there.",
            "set -euo pipefail",
            "",
            "# What leads to slurm-rlhf on your site: module load ..., source VENV/bin/activate",
            *_modules(start.modules),
            "",
            'cd "${SLURM_SUBMIT_DIR:-$PWD}"',
            "# exec: Slurm's signals reach the run itself, and its exit code is the job's.",
            f'exec slurm-rlhf train {start.name}.toml "$@"',
            "",
        ]
    )


def _modules(names: tuple[str, ...]) -> list[str]:
    """Write the modules of the site that a run may need; which of them it does need only the user knows."""
    if not names:
        return []
    return [
        "# Found here, by `module avail`; wheels of torch and vLLM bring CUDA themselves:",
        f"# module load {' '.join(names)}",
    ]
