"""`slurm-rlhf bench train`: the actor's update against a bare DeepSpeed and transformers loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slurm_rlhf.bench.options import COMMON_OPTIONS, MODEL_INTRO, Option, model_of, page, read, table

USAGE = "usage: slurm-rlhf bench train [FILE.toml] [--KEY=VALUE ...] [--OPTION=NUMBER ...] [--json]"
ABOUT = (
    "Takes PPO steps with the actor's role and with a plain loop (transformers' logits, log_softmax, the same loss,\n"
    "the same DeepSpeed settings, padded micro-batches of as many sequences as fit into train.max_tokens_per_gpu): in\n"
    "one process, the same sequences, in turns; once of equal and once of different lengths. Prints tokens/s of both.\n"
) + MODEL_INTRO
OPTIONS = {
    "sequences": Option(32, "sequences of an optimizer step"),
    "prompt_tokens": Option(64, "tokens of each prompt"),
    **COMMON_OPTIONS,
}
DEFAULTS = [
    "--data.max_len=512",
    "--rollout.max_new_tokens=192",
    "--train.max_tokens_per_gpu=1024",
    "--ds.param_dtype=fp32",
]


def help_page() -> str:
    """This bench's part of `slurm-rlhf bench --help`."""
    return page(USAGE, ABOUT, OPTIONS)


def run(words: list[str]) -> int:
    """Prints the comparison. Raises ConfigError, ModelError, RunError."""
    given = read(words, OPTIONS, DEFAULTS, USAGE)
    options = given.options
    with model_of(given, mean_response=1) as config:
        from slurm_rlhf.bench.train import bench_train

        result = bench_train(config, options["sequences"], options["prompt_tokens"], options["repeats"])
    if given.json:
        print(json.dumps(result))
        return 0
    print(table({name: result[name] for name in ("equal", "ragged")}, "tokens/s"))
    print(
        f"{result['sequences']} sequences of at most {result['longest']} tokens; micro-batches of at most "
        f"{result['max_tokens_per_gpu']} tokens, the bare loop's of {result['micro_batch']} sequences; "
        f"ZeRO-{result['zero_stage']}, {result['param_dtype']}"
    )
    rates = [f"{name} {_speed(result[name])}" for name in ("equal", "ragged")]
    print(f"model FLOPs of ours, forward and backward, without recomputation: {', '.join(rates)}")
    return 0


def _speed(row: Mapping[str, Any]) -> str:
    """TFLOP/s, and their share of the card's bf16 peak where that is known."""
    share = f" (MFU {row['mfu']:.1%})" if row["mfu"] else ""
    return f"{row['tflops']:.3g} TFLOP/s{share}"
