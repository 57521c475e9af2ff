"""Define the groups of the job (eval, generate, slurm, cluster, timeout) and of the stages sft, rm and dpo."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from slurm_rlhf.config.ranges import ANY, COUNT, NOT_NEGATIVE, POSITIVE, FilePath, Range
from slurm_rlhf.errors import ConfigError

_DAYS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(slots=True)
class Slurm:
    """The job, in sbatch's words."""

    partition: str = ""
    """Empty: the cluster's default. Keys from here to slurm.setup are for `slurm-rlhf submit`; scripts have headers."""
    account: str = ""
    """Account to charge; empty: your default one."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that the nodes must have."""
    exclude: str = ""
    """Nodes to leave out, in Slurm's words: gpu[007,012]."""
    reservation: str = ""
    """Reservation to run in."""
    job_name: str = ""
    """Name of the job; empty: the name of the run directory."""
    time: str = "24:00:00"
    """Time limit. Before it is over, the run saves and requeues itself."""
    nodes: Annotated[int, NOT_NEGATIVE] = 0
    """Nodes of the job; 0: as few as the roles fit on."""
    gpus_per_node: Annotated[int, NOT_NEGATIVE] = 0
    """GPUs of each node; 0: none, the run takes CPUs."""
    cpus_per_task: Annotated[int, NOT_NEGATIVE] = 0
    """CPUs of each node; 0: left to Slurm."""
    mem: str = ""
    """Memory of each node, such as 64G; 0: all of it; empty: left to Slurm."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    dependency: str = ""
    """Jobs that this one waits for: singleton (no other job of this name runs), afterany:12, ..."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the run: module load, source activate, export."""
    container: str = ""
    """Image in which the ranks run, while the conductor stays outside: a .sif or .sqsh file, or docker://..."""
    container_runtime: Literal["apptainer", "singularity", "pyxis"] = "apptainer"
    """apptainer, singularity, or pyxis (srun --container-image)."""
    container_mounts: list[str] = field(default_factory=list)
    """Directories to show inside, besides run_dir and the models: PATH or PATH:PATH_INSIDE."""
    container_python: str = "python3"
    """The interpreter inside."""
    chain: bool = False
    """The job is one of several that continue one run (--array=1-10%1, --dependency=singleton): instead of requeueing
    itself it leaves the rest to the next one, and when the run is finished it cancels those that still wait."""
    signal_lead_s: Annotated[float, NOT_NEGATIVE] = 600.0
    """Seconds before the end of the allocation at which a run saves and requeues itself, as in --signal=B:USR1@600."""


