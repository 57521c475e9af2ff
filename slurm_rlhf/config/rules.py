"""Rules over the keys of a configuration, without a look at files: one sentence per broken rule."""

from __future__ import annotations

import string
from collections.abc import Iterator

from slurm_rlhf.config.algorithm_rules import (
    ahead_problems,
    algorithm_problems,
    filter_problems,
    loss_problems,
    sampling_problems,
)
from slurm_rlhf.config.aliases import INTERVALS
from slurm_rlhf.config.correction import correction_problems
from slurm_rlhf.config.evaluation import eval_problems
from slurm_rlhf.config.keys import all_keys, changed_keys, get, without_effect
from slurm_rlhf.config.roles import ROLES, has_engines, running_roles
from slurm_rlhf.config.schema import Config


def rule_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of a training run; rules over several numbers wait until each is in its range."""
    alone = list(key_problems(config))
    algorithm = list(algorithm_problems(config))
    yield from alone
    yield from _frozen(config)
    yield from algorithm
    if next(out_of_range(config), None) is not None:
        return
    if not algorithm:
        yield from _batches(config)
        yield from loss_problems(config)
    yield from _relations(config)
    yield from engine_problems(config)
    if not algorithm:
        yield from colocated(config)
    yield from sampling_problems(config)
    yield from correction_problems(config)


def key_problems(config: Config) -> Iterator[str]:
    """Find keys whose value is wrong by itself, for training and for `slurm-rlhf sft`."""
    yield from out_of_range(config)
    yield from _lists(config)
    yield from _loss_scale(config)
    if not config.data.input_key:
        yield "data.input_key is empty: name the column that holds the prompts (default: input)"
    yield from _template(config)


def out_of_range(config: Config) -> Iterator[str]:
    """Find the numbers that are outside the range in the schema."""
    for name, key in all_keys().items():
        value = get(config, name)
        for number in value if isinstance(value, list) else [value]:
            if key.allowed is not None and number not in key.words and number not in key.allowed:
                never = "; never is 0 here" if name in INTERVALS and number == -1 else ""
                yield f"{name} must be {key.allowed}, got {number}{never}"


def _batches(config: Config) -> Iterator[str]:
    """Check that all ranks of a role get equally many sequences, in each optimizer step and forward pass."""
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    responses, batch = prompts * samples, config.train.batch_size
    told = f"rollout.batch_size * rollout.n_samples_per_prompt = {prompts} * {samples} = {responses}"
    if responses % batch:
        fits = _divisors(responses, batch)
        yield f"{told} responses do not divide into optimizer steps of train.batch_size = {batch}: use {fits}"
    for role in running_roles(config):
        group, name = role.settings(config), role.group
        if role.kind == "engine":
            continue
        ranks = role.ranks(config)
        sizes = f"{name}.num_nodes * {name}.num_gpus_per_node = {group.num_nodes} * {group.num_gpus_per_node} = {ranks}"
        if role.kind == "trained" and batch % ranks:
            yield f"train.batch_size = {batch} does not divide over {sizes} ranks: use a multiple of {ranks}"
        elif role.kind == "frozen" and responses % ranks:
            yield f"{told} responses do not divide over {sizes} ranks: use a multiple of {ranks}"


def _frozen(config: Config) -> Iterator[str]:
    for role in (row for row in ROLES.values() if row.kind == "frozen"):
        group, name = role.settings(config), role.group
        if group.zero_stage not in (0, 3):
            yield f"{name}.zero_stage takes 0 or 3, got {group.zero_stage}: a frozen model has parameters only to cut"
        elif group.offload and group.zero_stage != 3:
            yield f"{name}.offload needs {name}.zero_stage = 3: only parameters that ZeRO-3 has cut can be moved"


def _divisors(whole: int, wanted: int) -> str:
    """Name the divisors of `whole` that are nearest to `wanted`."""
    valid = [n for n in range(1, whole + 1) if whole % n == 0]
    near = sorted(sorted(valid, key=lambda n: abs(n - wanted))[:2])
    return " or ".join(str(n) for n in near)


def length_problems(config: Config) -> Iterator[str]:
    """Check that a prompt fits beside its response."""
    if config.data.max_len <= config.rollout.max_new_tokens:
        yield (
            f"data.max_len = {config.data.max_len} leaves no room for a prompt beside "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}: raise the one or lower the other"
        )


def _relations(config: Config) -> Iterator[str]:
    yield from length_problems(config)
    yield from eval_problems(config)
    if 0 < config.train.self_check_stop < 1:
        yield (
            f"train.self_check_stop = {config.train.self_check_stop:g} would end a run within the bound that it is "
            "a multiple of: use 1 or more, or 0 to be warned only"
        )
    if config.algo.kl.target and not config.algo.kl.init_coef:
        yield "algo.kl.target needs a coefficient to start from: set algo.kl.init_coef above 0"
    if config.timeout.heartbeat < 4 * config.timeout.heartbeat_interval:
        yield (
            f"timeout.heartbeat = {config.timeout.heartbeat:g} must be at least four heartbeats: "
            f"{4 * config.timeout.heartbeat_interval:g} for timeout.heartbeat_interval = "
            f"{config.timeout.heartbeat_interval:g}"
        )
    yield from ahead_problems(config)
    yield from filter_problems(config)
    ds = config.ds
    holds = ("auto", "fp32") if ds.param_dtype == "fp32" else ("auto", ds.param_dtype, "fp32")
    if config.vllm.dtype not in holds and has_engines(config):
        yield (
            f"vllm.dtype = {config.vllm.dtype} would round the weights that the actor trains in ds.param_dtype = "
            f"{ds.param_dtype}, at every update: use {' or '.join(holds)}"
        )


def _loss_scale(config: Config) -> Iterator[str]:
    ds = config.ds
    if ds.param_dtype != "fp16":
        names = (f"ds.{name}" for name in ("initial_scale_power", "loss_scale_window", "min_loss_scale"))
        why = "it is of the loss scale of fp16: leave the key out, or set ds.param_dtype = fp16"
        yield from without_effect(config, names, f"with ds.param_dtype = {ds.param_dtype}, {why}")
        return
    if ds.grad_comm_dtype == "bf16":
        yield (
            "ds.grad_comm_dtype = bf16 would round to 8 bits the gradients that ds.param_dtype = fp16 has computed "
            "with 11: use ds.grad_comm_dtype = fp32, or bf16 for both"
        )
    if ds.min_loss_scale > 2.0**ds.initial_scale_power:
        yield (
            f"ds.min_loss_scale = {ds.min_loss_scale:g} is above the scale to start with, 2 to the power of "
            f"ds.initial_scale_power = {ds.initial_scale_power}: lower the one or raise the other"
        )


def _lists(config: Config) -> Iterator[str]:
    if len(config.actor.adam_betas) != 2:
        yield f"actor.adam_betas takes two numbers, got {config.actor.adam_betas}"
    if len(config.actor.eps_clip_low_high) not in (0, 2):
        yield f"actor.eps_clip_low_high takes two numbers or none, got {config.actor.eps_clip_low_high}"
    clip = config.reward.clip_range
    if len(clip) != 2 or clip[0] > clip[1]:
        yield f"reward.clip_range takes two numbers, the lower first, got {clip}"
    if "" in config.rollout.stop:
        yield "rollout.stop holds an empty string, which would end every response at once: leave it out"


def _template(config: Config) -> Iterator[str]:
    template = config.data.input_template
    if not template:
        return
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        fields = [str(error)]
    if fields != [""]:
        yield (
            f"data.input_template needs exactly one {{}} where the prompt goes, got {template!r}: "
            "write {{ and }} for braces that are meant as they are"
        )


def colocated(config: Config) -> Iterator[str]:
    """Check train.colocate_all: roles of one size, and no option that excludes it."""
    if not config.train.colocate_all:
        if config.ds.enable_sleep:
            yield (
                "ds.enable_sleep makes room for engines on the same accelerators: it needs train.colocate_all = true"
            )
        return
    yield from _colocated_trainers(config)
    if not has_engines(config):
        return
    yield from _colocated_engines(config)
    if config.vllm.sync_mode == "inflight":
        yield (
            "train.colocate_all and vllm.sync_mode = inflight exclude each other: engines sleep while the actor "
            "trains, so no response is in flight when weights change. Use vllm.sync_mode = drain"
        )
    if config.sync.backend == "nccl":
        yield (
            "train.colocate_all puts actor and engines on the same GPUs, and NCCL refuses two ranks on one GPU: "
            "use sync.backend = auto, ipc, gloo or disk"
        )
    if config.ds.enable_sleep and config.ds.zero_stage < 2:
        yield f"ds.enable_sleep needs ds.zero_stage 2 or 3, got {config.ds.zero_stage}: raise it, or switch it off"


def _colocated_trainers(config: Config) -> Iterator[str]:
    """Check that every other role that runs on accelerators is as large as the actor."""
    actor = config.actor
    for role in running_roles(config):
        group, name = role.settings(config), role.group
        if role.kind == "engine":
            continue
        if (group.num_nodes, group.num_gpus_per_node) != (actor.num_nodes, actor.num_gpus_per_node):
            yield (
                f"train.colocate_all needs roles of one size, and {name} has {group.num_nodes} x "
                f"{group.num_gpus_per_node} slots, the actor {actor.num_nodes} x {actor.num_gpus_per_node}: set "
                f"{name}.num_nodes = {actor.num_nodes} and {name}.num_gpus_per_node = {actor.num_gpus_per_node}"
            )


def _colocated_engines(config: Config) -> Iterator[str]:
    """Check that engines cover the slots of the actor, each inside one node."""
    actor, vllm = config.actor, config.vllm
    slots, width = actor.num_nodes * actor.num_gpus_per_node, vllm.tensor_parallel_size
    if vllm.num_engines * width != slots or actor.num_gpus_per_node % width:
        fits = " or ".join(
            f"{slots // tp} x {tp}" for tp in range(1, actor.num_gpus_per_node + 1) if not actor.num_gpus_per_node % tp
        )
        yield (
            f"train.colocate_all needs engines on all of the actor's slots, actor.num_nodes * actor.num_gpus_per_node "
            f"= {actor.num_nodes} * {actor.num_gpus_per_node} = {slots}, and vllm.num_engines * "
            f"vllm.tensor_parallel_size is {vllm.num_engines} * {width} = {vllm.num_engines * width}; engines inside a "
            f"node: use {fits}"
        )
    if vllm.num_nodes not in (0, actor.num_nodes):
        yield (
            f"train.colocate_all puts engines on the actor's {actor.num_nodes} nodes, and vllm.num_nodes is "
            f"{vllm.num_nodes}: set it to 0 or {actor.num_nodes}"
        )


def engine_problems(config: Config) -> Iterator[str]:
    """Find the keys that the engine excludes."""
    if has_engines(config):
        why = "with rollout.engine = vllm, it is of rollout.engine = hf: leave one of the two out"
        yield from without_effect(config, changed_keys(config, "rollout.hf_"), why)
        return
    hf = "rollout.engine = hf"
    if config.vllm.sync_mode == "inflight":
        yield (
            f"vllm.sync_mode = inflight samples while the actor trains, and with {hf} the actor's own ranks sample: "
            "use vllm.sync_mode = drain, or rollout.engine = vllm"
        )
    if config.vllm.tensor_parallel_size > 1:
        yield (
            f"vllm.tensor_parallel_size = {config.vllm.tensor_parallel_size} cuts an engine, and {hf} has none: a "
            "model that is too large for one GPU is cut by ds.zero_stage = 3. Leave the key out, or use "
            "rollout.engine = vllm"
        )
    if config.vllm.dtype != "auto":
        yield (
            f"vllm.dtype = {config.vllm.dtype} is the precision of engines, and {hf} samples in that of the actor, "
            f"ds.param_dtype = {config.ds.param_dtype}: leave the key out"
        )
    if config.eval.overlap:
        yield f"eval.overlap has engines evaluate while the actor trains, and {hf} has none: leave the key out"
    if config.ds.enable_sleep:
        yield f"ds.enable_sleep makes room for engines, and {hf} has none: leave the key out"
    if config.rollout.hf_gather != "auto" and config.ds.zero_stage != 3:
        yield (
            f"rollout.hf_gather = {config.rollout.hf_gather} says how parameters are gathered that ds.zero_stage = 3 "
            f"has cut, and ds.zero_stage = {config.ds.zero_stage} cuts none: leave the key out"
        )


def unused_note(config: Config) -> str:
    """Name the keys of engines that were set and have no effect, because the actor samples; empty: none."""
    unused = [] if has_engines(config) else changed_keys(config, "vllm.", "sync.")
    if not unused:
        return ""
    return f"rollout.engine = hf: the actor's ranks sample, so {', '.join(unused)} have no effect"
