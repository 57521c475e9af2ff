"""The flags of OpenRLHF's PPO command, in both of their spellings, and the keys that they are here.

`now` is the spelling since April 2026 (`--actor.adam.lr`), `before` the one until then (`--actor_learning_rate`). Most
keys have OpenRLHF's name already. Read from `openrlhf/cli/train_ppo_ray.py` of August 2026 and of April 2026; a test
compares the table of `docs/migration.md` with this one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """Says what a flag of OpenRLHF is here: a `key` that takes the same value, or what to do `instead`."""

    now: str  # without the dashes; empty: it is gone
    before: str = ""  # empty: it is younger
    key: str = ""
    instead: str = ""


def _as(key: str, before: str = "", now: str = "") -> Flag:
    return Flag(now or key, before, key)


def _no(now: str, before: str, instead: str) -> Flag:
    return Flag(now, before, instead=instead)


_RAY = "no Ray starts processes here"
_TRAINED = "actor and critic share it: use "
_TOKENS = "micro-batches are cut by tokens, not by sequences: use train.max_tokens_per_gpu"
_TRACKERS = "metrics go to run_dir/metrics.jsonl and to the trackers that logger.use names"
_MUON = "AdamW is the only optimizer"
_LORA = "all parameters are trained"
_PICTURES = "models see text only"
_JSONL = "data sets are JSONL files: write the rows that you want into one"
_CORRECTION = (
    "algo.correction.preset chooses icepop or seq_mask (OpenRLHF's seq-mask-tis); its tis is algo.correction.level = "
    "token with algo.correction.mode = clip and algo.correction.thresholds = [0.5, 5]"
)
_ASYNC = "set vllm.sync_mode = inflight, and train.async_queue_size"

FLAGS: tuple[Flag, ...] = (
    # Where roles run
    _as("actor.num_nodes", "actor_num_nodes"),
    _as("actor.num_gpus_per_node", "actor_num_gpus_per_node"),
    _as("critic.num_nodes", "critic_num_nodes"),
    _as("critic.num_gpus_per_node", "critic_num_gpus_per_node"),
    _as("ref.num_nodes", "ref_num_nodes"),
    _as("ref.num_gpus_per_node", "ref_num_gpus_per_node"),
    _as("reward.num_nodes", "reward_num_nodes"),
    _as("reward.num_gpus_per_node", "reward_num_gpus_per_node"),
    _as("train.colocate_all", "colocate_all_models"),
    _as("train.colocate_actor_ref", "colocate_actor_ref"),
    _as("train.colocate_critic_reward", "colocate_critic_reward"),
    _as("ref.offload"),
    _as("reward.offload"),
    _no("", "ref_reward_offload", "set ref.offload and reward.offload"),
    _no("", "actor_init_on_gpu", "models are loaded where they fit"),
    _no("local_rank", "local_rank", "torchrun tells ranks their number"),
    # Models and data
    _as("actor.model_name_or_path", "pretrain"),
    _as("critic.model_name_or_path", "critic_pretrain"),
    _as("reward.model_name_or_path", "reward_pretrain"),
    _as("reward.remote_url", "remote_rm_url"),
    _no("ds.value_head_prefix", "value_head_prefix", "the head is found by its name in the model's files"),
    _no("train.agent_func_path", "agent_func_path", "agents of several turns are not there: use reward.remote_url"),
    _as("data.prompt_dataset", "prompt_data"),
    _as("data.input_key", "input_key"),
    _as("data.label_key", "label_key"),
    _as("data.input_template", "input_template"),
    _as("data.apply_chat_template", "apply_chat_template"),
    _as("data.max_len", "max_len"),
    _as("data.max_samples", "max_samples"),
    _no("data.prompt_probs", "prompt_data_probs", _JSONL),
    _no("data.prompt_split", "prompt_split", _JSONL),
    _no("data.disable_fast_tokenizer", "disable_fast_tokenizer", "tokenizers are read from tokenizer.json"),
    _no("data.dataloader_num_workers", "dataloader_num_workers", "the conductor reads prompts, without workers"),
    _no("data.image_key", "image_key", _PICTURES),
    _no("data.max_images_per_prompt", "max_images_per_prompt", _PICTURES),
    _no("actor.freeze_visual_encoder", "freeze_visual_encoder", _PICTURES),
    _no("use_ms", "use_ms", "name a directory in actor.model_name_or_path: nothing is downloaded"),
    # Engines and sampling
    _as("vllm.num_engines", "vllm_num_engines"),
    _as("vllm.tensor_parallel_size", "vllm_tensor_parallel_size"),
    _as("vllm.gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    _as("vllm.enable_prefix_caching", "enable_prefix_caching"),
    _as("vllm.enforce_eager", "enforce_eager"),
    _as("sync.backend", "vllm_sync_backend", "vllm.sync_backend"),
    _no("vllm.sync_with_ray", "vllm_sync_with_ray", f"{_RAY}: sync.backend chooses how weights go"),
    _no("vllm.enable_sleep", "vllm_enable_sleep", "with train.colocate_all engines always sleep while others work"),
    _as("rollout.batch_size", "rollout_batch_size"),
    _as("rollout.vllm_generate_batch_size", "vllm_generate_batch_size"),
    _as("rollout.n_samples_per_prompt", "n_samples_per_prompt"),
    _as("rollout.max_new_tokens", "max_new_tokens"),
    _as("rollout.temperature", "temperature"),
    _as("rollout.top_p", "top_p"),
    _no("rollout.micro_batch_size", "micro_rollout_batch_size", _TOKENS.replace("train.", "train.forward_")),
    _as("train.forward_max_tokens_per_gpu", "rollout_max_tokens_per_gpu", "rollout.max_tokens_per_gpu"),
    _as("train.async_queue_size", "async_queue_size"),
    _no("train.async_enable", "async_train", _ASYNC),
    _no("train.partial_rollout_enable", "partial_rollout", _ASYNC),
    # Algorithm
    _as("algo.advantage.estimator", "advantage_estimator"),
    _as("algo.advantage.gamma", "gamma"),
    _as("algo.advantage.lambd", "lambd"),
    _as("algo.advantage.no_std_norm", "no_advantage_std_norm"),
    _no("algo.advantage.is_correction_enable", "enable_vllm_is_correction", _CORRECTION),
    _no("algo.advantage.is_correction_type", "vllm_is_correction_type", _CORRECTION),
    _as("algo.correction.thresholds", "vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold"),
    _as("algo.kl.init_coef", "init_kl_coef"),
    _as("algo.kl.estimator", "kl_estimator"),
    _as("algo.kl.use_loss", "use_kl_loss"),
    _as("algo.kl.target", "kl_target"),
    _as("algo.kl.horizon", "kl_horizon"),
    _as("algo.dynamic_filtering_enable", "dynamic_filtering"),
    _as("algo.dynamic_filtering_range", "dynamic_filtering_reward_range"),
    _as("actor.policy_loss_type", "policy_loss_type"),
    _as("actor.dual_clip", "dual_clip"),
    _as("actor.eps_clip", "eps_clip"),
    _as("actor.eps_clip_low_high", "eps_clip_low_high"),
    _as("actor.entropy_coef", "entropy_loss_coef"),
    _no("actor.aux_loss_coef", "aux_loss_coef", "the router of a mixture of experts gets no loss of its own"),
    _no("", "ptx_coef", "there is no pre-training loss beside the policy's"),
    _as("critic.value_clip", "value_clip"),
    _as("critic.freezing_steps", "freezing_actor_steps"),
    _no("critic.save_value_network", "save_value_network", "checkpoints hold the critic; the export is the actor"),
    _as("reward.normalize_enable", "normalize_reward"),
    _as("reward.clip_range", "reward_clip_range"),
    _as("reward.overlong_buffer_len", "overlong_buffer_len"),
    _as("reward.overlong_penalty_factor", "overlong_penalty_factor"),
    _as("reward.stop_properly_penalty_coef", "stop_properly_penalty_coef"),
    # Training
    _as("train.batch_size", "train_batch_size"),
    _as("train.max_epochs", "max_epochs"),
    _as("train.num_episodes", "num_episodes"),
    _as("train.seed", "seed"),
    _as("train.full_determinism", "full_determinism", "train.full_determinism_enable"),
    _as("train.max_tokens_per_gpu", "train_max_tokens_per_gpu"),
    _no("train.micro_batch_size", "micro_train_batch_size", _TOKENS),
    _no("train.dynamic_batch_enable", "use_dynamic_batch", f"always on: {_TOKENS}"),
    _as("actor.learning_rate", "actor_learning_rate", "actor.adam.lr"),
    _as("critic.learning_rate", "critic_learning_rate", "critic.adam.lr"),
    _as("actor.adam_betas", "adam_betas", "actor.adam.betas"),
    _as("actor.weight_decay", "l2", "actor.adam.weight_decay"),
    _no("actor.adam.eps", "", "AdamW's epsilon is 1e-8, OpenRLHF's default"),
    _as("actor.max_norm", "max_norm"),
    _as("actor.lr_scheduler", "lr_scheduler"),
    _as("actor.lr_warmup_ratio", "lr_warmup_ratio"),
    _as("actor.lr_min_ratio", "", "actor.min_lr_ratio"),
    _no("critic.adam.betas", "", f"{_TRAINED}actor.adam_betas"),
    _no("critic.adam.weight_decay", "", f"{_TRAINED}actor.weight_decay"),
    _no("critic.adam.eps", "", "AdamW's epsilon is 1e-8, OpenRLHF's default"),
    _no("critic.max_norm", "", f"{_TRAINED}actor.max_norm"),
    _no("critic.lr_scheduler", "", f"{_TRAINED}actor.lr_scheduler"),
    _no("critic.lr_warmup_ratio", "", f"{_TRAINED}actor.lr_warmup_ratio"),
    _no("critic.min_lr_ratio", "", f"{_TRAINED}actor.lr_min_ratio"),
    *(
        _no(f"{role}.{name}", "", _MUON)
        for role in ("actor", "critic")
        for name in ("optim", "muon.lr", "muon.momentum", "muon.ns_steps", "muon.nesterov", "muon.no_nesterov")
    ),
    _as("actor.gradient_checkpointing_enable", "gradient_checkpointing"),
    _no("actor.gradient_checkpointing_reentrant", "gradient_checkpointing_use_reentrant", "it is never reentrant"),
    _no("train.enable_ema", "enable_ema", "no moving average of the weights is kept"),
    _no("train.ema_beta", "ema_beta", "no moving average of the weights is kept"),
    # DeepSpeed
    _as("ds.zero_stage", "zero_stage"),
    _as("ds.param_dtype", "param_dtype"),
    _as("ds.attn_implementation", "attn_implementation"),
    _as("ds.enable_sleep", "deepspeed_enable_sleep"),
    _no("ds.grad_accum_dtype", "grad_accum_dtype", "sums are in fp32; ds.grad_comm_dtype is how ranks exchange them"),
    _no("ds.overlap_comm", "overlap_comm", "always on, from ds.zero_stage = 1 and two ranks on"),
    _no("ds.packing_samples", "packing_samples", "every sequence is a row of its own"),
    _no("ds.adam_offload", "adam_offload", "a larger ds.zero_stage, or ds.enable_sleep, makes room"),
    _no("ds.zpg", "zpg", "ZeRO++ is not there"),
    _no("ds.deepcompile", "deepcompile", "models are not compiled"),
    _no("ds.use_liger_kernel", "use_liger_kernel", "log-probs are taken in chunks: train.logprob_chunk_tokens"),
    _no("ds.experts_implementation", "", "transformers chooses how experts are computed"),
    _no("ds.tensor_parallel_size", "ds_tensor_parallel_size", "trainers are cut by ds.zero_stage = 3"),
    _no("ds.ring_attn_size", "ring_attn_size", "a sequence is computed on one rank"),
    _no("ds.ring_attn_head_stride", "ring_head_stride", "a sequence is computed on one rank"),
    _no("ds.load_in_4bit", "load_in_4bit", _LORA),
    _no("ds.lora.rank", "lora_rank", _LORA),
    _no("ds.lora.alpha", "lora_alpha", _LORA),
    _no("ds.lora.target_modules", "target_modules", _LORA),
    _no("ds.lora.dropout", "lora_dropout", _LORA),
    _no("ds.use_universal_ckpt", "use_ds_universal_ckpt", "every checkpoint can be read by other numbers of ranks"),
    # Evaluation, checkpoints, metrics
    _as("eval.dataset", "eval_dataset"),
    _as("eval.steps", "eval_steps"),
    _as("eval.temperature", "eval_temperature"),
    _as("eval.n_samples_per_prompt", "eval_n_samples_per_prompt"),
    _no("eval.split", "eval_split", _JSONL),
    _as("ckpt.save_steps", "save_steps"),
    _as("ckpt.max_num", "max_ckpt_num"),
    _no("ckpt.path", "ckpt_path", "checkpoints lie in run_dir"),
    _no("ckpt.output_dir", "save_path", "the trained model lies in run_dir"),
    _no("ckpt.load_enable", "load_checkpoint", "resume = auto continues from the newest checkpoint"),
    _no("ckpt.max_mem", "max_ckpt_mem", "ckpt.max_num limits what is kept"),
    _no("ckpt.save_hf", "save_hf_ckpt", "the last policy is always exported as a Hugging Face directory"),
    _no("ckpt.disable_ds", "disable_ds_ckpt", "ckpt.save_steps = 0 saves at the end only"),
    _no("ckpt.best_metric_key", "best_metric_key", "ckpt.best_metric keeps the best one by a metric of an evaluation"),
    _no("logger.logging_steps", "logging_steps", "every step is logged"),
    _no("logger.tensorboard_dir", "use_tensorboard", "events go to run_dir/tensorboard (logger.use)"),
    _no("", "use_wandb", 'logger.use = ["wandb"]; its key comes from `wandb login` or WANDB_API_KEY'),
    _no("", "perf", "perf/... is among the metrics of every step"),
    *(_no(f"logger.wandb.{name}", f"wandb_{name}", _TRACKERS) for name in ("org", "group")),
    *(_no(f"logger.wandb.{name}", f"wandb_{name}", f"logger.{name} does it") for name in ("project", "run_name")),
    _no("logger.wandb.key", "", "a key does not belong into a configuration: `wandb login`, or WANDB_API_KEY"),
)