def minutes(text: str) -> int:
    """Convert a time limit to minutes, rounded up: `90`, `90:00`, `1:30:00`, `3-12`, `3-12:30`, `3-12:30:00`.

    Raises ConfigError.
    """
    match = _DAYS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"slurm.time = {text!r} is no time limit: write minutes, minutes:seconds, hours:minutes:seconds, "
            "days-hours or days-hours:minutes:seconds, for example 24:00:00"
        )
    days, *numbers = (int(group or 0) for group in match.groups())
    begins_with_hours = match[1] is not None or match[4] is not None
    units = (3600, 60, 1) if begins_with_hours else (60, 1, 0)
    seconds = 86400 * days + sum(number * unit for number, unit in zip(numbers, units, strict=True))
    if seconds == 0:
        raise ConfigError(f"slurm.time = {text!r} is no time at all: write for example 24:00:00")
    return -(-seconds // 60)


@dataclass(slots=True)
class Cluster:
    """The nodes."""

    spares: Annotated[int, NOT_NEGATIVE] = 0
    """Nodes of a Slurm allocation that are kept in reserve: a node that preflight finds bad is left out, and the run
    starts without it. `slurm-rlhf submit` asks for that many more nodes."""


@dataclass(slots=True)
class Timeout:
    """The one table of time-outs, in seconds."""

    connect: Annotated[float, POSITIVE] = 600.0
    """From the start of a role's process to its first message: until its libraries are imported. Then once more, until
    the ranks of a trainer have met."""
    start: Annotated[float, POSITIVE] = 1800.0
    """Loading the model, starting the engine."""
    generate: Annotated[float, POSITIVE] = 3600.0
    """Silence of an engine that has requests: no finished response within this time."""
    forward: Annotated[float, POSITIVE] = 1800.0
    """Log-probs, values or a reward model's scores of one batch."""
    train_step: Annotated[float, POSITIVE] = 3600.0
    """One optimizer step."""
    collective: Annotated[float, POSITIVE] = 1800.0
    """Any collective inside a role (training groups)."""
    sync: Annotated[float, POSITIVE] = 600.0
    """One weight update (half of it: one operation of it); with train.colocate_all, also making room for a role."""
    sync_silence: Annotated[float, POSITIVE] = 15.0
    """During a weight update: silence of a member after which its connection is cut, whatever it is waiting for."""
    checkpoint: Annotated[float, POSITIVE] = 3600.0
    """Saving or loading one role's state."""
    reward: Annotated[float, POSITIVE] = 600.0
    """The reward of a response, and one call of the reward function."""
    environment: Annotated[float, POSITIVE] = 60.0
    """One call of an environment; then its process is ended, and the episode is lost."""
    heartbeat_interval: Annotated[float, POSITIVE] = 1.0
    """Between a rank's heartbeats."""
    heartbeat: Annotated[float, POSITIVE] = 20.0
    """Silence after which a rank is lost."""
    node_down: Annotated[float, POSITIVE] = 900.0
    """Until Slurm marks the job's silent first node down (SlurmdTimeout), so that another node can requeue the job, if
    it has --no-kill."""
    hang: Annotated[float, POSITIVE] = 30.0
    """Shortest time without an answer or a change of phase that the watchdog calls a hang. Where longer waits are usual
    in a phase, it allows 10 times the usual one, but never more than the deadlines above."""
    hang_grace: Annotated[float, POSITIVE] = 300.0
    """From the watchdog's report of a hang to what train.on_hang says, unless something moves again."""
    preflight: Annotated[float, POSITIVE] = 60.0
    """The checks of all nodes before weights load."""
    tracker: Annotated[float, POSITIVE] = 60.0
    """At the end of a run, until a tracker (wandb, trackio, mlflow) has processed all that it received."""
    shutdown: Annotated[float, POSITIVE] = 8.0
    """From the request to end until SIGKILL; SIGTERM comes after half of it."""


@dataclass(slots=True)
class EvalDataSet:
    """Is an entry of eval.datasets. A field that is None has the value of eval, a column that of data."""

    path: FilePath = ""
    name: str = ""  # name in metrics and reports; empty: name of the file
    n_samples_per_prompt: int | None = None
    temperature: float | None = None
    max_samples: int | None = None
    pass_k: list[int] | None = None
    pass_score: float | None = None
    answer_pattern: str | None = None
    source_key: str | None = None
    input_key: str | None = None
    label_key: str | None = None

    @property
    def problem(self) -> str:
        """Say what is wrong with this entry; empty: nothing."""
        return "" if self.path else "a data set has no path: name its JSONL file"


@dataclass(slots=True)
class Eval:
    dataset: FilePath = ""
    """JSONL file of evaluation prompts; empty: no evaluation, unless eval.datasets names some."""
    datasets: list[EvalDataSet] = field(default_factory=list)
    """Several data sets: paths, or tables with path and, where they differ from the keys below, name,
    n_samples_per_prompt, temperature, max_samples, pass_k, pass_score, answer_pattern, source_key, input_key,
    label_key. A file may come twice, greedy and sampled, under two names."""
    steps: Annotated[int, NOT_NEGATIVE] = 0
    """Evaluate every so many steps; 0: before the first and after the last only."""
    temperature: Annotated[float, Range(0, 2)] = 0.0
    """0: greedy."""
    n_samples_per_prompt: Annotated[int, COUNT] = 1
    """Responses per evaluation prompt; more than one needs a temperature."""
    max_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Use only the first rows of the file; 0: all."""
    pass_k: Annotated[list[int], COUNT] = field(default_factory=list)
    """The k of pass@k; empty: 1, 2, 4, ... and n_samples_per_prompt."""
    pass_score: Annotated[float, ANY] = 1.0
    """A response with at least this score counts as correct."""
    answer_pattern: str = ""
    """Regular expression for the answer in a response, which the majority vote compares: the last match, or its group.
    Empty: the whole response."""
    source_key: str = ""
    """Column that says where a prompt comes from, for a table by source; empty: none."""
    overlap: bool = False
    """Evaluate on the engines while the actor trains on the batch of the next step; needs GPUs of the engines' own."""


@dataclass(slots=True)
class Generate:
    """`slurm-rlhf generate` only."""

    model_name_or_path: FilePath = ""
    """The model that answers: a Hugging Face directory, the name of a model in the Hugging Face cache of this machine,
    a run directory (its final model, else its newest checkpoint), or a checkpoint of a run."""
    dataset: FilePath = ""
    """Prompts in the column data.input_key: a file or directory, as data.prompt_dataset."""
    max_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Use only the first rows of the file; 0: all."""
    engines_per_node: Annotated[int, NOT_NEGATIVE] = 0
    """Engines on each node; 0: as many of vllm.tensor_parallel_size as its GPUs hold, one where there is no GPU."""
    logprobs: bool = False
    """Write the tokens of each response and their log-probs, too."""
    ordered: bool = False
    """When all rows are done, write them in the order of the file to merged.jsonl."""


STAGES = ("sft", "rm", "dpo")
"""Commands that train on a data set; each has a group of keys of its name."""


@dataclass(slots=True)
class StageKeys:
    dataset: FilePath = ""
    """Examples: a file or directory, as data.prompt_dataset. For sft with the columns data.input_key and
    data.output_key; for rm and dpo with data.input_key, data.chosen_key and data.rejected_key; with dpo.loss_type = kto
    data.input_key, data.output_key and data.label_key."""
    output_dir: FilePath = ""
    """Where the trained model goes."""
    learning_rate: Annotated[float, POSITIVE] = 1e-5
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """constant, linear or cosine, after a warm-up of actor.lr_warmup_ratio; the last two end at actor.lr_min_ratio."""
    batch_size: Annotated[int, COUNT] = 64
    """Examples per optimizer step, over all ranks."""
    max_epochs: Annotated[int, COUNT] = 1
    """Passes over the data."""
    max_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Stop after this many optimizer steps; 0: when the epochs are over."""
    eval_dataset: FilePath = ""
    """Held-out examples by which the model is measured, with the columns of dataset: all rows, whatever data.filter,
    data.weights and data.max_samples say. rm normalises its scores by them, or by those of dataset if this is empty."""
    eval_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Measure every so many steps; 0: after the last only."""
    save_steps: Annotated[int, NOT_NEGATIVE] = 100
    """Steps between two checkpoints in <output_dir>.run, from which resume = auto goes on; 0: none."""


@dataclass(slots=True)
class Sft(StageKeys):
    """`slurm-rlhf sft` only."""


@dataclass(slots=True)
class Rm(StageKeys):
    """`slurm-rlhf rm` only."""


@dataclass(slots=True)
class Dpo(StageKeys):
    """`slurm-rlhf dpo` only."""

    learning_rate: Annotated[float, POSITIVE] = 5e-7
    """Peak learning rate of AdamW."""
    loss_type: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """dpo, ipo and kto compare with the model as it starts; simpo and orpo need no reference. kto takes single answers,
    labelled good or bad, instead of pairs."""
    beta: Annotated[float, POSITIVE] = 0.1
    """How strongly dpo and kto hold to the reference; ipo's regularisation; simpo's scale (2 is usual); orpo's weight
    of the odds ratio."""
    label_smoothing: Annotated[float, Range(0, 0.5)] = 0.0
    """dpo and simpo: the share of pairs whose preference is wrong (conservative DPO)."""
    simpo_gamma: Annotated[float, NOT_NEGATIVE] = 0.5
    """The margin that simpo asks for."""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """kto: weight of the good answers. Where there are few of them, raise it: the sums of the weights of good and bad
    answers should be within 1:1 and 4:3."""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """kto: weight of the bad answers."""
