"""Names of keys that users of OpenRLHF and verl know: which are read as ours, and what the others are here."""

from __future__ import annotations

from functools import cache

from slurm_rlhf.config.openrlhf import FLAGS

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

VERL = {
    "algorithm.adv_estimator": "algo.advantage.estimator",
    "algorithm.gamma": "algo.advantage.gamma",
    "algorithm.lam": "algo.advantage.lambd",
    "algorithm.norm_adv_by_std_in_grpo": "algo.advantage.no_std_norm",
    "algorithm.gdpo_reward_keys": "algo.advantage.gdpo_reward_keys",
    "algorithm.gdpo_reward_weights": "algo.advantage.gdpo_reward_weights",
    "algorithm.rollout_correction.rollout_is": "algo.correction.level",
    "algorithm.rollout_correction.rollout_is_threshold": "algo.correction.thresholds",
    "algorithm.rollout_correction.bypass_mode": "algo.correction.bypass",
    "algorithm.filter_groups.enable": "algo.dynamic_filtering_enable",
    "algorithm.filter_groups.max_num_gen_batches": "algo.dynamic_filtering_max_tries",
    "algorithm.kl_ctrl.kl_coef": "algo.kl.init_coef",
    "algorithm.kl_ctrl.target_kl": "algo.kl.target",
    "algorithm.kl_ctrl.horizon": "algo.kl.horizon",
    "algorithm.kl_penalty": "algo.kl.estimator",
    "actor_rollout_ref.model.path": "actor.model_name_or_path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.gradient_checkpointing_enable",
    f"{_ACTOR}.optim.lr": "actor.learning_rate",
    f"{_ACTOR}.optim.weight_decay": "actor.weight_decay",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "actor.lr_warmup_ratio",
    f"{_ACTOR}.grad_clip": "actor.max_norm",
    f"{_ACTOR}.ppo_mini_batch_size": "train.batch_size",
    f"{_ACTOR}.ppo_epochs": "train.max_epochs",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "train.max_tokens_per_gpu",
    f"{_ACTOR}.clip_ratio": "actor.eps_clip",
    f"{_ACTOR}.clip_ratio_low": "actor.eps_clip_low_high",
    f"{_ACTOR}.clip_ratio_high": "actor.eps_clip_low_high",
    f"{_ACTOR}.clip_ratio_c": "actor.dual_clip",
    f"{_ACTOR}.policy_loss.loss_mode": "actor.policy_loss_type",
    f"{_ACTOR}.loss_agg_mode": "actor.loss_agg_mode",
    f"{_ACTOR}.entropy_coeff": "actor.entropy_coef",
    f"{_ACTOR}.use_kl_loss": "algo.kl.use_loss",
    f"{_ACTOR}.kl_loss_coef": "algo.kl.init_coef",
    f"{_ACTOR}.kl_loss_type": "algo.kl.estimator",
    f"{_ROLLOUT}.n": "rollout.n_samples_per_prompt",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    f"{_ROLLOUT}.top_p": "rollout.top_p",
    f"{_ROLLOUT}.top_k": "rollout.top_k",
    f"{_ROLLOUT}.tensor_model_parallel_size": "vllm.tensor_parallel_size",
    f"{_ROLLOUT}.gpu_memory_utilization": "vllm.gpu_memory_utilization",
    f"{_ROLLOUT}.max_num_seqs": "vllm.max_num_seqs",
    f"{_ROLLOUT}.enforce_eager": "vllm.enforce_eager",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": "train.forward_max_tokens_per_gpu",
    "critic.model.path": "critic.model_name_or_path",
    "critic.optim.lr": "critic.learning_rate",
    "critic.cliprange_value": "critic.value_clip",
    "trainer.critic_warmup": "critic.freezing_steps",
    "reward_model.model.path": "reward.model_name_or_path",
    "custom_reward_function.path": "reward.remote_url",
    "data.train_files": "data.prompt_dataset",
    "data.val_files": "eval.dataset",
    "data.prompt_key": "data.input_key",
    "data.train_batch_size": "rollout.batch_size",
    "data.max_response_length": "rollout.max_new_tokens",
    "trainer.total_epochs": "train.num_episodes",
    "trainer.total_training_steps": "train.max_steps",
    "trainer.save_freq": "ckpt.save_steps",
    "trainer.test_freq": "eval.steps",
    "trainer.nnodes": "actor.num_nodes",
    "trainer.n_gpus_per_node": "actor.num_gpus_per_node",
    "trainer.default_local_dir": "run_dir",
}
"""verl's name -> the key that does its work here. Values may differ, so they are named in errors and not read."""

