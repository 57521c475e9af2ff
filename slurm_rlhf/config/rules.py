"""The rules over the keys of a configuration, without a look at files. The docstring of a rule is its sentence."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator

from slurm_rlhf.config.algorithm_rules import FilterRules, LossRules, SamplingRules, algorithm_problems
from slurm_rlhf.config.correction import correction_problems
from slurm_rlhf.config.data_files import condition
from slurm_rlhf.config.evaluation import eval_problems
from slurm_rlhf.config.keys import INTERVALS, all_keys, changed_keys, get
from slurm_rlhf.config.roles import ROLES, algorithm_of, has_engines, running_roles
from slurm_rlhf.config.rule import Broken, Rules, in_turns, row_problems
from slurm_rlhf.config.schema import Config


def rule_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of a training run; rules over several numbers wait until each is in its range."""
    algorithm = list(algorithm_problems(config))
    yield from key_problems(config)
    yield from _frozen(config)
    yield from row_problems("compile", config)
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


def length_problems(config: Config) -> Iterator[str]:
    """Check that prompt and response fit together."""
    yield from row_problems("lengths", config)


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
        if role.kind == "trained":
            yield from hpz_problem(config, name, group.num_gpus_per_node)
            yield from shares_problem(config, f"train.batch_size = {batch} does", batch, sizes, ranks)
        else:
            yield from shares_problem(config, f"{product} responses do", responses, sizes, ranks)


def hpz_problem(config: Config, group: str, ranks: int) -> Iterator[str]:
    """Check that the copies of parameters that ZeRO-3 keeps within a node of `ranks` ranks divide over these."""
    inside = config.ds.hpz_size
    if config.ds.zero_stage == 3 and ranks % inside:
        yield f"ds.hpz_size = {inside} does not divide {group}.num_gpus_per_node = {ranks}: change one of them"


def shares_problem(config: Config, what: str, rows: int, sizes: str, ranks: int) -> Iterator[str]:
    """Check that `rows` divide over the ranks, or their groups; `what` and `sizes` call both, for the user."""
    together = config.ds.ulysses_size
    if ranks % together:
        yield f"ds.ulysses_size = {together} does not divide {sizes} ranks: change the one or the other"
    elif rows % (many := ranks // together):
        shared = f" in groups of ds.ulysses_size = {together}" if together > 1 else ""
        yield f"{what} not divide over {sizes} ranks{shared}: use a multiple of {many}"


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


class KeyRules(Rules):
    """Check keys by themselves."""

    group = "keys"

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

    def empty_stop(self) -> Broken:
        """rollout.stop holds an empty string, which would end every response at once: leave it out"""
        return "" in self.config.rollout.stop

    def smallest_loss_scale(self) -> Broken:
        """ds.min_loss_scale = {ds.min_loss_scale:g} is above the scale to start with, 2 to the power of
        ds.initial_scale_power = {ds.initial_scale_power}: lower the one or raise the other"""
        ds = self.config.ds
        return ds.param_dtype == "fp16" and ds.min_loss_scale > 2.0**ds.initial_scale_power

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


class TrainingRules(Rules):
    """Check keys of the training run against each other."""

    group = "training"

    def heartbeats(self) -> Broken:
        """timeout.heartbeat = {timeout.heartbeat:g} must be at least four heartbeats: {least:g} for
        timeout.heartbeat_interval = {timeout.heartbeat_interval:g}"""
        least = 4 * self.config.timeout.heartbeat_interval
        return {"least": least} if self.config.timeout.heartbeat < least else False


class EngineRules(Rules):
    """Find the keys that the engine excludes."""

    group = "engine"

    def precision_of_engines(self) -> Broken:
        """vllm.dtype = {vllm.dtype} would round the weights that the actor trains in ds.param_dtype = {ds.param_dtype},
        at every update: use {holds}"""
        holds = list(dict.fromkeys(["auto", self.config.ds.param_dtype, "fp32"]))
        rounds = has_engines(self.config) and self.config.vllm.dtype not in holds
        return {"holds": " or ".join(holds)} if rounds else False


class ColocationRules(Rules):
    """Find the options that train.colocate_all excludes or needs."""

    group = "colocation"

    def colocated_slots(self) -> Broken:
        """train.colocate_all needs engines on all of the actor's slots, actor.num_nodes * actor.num_gpus_per_node =
        {actor.num_nodes} * {actor.num_gpus_per_node} = {slots}, and vllm.num_engines * vllm.tensor_parallel_size is
        {vllm.num_engines} * {vllm.tensor_parallel_size} = {taken}; engines inside a node: use {fits}"""
        actor, vllm = self.config.actor, self.config.vllm
        slots, taken = actor.num_nodes * actor.num_gpus_per_node, vllm.num_engines * vllm.tensor_parallel_size
        if not in_turns(self.config) or (taken == slots and actor.num_gpus_per_node % vllm.tensor_parallel_size == 0):
            return False
        fits = " or ".join(f"{slots // width} x {width}" for width in _divisors(actor.num_gpus_per_node))
        return {"slots": slots, "taken": taken, "fits": fits}
