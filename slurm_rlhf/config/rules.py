"""The rules over the keys of a configuration, without a look at files. The docstring of a rule is its sentence."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator

from slurm_rlhf.config.algorithm_rules import FilterRules, LossRules, SamplingRules, algorithm_problems
from slurm_rlhf.config.correction import correction_problems
from slurm_rlhf.config.data_files import condition
from slurm_rlhf.config.evaluation import eval_problems
from slurm_rlhf.config.keys import INTERVALS, Broken, Rules, all_keys, changed_keys, get, unused
from slurm_rlhf.config.reward_sources import in_workers, runs_programs
from slurm_rlhf.config.roles import ROLES, algorithm_of, has_engines, has_teacher, running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_stages import STAGES


def rule_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of a training run; rules over several numbers wait until each is in its range."""
    algorithm = list(algorithm_problems(config))
    yield from key_problems(config)
    yield from _frozen(config)
    yield from _compiled(config) if config.ds.compile else ()
    yield from algorithm
    if next(out_of_range(config), None) is not None:
        return
    if not algorithm:
        yield from _batches(config)
        yield from LossRules(config, algorithm_of(config)).problems()
    yield from length_problems(config)
    yield from eval_problems(config)
    yield from TrainingRules(config).problems()
    yield from FilterRules(config).problems()
    yield from EngineRules(config).problems()
    if not algorithm:
        yield from colocated(config)
    yield from SamplingRules(config).problems()
    yield from correction_problems(config)


def key_problems(config: Config) -> Iterator[str]:
    """Find keys whose value is wrong by itself, for training and for `slurm-rlhf sft`."""
    yield from out_of_range(config)
    yield from KeyRules(config).problems()
    for name in STAGES:
        if get(config, f"{name}.eval_steps") and not get(config, f"{name}.eval_dataset"):
            yield f"{name}.eval_steps needs {name}.eval_dataset: set it, or leave both out"


def length_problems(config: Config) -> Iterator[str]:
    """Check that prompt and response fit together."""
    yield from LengthRules(config).problems()


def out_of_range(config: Config) -> Iterator[str]:
    """Find the numbers that are outside the range in the schema."""
    for name, key in all_keys().items():
        value = get(config, name)
        for number in value if isinstance(value, list) else [value]:
            if key.allowed is not None and number not in key.words and number not in key.allowed:
                never = "; never is 0 here" if name in INTERVALS and number == -1 else ""
                yield f"{name} must be {key.allowed}, got {number}{never}"


def unused_note(config: Config) -> str:
    """Name the keys of engines that were set and have no effect, because the actor samples; empty: none."""
    idle = [] if has_engines(config) else changed_keys(config, "vllm.", "sync.")
    return f"rollout.engine = hf: the actor's ranks sample, so {', '.join(idle)} have no effect" if idle else ""


def _frozen(config: Config) -> Iterator[str]:
    for role in (row for row in ROLES.values() if row.kind == "frozen"):
        group, name = role.settings(config), role.group
        if group.zero_stage not in (0, 3):
            yield f"{name}.zero_stage takes 0 or 3, got {group.zero_stage}: a frozen model has parameters only to cut"
        elif group.offload and group.zero_stage != 3:
            yield f"{name}.offload needs {name}.zero_stage = 3: only parameters that ZeRO-3 has cut can be moved"


def _compiled(config: Config) -> Iterator[str]:
    """Check that nothing in a layer is beyond the compiler."""
    stages = {"ds": config.ds.zero_stage, "ref": config.ref.zero_stage, "reward": config.reward.zero_stage}
    excluded = {f"{name}.zero_stage = 3": (stage == 3, "its layers gather") for name, stage in stages.items()}
    excluded |= {
        "ds.ulysses_size": (config.ds.ulysses_size > 1, "ranks exchange inside of layers"),
        "ds.use_liger_kernel": (config.ds.use_liger_kernel, "the compiler makes such kernels itself"),
        "train.gradient_checkpointing = selective": (
            config.checkpointing == "selective",
            "the compiler chooses itself what a layer keeps: use off or full",
        ),
        "rollout.engine = hf": (not has_engines(config), "the actor's layers also take single tokens"),
    }
    for key, (found, why) in excluded.items():
        if found:
            yield f"ds.compile = true excludes {key}: {why}. Change the one or leave out the other"


