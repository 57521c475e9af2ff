"""The rules over the keys of a configuration, without a look at files. The docstring of a rule is its sentence."""

from __future__ import annotations

import string
from collections.abc import Iterator

from slurm_rlhf.config.algorithm_rules import (
    FILTER,
    SAMPLING,
    algorithm_problems,
    loss_problems,
)
from slurm_rlhf.config.aliases import INTERVALS
from slurm_rlhf.config.correction import correction_problems
from slurm_rlhf.config.evaluation import eval_problems
from slurm_rlhf.config.keys import Broken, Rules, all_keys, changed_keys, get
from slurm_rlhf.config.roles import ROLES, has_engines, running_roles
from slurm_rlhf.config.schema import Config

KEYS, LENGTHS, RELATIONS, PRECISION, HF, COLOCATED = (Rules() for _ in range(6))


def rule_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of a training run; rules over several numbers wait until each is in its range."""
    algorithm = list(algorithm_problems(config))
    yield from key_problems(config)
    yield from _frozen(config)
    yield from algorithm
    if next(out_of_range(config), None) is not None:
        return
    if not algorithm:
        yield from _batches(config)
        yield from loss_problems(config)
    yield from length_problems(config)
    yield from eval_problems(config)
    yield from RELATIONS.problems(config)
    yield from FILTER.problems(config)
    yield from PRECISION.problems(config)
    yield from engine_problems(config)
    if not algorithm:
        yield from colocated(config)
    yield from SAMPLING.problems(config)
    yield from correction_problems(config)


def key_problems(config: Config) -> Iterator[str]:
    """Find keys whose value is wrong by itself, for training and for `slurm-rlhf sft`."""
    yield from out_of_range(config)
    yield from KEYS.problems(config)


def length_problems(config: Config) -> Iterator[str]:
    """Check that prompt and response fit together."""
    yield from LENGTHS.problems(config)


def engine_problems(config: Config) -> Iterator[str]:
    """Find the keys that the engine excludes."""
    yield from HF.problems(config)


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
    unused = [] if has_engines(config) else changed_keys(config, "vllm.", "sync.")
    return f"rollout.engine = hf: the actor's ranks sample, so {', '.join(unused)} have no effect" if unused else ""


@KEYS.add()
def _betas(config: Config) -> Broken:
    """actor.adam_betas takes two numbers, got {actor.adam_betas}"""
    return len(config.actor.adam_betas) != 2


@KEYS.add()
def _clip_range_of_the_loss(config: Config) -> Broken:
    """actor.eps_clip_low_high takes two numbers or none, got {actor.eps_clip_low_high}"""
    return len(config.actor.eps_clip_low_high) not in (0, 2)


@KEYS.add()
def _clip_range_of_rewards(config: Config) -> Broken:
    """reward.clip_range takes two numbers, the lower first, got {reward.clip_range}"""
    clip = config.reward.clip_range
    return len(clip) != 2 or clip[0] > clip[1]


@KEYS.add()
def _empty_stop(config: Config) -> Broken:
    """rollout.stop holds an empty string, which would end every response at once: leave it out"""
    return "" in config.rollout.stop


@KEYS.add("ds.initial_scale_power", "ds.loss_scale_window", "ds.min_loss_scale")
def _loss_scale_is_of_fp16(config: Config) -> Broken:
    """with ds.param_dtype = {ds.param_dtype}, it is of the loss scale of fp16: leave the key out, or set
    ds.param_dtype = fp16"""
    return config.ds.param_dtype != "fp16"


@KEYS.add()
def _gradients_of_fp16(config: Config) -> Broken:
    """ds.grad_comm_dtype = bf16 would round to 8 bits the gradients that ds.param_dtype = fp16 has computed with 11:
    use ds.grad_comm_dtype = fp32, or bf16 for both"""
    return config.ds.param_dtype == "fp16" and config.ds.grad_comm_dtype == "bf16"


@KEYS.add()
def _smallest_loss_scale(config: Config) -> Broken:
    """ds.min_loss_scale = {ds.min_loss_scale:g} is above the scale to start with, 2 to the power of
    ds.initial_scale_power = {ds.initial_scale_power}: lower the one or raise the other"""
    ds = config.ds
    return ds.param_dtype == "fp16" and ds.min_loss_scale > 2.0**ds.initial_scale_power


@KEYS.add()
def _input_key(config: Config) -> Broken:
    """data.input_key is empty: name the column that holds the prompts (default: input)"""
    return not config.data.input_key


@KEYS.add()
def _template(config: Config) -> Broken:
    """data.input_template needs exactly one {{}} where the prompt goes, got {data.input_template!r}: write {{{{ and
    }}}} for braces that are meant as they are"""
    try:
        parsed = string.Formatter().parse(config.data.input_template)
        fields = [field for _, field, _, _ in parsed if field is not None]
    except ValueError:
        return True
    return bool(config.data.input_template) and fields != [""]


def _frozen(config: Config) -> Iterator[str]:
    for role in (row for row in ROLES.values() if row.kind == "frozen"):
        group, name = role.settings(config), role.group
        if group.zero_stage not in (0, 3):
            yield f"{name}.zero_stage takes 0 or 3, got {group.zero_stage}: a frozen model has parameters only to cut"
        elif group.offload and group.zero_stage != 3:
            yield f"{name}.offload needs {name}.zero_stage = 3: only parameters that ZeRO-3 has cut can be moved"


def _batches(config: Config) -> Iterator[str]:
    """Check that all ranks of a role get equally many sequences, in each optimizer step and forward pass."""
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    responses, batch = prompts * samples, config.train.batch_size
    product = f"rollout.batch_size * rollout.n_samples_per_prompt = {prompts} * {samples} = {responses}"
    if responses % batch:
        fits = _divisors(responses, batch)
        yield f"{product} responses do not divide into optimizer steps of train.batch_size = {batch}: use {fits}"
    for role in (row for row in running_roles(config) if row.kind != "engine"):
        group, name, ranks = role.settings(config), role.group, role.ranks(config)
        sizes = f"{name}.num_nodes * {name}.num_gpus_per_node = {group.num_nodes} * {group.num_gpus_per_node} = {ranks}"
        if role.kind == "trained" and batch % ranks:
            yield f"train.batch_size = {batch} does not divide over {sizes} ranks: use a multiple of {ranks}"
        elif role.kind == "frozen" and responses % ranks:
            yield f"{product} responses do not divide over {sizes} ranks: use a multiple of {ranks}"


def _divisors(whole: int, wanted: int) -> str:
    """Name the divisors of `whole` that are nearest to `wanted`."""
    valid = [n for n in range(1, whole + 1) if whole % n == 0]
    near = sorted(sorted(valid, key=lambda n: abs(n - wanted))[:2])
    return " or ".join(str(n) for n in near)


@LENGTHS.add()
def _room_for_a_prompt(config: Config) -> Broken:
    """data.max_len = {data.max_len} leaves no room for a prompt beside rollout.max_new_tokens =
    {rollout.max_new_tokens}: raise the one or lower the other"""
    return config.data.max_len <= config.rollout.max_new_tokens


@RELATIONS.add()
def _self_check_stop(config: Config) -> Broken:
    """train.self_check_stop = {train.self_check_stop:g} would end a run within the bound that it is a multiple of: use
    1 or more, or 0 to be warned only"""
    return 0 < config.train.self_check_stop < 1


@RELATIONS.add()
def _kl_target(config: Config) -> Broken:
    """algo.kl.target needs a coefficient to start from: set algo.kl.init_coef above 0"""
    return bool(config.algo.kl.target and not config.algo.kl.init_coef)


@RELATIONS.add()
def _heartbeats(config: Config) -> Broken:
    """timeout.heartbeat = {timeout.heartbeat:g} must be at least four heartbeats: {least:g} for
    timeout.heartbeat_interval = {timeout.heartbeat_interval:g}"""
    least = 4 * config.timeout.heartbeat_interval
    return {"least": least} if config.timeout.heartbeat < least else False


@RELATIONS.add()
def _ahead_is_not_deterministic(config: Config) -> Broken:
    """train.full_determinism = true excludes vllm.sync_mode = inflight: between which two tokens the weights change
    depends on time. Use vllm.sync_mode = drain, or leave full_determinism out"""
    return config.vllm.sync_mode == "inflight" and config.train.full_determinism


@RELATIONS.add("train.async_queue_size", "train.staleness_threshold")
def _ahead(config: Config) -> Broken:
    """with vllm.sync_mode = drain, which samples nothing ahead: set vllm.sync_mode = inflight, or leave the key out"""
    return config.vllm.sync_mode == "drain"


@PRECISION.add()
def _precision_of_engines(config: Config) -> Broken:
    """vllm.dtype = {vllm.dtype} would round the weights that the actor trains in ds.param_dtype = {ds.param_dtype}, at
    every update: use {holds}"""
    holds = list(dict.fromkeys(["auto", config.ds.param_dtype, "fp32"]))
    return {"holds": " or ".join(holds)} if has_engines(config) and config.vllm.dtype not in holds else False


def colocated(config: Config) -> Iterator[str]:
    """Check train.colocate_all: roles of one size, and no option that excludes it."""
    if config.train.colocate_all:
        yield from _colocated_trainers(config)
    yield from COLOCATED.problems(config)


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


@COLOCATED.add()
def _sleep_alone(config: Config) -> Broken:
    """ds.enable_sleep makes room for engines on the same accelerators: it needs train.colocate_all = true"""
    return config.ds.enable_sleep and not config.train.colocate_all


@COLOCATED.add()
def _colocated_slots(config: Config) -> Broken:
    """train.colocate_all needs engines on all of the actor's slots, actor.num_nodes * actor.num_gpus_per_node =
    {actor.num_nodes} * {actor.num_gpus_per_node} = {slots}, and vllm.num_engines * vllm.tensor_parallel_size is
    {vllm.num_engines} * {vllm.tensor_parallel_size} = {taken}; engines inside a node: use {fits}"""
    actor, vllm = config.actor, config.vllm
    slots, taken = actor.num_nodes * actor.num_gpus_per_node, vllm.num_engines * vllm.tensor_parallel_size
    if not _turns(config) or (taken == slots and actor.num_gpus_per_node % vllm.tensor_parallel_size == 0):
        return False
    widths = [width for width in range(1, actor.num_gpus_per_node + 1) if actor.num_gpus_per_node % width == 0]
    return {"slots": slots, "taken": taken, "fits": " or ".join(f"{slots // width} x {width}" for width in widths)}


@COLOCATED.add()
def _colocated_nodes(config: Config) -> Broken:
    """train.colocate_all puts engines on the actor's {actor.num_nodes} nodes, and vllm.num_nodes is {vllm.num_nodes}:
    set it to 0 or {actor.num_nodes}"""
    return _turns(config) and config.vllm.num_nodes not in (0, config.actor.num_nodes)


@COLOCATED.add()
def _colocated_ahead(config: Config) -> Broken:
    """train.colocate_all and vllm.sync_mode = inflight exclude each other: engines sleep while the actor trains, so no
    response is in flight when weights change. Use vllm.sync_mode = drain"""
    return _turns(config) and config.vllm.sync_mode == "inflight"


@COLOCATED.add()
def _colocated_nccl(config: Config) -> Broken:
    """train.colocate_all puts actor and engines on the same GPUs, and NCCL refuses two ranks on one GPU: use
    sync.backend = auto, ipc, gloo or disk"""
    return _turns(config) and config.sync.backend == "nccl"


@COLOCATED.add()
def _sleep_needs_shards(config: Config) -> Broken:
    """ds.enable_sleep needs ds.zero_stage 2 or 3, got {ds.zero_stage}: raise it, or switch it off"""
    return _turns(config) and config.ds.enable_sleep and config.ds.zero_stage < 2


def _turns(config: Config) -> bool:
    """Tell whether engines and trainers take turns on the same accelerators."""
    return config.train.colocate_all and has_engines(config)


@HF.add("rollout.hf_max_num_seqs", "rollout.hf_gather")
def _keys_of_hf(config: Config) -> Broken:
    """with rollout.engine = vllm, it is of rollout.engine = hf: leave one of the two out"""
    return has_engines(config)


@HF.add()
def _hf_ahead(config: Config) -> Broken:
    """vllm.sync_mode = inflight samples while the actor trains, and with rollout.engine = hf the actor's own ranks
    sample: use vllm.sync_mode = drain, or rollout.engine = vllm"""
    return config.vllm.sync_mode == "inflight" and not has_engines(config)


@HF.add()
def _hf_tensor_parallel(config: Config) -> Broken:
    """vllm.tensor_parallel_size = {vllm.tensor_parallel_size} cuts an engine, and rollout.engine = hf has none: a model
    that is too large for one GPU is cut by ds.zero_stage = 3. Leave the key out, or use rollout.engine = vllm"""
    return config.vllm.tensor_parallel_size > 1 and not has_engines(config)


@HF.add()
def _hf_precision(config: Config) -> Broken:
    """vllm.dtype = {vllm.dtype} is the precision of engines, and rollout.engine = hf samples in that of the actor,
    ds.param_dtype = {ds.param_dtype}: leave the key out"""
    return config.vllm.dtype != "auto" and not has_engines(config)


@HF.add()
def _hf_overlap(config: Config) -> Broken:
    """eval.overlap has engines evaluate while the actor trains, and rollout.engine = hf has none: leave the key out"""
    return config.eval.overlap and not has_engines(config)


@HF.add()
def _hf_sleep(config: Config) -> Broken:
    """ds.enable_sleep makes room for engines, and rollout.engine = hf has none: leave the key out"""
    return config.ds.enable_sleep and not has_engines(config)


@HF.add()
def _hf_gather(config: Config) -> Broken:
    """rollout.hf_gather = {rollout.hf_gather} says how parameters are gathered that ds.zero_stage = 3 has cut, and
    ds.zero_stage = {ds.zero_stage} cuts none: leave the key out"""
    return config.rollout.hf_gather != "auto" and config.ds.zero_stage != 3 and not has_engines(config)
