"""Make the files of a new run: `slurm-rlhf init NAME` for this cluster, `migrate` from a script of a peer."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rlhf.cli.commands import Arguments, commands, filled, number, unknown
from slurm_rlhf.cluster.resources import Partition, ask_partitions, best
from slurm_rlhf.config.keys import peers
from slurm_rlhf.config.migrate import translate
from slurm_rlhf.errors import ConfigError, RunError


@dataclass(frozen=True, slots=True)
class NewRun:
    """Hold the answers to the questions of `slurm-rlhf init`."""

    name: str  # the run's name, also for its files and its job
    model: str  # directory
    prompts: str  # JSONL file
    nodes: int = 1
    gpus: int = 0  # GPUs of a node; 0: CPUs
    tensor_parallel_size: int = 1
    partition: str = ""
    time: str = ""
    account: str = ""

    @property
    def slots(self) -> int:
        """Count the accelerators of the run; without GPUs, one process per role."""
        return max(self.nodes * self.gpus, 1)


def toml(start: NewRun) -> str:
    """Write the configuration: GRPO, with all roles in turns on all GPUs, for any number of GPUs."""
    colocated = start.gpus > 0
    prompts = math.ceil(64 / start.slots) * start.slots  # at least 64, and divisible by the number of ranks
    return filled(
        "run.toml",
        **asdict(start),
        gpus_per_node=max(start.gpus, 1),
        engines=start.slots // start.tensor_parallel_size,
        share_of_memory="gpu_memory_utilization = 0.5  # the trainer needs the rest\n" if colocated else "",
        batch=prompts,
        zero_stage=3 if start.slots > 1 else 2,
        precision="" if colocated else 'param_dtype = "fp32"  # on CPUs\n',
        train_batch=prompts * 4,
        colocation="colocate_all = true  # engines and trainers share the GPUs, in turns\n" if colocated else "",
    )


def script(start: NewRun) -> str:
    """Write the batch script of a job that saves and requeues itself before its time is up."""
    text = filled(
        "job.sh.txt",
        **asdict(start) | {"time": start.time or "24:00:00"},
        gres=f"gpu:{start.gpus}" if start.gpus else "",
    )
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith("=\n"))


Ask = Callable[[str, str], str]
"""(question, default) -> answer."""


def write_files(arguments: Arguments) -> int:
    """Write NAME.toml, NAME_reward.py and, with Slurm, NAME.sh, unless one of them exists."""
    given, names = arguments.options, arguments.words
    if len(names) != 1 or not re.fullmatch(r"[A-Za-z0-9_]+", names[0]):
        raise arguments.error("give the run a name of letters, digits and _")
    asked = "yes" not in given and sys.stdin.isatty()
    try:
        partitions = ask_partitions()
    except RunError as error:
        print(f"warning: {error}. The files are written without information on the cluster", file=sys.stderr)
        partitions = []
    start = choose(names[0], given, partitions, _question if asked else lambda question, default: default)
    files = {f"{start.name}.toml": toml(start), f"{start.name}_reward.py": filled("reward.py.txt")}
    if partitions:
        files[f"{start.name}.sh"] = script(start)
    existing = [name for name in files if Path(name).exists()]
    if existing:
        raise ConfigError(f"{', '.join(existing)} exists already: choose another name, or move it away")
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    print("\n".join(next_steps(start, bool(partitions))))
    return 0


def choose(name: str, given: dict[str, str], partitions: list[Partition], ask: Ask) -> NewRun:
    """Take the answers from `given`, or ask for them. Raises ConfigError for an answer that is not possible."""

    def value(option: str, question: str, default: str) -> str:
        return given[option] if option in given else ask(question, default)

    partition = best(partitions)
    if partitions:
        assert partition
        lines = "\n".join(f"  {each.describe()}" for each in partitions)
        wanted = value("partition", f"Partitions:\n{lines}\nWhich one?", partition.name)
        partition = next((each for each in partitions if each.name == wanted), None)
        if partition is None:
            raise ConfigError(
                f"no partition {unknown(wanted, [each.name for each in partitions])}; these exist:\n{lines}"
            )
    nodes = number("nodes", value("nodes", "How many nodes?", "1"), most=partition.nodes if partition else math.inf)
    most = partition.gpus if partition else 0
    gpus = number("gpus_per_node", value("gpus_per_node", "GPUs per node?", str(most)), least=0, most=most or math.inf)
    size = number("tensor_parallel_size", given.get("tensor_parallel_size", "1"), most=max(gpus, 1))
    if gpus % size:
        raise ConfigError(f"--tensor_parallel_size={size} does not divide the {gpus} GPUs of a node")
    limit = partition.time if partition and partition.time != "infinite" else ""
    return NewRun(
        name,
        value("model", "Directory of the model?", "models/MY_MODEL"),
        value("prompts", "File with the prompts?", "prompts.jsonl"),
        nodes,
        gpus,
        size,
        "" if partition is None else partition.name,
        given.get("time", limit),
        given.get("account", ""),
    )


def next_steps(start: NewRun, slurm: bool) -> list[str]:
    """List the next steps for the user."""
    steps = []
    if not Path(start.model).is_dir():
        steps.append(f"put a Hugging Face model into {start.model} (hf download NAME --local-dir {start.model})")
    if not Path(start.prompts).is_file():
        steps.append(f'write your prompts to {start.prompts}: {{"input": "2+3=", "label": "5"}} in each line')
    steps.append(f"write in {start.name}_reward.py how good a response is")
    steps.append(f"slurm-rlhf check {start.name}.toml")
    steps.append(f"sbatch {start.name}.sh" if slurm else f"slurm-rlhf train {start.name}.toml")
    return ["", "Next:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))]


def _question(question: str, default: str) -> str:
    return input(f"{question} [{default}] ").strip() or default


def migrate(arguments: Arguments) -> int:
    """Print TOML on stdout, and on stderr how many flags were translated."""
    words = arguments.words
    if len(words) < 2 or words[0] not in peers():
        raise arguments.error(f"migrate takes one of {', '.join(peers())}, and a command or a script of it")
    found = translate(_script(words[1:], arguments), {name: one.keys for name, one in commands().items()}, words[0])
    print(found.toml(), end="")
    flags = len(found.values) + len(found.left_out)
    text = f"{len(found.values)} of {flags} flags translated; the others are at the end, with advice"
    print(f"{text}. The file is for `slurm-rlhf {found.command}`", file=sys.stderr)
    return 0


def _script(words: list[str], arguments: Arguments) -> str:
    if words == ["-"]:
        return sys.stdin.read()
    if len(words) == 1 and " " not in words[0]:
        try:
            return Path(words[0]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise arguments.error(f"{words[0]} cannot be read: {error}") from None
    return " ".join(words)
