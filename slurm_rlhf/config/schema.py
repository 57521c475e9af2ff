"""The configuration: dotted keys in OpenRLHF's words, one dataclass per group, a docstring under each field.

`load.py` reads TOML and dotted overrides into these classes, `rules.toml` and `rules.py` have the rules that
span several keys. The docstrings are the help, and the range of each number stands in its type. Groups of their own
files: actor, critic, ref, reward, ds, lora and algo in `schema_models.py`, sft, rm, dpo, eval,
generate, slurm, cluster and timeout in `schema_jobs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from slurm_rlhf.config.ranges import COUNT, NOT_NEGATIVE, POSITIVE, FilePath, Range
from slurm_rlhf.config.schema_jobs import Cluster, Dpo, Eval, Generate, Rm, Sft, Slurm, Timeout
from slurm_rlhf.config.schema_models import Actor, Algo, Critic, Ds, Lora, Ref, Reward

FORWARD_SHARE = 4
"""Default of train.forward_max_tokens_per_gpu / train.max_tokens_per_gpu: a pass without gradients keeps the states of
one layer only. Under ZeRO-3 each micro-batch gathers the model again, so fewer micro-batches are faster."""


@dataclass(slots=True)
class Data:
    prompt_dataset: FilePath = ""
    """Training prompts: a file of JSONL, CSV, Parquet or Arrow, several by a pattern (DIR/train-*.parquet), or a
    directory of the hub or of the library `datasets`; several of them are joined by commas. Relative paths start at
    the directory of the TOML file."""
    weights: Annotated[list[float], NOT_NEGATIVE] = field(default_factory=list)
    """Shares of several data sets in the mixture, one number for each: no row comes twice, so there are as many rows as
    the shares allow. Empty: all rows. A data set that is alone is taken whole."""
    map: list[str] = field(default_factory=list)
    """Columns to rename, `NAME=COLUMN`: ["input=question", "label=reward_model.ground_truth"], where a dot leads into
    a column that holds a table. A row without COLUMN stays as it is. For evaluations, too."""
    filter: list[str] = field(default_factory=list)
    """Rows to take: those for which all of these hold, `COLUMN=VALUE` or with !=, <, <=, > or >= and a number, after
    data.map: ["source=math", "difficulty<3"]. Not for evaluations."""
    reasoning_gym: str = ""
    """Tasks of reasoning-gym, separated by commas (basic_arithmetic,gcd), in place of data.prompt_dataset: prompts with
    their answers, generated at the start; data.max_samples of them, 0: 5000. Needs the extra [rewards]."""
    reasoning_gym_seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of the generated tasks."""
    input_key: str = "input"
    """Column with the prompt text."""
    chosen_key: str = "chosen"
    """Column with the preferred answer of a pair, for `slurm-rlhf rm` and `dpo`: a text, or messages that end with it.
    """
    rejected_key: str = "rejected"
    """Column with the other answer."""
    margin_key: str = "margin"
    """Column with the margin by which the score of the preferred answer should be higher, for `slurm-rlhf rm`; 0 where
    a row lacks it."""
    output_key: str = "output"
    """Column with the answer; `slurm-rlhf sft` trains on it, and `dpo` with dpo.loss_type = kto. With
    data.apply_chat_template sft takes messages, too: those after the prompt, or a whole conversation, in which all
    that the assistant says is trained on."""
    label_key: str = "label"
    """Column handed to the reward function as `labels` (None where a row lacks it); with dpo.loss_type = kto: true
    where the answer is good."""
    input_template: str = ""
    """Format string around the prompt, with one `{}`; empty: the prompt as it is."""
    apply_chat_template: bool = False
    """Wrap the prompt as a user's message in the tokenizer's chat template. The column may also hold a list of
    messages, each with role and content."""
    tools_key: str = ""
    """Column with the tools that the model may call, a list of JSON schemas for the chat template; a row may lack it.
    Empty: none. Needs data.apply_chat_template."""
    max_len: Annotated[int, Range(2)] = 2048
    """Longest prompt plus response in tokens. Prompts longer than max_len - rollout.max_new_tokens are dropped."""
    max_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Use only the first rows of the file; 0: all."""
    shuffle: bool = True
    """Visit prompts in an order drawn anew in each episode from train.seed."""


@dataclass(slots=True)
class Rollout:
    engine: Literal["vllm", "hf"] = "vllm"
    """vllm: engines of their own. hf: the actor's ranks sample with transformers' `generate`, for models that vLLM does
    not run: slower except for tiny models, without a rollout role and without weight transfers. Keys of vllm and sync
    then have no effect."""
    hf_max_num_seqs: Annotated[int, NOT_NEGATIVE] = 0
    """With rollout.engine = hf: responses that a rank of the actor works on at once, at most; 0: 256, on GPUs 64."""
    hf_gather: Literal["auto", "batch", "layer"] = "auto"
    """With rollout.engine = hf and ds.zero_stage = 3: batch gathers all parameters on every rank, once for the
    responses of a step; layer gathers each layer for each token, all ranks together. auto: batch where memory allows.
    """
    batch_size: Annotated[int, COUNT] = 128
    """Prompts per training step."""
    vllm_generate_batch_size: Annotated[int, NOT_NEGATIVE] = 0
    """Prompts sampled at a time where algo.dynamic_filtering_enable may drop some, at least rollout.batch_size; 0: that
    many. A larger number keeps the engines busy, but wastes responses that are not trained on."""
    n_samples_per_prompt: Annotated[int, COUNT] = 1
    """Responses per prompt."""
    max_new_tokens: Annotated[int, COUNT] = 1024
    """Longest response in tokens."""
    temperature: Annotated[float, Range(0, 2)] = 1.0
    """Sampling temperature, 0.01 to 2; log-probs and entropy are taken at the same temperature. 0, which is greedy, is
    for `slurm-rlhf generate` alone."""
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Must be 1, except for `slurm-rlhf generate`: the trainer's log-probs are over the whole vocabulary, so nucleus
    sampling is refused."""
    top_k: Annotated[int, Range(-1)] = -1
    """Must be -1 (all), for the same reason."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response."""
    mask_truncated: bool = False
    """Do not train on responses that were cut off. Their rewards still count in the mean of their group."""
    repetition_detection_max_pattern_size: Annotated[int, NOT_NEGATIVE] = 0
    """End a response that repeats a pattern of at most this many tokens; 0: never. It counts as cut off (`truncated`,
    `repetition` in the metrics). The engine looks at each size for every token, so stay below 100."""
    repetition_detection_min_pattern_size: Annotated[int, COUNT] = 1
    """The smallest pattern that counts."""
    repetition_detection_min_count: Annotated[int, Range(2)] = 8
    """Times in a row that the pattern must occur."""

    def hf_at_once(self, on_gpus: bool) -> int:
        """Return the responses that a rank of the actor works on at once: more on CPUs, where models are small."""
        return self.hf_max_num_seqs or (64 if on_gpus else 256)


