"""Define the group algo: advantages, KL, correction between engine and trainer. See `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from slurm_rlhf.config.ranges import ANY, COUNT, NOT_NEGATIVE, SHARE, Range


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
    """Lambda of the returns that the critic learns; -1: as algo.advantage.lambd. VAPO takes 1, beside a smaller one
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
    """The KL penalty is a term of the actor's loss, added up as the policy loss is, and no part of the reward."""
    target: Annotated[float, NOT_NEGATIVE] = 0.0
    """KL per response that the adaptive controller aims at; 0: the coefficient stays fixed."""
    horizon: Annotated[int, COUNT] = 10000
    """Samples over which the adaptive controller corrects the coefficient."""


@dataclass(slots=True)
class Correction:
    preset: Literal["auto", "none", "tis", "icepop", "seq_mask"] = "auto"
    """How the loss of a token is weighed by rho = its probability under the actor over that under the policy which
    sampled it. tis: rho, at most 2. icepop: rho inside [0.5, 5], else 0. seq_mask: rho where the geometric mean over
    the response is inside [0.99, 1.01], else 0. auto: tis with vllm.sync_mode = inflight, else none. Measured in any
    case: correction/... in the metrics."""
    level: Literal["", "token", "sequence", "geometric"] = ""
    """In place of a preset, with mode and thresholds: the ratio is the token's, the product over its response, or the
    geometric mean over its response."""
    mode: Literal["", "truncate", "mask", "clip"] = ""
    """In place of a preset: truncate (the ratio, at most the high threshold), clip (into the thresholds), or mask (0
    outside of the thresholds, inside the token's own ratio). OpenRLHF's tis is token and clip with [0.5, 5]."""
    thresholds: Annotated[list[float], NOT_NEGATIVE] = field(default_factory=list)
    """Two values, low below 1 and high above 1, or at 1: of level and mode, or in place of the preset's. The low one is
    0 for truncate. Empty: the preset's."""
    off_policy_delta: Annotated[float, NOT_NEGATIVE] = 0.0
    """Tokens with a negative advantage are dropped where log(pi_engine / pi_actor), averaged over the response, is
    above this; 0: never. DeepSeek-V3.2's off-policy sequence mask."""
    bypass: bool = False
    """Take the engine's log-probs for the old ones: the actor's pass without gradients is left out. The clipped ratio
    is then that to the policy which sampled the token, and corrects by itself; with vllm.sync_mode = inflight it also
    clips what the updates since have moved."""


@dataclass(slots=True)
class Algo:
    advantage: Advantage = field(default_factory=Advantage)
    kl: Kl = field(default_factory=Kl)
    correction: Correction = field(default_factory=Correction)
    dynamic_filtering_enable: bool = False
    """Drop prompts whose responses all have the same score (DAPO's dynamic sampling), and sample others for them."""
    dynamic_filtering_range: Annotated[list[float], ANY] = field(default_factory=list)
    """Two numbers: drop groups whose mean score is not between them, too; empty: any. Scores are those that the reward
    function answers beside its rewards, or the rewards."""
    dynamic_filtering_max_tries: Annotated[int, COUNT] = 10
    """Times rollout.vllm_generate_batch_size prompts that are sampled for a step at most; then the run ends and says
    what share passed."""
