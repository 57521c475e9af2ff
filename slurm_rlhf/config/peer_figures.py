"""Compute the keys that several names of a peer decide, where it is no product or sum: engines, losses, rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.shell_script import Setting

Values = dict[str, Any]
"""Key -> its value; None: it is not set, nan: a number that it follows from is not known."""


class PeerFigures:
    """Holds what was said, the first of each name, and the peer's defaults."""

    def __init__(self, said: Sequence[Setting]) -> None:
        self._words = {each.name: each.words or ["true"] for each in reversed(said)}

    def text(self, name: str) -> str:
        return " ".join(self._words.get(name, ()))

    def true(self, name: str) -> bool:
        return self.text(name).lower() == "true"

    def number(self, name: str) -> float:
        """Return a number; 0 where nothing is said, nan for what is no number."""
        try:
            return float(self.text(name) or 0)
        except ValueError:
            return math.nan


def _over(whole: float, part: float) -> float:
    return whole // part if part else math.nan


def openrlhf(said: PeerFigures, values: Mapping[str, Any], command: str) -> Values:
    """Choose the longest response where OpenRLHF gives it what its prompt leaves, and the default here is too long."""
    most = values.get("data.max_len", math.inf)
    short = most <= Config().rollout.max_new_tokens and "rollout.max_new_tokens" not in values
    return {"rollout.max_new_tokens": most // 2} if command == "train" and short else {}


def verl(said: PeerFigures, values: Mapping[str, Any], command: str) -> Values:
    """Give all GPUs to engines, in turns, and take the KL penalty and the source of rewards that are switched on."""
    actor, gpus = "actor_rollout_ref.actor.", said.number("trainer.nnodes") * said.number("trainer.n_gpus_per_node")
    clip = [said.number(f"{actor}clip_ratio_{side}") for side in ("low", "high")]
    width = said.number("actor_rollout_ref.rollout.tensor_model_parallel_size")
    found: Values = {"vllm.num_engines": _over(gpus, width), "actor.eps_clip_low_high": clip if any(clip) else None}
    if not (said.true(f"{actor}use_kl_loss") or said.true("algorithm.use_kl_in_reward")):
        found["algo.kl.init_coef"] = 0.0
    if not values.keys() & {"reward.model_name_or_path", "reward.remote_url"}:
        found["reward.preset"] = "math"
    return found


def trl(said: PeerFigures, values: Mapping[str, Any], command: str) -> Values:
    """Count prompts, where TRL counts responses; choose engines, loss, correction and reward of GRPO and RLOO."""
    if command != "train":
        return {}
    gpus, engines = said.number("num_processes"), said.true("use_vllm")
    served = engines and said.text("vllm_mode") == "server"
    steps = said.number("steps_per_generation") or said.number("gradient_accumulation_steps")
    responses = said.number("generation_batch_size") or steps * gpus * said.number("per_device_train_batch_size")
    loss, near, far = said.text("loss_type"), said.number("epsilon"), said.number("epsilon_high")
    usual = "gspo" if said.text("importance_sampling_level") == "sequence" else "ppo"
    policy = loss if loss in ("cispo", "sapo") else usual
    ranges = {"ppo": [near, far] if far else None, "gspo": [near, far or near], "cispo": [1.0, (far or near) - 1]}
    found: Values = {
        "rollout.batch_size": _over(responses, said.number("num_generations")),
        "train.colocate_all": not served,
        "vllm.num_engines": _over(gpus, said.number("vllm_tensor_parallel_size")) if engines and not served else None,
        "actor.policy_loss_type": policy,
        "actor.eps_clip_low_high": ranges.get(policy),
        "actor.eps_clip": near if policy == "ppo" and not far else None,
    }
    level, _, mode = said.text("vllm_importance_sampling_mode").partition("_")
    bounds = [said.number(f"vllm_importance_sampling_clip_{side}") for side in ("min", "max")]
    on = engines and said.true("vllm_importance_sampling_correction")
    for leaf, value in {"level": level, "mode": mode, "thresholds": bounds}.items():
        found[f"algo.correction.{leaf}"] = value if on else None
    if "reward.model_name_or_path" not in values:
        exact = "accuracy_reward" in said.text("reward_funcs")
        found |= {"reward.preset": "math" if exact else None, "reward.remote_url": None if exact else "reward.py"}
    return found


FIGURES = {"openrlhf": openrlhf, "verl": verl, "trl": trl}
"""Peer -> what it computes."""