@dataclass(slots=True)
class Env:
    path: FilePath = ""
    """A Python file with a class `Environment`, which answers the policy between its turns, by tools or by text, and
    gives rewards; or FILE.py:NAME, a class or functions, which are tools; or servers of `slurm-rlhf serve-env`,
    `http://HOST:PORT`, several by comma. If a source of rewards is set as well, both count: `slurm-rlhf docs
    environments`. rollout.max_new_tokens bounds each turn, data.max_len all turns of an episode."""
    token: str = ""
    """Where the token for the servers is: `env:VARIABLE`, or a file."""
    workers: Annotated[int, COUNT] = 4
    """Processes in which environments live, many in each."""
    memory_mb: Annotated[int, NOT_NEGATIVE] = 0
    """Memory of such a process in MiB, past which it is ended, and its episodes are lost; 0: no limit."""
    max_turns: Annotated[int, COUNT] = 8
    """Turns after which an episode ends, finished or not."""
    max_seconds: Annotated[float, NOT_NEGATIVE] = 0.0
    """Seconds after which an episode takes no further turn, time spent waiting for engines included; 0: no limit."""


@dataclass(slots=True)
class Vllm:
    num_engines: Annotated[int, COUNT] = 1
    """vLLM engines. An engine lives on one node."""
    tensor_parallel_size: Annotated[int, COUNT] = 1
    """Accelerator slots of one engine."""
    num_nodes: Annotated[int, NOT_NEGATIVE] = 0
    """Nodes the engines are spread over; 0: as few as hold them."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True)] = 0.9
    """Share of a GPU's memory for weights and KV cache. With train.colocate_all the other roles keep some of it while
    the engine is awake, so take about 0.5."""
    cpu_kvcache_gib: Annotated[float, POSITIVE] = 1.0
    """KV cache of one engine rank where there is no GPU, in GiB."""
    max_num_seqs: Annotated[int, COUNT] = 256
    """Sequences an engine works on at once."""
    enable_prefix_caching: bool = True
    """Share the KV cache of common prompt prefixes. The cache is dropped at every weight update."""
    sync_mode: Literal["drain", "inflight"] = "drain"
    """drain: sample, then train (exactly on-policy); inflight: sample while the actor trains, within the bound of
    train.async_queue_size. New weights then come between two tokens of the responses in flight."""
    keep_kv_cache: bool = False
    """With sync_mode = inflight: responses in flight keep the keys and values that older weights have made, so an
    update costs them nothing; false: these are computed anew. New responses never read older ones."""
    enforce_eager: bool = False
    """No CUDA graphs. Always on where there is no GPU."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The engine's precision: auto (= ds.param_dtype), fp32, bf16 or fp16."""


