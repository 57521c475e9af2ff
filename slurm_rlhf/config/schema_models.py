"""Define the groups of the models and of the algorithm: actor, critic, ref, reward, ds, lora, algo. See `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from slurm_rlhf.config.ranges import ANY, COUNT, NOT_NEGATIVE, POSITIVE, SHARE, FilePath, Range


@dataclass(slots=True)
class Actor:
    model_name_or_path: FilePath = ""
    """The policy to train: the directory of a Hugging Face model with its tokenizer, or OWNER/NAME on the hub."""
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
    """Share of all optimizer steps over which the learning rate rises from zero. OpenRLHF has 0.03; 0 is enough here,
    because AdamW's first updates are no larger than later ones."""
    lr_min_ratio: Annotated[float, SHARE] = 0.1
    """Where linear and cosine schedules end, as a share of the peak."""
    adam_betas: Annotated[list[float], Range(0, 1, below=True)] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's betas."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """AdamW's decoupled weight decay."""
    max_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Gradients are clipped to this global L2 norm; 0: not clipped."""
    eps_clip: Annotated[float, POSITIVE] = 0.2
    """PPO's clip range of the probability ratio, below and above 1."""
    eps_clip_low_high: Annotated[list[float], POSITIVE] = field(default_factory=list)
    """Two values: separate clip ranges below and above (clip-higher), as distances from a ratio of 1; cispo's weights
    are clipped so, too: 4 above is a cap of 5 (TRL's epsilon_high of 5), 1 below is no bound. dppo_tv: how far a
    token's probability may fall and rise. Empty: eps_clip for both with ppo, else the usual values of the loss: gspo
    0.0003 0.0004, cispo 1 4, dppo_tv 0.2 0.2."""
    policy_loss_type: Literal["ppo", "gspo", "cispo", "sapo", "dppo_tv"] = "ppo"
    """The loss of the policy: ppo (clipped ratio of each token), gspo (clipped ratio of whole responses), cispo
    (clipped importance weight, every token learns), sapo (a soft gate in place of the range), dppo_tv (tokens whose
    probability moved too far are left out). slurm_rlhf/algorithms/policy_losses has formulas and sources."""
    old_logprobs: Literal["auto", "pass"] = "auto"
    """Source of the old log-probs in the ratio. pass: a forward pass before the update. auto: the update's own forward
    pass, if a batch is one optimizer step (train.batch_size = rollout.batch_size x rollout.n_samples_per_prompt,
    train.max_epochs = 1) and no correction, reference or critic.freezing_steps needs them earlier: one pass less, the
    same gradient. algo.correction.bypass takes the engine's instead."""
    loss_agg_mode: Literal["", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        ""
    )
    """How losses of tokens become one number, always over the whole optimizer step: token-mean (all tokens alike),
    seq-mean-token-mean (all responses alike), seq-mean-token-sum, seq-mean-token-sum-norm (that divided by
    rollout.max_new_tokens: Dr. GRPO). Empty: seq-mean-token-mean with gspo and sapo, else what the algorithm says:
    seq-mean-token-sum-norm for dr_grpo, token-mean for the others."""
    dual_clip: Annotated[float, NOT_NEGATIVE] = 0.0
    """With ppo and gspo: bounds the loss of a token with a negative advantage at this ratio, above 1, usually 3; 0:
    off."""
    sapo_temperature_pos: Annotated[float, POSITIVE] = 1.0
    """With sapo: how fast the gradient of a token with a positive advantage fades as its ratio leaves 1."""
    sapo_temperature_neg: Annotated[float, POSITIVE] = 1.05
    """The same for the other tokens."""
    entropy_coef: Annotated[float, ANY] = 0.0
    """Weight of the entropy bonus, which is aggregated like the policy loss."""
    nll_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the negative log-likelihood of the responses with a positive reward, a mean over their tokens in the
    optimizer step: imitates what went well (VAPO: 0.1). The reward is the one before normalisation and clipping."""
    gradient_checkpointing_enable: bool | None = None
    """Recompute activations in the backward pass: true is train.gradient_checkpointing = full, false is off."""


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
    """Steps at the start that train the critic alone. They do not count in the actor's schedule."""


@dataclass(slots=True)
class Ref:
    num_nodes: Annotated[int, COUNT] = 1
    """Nodes of this role. The reference starts only when algo.kl.init_coef is not zero, the algorithm needs it,
    or algo.distill.model_name_or_path names a teacher, which takes its place."""
    num_gpus_per_node: Annotated[int, COUNT] = 1
    """Accelerator slots of this role on each of its nodes."""
    zero_stage: Annotated[int, Range(0, 3)] = 0
    """0: the whole model on every rank; 3: cut over the role's ranks by DeepSpeed ZeRO-3."""
    offload: bool = False
    """Keep the parameters in host memory and fetch layer by layer; needs zero_stage 3."""


