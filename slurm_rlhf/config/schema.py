"""The configuration: dotted keys in OpenRLHF's words, one dataclass per group, a docstring under each field.

`load.py` reads TOML and dotted overrides into these classes, `rules.py` has the rules that span several keys. The
docstrings are the help, and the range of each number stands in its type. `schema_cluster.py` has the groups slurm and
timeout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from slurm_rlhf.config.ranges import ANY, COUNT, NOT_NEGATIVE, POSITIVE, SHARE, TEMPERATURE, Range
from slurm_rlhf.config.schema_cluster import Slurm, Timeout

FilePath = Annotated[str, "path"]
"""A file or directory: made absolute when it is read. Empty stays empty."""

FORWARD_SHARE = 4
"""Tokens of a pass without gradients for one of a pass with them, unless the user says so: it keeps the states of one
layer and not of all. Under ZeRO-3 each micro-batch gathers the model again, so fewer are faster."""


@dataclass(slots=True)
class Data:
    prompt_dataset: FilePath = ""
    """JSONL file of training prompts, one object a line. Relative paths start at the TOML file's directory."""
    input_key: str = "input"
    """Column with the prompt text."""
    output_key: str = "output"
    """Column with the answer text; `slurm-rlhf sft` trains on it."""
    label_key: str = "label"
    """Column handed to the reward function as `labels` (None where a row lacks it)."""
    input_template: str = ""
    """Format string around the prompt, with one `{}`; empty: the prompt as it is."""
    apply_chat_template: bool = False
    """Wrap the prompt as a user's message in the tokenizer's chat template. The column may also hold a list of
    messages, each with role and content."""
    max_len: Annotated[int, Range(2)] = 2048
    """Longest prompt plus response in tokens. Prompts longer than max_len - rollout.max_new_tokens are dropped."""
    max_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Use only the first rows of the file; 0: all."""
    shuffle: bool = True
    """Visit prompts in an order drawn anew in each episode from train.seed."""


@dataclass(slots=True)
class Actor:
    model_name_or_path: FilePath = ""
    """Directory of a Hugging Face model with its tokenizer: the policy to train."""
    num_nodes: Annotated[int, COUNT] = 1
    """Nodes of this role."""
    num_gpus_per_node: Annotated[int, COUNT] = 1
    """Accelerator slots of this role on each of its nodes; without GPUs a slot is a process."""
    learning_rate: Annotated[float, NOT_NEGATIVE] = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """constant, linear or cosine (both after warm-up, down to lr_min_ratio). Constant, where OpenRLHF has cosine: the
    others are laid over the length of the run, so a run that is resumed with more steps would bend its past."""
    lr_warmup_ratio: Annotated[float, SHARE] = 0.0
    """Share of all optimizer steps over which the learning rate rises from zero. 0, where OpenRLHF has 0.03: for the
    same reason, and because AdamW's first updates are no larger than later ones."""
    lr_min_ratio: Annotated[float, SHARE] = 0.1
    """Where linear and cosine schedules end, as a share of the peak."""
    adam_betas: Annotated[list[float], Range(0, 1, below=True)] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's betas."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """AdamW's decoupled weight decay."""
    max_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Gradients are clipped to this global L2 norm; 0: not clipped."""
    eps_clip: Annotated[float, POSITIVE] = 0.2
    """PPO's clip range of the probability ratio."""
    eps_clip_low_high: Annotated[list[float], POSITIVE] = field(default_factory=list)
    """Two values: separate clip ranges below and above one (clip-higher). Empty: eps_clip for both."""
    entropy_coef: Annotated[float, ANY] = 0.0
    """Weight of the entropy bonus."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass."""


@dataclass(slots=True)
class Critic:
    model_name_or_path: FilePath = ""
    """Directory the value model starts from; empty: the reward model's, or the actor's where a function rewards. A
    reward model's head is kept, any other directory gets a new one. The log says which."""
    num_nodes: Annotated[int, COUNT] = 1
    """Nodes of this role."""
    num_gpus_per_node: Annotated[int, COUNT] = 1
    """Accelerator slots of this role on each of its nodes."""
    learning_rate: Annotated[float, NOT_NEGATIVE] = 9e-6
    """Peak learning rate of AdamW; schedule, betas and clipping as the actor's."""
    value_clip: Annotated[float, NOT_NEGATIVE] = 0.5
    """Clip range of the value update; 0: not clipped."""
    freezing_steps: Annotated[int, NOT_NEGATIVE] = 0
    """The actor is not trained during the first steps, the critic is. They do not count in the actor's schedule."""


