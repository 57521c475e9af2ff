"""`slurm-rlhf bench rollout`: the rollout worker against a bare `LLM.generate`."""

from __future__ import annotations

import json

from slurm_rlhf.bench.options import COMMON_OPTIONS, MODEL_INTRO, Option, model_of, page, read, table
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

USAGE = "usage: slurm-rlhf bench rollout [FILE.toml] [--KEY=VALUE ...] [--OPTION=NUMBER ...] [--json]"
ABOUT = (
    "Generates with the rollout worker, through its control plane, and with vLLM's LLM.generate: in one process, the\n"
    "same prompts, seeded sampling and log-probs, in turns; prints tokens/s of both (medians) and their ratio.\n"
    "Both engines are on the device at once: on a GPU give each less than half (vllm.gpu_memory_utilization).\n"
) + MODEL_INTRO
OPTIONS = {
    "prompts": Option(128, "prompts of a repetition"),
    "prompt_tokens": Option(64, "their mean length, half to one and a half times as many"),
    "mean_response": Option(96, "mean length of the random model's responses"),
    **COMMON_OPTIONS,
}
DEFAULTS = [
    "--data.max_len=512",
    "--rollout.max_new_tokens=256",
    "--vllm.max_num_seqs=64",
    "--vllm.gpu_memory_utilization=0.4",
    "--ds.param_dtype=fp32",
]


def help_page() -> str:
    """This bench's part of `slurm-rlhf bench --help`."""
    return page(USAGE, ABOUT, OPTIONS)


def run(words: list[str]) -> int:
    """Prints the comparison. Raises ConfigError, ModelError, RunError."""
    given = read(words, OPTIONS, DEFAULTS, USAGE)
    options = given.options
    _check_length(given.config, options["prompt_tokens"])
    with model_of(given, options["mean_response"]) as config:
        from slurm_rlhf.bench.rollout import bench_rollout

        result = bench_rollout(config, options["prompts"], options["prompt_tokens"], options["repeats"])
    if given.json:
        print(json.dumps(result))
        return 0
    print(table({"rollout": result}, "tokens/s"))
    print(
        f"{result['prompts']} prompts of {result['prompt_tokens']} tokens, {result['response_tokens']:.0f} tokens a "
        f"response, {result['max_num_seqs']} at once; {result['same_tokens']:.0%} of the responses the same on both"
    )
    return 0


def _check_length(config: Config, prompt_tokens: int) -> None:
    new, longest = config.rollout.max_new_tokens, prompt_tokens + prompt_tokens // 2
    if longest + new > config.data.max_len:
        raise ConfigError(
            f"bench rollout: prompts of up to {longest} tokens and rollout.max_new_tokens = {new} make "
            f"{longest + new}, more than data.max_len = {config.data.max_len}: lower one of them, or raise data.max_len"
        )