def _batches(config: Config) -> Iterator[str]:
    """Check that all ranks of a role get equally many sequences, in each optimizer step and forward pass."""
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    responses, batch = prompts * samples, config.train.batch_size
    product = f"rollout.batch_size * rollout.n_samples_per_prompt = {prompts} * {samples} = {responses}"
    if responses % batch:
        near = sorted(_divisors(responses), key=lambda n: abs(n - batch))[:2]
        fits = " or ".join(str(n) for n in sorted(near))
        yield f"{product} responses do not divide into optimizer steps of train.batch_size = {batch}: use {fits}"
    for role in (row for row in running_roles(config) if row.kind != "engine"):
        group, name, ranks = role.settings(config), role.group, role.ranks(config)
        sizes = f"{name}.num_nodes * {name}.num_gpus_per_node = {group.num_nodes} * {group.num_gpus_per_node} = {ranks}"
        together, inside, each = config.ds.ulysses_size, config.ds.hpz_size, group.num_gpus_per_node
        if role.kind == "trained" and config.ds.zero_stage == 3 and each % inside:
            yield f"ds.hpz_size = {inside} does not divide {name}.num_gpus_per_node = {each}: change one of them"
        if ranks % together:
            yield f"ds.ulysses_size = {together} does not divide {sizes} ranks: change the one or the other"
            continue
        shared = f" in groups of ds.ulysses_size = {together}" if together > 1 else ""
        many = ranks // together
        if role.kind == "trained" and batch % many:
            yield f"train.batch_size = {batch} does not divide over {sizes} ranks{shared}: use a multiple of {many}"
        elif role.kind == "frozen" and responses % many:
            yield f"{product} responses do not divide over {sizes} ranks{shared}: use a multiple of {many}"