@dataclass(slots=True)
class Ref:
    num_nodes: Annotated[int, COUNT] = 1
    """Nodes of this role. The reference starts only when algo.kl.init_coef is not zero, or the algorithm needs it."""
    num_gpus_per_node: Annotated[int, COUNT] = 1
    """Accelerator slots of this role on each of its nodes."""
    zero_stage: Annotated[int, Range(0, 3)] = 0
    """0: the whole model on every rank; 3: cut over the role's ranks by DeepSpeed ZeRO-3."""
    offload: bool = False
    """Keep the parameters in host memory and fetch layer by layer; needs zero_stage 3."""


@dataclass(slots=True)
class Reward:
    remote_url: FilePath = ""
    """A Python file with `reward_func(queries, prompts, labels, **kwargs)`, as in OpenRLHF. README.md says what it can
    take."""
    function: str = ""
    """Name of a function that a file in train.plugins registers (slurm_rlhf.register_reward), instead of a file."""
    model_name_or_path: FilePath = ""
    """Directory of a reward model, instead of a function: sequence classification with one label, or a value head."""
    num_nodes: Annotated[int, COUNT] = 1
    """Nodes of the reward model."""
    num_gpus_per_node: Annotated[int, COUNT] = 1
    """Accelerator slots of the reward model on each of its nodes."""
    zero_stage: Annotated[int, Range(0, 3)] = 0
    """0: the whole model on every rank; 3: cut over the role's ranks by DeepSpeed ZeRO-3."""
    offload: bool = False
    """Keep the parameters in host memory and fetch layer by layer; needs zero_stage 3."""
    pooling: Literal["auto", "last", "last_not_pad"] = "auto"
    """Token whose score counts: last (the end-of-sequence token included; OpenRLHF, TRL's value head) or last_not_pad
    (transformers' sequence classification). They differ where pad and end-of-sequence token are one. auto: by whoever
    saved the model."""
    normalize_enable: bool = False
    """Bring rewards to mean 0 and standard deviation 1: by `mean` and `std` in the reward model's config.json, and
    without them by all rewards of the run so far (kept in checkpoints). `reward` in the metrics stays as it was."""
    clip_range: Annotated[list[float], ANY] = field(default_factory=lambda: [-10.0, 10.0])
    """Rewards are clipped to these two values, after normalisation, before they reach the advantages; `reward_clipped`
    in the metrics is the share of those that it changes."""
    shuffle: bool = False
    """Control experiment: permute the rewards over the batch, so that there is nothing to learn."""


@dataclass(slots=True)
class Rollout:
    batch_size: Annotated[int, COUNT] = 128
    """Prompts per training step."""
    n_samples_per_prompt: Annotated[int, COUNT] = 1
    """Responses per prompt."""
    max_new_tokens: Annotated[int, COUNT] = 1024
    """Longest response in tokens."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """Sampling temperature, 0.01 to 2; log-probs and entropy are taken at the same temperature."""
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    """1: the trainer's log-probs are over the whole vocabulary, so nucleus sampling is refused."""
    top_k: Annotated[int, Range(-1)] = -1
    """-1 (all), for the same reason."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response."""


@dataclass(slots=True)
class Vllm:
    num_engines: Annotated[int, COUNT] = 1
    """vLLM engines. An engine lives on one node."""
    tensor_parallel_size: Annotated[int, COUNT] = 1
    """Accelerator slots of one engine."""
    num_nodes: Annotated[int, NOT_NEGATIVE] = 0
    """Nodes the engines are spread over; 0: as few as hold them."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True)] = 0.9
    """Share of a GPU's memory for weights and KV cache. With train.colocate_all: while the engine is awake, beside what
    the other roles keep, so about 0.5."""
    cpu_kvcache_gib: Annotated[float, POSITIVE] = 1.0
    """KV cache of one engine rank where there is no GPU, in GiB."""
    max_num_seqs: Annotated[int, COUNT] = 256
    """Sequences an engine works on at once."""
    enable_prefix_caching: bool = True
    """Share the KV cache of common prompt prefixes. The cache is dropped at every weight update."""
    sync_mode: Literal["drain", "inflight"] = "drain"
    """drain: sample, then train (exactly on-policy); inflight: sample the next batch while the actor trains, up to
    train.async_queue_size ahead. New weights then come between two tokens of the responses in flight."""
    enforce_eager: bool = False
    """No CUDA graphs. Always on where there is no GPU."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The engine's precision: auto (= ds.param_dtype), fp32, bf16 or fp16."""


