"""Tokens trained per second with vllm.sync_mode = inflight, compared with drain; responses have a long tail.

    python tests/lab/inflight.py --queue=4

Trains a small model with both modes, in turns and on the same prompts. The model counts down from a number in its
prompt, so the lengths of its responses are known: log-normal. Real engines, a real actor and its updates (with a
learning rate of 0), no critic. All steps count; what a run needs to start does not.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import task
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[1] / "support"))

from sums_task import toml

from slurm_rlhf.bench.compare import EOS, ModelSize, fast_tokenizer, write_qwen2

DEFAULTS = {
    "prompts": 16,
    "samples": 4,
    "steps": 24,
    "median": 32,
    "sigma_percent": 100,  # standard deviation of the logarithm of the length
    "longest": 1024,
    "queue": 8,  # train.async_queue_size; small: a batch waits for its longest responses after all
    "stale_percent": 25,  # train.staleness_threshold
    "engines": 2,
    "width": 64,  # vllm.max_num_seqs
    "repeats": 3,
    "threads": 1,
    "hidden": 64,  # width of the model, a multiple of 64
    "layers": 1,
}
"""Option -> its usual value: sizes of a step and of the model, lengths in tokens, runs of each mode."""


def main(words: list[str] | None = None) -> int:
    """Train with both modes, and show the rates."""
    options = task.parser(__doc__, **DEFAULTS).parse_args(words)
    return task.printed(lambda: measure(vars(options)), show, options.json)


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Train with both modes, in turns, on the same prompts. Raises RunError if a run fails."""
    tail = LongTail(options["median"], options["sigma_percent"] / 100, options["longest"])
    runs: dict[str, list[dict[str, float]]] = {"drain": [], "inflight": []}
    with tempfile.TemporaryDirectory(prefix="slurm-rlhf-inflight-") as scratch:
        path = Path(scratch)
        prompts = options["prompts"] * options["steps"]
        write_workload(path, tail, prompts, options["hidden"], options["layers"])
        (path / "run.toml").write_text(_config(options), encoding="utf-8")
        for number in range(options["repeats"]):
            modes = list(runs) if number % 2 == 0 else list(reversed(runs))
            for mode in modes:
                runs[mode].append(_measure(path, mode, number, options))
    rates = {mode: [row["tokens_per_s"] for row in rows] for mode, rows in runs.items()}
    ratios = [new / old for new, old in zip(rates["inflight"], rates["drain"], strict=True)]
    return {
        "bench": "inflight",
        **{mode: statistics.median(found) for mode, found in rates.items()},
        "ratio": statistics.median(ratios),
        "runs": runs,
        **{name: options[name] for name in ("prompts", "samples", "engines", "steps", "queue", "stale_percent")},
        "oldest_token": max(row["staleness_max"] for row in runs["inflight"]),  # in updates
        "stale_tokens": statistics.fmean(row["stale_tokens"] for row in runs["inflight"]),
        "load": os.getloadavg()[0],
    }


def show(result: dict[str, Any]) -> str:
    """Write the results for a reader."""
    pairs = zip(result["runs"]["drain"], result["runs"]["inflight"], strict=True)
    rates = [(old["tokens_per_s"], new["tokens_per_s"]) for old, new in pairs]
    rows = [f"{old:8.0f}{new:10.0f}{new / old:8.2f}" for old, new in rates]
    rest = {
        name: value for name, value in result.items() if name not in ("bench", "runs", "drain", "inflight", "ratio")
    }
    named = ", ".join(f"{name} {value:g}" for name, value in rest.items())
    middle = f"{result['drain']:8.0f}{result['inflight']:10.0f}{result['ratio']:8.2f}  medians"
    return "\n".join(["tokens trained/s", "   drain  inflight   ratio", *rows, middle, named])