def _divisors(whole: int) -> list[int]:
    """List the divisors of `whole`, for numbers above 1e12 those that a tenth of a second finds."""
    pairs = ((n, whole // n) for n in range(1, min(math.isqrt(whole), 1_000_000) + 1) if whole % n == 0)
    return sorted({n for pair in pairs for n in pair})


def colocated(config: Config) -> Iterator[str]:
    """Check train.colocate_all: roles of one size, and no option that excludes it."""
    if config.train.colocate_all:
        yield from _colocated_trainers(config)
    yield from ColocationRules(config).problems()


def _colocated_trainers(config: Config) -> Iterator[str]:
    """Check that every other role that runs on accelerators is as large as the actor."""
    actor = config.actor
    for role in (row for row in running_roles(config) if row.kind != "engine"):
        group, name = role.settings(config), role.group
        if (group.num_nodes, group.num_gpus_per_node) != (actor.num_nodes, actor.num_gpus_per_node):
            yield (
                f"train.colocate_all needs roles of one size, and {name} has {group.num_nodes} x "
                f"{group.num_gpus_per_node} slots, the actor {actor.num_nodes} x {actor.num_gpus_per_node}: set "
                f"{name}.num_nodes = {actor.num_nodes} and {name}.num_gpus_per_node = {actor.num_gpus_per_node}"
            )


def _turns(config: Config) -> bool:
    """Tell whether engines and trainers take turns on the same accelerators."""
    return config.train.colocate_all and has_engines(config)


class KeyRules(Rules):
    """Check keys by themselves."""

    def betas(self) -> Broken:
        """actor.adam_betas takes two numbers, got {actor.adam_betas}"""
        return len(self.config.actor.adam_betas) != 2

    def clip_range_of_the_loss(self) -> Broken:
        """actor.eps_clip_low_high takes two numbers or none, got {actor.eps_clip_low_high}"""
        return len(self.config.actor.eps_clip_low_high) not in (0, 2)

    def clip_range_of_rewards(self) -> Broken:
        """reward.clip_range takes two numbers, the lower first, got {reward.clip_range}"""
        clip = self.config.reward.clip_range
        return len(clip) != 2 or clip[0] > clip[1]

    @unused("reward.sandbox")
    def no_programs(self) -> Broken:
        """without reward.preset = code, whose programs run in it: leave it out"""
        return not runs_programs(self.config)

    def empty_stop(self) -> Broken:
        """rollout.stop holds an empty string, which would end every response at once: leave it out"""
        return "" in self.config.rollout.stop

    @unused("ds.initial_scale_power", "ds.loss_scale_window", "ds.min_loss_scale")
    def loss_scale_is_of_fp16(self) -> Broken:
        """with ds.param_dtype = {ds.param_dtype}, it is of the loss scale of fp16: leave the key out, or set fp16"""
        return self.config.ds.param_dtype != "fp16"

    def gradients_of_fp16(self) -> Broken:
        """ds.grad_comm_dtype = bf16 would round to 8 bits the gradients that ds.param_dtype = fp16 has computed with
        11: use ds.grad_comm_dtype = fp32, or bf16 for both"""
        return self.config.ds.param_dtype == "fp16" and self.config.ds.grad_comm_dtype == "bf16"

    def smallest_loss_scale(self) -> Broken:
        """ds.min_loss_scale = {ds.min_loss_scale:g} is above the scale to start with, 2 to the power of
        ds.initial_scale_power = {ds.initial_scale_power}: lower the one or raise the other"""
        ds = self.config.ds
        return ds.param_dtype == "fp16" and ds.min_loss_scale > 2.0**ds.initial_scale_power

    @unused("ds.hpz_size")
    def copies_within_nodes(self) -> Broken:
        """with ds.zero_stage = {ds.zero_stage}, it copies what ds.zero_stage = 3 cuts: leave it out or set 3"""
        return self.config.ds.zero_stage != 3

    def input_key(self) -> Broken:
        """data.input_key is empty: name the column that holds the prompts (default: input)"""
        return not self.config.data.input_key

    def columns_to_rename(self) -> Broken:
        """data.map has {entry!r}: write NAME=COLUMN, as in input=question"""
        return [{"entry": entry} for entry in self.config.data.map if (condition(entry) or "  ")[1] != "="]

    def conditions(self) -> Broken:
        """data.filter has {entry!r}: write COLUMN=VALUE, or !=, or one of <, <=, >, >= with a number behind it"""
        return [{"entry": entry} for entry in self.config.data.filter if condition(entry) is None]

    def weights(self) -> Broken:
        """data.weights = {data.weights} sums to zero, which takes no row: give a data set that counts a positive one"""
        return bool(self.config.data.weights) and not sum(self.config.data.weights)

    def template(self) -> Broken:
        """data.input_template needs exactly one {{}} where the prompt goes, got {data.input_template!r}: write {{{{ and
        }}}} for braces that are meant as they are"""
        try:
            parsed = string.Formatter().parse(self.config.data.input_template)
            fields = [field for _, field, _, _ in parsed if field is not None]
        except ValueError:
            return True
        return bool(self.config.data.input_template) and fields != [""]


class PreferenceRules(Rules):
    """Check the keys of `slurm-rlhf dpo` against its loss."""

    @unused("dpo.label_smoothing")
    def no_smoothing(self) -> Broken:
        """with dpo.loss_type = {dpo.loss_type}, it belongs to dpo and simpo: leave one of them out"""
        return self.config.dpo.loss_type not in ("dpo", "simpo")

    @unused("dpo.desirable_weight", "dpo.undesirable_weight")
    def no_labels(self) -> Broken:
        """with dpo.loss_type = {dpo.loss_type}, it belongs to kto: leave one of them out"""
        return self.config.dpo.loss_type != "kto"


class LengthRules(Rules):
    """Check that prompt and response fit together."""

    def room_for_a_prompt(self) -> Broken:
        """data.max_len = {data.max_len} leaves no room for a prompt, because of rollout.max_new_tokens =
        {rollout.max_new_tokens}: raise the one or lower the other"""
        return self.config.data.max_len <= self.config.rollout.max_new_tokens


class TrainingRules(Rules):
    """Check keys of the training run against each other."""

    def self_check_stop(self) -> Broken:
        """train.self_check_stop = {train.self_check_stop:g} would end a run within the bound that it is a multiple of:
        use 1 or more, or 0 to be warned only"""
        return 0 < self.config.train.self_check_stop < 1

    def kl_target(self) -> Broken:
        """algo.kl.target needs a coefficient to start from: set algo.kl.init_coef above 0"""
        return bool(self.config.algo.kl.target and not self.config.algo.kl.init_coef)

    def teacher_and_reference(self) -> Broken:
        """algo.distill.model_name_or_path puts a teacher in the reference's place, and algo.kl.init_coef =
        {algo.kl.init_coef:g} would penalise the distance to it a second time: set algo.kl.init_coef to 0"""
        return has_teacher(self.config) and self.config.algo.kl.init_coef != 0

    @unused("algo.distill.coef")
    def no_teacher(self) -> Broken:
        """without algo.distill.model_name_or_path, the teacher whose weight it is: set both, or leave it out"""
        return not has_teacher(self.config)

    def heartbeats(self) -> Broken:
        """timeout.heartbeat = {timeout.heartbeat:g} must be at least four heartbeats: {least:g} for
        timeout.heartbeat_interval = {timeout.heartbeat_interval:g}"""
        least = 4 * self.config.timeout.heartbeat_interval
        return {"least": least} if self.config.timeout.heartbeat < least else False

    def ahead_is_not_deterministic(self) -> Broken:
        """train.full_determinism = true excludes vllm.sync_mode = inflight: between which two tokens the weights change
        depends on time. Use vllm.sync_mode = drain, or leave full_determinism out"""
        return self.config.vllm.sync_mode == "inflight" and self.config.train.full_determinism

    def checkpointing(self) -> Broken:
        """train.gradient_checkpointing = off and actor.gradient_checkpointing_enable = true contradict each other:
        leave one of them out"""
        return self.config.actor.gradient_checkpointing_enable and self.config.checkpointing == "off"

    def selective_gathering(self) -> Broken:
        """train.gradient_checkpointing = selective excludes ds.zero_stage = 3, where a layer gathers its parameters
        in other operations when it is computed again: use full, or a lower stage"""
        return self.config.checkpointing == "selective" and self.config.ds.zero_stage == 3

    @unused("reward.workers_num_nodes")
    def no_workers(self) -> Broken:
        """where nothing runs in workers, as with reward.workers = 0: leave it out, or name a function or environment"""
        return not in_workers(self.config)

    @unused("lora.alpha", "lora.target_modules")
    def adapters(self) -> Broken:
        """with lora.rank = 0, which trains all parameters: set lora.rank, or leave the key out"""
        return not self.config.lora.rank

    def kept_cache(self) -> Broken:
        """vllm.keep_kv_cache = true needs vllm.sync_mode = inflight, where responses are in flight when weights change,
        and excludes lora.rank, with which they keep their policy as well: leave it out"""
        return self.config.vllm.keep_kv_cache and (self.config.vllm.sync_mode == "drain" or self.config.lora.rank > 0)

    @unused("train.async_queue_size", "train.staleness_threshold")
    def ahead(self) -> Broken:
        """with vllm.sync_mode = drain, which samples nothing ahead: set vllm.sync_mode = inflight, or leave the key
        out"""
        return self.config.vllm.sync_mode == "drain"


class EngineRules(Rules):
    """Find the keys that the engine excludes."""

    def precision_of_engines(self) -> Broken:
        """vllm.dtype = {vllm.dtype} would round the weights that the actor trains in ds.param_dtype = {ds.param_dtype},
        at every update: use {holds}"""
        holds = list(dict.fromkeys(["auto", self.config.ds.param_dtype, "fp32"]))
        rounds = has_engines(self.config) and self.config.vllm.dtype not in holds
        return {"holds": " or ".join(holds)} if rounds else False

    @unused("rollout.hf_max_num_seqs", "rollout.hf_gather")
    def keys_of_hf(self) -> Broken:
        """with rollout.engine = vllm, it is of rollout.engine = hf: leave one of the two out"""
        return has_engines(self.config)

    def hf_ahead(self) -> Broken:
        """vllm.sync_mode = inflight samples while the actor trains, and with rollout.engine = hf the actor's own ranks
        sample: use vllm.sync_mode = drain, or rollout.engine = vllm"""
        return self.config.vllm.sync_mode == "inflight" and not has_engines(self.config)

    def hf_tensor_parallel(self) -> Broken:
        """vllm.tensor_parallel_size = {vllm.tensor_parallel_size} cuts an engine, and rollout.engine = hf has none: a
        model that is too large for one GPU is cut by ds.zero_stage = 3. Leave the key out, or use rollout.engine =
        vllm"""
        return self.config.vllm.tensor_parallel_size > 1 and not has_engines(self.config)

    def hf_precision(self) -> Broken:
        """vllm.dtype = {vllm.dtype} is the precision of engines, and rollout.engine = hf samples in that of the actor,
        ds.param_dtype = {ds.param_dtype}: leave the key out"""
        return self.config.vllm.dtype != "auto" and not has_engines(self.config)

    def hf_overlap(self) -> Broken:
        """eval.overlap has engines evaluate while the actor trains, and rollout.engine = hf has none: leave the key
        out"""
        return self.config.eval.overlap and not has_engines(self.config)

    def hf_sleep(self) -> Broken:
        """ds.enable_sleep makes room for engines, and rollout.engine = hf has none: leave the key out"""
        return self.config.ds.enable_sleep and not has_engines(self.config)

    def hf_gather(self) -> Broken:
        """rollout.hf_gather = {rollout.hf_gather} says how parameters are gathered that ds.zero_stage = 3 has cut, and
        ds.zero_stage = {ds.zero_stage} cuts none: leave the key out"""
        gathers = self.config.rollout.hf_gather != "auto" and not has_engines(self.config)
        return gathers and self.config.ds.zero_stage != 3


class ColocationRules(Rules):
    """Find the options that train.colocate_all excludes or needs."""

    def sleep_alone(self) -> Broken:
        """ds.enable_sleep makes room for engines on the same accelerators: it needs train.colocate_all = true"""
        return self.config.ds.enable_sleep and not self.config.train.colocate_all

    def colocated_slots(self) -> Broken:
        """train.colocate_all needs engines on all of the actor's slots, actor.num_nodes * actor.num_gpus_per_node =
        {actor.num_nodes} * {actor.num_gpus_per_node} = {slots}, and vllm.num_engines * vllm.tensor_parallel_size is
        {vllm.num_engines} * {vllm.tensor_parallel_size} = {taken}; engines inside a node: use {fits}"""
        actor, vllm = self.config.actor, self.config.vllm
        slots, taken = actor.num_nodes * actor.num_gpus_per_node, vllm.num_engines * vllm.tensor_parallel_size
        if not _turns(self.config) or (taken == slots and actor.num_gpus_per_node % vllm.tensor_parallel_size == 0):
            return False
        fits = " or ".join(f"{slots // width} x {width}" for width in _divisors(actor.num_gpus_per_node))
        return {"slots": slots, "taken": taken, "fits": fits}

    def colocated_nodes(self) -> Broken:
        """train.colocate_all puts engines on the actor's {actor.num_nodes} nodes, and vllm.num_nodes is
        {vllm.num_nodes}: set it to 0 or {actor.num_nodes}"""
        return _turns(self.config) and self.config.vllm.num_nodes not in (0, self.config.actor.num_nodes)

    def colocated_ahead(self) -> Broken:
        """train.colocate_all and vllm.sync_mode = inflight exclude each other: engines sleep while the actor trains, so
        no response is in flight when weights change. Use vllm.sync_mode = drain"""
        return _turns(self.config) and self.config.vllm.sync_mode == "inflight"

    def colocated_nccl(self) -> Broken:
        """train.colocate_all puts actor and engines on the same GPUs, and NCCL refuses two ranks on one GPU: use
        sync.backend = auto, ipc, gloo or disk"""
        return _turns(self.config) and self.config.sync.backend == "nccl"

    def sleep_needs_shards(self) -> Broken:
        """ds.enable_sleep needs ds.zero_stage 2 or 3, got {ds.zero_stage}: raise it, or switch it off"""
        return _turns(self.config) and self.config.ds.enable_sleep and self.config.ds.zero_stage < 2