@dataclass(slots=True)
class Ds:
    zero_stage: Annotated[int, Range(0, 3)] = 2
    """DeepSpeed ZeRO stage of actor and critic. 1 keeps all gradients on every rank, 4 bytes a parameter, and adds them
    up once per optimizer step; 2 keeps a rank's part and adds up in each micro-batch, behind the backward pass; 3 cuts
    the parameters, too. On a slow network 1 is the faster, where it fits."""
    grad_comm_dtype: Literal["fp32", "bf16"] = "fp32"
    """In which ranks add up their gradients: bf16 halves the bytes and rounds the sums to 8 bits."""
    param_dtype: Literal["bf16", "fp32"] = "bf16"
    """bf16 (with fp32 master weights; at stage 0 fp32 weights under autocast, the reference's too) or fp32."""
    enable_sleep: bool = False
    """With train.colocate_all: actor and critic keep their optimizer states in host memory while the engines work."""
    attn_implementation: str = "sdpa"
    """Of Hugging Face. sdpa: eager for models that have no sdpa, or cap their attention scores, which it ignores."""


@dataclass(slots=True)
class Advantage:
    estimator: str = "gae"
    """How advantages are estimated, and so which algorithm trains: {algorithms}, or one that a file in train.plugins
    registers. gae is PPO. An algorithm without values starts no critic."""
    gamma: Annotated[float, SHARE] = 1.0
    """Discount per token."""
    lambd: Annotated[float, SHARE] = 1.0
    """GAE's lambda. 1, as in OpenRLHF: the reward reaches every token. At 0.95 a hundredth of it is left 90 tokens from
    the end, and before that the critic's guess decides; less noise, so good for short responses."""
    no_whitening: bool = False
    """Leave advantages as they are instead of giving the batch mean 0 and standard deviation 1."""


@dataclass(slots=True)
class Kl:
    init_coef: Annotated[float, NOT_NEGATIVE] = 0.01
    """Weight of the KL penalty in the reward; 0: no reference model is started, unless the algorithm needs it."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1, k2 or k3 (Schulman, Approximating KL Divergence, 2020)."""
    target: Annotated[float, NOT_NEGATIVE] = 0.0
    """KL per response that the adaptive controller aims at; 0: the coefficient stays fixed."""
    horizon: Annotated[int, COUNT] = 10000
    """Samples over which the adaptive controller corrects the coefficient."""


@dataclass(slots=True)
class Algo:
    advantage: Advantage = field(default_factory=Advantage)
    kl: Kl = field(default_factory=Kl)


@dataclass(slots=True)
class Train:
    batch_size: Annotated[int, COUNT] = 128
    """Responses per optimizer step, over all ranks. By default one step of them per rollout, so that every update is
    on-policy; OpenRLHF's defaults make 8 (rollout.batch_size 1024), which learns more from a response and strays
    further from the policy that sampled it."""
    max_epochs: Annotated[int, COUNT] = 1
    """Passes over the experience of a step."""
    num_episodes: Annotated[int, COUNT] = 1
    """Passes over the prompt data set."""
    max_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Stop after this many training steps; 0: when the episodes are over."""
    max_tokens_per_gpu: Annotated[int, COUNT] = 16384
    """Token budget of a micro-batch; a longer single sequence is a micro-batch of its own."""
    forward_max_tokens_per_gpu: Annotated[int, NOT_NEGATIVE] = 0
    """The same in passes without gradients (old log-probs, reference, values, reward model), which keep no activations;
    0: four times train.max_tokens_per_gpu."""
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
    async_queue_size: Annotated[int, COUNT] = 1
    """Batches sampled ahead with vllm.sync_mode = inflight: no token is older than so many updates when trained on."""
    full_determinism: bool = False
    """Bitwise equal metrics from run to run and over a resume: fixed prompt-to-engine assignment and order."""
    gpu: str = ""
    """Kind of the GPUs (h100, a100_40gb, ...), whose memory is checked before anything starts; empty: found out."""
    gpu_memory_gb: Annotated[float, NOT_NEGATIVE] = 0.0
    """Memory of a GPU, as it is sold (80), where the kind is unknown; 0: found out."""
    self_check: bool = True
    """Look at the first batch before training on it: actor, reference and engine agree, forwards repeat, rewards and
    prompts are sane. What fails ends the run; later steps watch for drift. README.md: When something is wrong."""
    self_check_stop: Annotated[float, NOT_NEGATIVE] = 10.0
    """A later step that is beyond a bound of the self-check warns; at this multiple of it the run ends. 0: never."""
    threads_per_rank: Annotated[int, NOT_NEGATIVE] = 0
    """CPU threads of a process; 0: the CPUs of the node divided by the busiest phase's processes."""
    kernel_cache: FilePath = "auto"
    """Where ranks keep compiled kernels from run to run: auto (with GPUs: a disk of the node's own), none, or a
    directory. Your own one below it, closed to others, with one for each set of versions and each rank."""
    kernel_cache_gib: Annotated[float, POSITIVE] = 20.0
    """Size of all of them on a node; the longest unused go first."""

    @property
    def forward_tokens(self) -> int:
        """Token budget of a micro-batch that is not trained on."""
        return self.forward_max_tokens_per_gpu or FORWARD_SHARE * self.max_tokens_per_gpu