@dataclass(slots=True)
class Train:
    batch_size: Annotated[int, COUNT] = 128
    """Responses per optimizer step, over all ranks. By default a rollout is one step, so that every update is
    on-policy; with OpenRLHF's defaults it is 8 (rollout.batch_size 1024), which learn more from each response, but
    stray further from the policy that sampled it."""
    max_epochs: Annotated[int, COUNT] = 1
    """Passes over the experience of a step."""
    num_episodes: Annotated[int, COUNT] = 1
    """Passes over the prompt data set."""
    max_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Stop after this many training steps, in a further episode if need be; 0: after train.num_episodes."""
    max_tokens_per_gpu: Annotated[int, COUNT] = 16384
    """Token budget of a micro-batch, with the padding that ds.packing_samples leaves; a longer single sequence is a
    micro-batch of its own. Ranks that compute one together (ds.ulysses_size) have this budget each."""
    forward_max_tokens_per_gpu: Annotated[int, NOT_NEGATIVE] = 0
    """The same in passes without gradients (old log-probs, reference, values, reward model), which keep no activations;
    0: four times train.max_tokens_per_gpu."""
    gradient_checkpointing: Literal["auto", "full", "selective", "off"] = "auto"
    """Recomputation in the backward passes of actor and critic: full (all of a layer but its input), selective
    (norms, rotations and activations; results of matrix products and attention are kept; not under ZeRO-3) or off. On
    an H200 updates with selective and full took 1.16 and 1.18 times as long as with off, in 28, 19 and 39 GiB. auto:
    what actor.gradient_checkpointing_enable says; if it is not set, on GPUs off if it fits by estimate, or full, which
    the run prints; on CPUs off."""
    logprob_chunk_tokens: Annotated[int, COUNT] = 2048
    """Logits over the vocabulary exist for this many tokens at a time."""
    colocate_actor_ref: bool = False
    """Actor and reference share their accelerator slots, so they must be of the same size."""
    colocate_critic_reward: bool = False
    """Critic and reward model share their accelerator slots. A reward function has none."""
    colocate_all: bool = False
    """All roles share the actor's accelerator slots and take turns: engines start first and sleep unless they generate.
    Roles must be of one size, and vllm.num_engines * vllm.tensor_parallel_size the actor's slots."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 42
    """Every random choice of a run derives from it."""
    plugins: list[FilePath] = field(default_factory=list)
    """Python files of yours that register algorithms or rewards (slurm_rlhf.register_algorithm, register_reward).
    Conductor and actor ranks run them, so every node must see them. Relative paths as data.prompt_dataset."""
    async_queue_size: Annotated[int, Range(1, 8)] = 1
    """With vllm.sync_mode = inflight: the most updates, 1 to 8, that a token may be old when it is trained on. A batch
    is made of whichever groups are finished; a group with a long response may come this many batches later."""
    staleness_threshold: Annotated[float, Range(0, 8)] = 0.25
    """With vllm.sync_mode = inflight: largest share of a batch's groups that may be begun by policies older than the
    one that trains on it. 0: engines wait for the actor; 1: they sample one whole batch ahead; more: further batches,
    up to train.async_queue_size."""
    full_determinism: bool = False
    """Bitwise equal metrics from run to run and over a resume: fixed prompt-to-engine assignment and order."""
    gpu: str = ""
    """Kind of the GPUs (h100, a100_40gb, ...), whose memory is checked before anything starts; empty: found out."""
    gpu_memory_gb: Annotated[float, NOT_NEGATIVE] = 0.0
    """Memory of a GPU, as it is sold (80), where the kind is unknown; 0: found out."""
    self_check: bool = True
    """Look at the first batch before training on it: actor, reference and engine agree, forwards repeat, rewards and
    prompts are sane. A failed check ends the run; later steps watch for drift. `slurm-rlhf docs trouble`."""
    self_check_stop: Annotated[float, NOT_NEGATIVE] = 10.0
    """A later step beyond a bound of the self-check warns; beyond this multiple of the bound the run ends. 0: never."""
    on_hang: Literal["restart", "stop"] = "stop"
    """If nothing moves for timeout.hang_grace seconds after the report of a hang: stop ends the run with an error, and
    saves first if the trainers can; restart starts the trainers again from the newest checkpoint if they hang
    (train.max_restarts), and otherwise ends the run as at the end of an allocation, to go on from its last checkpoint.
    """
    max_restarts: Annotated[int, NOT_NEGATIVE] = 3
    """When a rank of a trainer or its node dies, all roles except engines start again from the newest checkpoint in the
    same job, at most this many times in one start of the run; 0: the run ends. `slurm-rlhf docs resume`. In a stage all
    ranks do, if it has trained since its start."""
    max_skipped_steps: Annotated[int, NOT_NEGATIVE] = 3
    """Optimizer steps in a row that may be skipped on all ranks because loss or gradient is not finite; one more ends
    the run. They are counted (actor_skipped_steps, critic_skipped_steps). In fp16 ds.min_loss_scale is the bound."""
    max_engine_restarts: Annotated[int, NOT_NEGATIVE] = 3
    """Times that an engine which died is started again, on its node or a spare one, while the others go on; then the
    run goes on without it. A node that has lost engines more often gets none. Not under MPI or train.colocate_all."""
    threads_per_rank: Annotated[int, NOT_NEGATIVE] = 0
    """CPU threads of a process; 0: the CPUs of the node divided by the busiest phase's processes."""
    kernel_cache: FilePath = "auto"
    """Where ranks keep compiled kernels from run to run: auto (with GPUs: a disk of the node's own), none, or a
    directory. Below it each user has a private one, with a directory for each set of versions and each rank."""
    kernel_cache_gib: Annotated[float, POSITIVE] = 20.0
    """Largest size of all these directories on a node; those unused for longest are removed first."""

    @property
    def forward_tokens(self) -> int:
        """Token budget of a micro-batch that is not trained on."""
        return self.forward_max_tokens_per_gpu or FORWARD_SHARE * self.max_tokens_per_gpu


