"""Compute the keys that several names of a peer say together: batch sizes, lengths, engines, clip ranges, rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.shell_script import Said

Values = dict[str, Any]
"""Key -> its value; None: it is not set, nan: a number that it follows from is not known."""


class Figures:
    """Holds what was said, the first of each name, and the peer's defaults."""

    def __init__(self, said: Iterable[Said]) -> None:
        self._words: dict[str, list[str]] = {}
        for each in said:
            self._words.setdefault(each.name, each.words or ["true"])

    def text(self, name: str) -> str:
        return " ".join(self._words.get(name, ()))

    def true(self, name: str) -> bool:
        return self.text(name).lower() == "true"

    def number(self, name: str) -> float:
        """Return a number; 0 where nothing is said, nan for what is no number."""
        text = self.text(name)
        try:
            return float(text) if text not in ("", "None", "null") else 0.0
        except ValueError:
            return math.nan


def _roles(nodes: float, gpus: float) -> Values:
    """All roles share the GPUs of the actor, as peers have it."""
    sizes = {"num_nodes": nodes, "num_gpus_per_node": gpus}
    return {f"{role}.{leaf}": size for role in ("actor", "critic", "ref", "reward") for leaf, size in sizes.items()}


def _over(whole: float, part: float) -> float:
    return whole // part if part else math.nan


def openrlhf(said: Figures, values: Mapping[str, Any], command: str) -> Values:
    """Choose the longest response where OpenRLHF gives it what its prompt leaves, and the default here is too long."""
    most = values.get("data.max_len", math.inf)
    short = most <= Config().rollout.max_new_tokens and "rollout.max_new_tokens" not in values
    return {"rollout.max_new_tokens": most // 2} if command == "train" and short else {}


def verl(said: Figures, values: Mapping[str, Any], command: str) -> Values:
    """Compute sizes: verl counts prompts in a mini-batch, and shares all GPUs between the roles."""
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    nodes, gpus = said.number("trainer.nnodes"), said.number("trainer.n_gpus_per_node")
    found = _roles(nodes, gpus) | {
        "vllm.num_engines": _over(nodes * gpus, said.number(f"{rollout}tensor_model_parallel_size")),
        "train.batch_size": said.number(f"{actor}ppo_mini_batch_size") * said.number(f"{rollout}n"),
        "data.max_len": said.number("data.max_prompt_length") + said.number("data.max_response_length"),
    }
    if not (said.true(f"{actor}use_kl_loss") or said.true("algorithm.use_kl_in_reward")):
        found["algo.kl.init_coef"] = 0.0
    low, high = said.number(f"{actor}clip_ratio_low"), said.number(f"{actor}clip_ratio_high")
    found["actor.eps_clip_low_high"] = [low or 0.2, high or 0.2] if low or high else None
    if said.text("algorithm.rollout_correction.rollout_is") not in ("", "null"):
        most = said.number("algorithm.rollout_correction.rollout_is_threshold")
        found |= {"algo.correction.mode": "truncate", "algo.correction.thresholds": [0.0, most]}
    else:
        found["algo.correction.thresholds"] = None
    if not values.keys() & {"reward.model_name_or_path", "reward.remote_url"}:
        found["reward.preset"] = "math"
    return found


def trl(said: Figures, values: Mapping[str, Any], command: str) -> Values:
    """Compute sizes: TRL counts the examples of a GPU and of a step of accumulation."""
    gpus = said.number("num_processes")
    once = said.number("per_device_train_batch_size") * gpus
    batch = once * said.number("gradient_accumulation_steps")
    if command != "train":
        return {f"{command}.batch_size": batch}
    steps = said.number("steps_per_generation") * once
    served = said.true("use_vllm") and said.text("vllm_mode") == "server"
    found = _roles(1, gpus) | {
        "train.batch_size": batch,
        "rollout.batch_size": _over(
            said.number("generation_batch_size") or steps or batch, said.number("num_generations")
        ),
        "data.max_len": said.number("vllm_max_model_length")
        or said.number("max_prompt_length") + said.number("max_completion_length"),
        "train.colocate_all": not served,
    }
    if said.true("use_vllm") and not served:
        found["vllm.num_engines"] = _over(gpus, said.number("vllm_tensor_parallel_size") or 1)
    loss, near, far = said.text("loss_type"), said.number("epsilon"), said.number("epsilon_high")
    policy = "gspo" if said.text("importance_sampling_level") == "sequence" else "ppo"
    policy = loss if loss in ("cispo", "sapo") else policy
    ranges = {"ppo": [near, far] if far else None, "gspo": [near, far or near], "cispo": [1.0, (far or near) - 1]}
    found |= {"actor.policy_loss_type": policy, "actor.eps_clip_low_high": ranges.get(policy)}
    if policy != "ppo" or far:
        found["actor.eps_clip"] = None
    level, _, mode = said.text("vllm_importance_sampling_mode").partition("_")
    if said.true("use_vllm") and said.true("vllm_importance_sampling_correction"):
        bounds = [said.number(f"vllm_importance_sampling_clip_{side}") for side in ("min", "max")]
        found |= {"algo.correction.level": level, "algo.correction.mode": mode, "algo.correction.thresholds": bounds}
    else:
        found |= dict.fromkeys(("algo.correction.level", "algo.correction.thresholds"))
    if "reward.model_name_or_path" not in values:
        exact = "accuracy_reward" in said.text("reward_funcs")
        found |= {"reward.preset": "math", "reward.remote_url": None} if exact else {"reward.remote_url": "reward.py"}
    return found


FIGURES: dict[str, Callable[[Figures, Mapping[str, Any], str], Values]] = {
    "openrlhf": openrlhf,
    "verl": verl,
    "trl": trl,
}
"""Peer -> what it computes."""
