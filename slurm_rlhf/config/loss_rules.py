"""Rules over the keys of the policy loss: what contradicts each other, and what would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rlhf.config.keys import all_keys, get
from slurm_rlhf.config.roles import algorithm_of
from slurm_rlhf.config.schema import Config

TYPE, EPS_CLIP = "actor.policy_loss_type", "actor.eps_clip"
PPO = "ppo"  # the loss that has one range for both sides


def loss_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of the policy loss. The name of the algorithm has to be a valid one."""
    yield from _ranges(config)
    yield from _kl(config)
    algorithm, actor = algorithm_of(config), config.actor
    if algorithm.policy_loss is not None:
        if actor.policy_loss_type != all_keys()[TYPE].default:
            yield (
                f"algo.advantage.estimator = {algorithm.name} brings a policy loss of its own, which "
                f"{TYPE} = {actor.policy_loss_type} would replace: leave {TYPE} out, or choose an algorithm without one"
            )
        return
    yield from _unused(config)
    yield from _aggregation(config)


def _ranges(config: Config) -> Iterator[str]:
    actor = config.actor
    if 0 < actor.dual_clip <= 1:
        yield (
            f"actor.dual_clip = {actor.dual_clip:g} would cut off tokens that did not become likelier: it bounds a "
            "ratio, use a number above 1 (3 is usual), or 0 to switch it off"
        )
    if len(actor.eps_clip_low_high) == 2:
        low, high = actor.eps_clip_low_high
        if high < low < 1:
            yield (
                f"actor.eps_clip_low_high = {low:g} {high:g} is the wrong way round: the range below comes first and "
                f"is the narrower one, write {high:g} {low:g} (a range of 1 or more below is no bound at all)"
            )
    if actor.eps_clip_low_high and actor.policy_loss_type == PPO and actor.eps_clip != all_keys()[EPS_CLIP].default:
        yield (
            f"{EPS_CLIP} = {actor.eps_clip:g} has no effect beside actor.eps_clip_low_high = "
            f"{' '.join(f'{side:g}' for side in actor.eps_clip_low_high)}, which says how far on either side: leave "
            "one of them out"
        )


def _kl(config: Config) -> Iterator[str]:
    kl = config.algo.kl
    if kl.use_loss and not kl.init_coef:
        yield (
            "algo.kl.use_loss = true adds a KL term of weight algo.kl.init_coef = 0, and no reference is started: "
            "set algo.kl.init_coef above 0, or leave use_loss out"
        )
    if not kl.target and kl.horizon != all_keys()["algo.kl.horizon"].default:
        yield (
            f"algo.kl.horizon = {kl.horizon} has no effect without algo.kl.target, which it says how fast to reach: "
            "set algo.kl.target, or leave the key out"
        )
    if kl.use_loss and kl.estimator == "k1":
        yield (
            "algo.kl.use_loss = true with algo.kl.estimator = k1 would add noise alone, because the mean gradient of "
            "k1 is zero: set algo.kl.estimator to k2 or k3+, whose gradient is that of the KL divergence, or to k3"
        )


def _unused(config: Config) -> Iterator[str]:
    """Find keys that were set for another policy loss: the run would be another than its author thinks."""
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    chosen = POLICY_LOSSES[config.actor.policy_loss_type]
    users: dict[str, list[str]] = {}
    for row in POLICY_LOSSES.values():
        for leaf in row.keys:
            users.setdefault(f"actor.{leaf}", []).append(row.name)
    for name, losses in users.items():
        value = get(config, name)
        if chosen.name not in losses and value != all_keys()[name].default:
            instead = ""
            if name == EPS_CLIP and chosen.clip_range:
                instead = ", set actor.eps_clip_low_high for its range"
            yield (
                f"{name} = {value} has no effect with {TYPE} = {chosen.name}, it belongs to {' and '.join(losses)}: "
                f"leave it out{instead}"
            )


def _aggregation(config: Config) -> Iterator[str]:
    """Check that loss and algorithm do not each bring an aggregation that makes them what they are."""
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    algorithm, loss = algorithm_of(config), POLICY_LOSSES[config.actor.policy_loss_type]
    usual = type(algorithm).__dataclass_fields__["aggregation"].default
    if config.actor.loss_agg_mode or algorithm.aggregation == usual:
        return
    if loss.aggregation not in ("", algorithm.aggregation):
        yield (
            f"algo.advantage.estimator = {algorithm.name} adds up losses by {algorithm.aggregation} and {TYPE} = "
            f"{loss.name} by {loss.aggregation}: say which with actor.loss_agg_mode"
        )