VALUES = {
    "actor.lr_scheduler": {"cosine_with_min_lr": "cosine"},
    "actor.policy_loss_type": {"vanilla": "ppo", "dapo": "ppo", "grpo": "ppo"},
}
"""Key -> a value of OpenRLHF, verl or TRL -> what it is here. Named in errors and not read."""

INTERVALS = ("ckpt.save_steps", "eval.steps")
"""Keys for which -1 is never at OpenRLHF and verl, and 0 here."""


@cache
def read_as() -> dict[str, str]:
    """Return OpenRLHF's spellings that differ from ours: flag -> key."""
    return {
        name: flag.key for flag in FLAGS if flag.key for name in (flag.now, flag.before) if name not in ("", flag.key)
    }


@cache
def _instead() -> dict[str, str]:
    return {name: flag.instead for flag in FLAGS if flag.instead for name in (flag.now, flag.before) if name}


def begins_alias(name: str) -> bool:
    """Return whether `name` is a group of OpenRLHF's that holds keys of ours, as `actor.adam` does."""
    return any(alias.startswith(f"{name}.") for alias in [*read_as(), *_instead()])


TRL = {
    "num_generations": "rollout.n_samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_len",
    "per_device_train_batch_size": "train.batch_size",
    "generation_batch_size": "rollout.batch_size",
    "num_train_epochs": "train.num_episodes",
    "num_iterations": "train.max_epochs",
    "num_ppo_epochs": "train.max_epochs",
    "beta": "algo.kl.init_coef",
    "epsilon": "actor.eps_clip",
    "epsilon_high": "actor.eps_clip_low_high",
    "delta": "actor.dual_clip",
    "cliprange": "actor.eps_clip",
    "cliprange_value": "critic.value_clip",
    "lam": "algo.advantage.lambd",
    "scale_rewards": "algo.advantage.no_std_norm",
    "reward_funcs": "reward.remote_url",
    "reward_model_path": "reward.model_name_or_path",
    "warmup_ratio": "actor.lr_warmup_ratio",
    "max_grad_norm": "actor.max_norm",
    "report_to": "logger.use",
    "loss_type": "actor.loss_agg_mode",
    "importance_sampling_level": "actor.policy_loss_type",
    "mask_truncated_completions": "rollout.mask_truncated",
    "gradient_accumulation_steps": "train.batch_size",
    "vllm_mode": "train.colocate_all",
    "vllm_importance_sampling_correction": "algo.correction.preset",
    "vllm_importance_sampling_cap": "algo.correction.thresholds",
    "reward_weights": "algo.advantage.gdpo_reward_weights",
    "dataset_name": "data.prompt_dataset",
    "log_completions": "logger.print_samples",
    "bf16": "ds.param_dtype",
}
"""TRL's name -> the key that does its work here."""

UNITS = {
    f"{_ACTOR}.ppo_mini_batch_size": "verl counts prompts, this key responses, rollout.n_samples_per_prompt to each",
    "per_device_train_batch_size": "TRL counts for one GPU and one step of accumulation, this key for all",
    "gradient_accumulation_steps": "how often a GPU accumulates follows from it and from train.max_tokens_per_gpu",
    "generation_batch_size": "TRL counts responses, this key prompts, rollout.n_samples_per_prompt responses to each",
    "max_prompt_length": "this key counts prompt and response together",
    "scale_rewards": "true there is false here",
    "algorithm.norm_adv_by_std_in_grpo": "true there is false here",
    "epsilon_high": "it takes two values, the lower and the upper one",
    "importance_sampling_level": "sequence there is gspo here",
    "reward_weights": "it weighs components of the reward, with algo.advantage.estimator = gdpo",
}
"""A peer's name -> how its number differs."""


def meaning(name: str) -> str:
    """Say what a name of OpenRLHF, verl or TRL is here; empty where it is none of theirs."""
    if name in _instead():
        return f"OpenRLHF's {name} is no key here: {_instead()[name]}"
    if name in VERL:
        return _renamed("verl", name, VERL[name])
    if name in TRL:
        return _renamed("TRL", name, TRL[name])
    return ""


def _renamed(peer: str, name: str, key: str) -> str:
    unit = f"; {UNITS[name]}" if name in UNITS else ""
    return f"{peer}'s {name} is {key} here{unit} (`slurm-rlhf train --help {key}` says what it takes)"
