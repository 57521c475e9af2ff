"""Run `slurm-rlhf bench NAME`: measure how fast a part of a run is on this machine."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from slurm_rlhf.cli.main import Command, number, parse, take_options, unknown
from slurm_rlhf.config.load import joined, load_config
from slurm_rlhf.config.rules import out_of_range
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError

USAGE = "usage: slurm-rlhf bench NAME [FILE.toml] [--KEY=VALUE ...] [--OPTION=VALUE ...] [--json]"


class Option(NamedTuple):
    """Describe an option of a bench: a whole number, a text, or a switch."""

    default: int | str | bool  # False: a switch
    about: str
    least: int = 1
    step: int = 1  # the value is a multiple of it

    def read(self, name: str, text: str) -> int | str | bool:
        """Read the value of the option `name`. Raises ConfigError."""
        if self.default is False:
            return True
        if isinstance(self.default, str):
            return text
        if (value := int(number(name, text, least=self.least))) % self.step:
            raise ConfigError(f"--{name} takes a multiple of {self.step}, got {text}")
        return value


@dataclass(frozen=True, slots=True)
class Bench:
    """Describe a bench. The module `slurm_rlhf.bench.<name>` has `run_bench(options, config)` and `show(result)`."""

    name: str
    about: str
    options: Mapping[str, Option]
    defaults: tuple[str, ...] | None = None  # keys if no file is given; None: it takes no files and keys

    def command(self) -> Command:
        """Return its usage, help page, and the function that runs it."""
        config = "" if self.defaults is None else "[FILE.toml ...] [--KEY=VALUE ...] "
        usage = f"usage: slurm-rlhf bench {self.name} {config}[--OPTION=VALUE ...] [--json]"
        shown = {
            name: option.about
            + (f" [{option.default}]" if option.default is not False and option.default != "" else "")
            for name, option in self.options.items()
        }
        return Command(usage, self.about, self.run, shown | {"json": "print one JSON object"})

    def run(self, words: list[str]) -> int:
        """Measure and print the result. Raises ConfigError, and what the bench raises."""
        command = self.command()
        switches = [name for name, option in self.options.items() if option.default is False]
        given, rest = take_options(words, command.options, command.usage, [*switches, "json"], strict=False)
        as_json = given.pop("json", None) is not None
        options = {name: option.default for name, option in self.options.items()}
        options |= {name: self.options[name].read(name, text) for name, text in given.items()}
        config = self._config(rest, command.usage)
        if "threads" in options:  # before torch is imported: it reads this once
            os.environ["OMP_NUM_THREADS"] = str(options["threads"])
        # Libraries print to standard error meanwhile: standard output is for the result.
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(f"slurm_rlhf.bench.{self.name}")
            result: dict[str, Any] = module.run_bench(options, config)
        print(json.dumps(result) if as_json else module.show(result))
        return 0

    def _config(self, words: list[str], usage: str) -> Config:
        if self.defaults is None:
            if words:
                raise ConfigError(f"bench {self.name} does not know {words[0]!r}\n{usage}")
            return Config()
        arguments = parse(words, usage, file_needed=False)
        config = load_config(
            arguments.files or None, [*(() if arguments.files else self.defaults), *arguments.overrides]
        )
        if problems := list(out_of_range(config)):
            raise ConfigError(joined(problems))
        return config


_MODEL = "Without actor.model_name_or_path it makes a Qwen2 with random weights and removes it afterwards."
_OF_BOTH_SIDES = {
    "repeats": Option(5, "repetitions of each side, after one that does not count"),
    "threads": Option(max(1, len(os.sched_getaffinity(0))), "CPU threads of a step"),
    "hidden": Option(256, "hidden size of the random model, a multiple of 64", step=64),
    "layers": Option(4, "layers of the random model"),
    "vocab": Option(8192, "tokens of the random model, at least 258", least=258),
}

_ROLLOUT = Bench(
    "rollout",
    "Generates with the rollout worker, called as in a run, and with vLLM's LLM.generate: in one process, the same "
    "prompts, seeded sampling and log-probs, in turns. Prints tokens/s of both (medians) and their ratio. Both engines "
    "are on the device at once: on a GPU give each less than half of the memory (vllm.gpu_memory_utilization). "
    + _MODEL,
    {
        "prompts": Option(128, "prompts of a repetition"),
        "prompt_tokens": Option(64, "their mean length; single ones have half to one and a half times as many"),
        "mean_response": Option(96, "mean length of the random model's responses"),
        **_OF_BOTH_SIDES,
    },
    (
        "--data.max_len=512",
        "--rollout.max_new_tokens=256",
        "--vllm.max_num_seqs=64",
        "--vllm.gpu_memory_utilization=0.4",
        "--ds.param_dtype=fp32",
    ),
)
_TRAIN = Bench(
    "train",
    "Takes PPO steps with the actor's role and with a plain loop (transformers' logits, log_softmax, the same loss, "
    "the same DeepSpeed settings, padded micro-batches of as many sequences as fit into train.max_tokens_per_gpu): in "
    "one process, the same sequences, in turns, first of equal and then of different lengths. Prints tokens/s of both. "
    "Without a file its sizes are about a tenth of a 7B run's on mathematics: prompts of 300 tokens, responses of 850 "
    "in the mean and 2,048 at most, micro-batches of 16,384. " + _MODEL,
    {
        "sequences": Option(32, "sequences of an optimizer step"),
        "prompt_tokens": Option(28, "tokens of each prompt"),
        **_OF_BOTH_SIDES,
    },
    (
        "--data.max_len=512",
        "--rollout.max_new_tokens=192",
        "--train.max_tokens_per_gpu=1536",
        "--ds.param_dtype=fp32",
    ),
)
_SYNC = Bench(
    "sync",
    "Starts actor ranks and engine ranks on this machine, moves the weights of a model (bf16), and prints seconds, "
    "bytes and rates of three ways: as in a run; raw, the same bytes by plain gloo in 64 MB pieces, from one actor "
    "rank to all engine ranks, without checksums and parameters; and naively, a broadcast per parameter. The first "
    "two take turns. Each byte that arrives is compared. `2x2` means two nodes of two ranks; the nodes are only "
    "names, and all ranks use the loopback interface. With --one_node all ranks are on one node and share its memory. "
    "With nccl and ipc each rank has a GPU, and several ranks share one if there are fewer; the raw way of nccl uses "
    "NCCL. The JSON object has seconds, bytes, raw_seconds, share_of_raw, naive_seconds, cpu_seconds, "
    "peak_extra_bytes and more.",
    {
        "size": Option("500MB", "bytes of the model: kB, MB or GB"),
        "model": Option("", "directory of a model: its shapes instead of --size"),
        "actors": Option("1x1", "actor nodes x ranks on each"),
        "engines": Option("1x2", "engine nodes x ranks on each"),
        "zero": Option(0, "ZeRO stage; 3: every actor rank holds a shard", least=0),
        "backend": Option("gloo", "as sync.backend"),
        "lora_rank": Option(0, "send adapters of this rank for the layers, and not the model", least=0),
        "bucket_mb": Option(0, "as sync.bucket_mb", least=0),
        "repeats": Option(3, "measurements; the median is shown"),
        "one_node": Option(False, "all ranks on one node"),
        "load": Option(False, "also measure with loading into vLLM (needs --model)"),
        "no_naive": Option(False, "leave the naive way out"),
    },
)
BENCHES = {bench.name: bench for bench in (_ROLLOUT, _TRAIN, _SYNC)}


def run(words: list[str]) -> int:
    """Run the bench that the first word names, or show its help page. Raises ConfigError, and what the bench raises."""
    if not words or words[0] not in BENCHES:
        name = words[0] if words else ""
        raise ConfigError(f"bench: unknown bench {unknown(name, BENCHES)} (benches: {', '.join(BENCHES)})\n{USAGE}")
    bench = BENCHES[words[0]]
    if "-h" in words or "--help" in words:
        print(bench.command().help_page(), end="")
        return 0
    return bench.run(words[1:])


COMMANDS = {
    "bench": Command(
        USAGE,
        "Measures a part of a run and compares it with a plain way to do the same. NAME is rollout (the rollout "
        "worker against LLM.generate), train (the update of the actor against a plain DeepSpeed and transformers "
        "loop) or sync (a weight update against the raw transfer of its bytes). `slurm-rlhf bench NAME --help` "
        "explains each.",
        run,
    ),
}