def _config(options: dict[str, Any]) -> str:
    """Write the configuration of both modes: REINFORCE with a baseline, so that actor and engines are all there is."""
    whole = options["longest"] + 4
    keys = {
        **{"data.prompt_dataset": "prompts.jsonl", "data.max_len": whole, "data.shuffle": False},
        **{"actor.model_name_or_path": "model", "actor.learning_rate": 0.0, "reward.remote_url": "reward.py"},
        **{"rollout.batch_size": options["prompts"], "rollout.n_samples_per_prompt": options["samples"]},
        **{"rollout.max_new_tokens": options["longest"], "algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.0},
        **{"ds.param_dtype": "fp32", "vllm.num_engines": options["engines"], "vllm.max_num_seqs": options["width"]},
        **{"train.batch_size": options["prompts"] * options["samples"], "train.max_steps": options["steps"]},
        **{"train.max_tokens_per_gpu": max(whole, 4096), "train.threads_per_rank": options["threads"]},
        **{"logger.tensorboard": False, "logger.progress": "none"},
    }
    return toml(keys)


def _measure(path: Path, mode: str, number: int, options: dict[str, Any]) -> dict[str, float]:
    """Do one run; answer tokens trained per second over all of its steps: the same tokens in each mode."""
    run_dir = path / f"{mode}_{number}"
    words = [f"--run_dir={run_dir}", f"--vllm.sync_mode={mode}"]
    if mode == "inflight":
        words.append(f"--train.async_queue_size={options['queue']}")
        words.append(f"--train.staleness_threshold={options['stale_percent'] / 100}")
    task.run_process([*task.TRAIN, str(path / "run.toml"), *words], path / f"{mode}_{number}.log")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    seconds, tokens = (sum(row[name] for row in rows) for name in ("time/step", "response_tokens"))
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "tokens": tokens,
        "staleness_max": max(row.get("staleness_max", 0.0) for row in rows),
        "stale_tokens": statistics.fmean(row.get("stale_tokens", 0.0) for row in rows),
    }


# At this scale the logit of the next word is above all others by so much that sampling never takes another one.
_LOGIT = 60.0

REWARD = '''"""Rewards that differ within a group, so that nothing is skipped for want of spread."""


def reward_func(responses):
    return [float(index % 2) for index in range(len(responses))]
'''


@dataclass(frozen=True, slots=True)
class LongTail:
    """Say how long responses are, in tokens: log-normal, cut at `longest`."""

    median: int
    sigma: float  # standard deviation of the logarithm
    longest: int

    def lengths(self, count: int, seed: int) -> NDArray[np.int64]:
        """Draw the lengths of `count` responses, [count], from 1 to `longest`."""
        drawn = np.random.default_rng([seed, count]).lognormal(np.log(self.median), self.sigma, count)
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)


def write_workload(directory: Path, tail: LongTail, prompts: int, hidden: int, layers: int) -> None:
    """Write model/, prompts.jsonl and reward.py into `directory`."""
    rows = [{"input": f"w{length - 1}"} for length in tail.lengths(prompts, 0)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")
    make_counting_model(directory / "model", tail.longest, hidden, layers)


def make_counting_model(path: Path, longest: int, hidden: int, layers: int) -> None:
    """Write a Qwen2 that answers word n with word n - 1, and word 0 with the end of the sequence.

    The response to a prompt `w37` is `w36 w35 ... w0`, so its length is in the prompt, whatever the seed. The model
    does all the computing of a transformer of its size; its layers add 0 to what passes through them.
    """
    import torch

    tokenizer = _tokenizer(longest)

    def count_down(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # Random directions are nearly orthogonal: word n's embedding meets the head's row n - 1 alone.
        words = torch.nn.functional.normalize(torch.randn(len(tokenizer), hidden), dim=1)
        model.model.embed_tokens.weight.copy_(words)
        head = torch.zeros_like(words)
        head[:-1] = words[1:] * _LOGIT / hidden**0.5  # the norm before the head gives vectors of length sqrt(hidden)
        model.lm_head.weight.copy_(head)

    size = ModelSize(hidden, layers, len(tokenizer), longest + 8, tied=False)
    write_qwen2(path, tokenizer, size, count_down)


def _tokenizer(words: int) -> Any:
    """The end is token 0, word n token n + 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [EOS, *(f"w{number}" for number in range(words))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast_tokenizer(tokenizer)


if __name__ == "__main__":
    sys.exit(main())