Preset = Literal["", "math", "exact", "regex", "json_schema", "length", "code", "reasoning_gym"]
"""Rewards that need no code."""


@dataclass(slots=True)
class RewardPart:
    """One entry of reward.sources."""

    name: str = ""
    weight: float = 1.0
    clip: list[float] = field(default_factory=list)  # empty: it is not clipped
    remote_url: FilePath = ""
    function: str = ""
    preset: Preset = ""
    preset_value: str = ""
    model: bool = False  # true: the score of reward.model_name_or_path

    @property
    def problem(self) -> str:
        """Say what is wrong with it; empty: nothing."""
        whole = not self.clip or (len(self.clip) == 2 and self.clip[0] < self.clip[1])
        return "" if whole else f"clip takes two numbers, the lower first, got {self.clip}"


@dataclass(slots=True)
class Reward:
    sources: list[RewardPart] = field(default_factory=list)
    """Several rewards, whose weighted sum counts: one table `[[reward.sources]]` for each, with name, weight (1), clip
    (two numbers) and one of remote_url, function, preset (and preset_value) or model = true, the model of
    reward.model_name_or_path. Each is a component and a metric, reward/NAME."""
    remote_url: FilePath = ""
    """A Python file with `reward_func(queries, prompts, labels, **kwargs)`, as in OpenRLHF, or a TRL function, or
    FILE.py:NAME; or servers, `http://HOST:PORT/...`, several by comma. What they get and answer: `slurm-rlhf docs
    rewards`."""
    token: str = ""
    """Where the token for the servers is: `env:VARIABLE`, or a file."""
    function: str = ""
    """Name of a function that a file in train.plugins registers (slurm_rlhf.register_reward), instead of a file; or
    MODULE:NAME of one that Python can import, as trl.rewards:accuracy_reward."""
    preset: Preset = ""
    """A reward that needs no code. math (math-verify) and exact compare with the label; regex (its group is the label,
    or it is found), json_schema, length; code: the share of the row's unit tests that the program in the response
    passes; reasoning_gym: the scorer of the row's task. `slurm-rlhf docs rewards` and `sandbox` say what each takes."""
    preset_value: str = ""
    """The pattern of regex, the file of json_schema, the tokens of length."""
    model_name_or_path: FilePath = ""
    """Directory of a reward model, instead of a function: sequence classification with one label, or a value head."""
    sandbox: Literal["auto", "bubblewrap", "apptainer", "landlock", "none"] = "auto"
    """How programs run with reward.preset = code. auto: the best that the node has: bubblewrap, apptainer, landlock;
    `slurm-rlhf docs sandbox` says what each can do. none: unprotected."""
    workers: Annotated[int, NOT_NEGATIVE] = 2
    """Processes next to the conductor that run the reward function; 0: the conductor runs it itself, where it can hang,
    crash or fill the memory of the run. A function that your own script defines needs 0."""
    workers_num_nodes: Annotated[int, NOT_NEGATIVE] = 0
    """Nodes for workers alone: the last ones of the Slurm allocation, with reward.workers and env.workers processes on
    each, in a step `workers`, and no ranks. 0: workers run on the conductor's node."""
    memory_mb: Annotated[int, NOT_NEGATIVE] = 0
    """Memory of a worker in MiB, past which it is replaced; 0: no limit."""
    on_error: Annotated[float | Literal["skip", "fail"], ANY] = "fail"
    """The reward of a response whose computation fails, is late or ends its worker: a number; skip: the response is not
    trained on, and its group is compared without it; fail: the run saves and ends."""
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
    (transformers' sequence classification). They differ where pad and end-of-sequence token are one. auto: the rule of
    the library that saved the model."""
    normalize_enable: bool = False
    """Bring rewards to mean 0 and standard deviation 1: by `mean` and `std` in the reward model's config.json, and
    without them by all rewards of the run so far (kept in checkpoints). `reward` in the metrics stays as it was."""
    clip_range: Annotated[list[float], ANY] = field(default_factory=lambda: [-10.0, 10.0])
    """Rewards are clipped to these two values, after normalisation, before they reach the advantages; `reward_clipped`
    in the metrics is the share of those that it changes."""
    overlong_buffer_len: Annotated[int, NOT_NEGATIVE] = 0
    """DAPO's penalty for long responses: over this many tokens before rollout.max_new_tokens (episodes of env.path:
    before data.max_len, all turns and observations together) the reward falls by reward.overlong_penalty_factor; 0:
    none."""
    overlong_penalty_factor: Annotated[float, POSITIVE] = 1.0
    """Amount that the reward of the longest possible response loses."""
    stop_properly_penalty_coef: Annotated[float, Range(high=1)] = 1.0
    """The reward of a response that was cut off is multiplied by this; a value below 0 replaces it (ProRL)."""
    length_penalty_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of Kimi k1.5's length reward: from +0.5 for the shortest response to a prompt to -0.5 for the longest; a
    wrong response gets no positive one. Correct is a score (without scores, a reward) above 0."""


