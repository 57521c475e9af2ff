"""Rules over keys: each that is broken is one sentence, which names the keys and says how to mend it."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from slurm_rlhf.algorithms import registry
from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES
from slurm_rlhf.algorithms.registry import Algorithm, built_in, register_algorithm
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.rules import rule_problems

GROUPS = "rollout.n_samples_per_prompt=4 rollout.batch_size=32"
"""As many responses as by default, in groups."""
FILTERED = f"algo.dynamic_filtering_enable=true {GROUPS}"
PATTERN = "rollout.repetition_detection"
ENABLE = "actor.gradient_checkpointing_enable"

BROKEN = [
    # sizes, lengths, ranges
    ("rollout.batch_size=100", "100 * 1 = 100 responses do not divide ... train.batch_size = 128: use 50 or 100"),
    ("actor.num_nodes=3", "train.batch_size = 128 does not divide over actor.num_nodes ... use a multiple of 3"),
    ("critic.num_gpus_per_node=3", "critic.num_nodes * critic.num_gpus_per_node = 1 * 3 = 3"),
    ("ref.num_gpus_per_node=3", "ref.num_nodes * ref.num_gpus_per_node = 1 * 3 = 3 ranks"),
    (
        "actor.num_gpus_per_node=3 ds.ulysses_size=2 with critic.num_nodes=2 ref.num_nodes=2",
        "ds.ulysses_size = 2 does not divide actor.num_nodes * actor.num_gpus_per_node = 1 * 3 = 3 ranks",
    ),
    (
        "actor.num_gpus_per_node=6 ds.ulysses_size=2 with critic.num_nodes=2 ref.num_nodes=2",
        "train.batch_size = 128 does not divide over ... 6 ranks in groups of ds.ulysses_size = 2: use a multiple of 3",
    ),
    ("reward.num_nodes=3 with reward.model_name_or_path=/rm", "reward.num_gpus_per_node = 3 * 1 = 3 ranks"),
    ("rollout.max_new_tokens=2048", "data.max_len = 2048 leaves no room ... rollout.max_new_tokens = 2048"),
    ("rollout.batch_size=0", "rollout.batch_size must be at least 1, got 0"),
    ("train.seed=-1", "train.seed must be at least 0 and at most 4294967295, got -1"),
    ("train.kernel_cache_gib=0", "train.kernel_cache_gib must be above 0"),
    ("train.self_check_stop=0.5", "would end a run within the bound ... use 1 or more, or 0"),
    ("timeout.heartbeat=1", "timeout.heartbeat = 1 must be at least four heartbeats: 4"),
    ("actor.adam_betas=0.9,1", "actor.adam_betas must be at least 0 and below 1, got 1.0"),
    ("actor.adam_betas=0.9", "actor.adam_betas takes two numbers, got [0.9]"),
    ("reward.clip_range=5,-5", "the lower first, got [5.0, -5.0]"),
    ("data.input_key=", "data.input_key is empty: name the column"),
    ("data.input_template=Q:", "data.input_template needs exactly one {} ... 'Q:'"),
    ("data.input_template='{} {}'", "exactly one {}"),
    ("data.input_template={x}", "exactly one {}"),
    ("data.input_template={", "exactly one {}"),
    ("ref.zero_stage=2", "ref.zero_stage takes 0 or 3, got 2"),
    ("reward.offload=true", "reward.offload needs reward.zero_stage = 3"),
    (f"train.gradient_checkpointing=off {ENABLE}=true", f"= off and {ENABLE} = true contradict each other"),
    (f"train.gradient_checkpointing=full {ENABLE}=false", f"= full and {ENABLE} = false contradict each other"),
    (f"train.gradient_checkpointing=selective {ENABLE}=false", f"= selective and {ENABLE} = false contradict"),
    ("train.gradient_checkpointing=selective ds.zero_stage=3", "selective excludes ds.zero_stage = 3 ... use full"),
    (
        "ds.hpz_size=4 with ds.zero_stage=3 actor.num_gpus_per_node=2 critic.num_gpus_per_node=4",
        "ds.hpz_size = 4 does not divide actor.num_gpus_per_node = 2",
    ),
    ("ds.compile=true ds.zero_stage=3", "ds.compile = true excludes ds.zero_stage = 3: its layers gather"),
    ("ds.compile=true ref.zero_stage=3", "ds.compile = true excludes ref.zero_stage = 3: its layers gather"),
    (
        "ds.compile=true ds.ulysses_size=2 with actor.num_nodes=2 critic.num_nodes=2 ref.num_nodes=2",
        "ds.compile = true excludes ds.ulysses_size: ranks exchange",
    ),
    ("ds.compile=true ds.use_liger_kernel=true", "ds.compile = true excludes ds.use_liger_kernel: the compiler makes"),
    ("ds.compile=true train.gradient_checkpointing=selective", "selective: the compiler chooses ... use off or full"),
    ("ds.compile=true rollout.engine=hf", "ds.compile = true excludes rollout.engine = hf: the actor's layers"),
    ("vllm.keep_kv_cache=true", "vllm.keep_kv_cache = true needs vllm.sync_mode = inflight"),
    ("vllm.keep_kv_cache=true lora.rank=8 with vllm.sync_mode=inflight", "true excludes lora.rank = 8, with"),
    ("lora.alpha=32", "lora.alpha ... with lora.rank = 0, which trains all parameters"),
    ("lora.rank=513", "lora.rank must be at least 0 and at most 512, got 513"),
    # the distribution that is sampled from
    ("rollout.temperature=2.1", "rollout.temperature must be at least 0 and at most 2, got 2.1"),
    ("rollout.temperature=0.009", "rollout.temperature = 0.009 ... vLLM takes 0.01 ... use 0.01 or more"),
    ("rollout.top_k=-2", "rollout.top_k must be at least -1, got -2"),
    ("rollout.top_k=0", "rollout.top_k = 0 would make the engine sample from a part of the vocabulary"),
    ("rollout.top_k=40", "rollout.top_k = 40 ... leave the key out, and lower rollout.temperature"),
    ("rollout.top_p=0", "rollout.top_p must be above 0 and at most 1, got 0.0"),
    ("rollout.top_p=0.9 rollout.temperature=0.7", "learn from wrong ratios ... leave the key out, and lower"),
    *(
        (f"rollout.top_p=0.9 with {corrected}", "wrong ratios (algo.correction.* does not mend that: its ratios would")
        for corrected in (
            *("algo.correction.preset=tis", "algo.correction.bypass=true", "vllm.sync_mode=inflight"),
            "algo.correction.off_policy_delta=0.1",
        )
    ),
    ("""rollout.stop='[""]'""", "rollout.stop holds an empty string"),
    (f"{PATTERN}_min_pattern_size=2", f"2 has no effect without {PATTERN}_max_pattern_size: set both"),
    (f"{PATTERN}_min_count=3", f"min_count = 3 has no effect without {PATTERN}_max_pattern_size: set both"),
    (f"{PATTERN}_min_pattern_size=5 {PATTERN}_max_pattern_size=4", "5 is above ... = 4: no pattern is"),
    (
        f"{PATTERN}_min_pattern_size=200 with {PATTERN}_max_pattern_size=300",
        f"200 times {PATTERN}_min_count = 8 is more than rollout.max_new_tokens = 1024",
    ),
    (f"{PATTERN}_min_count=1 with {PATTERN}_max_pattern_size=4", "must be at least 2, got 1"),
    # advantages
    *(
        (f"algo.advantage.estimator={name} rollout.n_samples_per_prompt=1", "of at least 2, got 1")
        for name in ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo", "max_rl", "gdpo")
    ),
    ("algo.advantage.estimator=reinforce critic.freezing_steps=3", "trains the critic alone at first ... has none"),
    ("algo.advantage.lambd_critic=-0.5", "is no lambda: use -1 for that of algo.advantage.lambd"),
    ("algo.advantage.estimator=reinforce algo.advantage.lambd_critic=1", "learns ... has none: leave the key out"),
    *(
        (f"algo.advantage.estimator={name} algo.advantage.no_std_norm=true with {GROUPS}", "deviation ... has none")
        for name in ("rloo", "max_rl")
    ),
    ("algo.advantage.no_whitening=true algo.advantage.no_std_norm=true", "keeps the mean of the whitening that"),
    (
        "algo.advantage.no_whitening=true algo.advantage.no_std_norm=true with "
        f"algo.advantage.estimator=reinforce_baseline {GROUPS}",
        "keeps the mean of the whitening that",
    ),
    *(
        (f"algo.advantage.no_whitening=true algo.advantage.estimator={name} with {GROUPS}", "whitening ... has none")
        for name in ("rloo", "group_norm", "dr_grpo")
    ),
    (
        "algo.advantage.no_whitening=true algo.advantage.estimator=group_norm with "
        f"algo.advantage.no_std_norm=true {GROUPS}",
        "whitening ... has none",
    ),
    (
        f"algo.advantage.estimator=group_norm algo.advantage.gdpo_reward_weights=1 with {GROUPS}",
        "gdpo_reward_weights = [1.0] has no effect with",
    ),
    (
        f"""algo.advantage.estimator=rloo algo.advantage.gdpo_reward_keys='["a"]' with {GROUPS}""",
        "gdpo_reward_keys = ['a'] has no effect with",
    ),
    (
        f"algo.advantage.gdpo_reward_weights=1 with algo.advantage.estimator=gdpo {GROUPS}",
        "= [1.0] does not go with algo.advantage.gdpo_reward_keys = []",
    ),
    (
        f"""algo.advantage.gdpo_reward_keys='["a","a"]' with algo.advantage.estimator=gdpo {GROUPS}""",
        "['a', 'a'] names a component twice",
    ),
    (
        f"""algo.advantage.gdpo_reward_weights=0,0 with algo.advantage.estimator=gdpo {GROUPS}
        algo.advantage.gdpo_reward_keys='["a","b"]'""",
        "are all 0, so that there is nothing to learn",
    ),
    (f"algo.advantage.estimator=gdpo reward.model_name_or_path=/m with {GROUPS}", "several rewards ... gives one"),
    (f"algo.advantage.estimator=gdpo reward.normalize_enable=true with {GROUPS}", "learns from its components"),
    # workers
    ("reward.workers_num_nodes=1", "has no effect where nothing runs in workers ... leave it out, or name a function"),
    (
        "reward.workers_num_nodes=1 reward.workers=0 with reward.remote_url=/r.py",
        "reward.workers_num_nodes = 1 has no effect where nothing runs in workers, as with reward.workers = 0",
    ),
    ("reward.workers_num_nodes=1 with reward.remote_url=http://h", "has no effect where nothing runs in workers"),
    ("reward.workers_num_nodes=-1", "reward.workers_num_nodes must be at least 0, got -1"),
    # penalties
    ("reward.overlong_buffer_len=1025 rollout.max_new_tokens=1024", "= 1025 is more than ... = 1024"),
    ("reward.overlong_penalty_factor=2 reward.overlong_buffer_len=0", "= 2 has no effect without"),
    ("reward.length_penalty_coef=0.1 rollout.n_samples_per_prompt=1", "compares the lengths of the responses to one"),
    ("reward.stop_properly_penalty_coef=0.5 rollout.mask_truncated=true", "is a penalty for responses that were cut"),
    ("reward.stop_properly_penalty_coef=0.5 reward.normalize_enable=true", "brings rewards nearer to 0"),
    ("reward.stop_properly_penalty_coef=1.5", "must be at most 1, got 1.5"),
    *(
        (f"reward.{penalty} algo.advantage.estimator=gdpo with {GROUPS}", "changes the reward ... learns from its")
        for penalty in ("overlong_buffer_len=9", "stop_properly_penalty_coef=0.5")
    ),
    *(
        (f"reward.{penalty} algo.advantage.estimator=max_rl with {GROUPS}", f"= {penalty.partition('=')[2]} makes")
        for penalty in ("length_penalty_coef=0.5", "stop_properly_penalty_coef=-0.5", "normalize_enable=true")
    ),
    # policy losses
    ("actor.eps_clip=0.3 actor.eps_clip_low_high=0.2,0.28", "has no effect with ... leave one of them out"),
    ("actor.policy_loss_type=gspo actor.eps_clip=0.3 with actor.eps_clip_low_high=0.0003,0.0004", "belongs to ppo"),
    (
        "actor.policy_loss_type=gspo actor.eps_clip=0.1",
        "it belongs to ppo: leave it out, set actor.eps_clip_low_high for its range",
    ),
    (
        "actor.policy_loss_type=sapo actor.eps_clip_low_high=0.2,0.28",
        "it belongs to ppo and gspo and cispo and dppo_tv: leave it out",
    ),
    ("actor.policy_loss_type=cispo actor.dual_clip=3", "has no effect with ... it belongs to ppo and gspo"),
    ("actor.sapo_temperature_neg=2", "actor.sapo_temperature_neg = 2 has no effect with actor.policy_loss_type"),
    (
        f"algo.advantage.estimator=dr_grpo actor.policy_loss_type=gspo with {GROUPS}",
        "by seq-mean-token-sum-norm and ... by seq-mean-token-mean: say which with actor.loss_agg_mode",
    ),
    ("actor.dual_clip=1", "= 1 would cut off tokens that did not become likelier: it bounds a ratio"),
    ("actor.dual_clip=-1", "actor.dual_clip must be at least 0, got -1"),
    ("actor.eps_clip_low_high=0.28,0.2", "= 0.28 0.2 is the wrong way round: the range below comes first and is"),
    ("actor.eps_clip_low_high=0.2", "actor.eps_clip_low_high takes two numbers or none, got [0.2]"),
    ("actor.eps_clip_low_high=0,0.2", "actor.eps_clip_low_high must be above 0, got 0.0"),
    ("actor.sapo_temperature_pos=0", "actor.sapo_temperature_pos must be above 0, got 0.0"),
    # KL
    ("algo.kl.target=6 algo.kl.init_coef=0", "algo.kl.target needs a coefficient"),
    ("algo.kl.horizon=500 algo.kl.target=0", "has no effect without"),
    ("algo.kl.use_loss=true algo.kl.init_coef=0 with algo.kl.estimator=k2", "no reference is started: set ... above 0"),
    (
        "algo.kl.use_loss=true algo.kl.estimator=k1",
        "mean gradient of k1 is zero: set algo.kl.estimator to k2 or k3+, whose gradient is that of the KL divergence",
    ),
    # correction
    ("algo.correction.bypass=true actor.old_logprobs=pass", "leave one of the two out"),
    ("algo.correction.bypass=true algo.correction.preset=tis", "algo.correction.preset = tis to bound"),
    (
        "algo.correction.bypass=true algo.correction.level=token algo.correction.mode=clip "
        "algo.correction.thresholds=0.5,5",
        "leaves none for algo.correction.level, algo.correction.mode and algo.correction.thresholds to bound",
    ),
    ("algo.correction.bypass=true algo.correction.off_policy_delta=0.1", "leaves none for ... = 0.1 to compare"),
    ("algo.correction.off_policy_delta=-0.1", "off_policy_delta must be at least 0, got -0.1"),
    *(
        (f"algo.correction.thresholds={given} with algo.correction.preset={preset}", said)
        for preset, given, said in (
            ("icepop", "5,0.5", "[5.0, 0.5] are the wrong way round"),
            ("icepop", "1,1", "wrong way round, or equal"),
            ("icepop", "-0.5,5", "thresholds must be at least 0, got -0.5"),
            ("icepop", "1.5,5", "[1.5, 5.0] leave out 1 ... every token ... low <= 1 <= high"),
            ("seq_mask", "0.2,0.9", "[0.2, 0.9] leave out 1"),
            ("icepop", "2", "[2.0] takes two numbers"),
            ("tis", "0.5,5", "algo.correction.preset = tis ... use [0, 5] ... mode = clip"),
            ("auto", "0.5,5", "have no effect with ... = auto (auto is none with vllm.sync_mode"),
            (
                "none vllm.sync_mode=inflight",
                "0,2",
                "have no effect with ... = none ... choose tis, icepop or seq_mask",
            ),
        )
    ),
    (
        "algo.correction.level=sequence algo.correction.mode=truncate algo.correction.thresholds=0.5,5",
        "algo.correction.mode = truncate does not apply ... algo.correction.level = sequence with",
    ),
    ("algo.correction.level=token", "level = token says half of a correction: set algo.correction.mode"),
    (
        "algo.correction.mode=mask with algo.correction.thresholds=0.5,5",
        "mode = mask says half of a correction: set algo.correction.level",
    ),
    ("algo.correction.level=token algo.correction.mode=mask", "needs algo.correction.thresh"),
    (
        "algo.correction.preset=tis algo.correction.level=token with algo.correction.mode=mask "
        "algo.correction.thresholds=0.5,5",
        "algo.correction.level = token and algo.correction.preset = tis are two corrections",
    ),
    ("algo.correction.preset=none algo.correction.mode=mask", "= mask and ... = none are two corrections"),
    # dynamic sampling and sampling ahead
    (f"algo.dynamic_filtering_range=0.8,0.2 with {FILTERED}", "the lower first, got [0.8, 0.2]"),
    (f"algo.dynamic_filtering_range=0.8 with {FILTERED}", "takes nothing or two numbers"),
    ("algo.dynamic_filtering_enable=true rollout.n_samples_per_prompt=1", "= 1 it would drop every"),
    (f"algo.dynamic_filtering_enable=true reward.model_name_or_path=/m with {GROUPS}", "judges ... whole batches"),
    (f"algo.dynamic_filtering_enable=true algo.advantage.estimator=gdpo with {GROUPS}", "components that may differ"),
    *(
        (f"algo.dynamic_filtering_enable=false {word}", "has no effect while ... is false")
        for word in (
            "rollout.vllm_generate_batch_size=256",
            "algo.dynamic_filtering_range=0.1,0.9",
            "algo.dynamic_filtering_max_tries=3",
        )
    ),
    (f"rollout.vllm_generate_batch_size=8 rollout.batch_size=32 with {FILTERED}", "= 8 is less than ... = 32"),
    (f"rollout.vllm_generate_batch_size=64 vllm.sync_mode=inflight with {FILTERED}", "64 has no effect with"),
    ("train.full_determinism=true vllm.sync_mode=inflight", "train.full_determinism = true excludes"),
    ("train.async_queue_size=9", "train.async_queue_size must be at least 1 and at most 8, got 9"),
    ("train.async_queue_size=2 vllm.sync_mode=drain", "= 2 has no effect with"),
    ("train.staleness_threshold=0.2 vllm.sync_mode=drain", "= 0.2 has no effect with"),
    # precision
    ("vllm.dtype=bf16 ds.param_dtype=fp32", "would round the weights ... use auto or fp32"),
    ("vllm.dtype=bf16 ds.param_dtype=fp16", "would round the weights ... use auto or fp32"),
    ("vllm.dtype=fp16 ds.param_dtype=bf16", "would round the weights ... use auto or fp32"),
    ("ds.grad_comm_dtype=bf16 ds.param_dtype=fp16", "would round to 8 bits ... bf16 for both"),
    ("ds.hpz_size=2 ds.zero_stage=2", "it copies what ds.zero_stage = 3 cuts: leave it out"),
    ("ds.loss_scale_window=9 ds.param_dtype=bf16", "it belongs to the loss scale of fp16"),
    ("ds.min_loss_scale=2 ds.param_dtype=bf16", "it belongs to the loss scale of fp16"),
    ("ds.initial_scale_power=9 ds.param_dtype=fp32", "it belongs to the loss scale of fp16"),
    ("ds.initial_scale_power=33 with ds.param_dtype=fp16", "must be at least 0 and at most"),
    ("ds.min_loss_scale=64 ds.initial_scale_power=5 with ds.param_dtype=fp16", "64 is above ... = 5"),
    # slots that are shared
    (
        "train.colocate_all=true vllm.num_nodes=1 with algo.kl.init_coef=0 actor.num_nodes=2 critic.num_nodes=2 "
        "vllm.num_engines=2",
        "vllm.num_nodes is 1: set it to 0 or 2",
    ),
    ("train.colocate_all=true vllm.sync_mode=inflight", "exclude each other ... Use vllm.sync_mode = drain"),
    ("train.colocate_all=true sync.backend=nccl", "NCCL refuses two ranks on one GPU ... auto, ipc, gloo"),
    ("ds.enable_sleep=true", "ds.enable_sleep makes room ... needs train.colocate_all = true"),
    ("ds.enable_sleep=true ds.zero_stage=1 with train.colocate_all=true", "ds.zero_stage 2 or 3, got 1"),
    # the actor samples
    ("vllm.sync_mode=inflight rollout.engine=hf", "vllm.sync_mode = inflight ... rollout.engine = vllm"),
    ("vllm.tensor_parallel_size=2 rollout.engine=hf", "vllm.tensor_parallel_size = 2 ... ds.zero_stage = 3"),
    ("vllm.dtype=fp32 rollout.engine=hf", "vllm.dtype = fp32 ... ds.param_dtype = bf16"),
    ("ds.enable_sleep=true rollout.engine=hf with train.colocate_all=true", "leave the key out"),
    ("eval.overlap=true rollout.engine=hf with eval.dataset=e.jsonl", "leave the key out"),
    ("rollout.hf_gather=layer with rollout.engine=hf", "rollout.hf_gather = layer ... ds.zero_stage = 3"),
    ("rollout.hf_max_num_seqs=8 rollout.engine=vllm", "rollout.hf_max_num_seqs = 8"),
    # evaluations
    ("eval.temperature=2.1", "eval.temperature must be at least 0 and at most 2, got 2.1"),
    ("eval.dataset=a.jsonl eval.datasets=b.jsonl", "eval.dataset and eval.datasets are both set"),
    ("eval.steps=2", "eval.steps = 2 evaluates nothing without eval.dataset: name a JSONL file"),
    ("ckpt.best_metric=eval", "ckpt.best_metric = 'eval' needs an evaluation, and there is none"),
    (
        "eval.n_samples_per_prompt=4 with eval.dataset=a.jsonl",
        "= 4 with temperature 0: greedy responses to a prompt are all the same",
    ),
    (
        "eval.pass_k=1,8 with eval.dataset=a.jsonl eval.n_samples_per_prompt=4 eval.temperature=1",
        "has 8, and pass@8 needs k from 1 to n_samples_per_prompt = 4: ask for more samples",
    ),
    (
        """eval.datasets='[{path="a.jsonl", n_samples_per_prompt=2}]'""",
        "eval.datasets, a: n_samples_per_prompt = 2 with temperature 0",
    ),
    ("""eval.datasets='["x/a.jsonl", "y/a.jsonl"]'""", "two data sets are called 'a': give each its own name"),
    ("""eval.datasets='[{path="a.jsonl", name="a/b"}]'""", "name is part of metric names: use letters, digits"),
    ("eval.answer_pattern='(' with eval.dataset=a.jsonl", "is not a regular expression: missing"),
    ("eval.answer_pattern='(a)(b)' with eval.dataset=a.jsonl", "has 2 groups, and one is the answer"),
    (
        "ckpt.best_metric=eval/a/pass@2 with eval.dataset=a.jsonl",
        "is no metric of this evaluation; did you mean eval/a/pass@1? (valid: eval, eval/a/mean, eval/a/pass@1",
    ),
    ("eval.overlap=true train.colocate_all=true with eval.dataset=a.jsonl", "exclude"),
    ("eval.overlap=true vllm.sync_mode=inflight with eval.dataset=a.jsonl", "eval.overlap needs"),
]
"""Words of a command line, and what the sentence says, in its order. It names each key that comes before `with`."""

SOUND = [
    *("", GROUPS, "ds.param_dtype=fp16 ds.fp32_lm_head=true"),
    "actor.eps_clip=0.2 actor.eps_clip_low_high=0.2,0.28",  # as verl writes all three
    *(f"train.gradient_checkpointing=off {ENABLE}=false", f"train.gradient_checkpointing=selective {ENABLE}=true"),
    "algo.kl.target=6 algo.kl.horizon=500",
    "algo.kl.estimator=k3+",
    *(f"algo.kl.use_loss=true algo.kl.estimator={name} actor.nll_coef=0.1" for name in ("k2", "k3", "k3+")),
    "algo.advantage.no_whitening=true",
    f"{FILTERED} algo.dynamic_filtering_range=0.1,0.9",
    # DAPO's filter and its penalty; a scaled reward with max_rl, which stays at 0 or above
    f"rollout.mask_truncated=true reward.overlong_buffer_len=256 {PATTERN}_max_pattern_size=20",
    f"algo.advantage.estimator=max_rl reward.stop_properly_penalty_coef=0.5 {GROUPS}",
    "actor.dual_clip=3 actor.eps_clip=0.1",
    "actor.policy_loss_type=gspo actor.dual_clip=3 actor.eps_clip_low_high=0.001,0.002",
    "actor.policy_loss_type=cispo actor.eps_clip_low_high=1,0.28 actor.loss_agg_mode=seq-mean-token-sum",
    "actor.policy_loss_type=sapo actor.sapo_temperature_pos=2 actor.sapo_temperature_neg=2.1",
    *(f"actor.policy_loss_type={name} algo.advantage.estimator=group_norm {GROUPS}" for name in POLICY_LOSSES),
    f"algo.advantage.estimator=dr_grpo actor.policy_loss_type=cispo {GROUPS}",
    f"algo.advantage.estimator=dr_grpo actor.policy_loss_type=gspo actor.loss_agg_mode=seq-mean-token-mean {GROUPS}",
    *("rollout.engine=hf", "rollout.engine=hf train.colocate_all=true"),
]


def problems(words: str) -> list[str]:
    return list(rule_problems(load_config(None, [f"--{word}" for word in shlex.split(words)])))


def key(word: str) -> str:
    return word.partition("=")[0]


@pytest.mark.parametrize("words", SOUND)
def test_keys_that_go_together_break_no_rule(words: str) -> None:
    assert problems(words) == []


@pytest.mark.parametrize(("words", "stated"), BROKEN, ids=[words for words, _ in BROKEN])
def test_a_broken_rule_is_one_sentence_that_names_the_keys(words: str, stated: str) -> None:
    named, _, given = words.partition(" with ")
    found = problems(f"{named} {given}")
    assert len(found) == 1, found
    assert re.search(".*".join(map(re.escape, stated.split(" ... "))), found[0]), found[0]
    assert [word for word in shlex.split(named) if key(word) not in found[0]] == []
    assert "correction" not in words or ". " not in found[0]


@pytest.mark.parametrize("estimator", sorted(built_in()))
def test_every_estimator_goes_with_every_loss_or_says_with_which_key_it_would(estimator: str) -> None:
    losses, modes = (all_keys()[f"actor.{name}"].choices for name in ("policy_loss_type", "loss_agg_mode"))
    assert len(losses) >= 5
    assert len(modes) >= 5
    for loss, mode, sync in itertools.product(losses, modes, all_keys()["vllm.sync_mode"].choices):
        words = f"algo.advantage.estimator={estimator} actor.policy_loss_type={loss}"
        found = problems(f"{words} vllm.sync_mode={sync} actor.loss_agg_mode={mode} {GROUPS}")
        assert len(found) <= 1, (loss, mode, found)
        if found:
            assert mode == ""
            assert all(name in found[0] for name in (*map(key, words.split()), "actor.loss_agg_mode"))


def test_a_loss_of_the_algorithms_own_excludes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_algorithm(Algorithm("mine", lambda inputs: None, policy_loss=lambda inputs: None))  # type: ignore[arg-type, return-value]
    mine = "algo.advantage.estimator=mine"
    assert problems(f"{mine} actor.sapo_temperature_pos=2") == []  # it may look at any of them
    assert problems(f"{mine} actor.policy_loss_type=cispo") == [
        "algo.advantage.estimator = mine brings a policy loss of its own, which actor.policy_loss_type = cispo would "
        "replace: leave actor.policy_loss_type out, or choose an algorithm without one"
    ]
