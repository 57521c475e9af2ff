"""The benches by name, their options, and the parser that all of them share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.config.load import joined, load_config
from slurm_rlhf.config.rules import out_of_range
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """Describe an option of a bench: a multiple of `step`, `least` at least; a switch (True, False); or a text."""

    default: int | str | bool
    about: str
    least: int = 1
    step: int = 1

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)


@dataclass(frozen=True, slots=True)
class Bench:
    """Describe a bench for the command line; `slurm_rlhf.bench.<name>` runs it."""

    name: str
    summary: str
    about: str
    options: Mapping[str, Option]
    takes_config: bool = False  # [FILE.toml] and configuration keys
    defaults: tuple[str, ...] = ()  # keys of the configuration where no file is given

    @property
    def usage(self) -> str:
        config = "[FILE.toml ...] [--KEY=VALUE ...] " if self.takes_config else ""
        return f"usage: slurm-rlhf bench {self.name} {config}[--OPTION=VALUE ...] [--json]"

    def help_page(self) -> str:
        """List all options with their defaults."""
        named = {_spelled(name, option): option for name, option in self.options.items()}
        width = max(map(len, [*named, "--json"]))
        listed = [f"  {name.ljust(width)}  {option.about}{_default(option)}" for name, option in named.items()]
        listed.append(f"  {'--json'.ljust(width)}  print one JSON object")
        return "\n".join([self.usage, "", self.about, "", *listed, ""])


@dataclass(frozen=True, slots=True)
class Given:
    """Hold what a user wrote behind the name of a bench."""

    options: dict[str, Any]  # option -> its value or its default
    json: bool = False
    config: Config = field(default_factory=Config)


_MODEL = "Without actor.model_name_or_path a Qwen2 with random weights is made for the bench and removed afterwards."
_OF_BOTH_SIDES = {
    "repeats": Option(5, "repetitions of each side, after one that does not count"),
    "threads": Option(max(1, len(os.sched_getaffinity(0))), "CPU threads of a step"),
    "hidden": Option(256, "hidden size of the random model, a multiple of 64", step=64),
    "layers": Option(4, "its layers"),
    "vocab": Option(8192, "its tokens, at least 258", least=258),
}

_ROLLOUT = Bench(
    "rollout",
    "the rollout worker, compared with a plain LLM.generate",
    "Generates with the rollout worker, through its control plane, and with vLLM's LLM.generate: in one process, the\n"
    "same prompts, seeded sampling and log-probs, in turns; prints tokens/s of both (medians) and their ratio.\n"
    "Both engines are on the device at once: on a GPU give each less than half (vllm.gpu_memory_utilization).\n"
    + _MODEL,
    {
        "prompts": Option(128, "prompts of a repetition"),
        "prompt_tokens": Option(64, "their mean length, half to one and a half times as many"),
        "mean_response": Option(96, "mean length of the random model's responses"),
        **_OF_BOTH_SIDES,
    },
    takes_config=True,
    defaults=(
        "--data.max_len=512",
        "--rollout.max_new_tokens=256",
        "--vllm.max_num_seqs=64",
        "--vllm.gpu_memory_utilization=0.4",
        "--ds.param_dtype=fp32",
    ),
)
_TRAIN = Bench(
    "train",
    "the update of the actor, compared with a plain DeepSpeed and transformers loop",
    "Takes PPO steps with the actor's role and with a plain loop (transformers' logits, log_softmax, the same loss,\n"
    "the same DeepSpeed settings, padded micro-batches of as many sequences as fit into train.max_tokens_per_gpu): in\n"
    "one process, the same sequences, in turns; once of equal and once of different lengths. Prints tokens/s of both.\n"
    + _MODEL,
    {
        "sequences": Option(32, "sequences of an optimizer step"),
        "prompt_tokens": Option(64, "tokens of each prompt"),
        **_OF_BOTH_SIDES,
    },
    takes_config=True,
    defaults=(
        "--data.max_len=512",
        "--rollout.max_new_tokens=192",
        "--train.max_tokens_per_gpu=1024",
        "--ds.param_dtype=fp32",
    ),
)
_SYNC = Bench(
    "sync",
    "a weight update, compared with the raw transfer of its bytes and with one broadcast per parameter",
    "Starts actor ranks and engine ranks on this machine, moves the weights of a model of the given size (bf16), or\n"
    "of the shapes in a model directory, and prints seconds, bytes and rates: as a run does it, as plain gloo moves\n"
    "the same bytes in 64 MB pieces (one actor rank sends one buffer over and over, to all engine ranks, or over a\n"
    "network to one: the same processes and sockets but for further actor ranks, no checksums, no parameters), and\n"
    "naively, a broadcast per parameter from one root. Update and raw transfer take turns. Each byte is compared.\n"
    "`2x2` stands for two nodes of two ranks; on one machine nodes are names, and all of them share its loopback.\n"
    "With --one_node all ranks are on one node, and what they share goes through its shared memory, as in a run on\n"
    "this machine. With nccl and ipc every rank has a GPU, several ranks the same one where there are fewer; the raw\n"
    "transfer of nccl is NCCL's. The JSON object has seconds, bytes, raw_seconds, share_of_raw, naive_seconds,\n"
    "cpu_seconds, peak_extra_bytes and more.",
    {
        "size": Option("500MB", "bytes of the model: kB, MB or GB"),
        "model": Option("", "directory of a model: its shapes instead of --size"),
        "actors": Option("1x1", "actor nodes x ranks on each"),
        "engines": Option("1x2", "engine nodes x ranks on each"),
        "zero": Option(0, "ZeRO stage; 3: every actor rank holds a shard", least=0),
        "backend": Option("gloo", "as sync.backend"),
        "bucket_mb": Option(0, "as sync.bucket_mb", least=0),
        "repeats": Option(3, "measurements; the median is shown"),
        "one_node": Option(False, "all ranks on one node"),
        "load": Option(False, "also time loading into vLLM (with --model)"),
        "naive": Option(True, "leave the naive way out"),
    },
)
BENCHES = {bench.name: bench for bench in (_ROLLOUT, _TRAIN, _SYNC)}


def read(bench: Bench, words: list[str]) -> Given:
    """Sort the words of a command line: `--option=value`, `--option value`, `--switch`, `--json`, a file and keys.

    Raises ConfigError for a bad value or an unknown word, and what `load_config` raises.
    """
    values = {name: option.default for name, option in bench.options.items()}
    rest: list[str] = []
    left = iter(word for word in words if word != "--json")
    for word in left:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        option = bench.options.get(name.removeprefix("no_")) if word.startswith("--") else None
        if option is None or (option.is_switch and equals) or (name.startswith("no_") and not option.is_switch):
            rest.append(word)
        elif option.is_switch:
            values[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            values[name] = _value(name, option, value if equals else next(left, ""), bench)
    as_json = "--json" in words
    if bench.takes_config:
        files, keys = _layers(rest)
        config = _config(files, keys if files else [*bench.defaults, *keys])
        return Given(values, as_json, config)
    if rest:
        raise ConfigError(f"bench {bench.name} does not know {rest[0]!r}\n{bench.usage}")
    return Given(values, as_json)


def _layers(words: list[str]) -> tuple[list[str], list[str]]:
    """Part the files at the begin, one of any name or several that end in .toml, from the keys."""
    count = 0
    while count < len(words) and not words[count].startswith("-") and (not count or words[count].endswith(".toml")):
        count += 1
    return words[:count], words[count:]


def _config(files: list[str], keys: list[str]) -> Config:
    config = load_config(files or None, keys)
    if problems := list(out_of_range(config)):
        raise ConfigError(joined(problems))
    return config


def _value(name: str, option: Option, text: str, bench: Bench) -> int | str:
    if isinstance(option.default, str):
        return text
    if not text.isdecimal() or int(text) < option.least:
        raise ConfigError(f"--{name} takes a whole number of at least {option.least}, got {text!r}\n{bench.usage}")
    if int(text) % option.step:
        raise ConfigError(f"--{name} takes a multiple of {option.step}, got {text}\n{bench.usage}")
    return int(text)


def _spelled(name: str, option: Option) -> str:
    return f"--no-{name}" if option.default is True else f"--{name}"


def _default(option: Option) -> str:
    return "" if option.is_switch or option.default == "" else f" [{option.default}]"
