"""Four tiny runs under train.full_determinism, and a program that does them with the code of a checkout.

    CHECKOUT/.venv/bin/python tests/lab/fixed_runs.py CHECKOUT

reads jobs from standard input, a line of JSON each: {"config": FILE, "run_dir": DIRECTORY, "words": [OVERRIDE, ...]}.
It answers each with {"code": EXIT STATUS, "output": TEXT}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

STEPS, SAVED = 4, 2
"""Steps of a run, and the step after which it writes the checkpoint that others resume."""

REWARD = '''"""One point for a response that holds the label; a digit is worth a little, so that rewards differ."""


def reward_func(responses, labels, **kwargs):
    scores = [float(label in response) for label, response in zip(labels, responses)]
    digits = [sum(map(str.isdigit, response)) / 8 for response in responses]
    return {"rewards": [score + share / 2 for score, share in zip(scores, digits)], "scores": scores}
'''
PARITY = '''"""A reward that about half of all pairs of responses share."""


def reward_func(responses, **kwargs):
    return [float(sum(map(ord, response)) % 2) for response in responses]
'''
COMMON: dict[str, object] = {
    "data.prompt_dataset": "prompts.jsonl",
    "data.max_len": 16,
    "actor.model_name_or_path": "model",
    "actor.learning_rate": 1e-3,
    "actor.lr_scheduler": "cosine",
    "critic.learning_rate": 1e-3,
    "reward.normalize_enable": True,
    "rollout.batch_size": 8,
    "rollout.n_samples_per_prompt": 4,
    "rollout.max_new_tokens": 8,
    "algo.kl.init_coef": 0.02,
    "algo.kl.target": 0.1,
    "algo.kl.horizon": 100,
    "train.batch_size": 16,
    "train.max_steps": STEPS,
    "train.max_epochs": 2,
    "train.threads_per_rank": 1,
    "train.full_determinism": True,
    "ds.param_dtype": "fp32",
    "vllm.max_num_seqs": 16,
    "ckpt.save_steps": SAVED,
    "logger.samples": 32,
    "logger.report_steps": 0,
    "logger.tensorboard": False,
}
RUNS: dict[str, dict[str, object]] = {
    "drain": {
        "actor.num_gpus_per_node": 2,
        "actor.entropy_coef": 0.001,
        "actor.nll_coef": 0.1,
        "algo.advantage.lambd": 0.95,
        "eval.dataset": "eval.jsonl",
        "eval.steps": 2,
        "reward.remote_url": "reward.py",
        "vllm.num_engines": 2,
    },
    "dynamic": {
        "algo.advantage.estimator": "rloo",
        "algo.dynamic_filtering_enable": True,
        "algo.kl.estimator": "k3",
        "algo.kl.use_loss": True,
        "reward.remote_url": "parity.py",
        "rollout.n_samples_per_prompt": 2,
        "vllm.num_engines": 2,
    },
    "colocated": {
        "ds.enable_sleep": True,
        "reward.model_name_or_path": "reward",
        "train.colocate_all": True,
    },
    "hf": {
        "actor.num_gpus_per_node": 2,
        "algo.advantage.estimator": "group_norm",
        "ds.zero_stage": 3,
        "reward.remote_url": "reward.py",
        "rollout.engine": "hf",
        "rollout.hf_gather": "layer",
        "rollout.hf_max_num_seqs": 6,
    },
}
"""Keys besides `COMMON`. All runs have a reference; drain and colocated a critic, too; colocated a reward model."""


def write_inputs(path: Path) -> dict[str, Path]:
    """Write models, data and reward functions to `path`; return the file of each run's configuration."""
    from sums_task import sums, toml
    from tiny_models import make_reward, make_tiny

    sizes = {"hidden": 32, "heads": 1, "kv_heads": 1}
    make_tiny(path / "model", tied=True, **sizes)
    make_reward(path / "reward", **sizes)
    rows = sums()
    (path / "prompts.jsonl").write_text("".join(rows[:130]))
    (path / "eval.jsonl").write_text("".join(rows[130:]))
    (path / "reward.py").write_text(REWARD)
    (path / "parity.py").write_text(PARITY)
    for name, keys in RUNS.items():
        (path / f"{name}.toml").write_text(toml({**COMMON, **keys}))
    return {name: path / f"{name}.toml" for name in RUNS}


def main(checkout: Path) -> None:
    """Do the jobs of standard input, in processes forked from one that has imported this checkout's libraries."""
    sys.path[0] = str(checkout / "tests" / "support")
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import warm_runs
    from training_runs import train

    import slurm_rlhf

    if not Path(slurm_rlhf.__file__).is_relative_to(checkout):
        raise SystemExit(f"{sys.executable} imports {slurm_rlhf.__file__}, which is not in {checkout}")
    try:
        for line in sys.stdin:
            job = json.loads(line)
            code, output = train(Path(job["config"]), Path(job["run_dir"]), *job["words"], warm=True)
            print(json.dumps({"code": code, "output": output}), flush=True)
    finally:
        warm_runs.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
