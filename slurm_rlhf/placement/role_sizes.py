"""How large each role is, and which configuration keys say so."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.config.algorithm import has_critic, has_reference, has_reward_model
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError

ACTOR = "actor"
CRITIC = "critic"
REFERENCE = "reference"
ROLLOUT = "rollout"
REWARD = "reward"
ROLE_ORDER = (ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT)
"""The order in which roles are printed and given GPUs of a node they share; other names follow by alphabet."""

_CONFIG_GROUP = {REFERENCE: "ref", ROLLOUT: "vllm"}


@dataclass(frozen=True, slots=True)
class RoleSize:
    """Slots one role asks for.

    A role of `engines` engines takes `tp` neighbouring slots of one node for each; its `num_nodes` may be 0 (as few
    nodes as hold them) and its `num_gpus_per_node` follows from the placement. Any other role takes
    `num_gpus_per_node` slots on each of `num_nodes` nodes. A rollout role without `engines` has as many as fill
    num_nodes x num_gpus_per_node.
    """

    role: str
    num_nodes: int
    num_gpus_per_node: int = 0
    tp: int = 1
    engines: int = 0

    def __post_init__(self) -> None:
        if self.tp < 1 or self.num_nodes < 0 or self.engines < 0:
            raise PlacementError(f"{self.role}: sizes must be positive, got {self}")
        if self.engines == 0 and (self.num_nodes < 1 or self.num_gpus_per_node < 1):
            nodes, gpus = self.key("num_nodes"), self.key("num_gpus_per_node")
            raise PlacementError(
                f"{nodes} and {gpus} must be at least 1, got {self.num_nodes}, {self.num_gpus_per_node}"
            )
        if self.engines == 0 and self.role == ROLLOUT:
            if self.num_gpus_per_node % self.tp:
                raise PlacementError(
                    f"{self.role}: {self.num_gpus_per_node} slots per node are not a multiple of "
                    f"{self.key('tensor_parallel_size')} = {self.tp}"
                )
            object.__setattr__(self, "engines", self.num_nodes * self.num_gpus_per_node // self.tp)

    @property
    def slots(self) -> int:
        """Slots on all nodes together: the role's world size."""
        return self.engines * self.tp if self.engines else self.num_nodes * self.num_gpus_per_node

    def key(self, name: str) -> str:
        """The configuration key of this role's `name`, e.g. `vllm.num_engines`."""
        return f"{_CONFIG_GROUP.get(self.role, self.role)}.{name}"

    def settings(self) -> dict[str, int]:
        """Configuration keys and values that give this size."""
        if not self.engines:
            return {self.key("num_nodes"): self.num_nodes, self.key("num_gpus_per_node"): self.num_gpus_per_node}
        engines = {self.key("num_engines"): self.engines, self.key("tensor_parallel_size"): self.tp}
        return {**engines, self.key("num_nodes"): self.num_nodes} if self.num_nodes else engines


def role_sizes(config: Config) -> list[RoleSize]:
    """The roles that a run with `config` starts, in ROLE_ORDER.

    Critic and reference only when the algorithm or the KL asks for them, the reward model only when there is one.
    """
    actor, critic, ref, reward, vllm = config.actor, config.critic, config.ref, config.reward, config.vllm
    if vllm.num_engines < 1:
        raise PlacementError(f"vllm.num_engines must be at least 1, got {vllm.num_engines}")
    sizes = [RoleSize(ACTOR, actor.num_nodes, actor.num_gpus_per_node)]
    if has_critic(config):
        sizes.append(RoleSize(CRITIC, critic.num_nodes, critic.num_gpus_per_node))
    if has_reference(config):
        sizes.append(RoleSize(REFERENCE, ref.num_nodes, ref.num_gpus_per_node))
    if has_reward_model(config):
        sizes.append(RoleSize(REWARD, reward.num_nodes, reward.num_gpus_per_node))
    sizes.append(RoleSize(ROLLOUT, vllm.num_nodes, tp=vllm.tensor_parallel_size, engines=vllm.num_engines))
    return sizes


def colocations(config: Config) -> list[frozenset[str]]:
    """The sets of roles that share their slots, as `train.colocate_...` says."""
    pairs = {
        frozenset(ROLE_ORDER): config.train.colocate_all,
        frozenset({ACTOR, REFERENCE}): config.train.colocate_actor_ref,
        frozenset({CRITIC, REWARD}): config.train.colocate_critic_reward,
    }
    return [pair for pair, wanted in pairs.items() if wanted]


def role_rank(role: str) -> tuple[int, str]:
    """Sort key of a role's name."""
    return (ROLE_ORDER.index(role) if role in ROLE_ORDER else len(ROLE_ORDER), role)