@dataclass(slots=True)
class Ckpt:
    save_steps: Annotated[int | Literal["auto"], NOT_NEGATIVE] = 20
    """Checkpoint every so many steps; 0: only at the end and on a signal to stop, so a node that fails costs all work.
    auto: the best interval for how long a save takes and how often nodes fail (Young and Daly), at least every hour."""
    mtbf_hours: Annotated[float, POSITIVE] = 6000.0
    """For save_steps = auto, mean time between failures of one node; the default is about what Llama 3 saw (419 stops
    in 54 days of 2,048 nodes). After the first failure of this run, its own mean time between failures counts."""
    async_save: bool = False
    """Copy the state to host memory and write it during the next steps. Needs 12 more bytes of host memory for each
    trained parameter, divided over the ranks of its role. The checkpoint is the same."""
    max_num: Annotated[int, COUNT] = 3
    """The newest checkpoints that are kept."""
    best_metric: str = ""
    """Keep the checkpoint that is best by this metric of an evaluation, too, however old: eval (the mean over data
    sets), or eval/NAME/ and mean, pass@K or maj@N. A step that is the best so far gets a checkpoint. Empty: none."""


@dataclass(slots=True)
class Sync:
    backend: Literal["auto", "gloo", "nccl", "ipc", "disk"] = "auto"
    """auto, gloo, nccl, ipc (one device or node) or disk (files in run_dir). auto: by the members' nodes and GPUs."""
    bucket_mb: Annotated[int, NOT_NEGATIVE] = 0
    """MiB of weights that are sent at a time; 0: 64, between GPUs 256. An engine rank needs 3 times as much memory."""
    interface: str = ""
    """Network interface of the weight transfer. Empty: one that connects."""
    fallback: Literal["none", "gloo"] = "none"
    """gloo: use gloo if the backend cannot connect the members or keeps breaking; none: end the run then."""

    def bucket_size_mb(self, on_gpus: bool) -> int:
        """Return the MiB of a bucket. Between GPUs small buckets cost launches and waits."""
        return self.bucket_mb or (256 if on_gpus else 64)