REWARD_SOURCES = {
    "remote_url": "a Python file with reward_func, or servers",
    "function": "one that a plugin registers",
    "preset": "one that needs no code",
    "model_name_or_path": "a reward model",
}
"""Keys of `reward`, exactly one of which names the source of rewards -> kind of the source, for messages."""


@dataclass(slots=True)
class Ds:
    zero_stage: Annotated[int, Range(0, 3)] = 2
    """DeepSpeed ZeRO stage of actor and critic. 1 keeps all gradients on every rank, 4 bytes a parameter, and adds them
    up once per optimizer step; 2 keeps a rank's part and adds up in each micro-batch, during the backward pass; 3 cuts
    the parameters, too. On a slow network 1 is the faster, where it fits."""
    grad_comm_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which ranks add up their gradients: bf16 halves the bytes and rounds the sums to 8 bits."""
    param_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """bf16 (with fp32 master weights; at stage 0 fp32 weights under autocast, the reference's too), fp16 (the same, and
    a loss scale: it rounds 8 times less than bf16, so log-probs of trainer and engine agree better) or fp32."""
    initial_scale_power: Annotated[int, Range(0, 32)] = 16
    """fp16: gradients are multiplied by 2 to this power at first, so that small ones do not vanish. An optimizer step
    that overflows is skipped, counted (actor_skipped_steps, critic_skipped_steps) and halves the scale."""
    loss_scale_window: Annotated[int, COUNT] = 1000
    """fp16: optimizer steps without an overflow after which the scale doubles."""
    min_loss_scale: Annotated[float, POSITIVE] = 1.0
    """fp16: lowest loss scale; an optimizer step that overflows at it ends the run."""
    fp32_lm_head: bool = False
    """Take the product of hidden states and LM head in fp32, in actor, reference and engines, where a 16-bit one rounds
    every logit. In the trainer it costs an fp32 copy of the head and of its gradient during each micro-batch."""
    enable_sleep: bool = False
    """With train.colocate_all: actor and critic keep their optimizer states in host memory while the engines work."""
    packing_samples: Literal["auto", "always", "never"] = "auto"
    """Lay the sequences of a micro-batch end to end in one row, so that no padding is computed. auto: for models that
    were compared (not with recurrent or linear layers); others have a row for each sequence. always: for those, too;
    loading a model fails if sequences of one row can see each other."""
    ulysses_size: Annotated[int, COUNT] = 1
    """Neighbouring ranks of each role that compute a micro-batch together, a part of its tokens each, and exchange
    heads for attention: long sequences then take that much less memory for activations. The model's attention heads,
    and the ranks of actor, critic, reference and reward model, must be multiples of it. `slurm-rlhf docs models`."""
    hpz_size: Annotated[int, COUNT] = 1
    """With zero_stage = 3: in the first forward pass after an optimizer step, this many neighbouring ranks keep a copy
    of all parameters, cut over themselves alone, and all further passes gather inside their node (ZeRO++'s hpZ). Costs
    the bytes of a parameter / hpz_size on every GPU. It must divide the ranks of a node of actor and critic."""
    compile: bool = False
    """Compile the layers of all models but engines' (torch.compile): fewer, larger kernels, at the price of minutes at
    the first steps. Needs a C++ compiler, and on GPUs Triton, on the nodes."""
    use_liger_kernel: bool = False
    """Compute norms, rotations and gated products by the Triton kernels of the package liger-kernel, on GPUs, for the
    models that it knows; log-probs stay chunked (train.logprob_chunk_tokens)."""
    attn_implementation: str = "sdpa"
    """A name of Hugging Face. sdpa: eager for models that have no sdpa, or cap their attention scores, which sdpa
    ignores."""


@dataclass(slots=True)
class Lora:
    rank: Annotated[int, Range(0, 512)] = 0
    """Train low-rank adapters of this rank (vLLM takes up to 512) in policy and critic, and of other parameters the
    critic's head alone; 0: train all parameters. The reference is the policy without its adapter, so no role runs for
    it, and the adapter alone goes to the engines. Needs about ten times the learning rate: `slurm-rlhf docs models`."""
    alpha: Annotated[float, POSITIVE] = 16.0
    """An adapter's output is multiplied by lora.alpha / lora.rank."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get adapters, by the last part of their names (q_proj, up_proj, ...). all-linear: all but the
    head over the vocabulary."""


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
    lambd_critic: Annotated[float, Range(-1, 1)] = -1.0
    """Lambda of the returns that the critic learns; -1: as algo.advantage.lambd. VAPO takes 1, with a smaller one
    for the policy."""
    no_whitening: bool = False
    """Leave advantages as they are instead of giving the batch mean 0 and standard deviation 1."""
    no_std_norm: bool = False
    """Subtract the mean but divide by no standard deviation: neither in whitening nor in the groups of group_norm and
    gdpo."""
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """Components of the reward function's answer that gdpo uses; empty: all, each with weight 1."""
    gdpo_reward_weights: Annotated[list[float], ANY] = field(default_factory=list)
    """A weight for each of algo.advantage.gdpo_reward_keys; empty: 1."""


@dataclass(slots=True)
class Kl:
    init_coef: Annotated[float, NOT_NEGATIVE] = 0.01
    """Weight of the KL penalty; 0: no reference model is started, unless the algorithm needs it."""
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k1"
    """k1, k2 or k3 (Schulman, Approximating KL Divergence, 2020). With use_loss: k2, k3, or k3+ (the value of k3 with
    the gradient of k2, which is the right one); in the reward k3+ is k3."""
    use_loss: bool = False
    """The KL penalty is a term of the actor's loss, aggregated like the policy loss, and no part of the reward."""
    target: Annotated[float, NOT_NEGATIVE] = 0.0
    """KL per response that the adaptive controller aims at; 0: the coefficient stays fixed."""
    horizon: Annotated[int, COUNT] = 10000
    """Samples over which the adaptive controller corrects the coefficient."""


@dataclass(slots=True)
class Distill:
    model_name_or_path: FilePath = ""
    """A teacher in the reference's place, with the actor's tokenizer: each token's advantage gets the log-prob that the
    teacher gives it less the policy's (on-policy distillation, the reverse KL divergence). Size and ZeRO stage are
    those of ref. Without a source of rewards the teacher alone says what is better."""
    coef: Annotated[float, POSITIVE] = 1.0
    """Weight of the teacher, which is added to the advantages of the reward."""


@dataclass(slots=True)
class Correction:
    preset: Literal["auto", "none", "tis", "icepop", "seq_mask"] = "auto"
    """Weight of each token's loss, by rho = its probability under the actor over that under the policy which sampled
    it. tis: rho, at most 2. icepop: rho inside [0.5, 5], else 0. seq_mask: rho where the geometric mean over
    the response is inside [0.99, 1.01], else 0. auto: tis with vllm.sync_mode = inflight, else none. Measured in any
    case: correction/... in the metrics."""
    level: Literal["", "token", "sequence", "geometric"] = ""
    """In place of a preset, with mode and thresholds: the ratio is the token's, the product over its response, or the
    geometric mean over its response."""
    mode: Literal["", "truncate", "mask", "clip"] = ""
    """In place of a preset: truncate (the ratio, at most the high threshold), clip (into the thresholds), or mask (0
    outside of the thresholds, inside the token's own ratio). OpenRLHF's tis is token and clip with [0.5, 5]."""
    thresholds: Annotated[list[float], NOT_NEGATIVE] = field(default_factory=list)
    """Two values, low <= 1 <= high, for level and mode, or in place of the preset's. The low one is 0 for truncate.
    Empty: the preset's."""
    off_policy_delta: Annotated[float, NOT_NEGATIVE] = 0.0
    """Tokens with a negative advantage are dropped where log(pi_engine / pi_actor), averaged over the response, is
    above this; 0: never. DeepSeek-V3.2's off-policy sequence mask."""
    bypass: bool = False
    """Use the engine's log-probs as the old ones: the actor's pass without gradients is left out. The clipped ratio
    then compares with the policy that sampled the token, so it corrects by itself; with vllm.sync_mode = inflight it
    also clips the change by the updates since."""


@dataclass(slots=True)
class Algo:
    advantage: Advantage = field(default_factory=Advantage)
    kl: Kl = field(default_factory=Kl)
    distill: Distill = field(default_factory=Distill)
    correction: Correction = field(default_factory=Correction)
    dynamic_filtering_enable: bool = False
    """Drop prompts whose responses all have the same score (DAPO's dynamic sampling), and sample others for them."""
    dynamic_filtering_range: Annotated[list[float], ANY] = field(default_factory=list)
    """Two numbers: drop groups whose mean score is not between them, too; empty: any. Scores are those that the reward
    function returns with its rewards, else the rewards."""
    dynamic_filtering_max_tries: Annotated[int, COUNT] = 10
    """At most this many times rollout.vllm_generate_batch_size prompts are sampled for a step; then the run ends and
    says what share passed."""