@dataclass(slots=True)
class Eval:
    dataset: FilePath = ""
    """JSONL file of evaluation prompts; empty: no evaluation."""
    steps: Annotated[int, NOT_NEGATIVE] = 0
    """Evaluate every so many steps; 0: before the first and after the last only."""
    temperature: Annotated[float, Range(0, 2)] = 0.0
    """0: greedy."""
    n_samples_per_prompt: Annotated[int, COUNT] = 1
    """Responses per evaluation prompt."""
    max_samples: Annotated[int, NOT_NEGATIVE] = 0
    """Use only the first rows of the file; 0: all."""


@dataclass(slots=True)
class Ckpt:
    save_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Checkpoint every so many steps; 0: only at the end and when told to stop."""
    max_num: Annotated[int, COUNT] = 3
    """Checkpoints kept."""


@dataclass(slots=True)
class Sync:
    backend: Literal["auto", "gloo", "nccl", "ipc", "disk"] = "auto"
    """auto, gloo, nccl, ipc (one device or node) or disk (files in run_dir). auto: by the members' nodes and GPUs."""
    bucket_mb: Annotated[int, NOT_NEGATIVE] = 0
    """MiB of weights that go at a time, 0: 64, between GPUs 256. An engine rank needs 3 x as much; relays cut in 8."""
    interface: str = ""
    """Network interface of the weight transfer, or several (ib0,ib1), near the GPUs. Empty: any that connects."""
    fallback: Literal["none", "gloo"] = "none"
    """gloo: go over to it where the backend cannot connect the members or keeps breaking; none: end the run."""

    def bucket_size_mb(self, on_gpus: bool) -> int:
        """Return the MiB of a bucket. Between GPUs small buckets cost launches and waits."""
        return self.bucket_mb or (256 if on_gpus else 64)


@dataclass(slots=True)
class Logger:
    tensorboard: bool = True
    """Write TensorBoard events."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """auto (rich on a terminal, plain lines elsewhere), rich, plain or none."""


@dataclass(slots=True)
class Sft:
    """`slurm-rlhf sft` only."""

    dataset: FilePath = ""
    """JSONL file with data.input_key and data.output_key."""
    output_dir: FilePath = ""
    """Where the trained model goes."""
    learning_rate: Annotated[float, POSITIVE] = 1e-3
    """Peak learning rate of AdamW, cosine schedule."""
    batch_size: Annotated[int, COUNT] = 64
    """Examples per optimizer step, over all ranks."""
    max_epochs: Annotated[int, COUNT] = 1
    """Passes over the data."""
    max_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Stop after this many optimizer steps; 0: when the epochs are over."""


@dataclass(slots=True)
class Config:
    run_dir: FilePath = ""
    """Where everything of the run goes; empty: runs/<name of the TOML file>."""
    resume: FilePath = "auto"
    """auto (from the newest checkpoint in run_dir, anew if there is none), never, or a checkpoint directory."""
    data: Data = field(default_factory=Data)
    actor: Actor = field(default_factory=Actor)
    critic: Critic = field(default_factory=Critic)
    ref: Ref = field(default_factory=Ref)
    reward: Reward = field(default_factory=Reward)
    rollout: Rollout = field(default_factory=Rollout)
    vllm: Vllm = field(default_factory=Vllm)
    ds: Ds = field(default_factory=Ds)
    algo: Algo = field(default_factory=Algo)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    ckpt: Ckpt = field(default_factory=Ckpt)
    sync: Sync = field(default_factory=Sync)
    logger: Logger = field(default_factory=Logger)
    timeout: Timeout = field(default_factory=Timeout)
    slurm: Slurm = field(default_factory=Slurm)
    sft: Sft = field(default_factory=Sft)