@dataclass(slots=True)
class Logger:
    use: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Trackers that get metrics and samples: tensorboard, wandb, trackio, mlflow. `slurm-rlhf docs trackers`."""
    tensorboard: bool = True
    """false: no TensorBoard events, whatever logger.use says."""
    online: bool = False
    """wandb, trackio and mlflow may use the network; false: files below run_dir, to be sent later."""
    project: str = "slurm_rlhf"
    """The project (MLflow: experiment) that the trackers file the run under."""
    run_name: str = ""
    """The run's name there; empty: that of run_dir."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """auto (rich on a terminal, plain lines elsewhere), rich, plain or none."""
    samples: Annotated[int, NOT_NEGATIVE] = 2
    """Responses of each step, drawn by train.seed, that samples.jsonl, the report and trackers show; 0: none."""
    report_steps: Annotated[int, NOT_NEGATIVE] = 10
    """Write report.html after the first step, then every so many steps, if that costs less than 1 % of the time, and at
    the end; 0: at the end only."""


@dataclass(slots=True)
class Config:
    run_dir: FilePath = ""
    """Where everything of the run goes; empty: runs/<name of the TOML file>."""
    resume: FilePath = "auto"
    """auto (from the newest checkpoint: of run_dir, of a stage in <output_dir>.run; anew if there is none), never,
    or a checkpoint directory."""
    preflight: Literal["auto", "quick", "off"] = "auto"
    """Look at the nodes before weights load. auto: on several nodes also the links between them and all process groups
    of the run, and on CPUs, once models are loaded, how fast they are, from which the run predicts its steps; quick:
    each node by itself; off: not at all. `slurm-rlhf preflight` does only this, without models."""
    data: Data = field(default_factory=Data)
    actor: Actor = field(default_factory=Actor)
    critic: Critic = field(default_factory=Critic)
    ref: Ref = field(default_factory=Ref)
    reward: Reward = field(default_factory=Reward)
    rollout: Rollout = field(default_factory=Rollout)
    env: Env = field(default_factory=Env)
    vllm: Vllm = field(default_factory=Vllm)
    ds: Ds = field(default_factory=Ds)
    lora: Lora = field(default_factory=Lora)
    algo: Algo = field(default_factory=Algo)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    ckpt: Ckpt = field(default_factory=Ckpt)
    sync: Sync = field(default_factory=Sync)
    logger: Logger = field(default_factory=Logger)
    timeout: Timeout = field(default_factory=Timeout)
    slurm: Slurm = field(default_factory=Slurm)
    cluster: Cluster = field(default_factory=Cluster)
    sft: Sft = field(default_factory=Sft)
    rm: Rm = field(default_factory=Rm)
    dpo: Dpo = field(default_factory=Dpo)
    generate: Generate = field(default_factory=Generate)

    @property
    def checkpointing(self) -> str:
        """Return what the backward pass computes again: full, selective or off."""
        chosen = self.train.gradient_checkpointing
        return ("full" if self.actor.gradient_checkpointing_enable else "off") if chosen == "auto" else chosen
