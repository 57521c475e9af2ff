"""Check the rules over several keys, without reading files: rows of `rules.toml`, and rules that need code.

The keys of algo.correction are read here, too: the rule that they choose, and where old log-probs come from.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator
from itertools import islice
from typing import cast

from slurm_rlhf.algorithms.registry import PRESETS, CorrectionRule, Level, Mode
from slurm_rlhf.config.architectures import problem as attention_problem
from slurm_rlhf.config.evaluation import eval_problems
from slurm_rlhf.config.keys import INTERVALS, all_keys, changed_keys, get
from slurm_rlhf.config.roles import ROLES, algorithm_of, has_engines, has_reference, running_roles
from slurm_rlhf.config.rule import row_problems, where_set
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.user_data import condition
from slurm_rlhf.errors import ConfigError

GROUP = "algo.correction"


def correction_of(config: Config) -> CorrectionRule | None:
    """Find the rule by which losses are weighted; None: they are not. The keys have been checked before."""
    keys = config.algo.correction
    if keys.level:
        return CorrectionRule(cast(Level, keys.level), cast(Mode, keys.mode), *keys.thresholds)
    preset = PRESETS.get(_preset(config))
    if preset is None or not keys.thresholds:
        return preset
    return CorrectionRule(preset.level, preset.mode, *keys.thresholds)


def corrects(config: Config) -> bool:
    """Tell whether the loss corrects for the policy that sampled, by weights or by its ratio."""
    keys = config.algo.correction
    return bool(keys.bypass or keys.level or _preset(config) != "none" or keys.off_policy_delta)


def _preset(config: Config) -> str:
    """Resolve `auto`: with bypass the ratio corrects by itself."""
    keys = config.algo.correction
    if keys.preset != "auto":
        return keys.preset
    return "tis" if config.vllm.sync_mode == "inflight" and not keys.bypass else "none"


def of_the_update(config: Config) -> bool:
    """Tell whether the old log-probs are those of the update's own forward pass, so that none is made before it.

    This needs a batch of one optimizer step, which starts from the policy whose log-probs they are, and nothing that
    uses them earlier: a correction, a reference, or critic.freezing_steps. The ratio is 1 then, and its gradient is
    that of the log-probs. TRL and verl leave out the same pass.
    """
    responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    one_step = config.train.max_epochs == 1 and config.train.batch_size == responses
    needed = corrects(config) or has_reference(config) or config.critic.freezing_steps
    return config.actor.old_logprobs == "auto" and one_step and not needed


def before_update(config: Config) -> bool:
    """Tell whether the actor computes old log-probs in a pass of its own, before the update."""
    return not (config.algo.correction.bypass or of_the_update(config))


def rule_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of a training run. Some compare several numbers: first each has to be in its range."""
    algorithm = list(_algorithm_problems(config))
    yield from key_problems(config)
    for role in (row for row in ROLES.values() if row.kind == "frozen"):
        yield from row_problems("frozen", config, frozen=role.settings(config), name=role.group)
    yield from layer_problems(config)
    yield from row_problems("compile", config)
    yield from algorithm
    if next(out_of_range(config), None) is not None:
        return
    if not algorithm:
        yield from _batches(config)
        yield from _loss_problems(config)
    yield from row_problems("lengths", config)
    yield from eval_problems(config)
    yield from row_problems("training", config, least=4 * config.timeout.heartbeat_interval)
    yield from row_problems("filter", config)
    yield from row_problems("engine", config)
    if not algorithm:
        yield from colocated(config)
    yield from row_problems("sampling", config)
    if config.algo.correction.bypass:
        yield from row_problems("bypass", config)
    else:
        yield from islice(row_problems("choice", config, chosen=_preset(config)), 1)
    yield from islice(row_problems("thresholds", config, chosen=_preset(config)), 1)


def _algorithm_problems(config: Config) -> Iterator[str]:
    """Check what the algorithm needs."""
    try:
        algorithm = algorithm_of(config)
    except ConfigError as error:
        yield str(error)
        return
    advantage, rollout = config.algo.advantage, config.rollout
    yield from row_problems(
        "algorithm",
        config,
        algorithm=algorithm,
        twice=len(set(advantage.gdpo_reward_keys)) < len(advantage.gdpo_reward_keys),
        any_weight=any(advantage.gdpo_reward_weights),
        shortest=rollout.repetition_detection_min_pattern_size * rollout.repetition_detection_min_count,
    )


def _loss_problems(config: Config) -> Iterator[str]:
    """Check the keys of the policy loss."""
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    algorithm, chosen = algorithm_of(config), POLICY_LOSSES[config.actor.policy_loss_type]
    yield from row_problems("loss", config, algorithm=algorithm, loss=chosen)
    if algorithm.policy_loss is not None:
        return
    for leaf in dict.fromkeys(leaf for row in POLICY_LOSSES.values() for leaf in row.keys):
        if leaf not in chosen.keys:  # the author of the run may think that such a key has an effect
            name, users = f"actor.{leaf}", " and ".join(row.name for row in POLICY_LOSSES.values() if leaf in row.keys)
            own = ", set actor.eps_clip_low_high for its range" if leaf == "eps_clip" and chosen.clip_range else ""
            why = f"has no effect with actor.policy_loss_type = {chosen.name}, it belongs to {users}: leave it out{own}"
            yield from where_set(config, [name], why)


def key_problems(config: Config) -> Iterator[str]:
    """Find keys whose value is wrong by itself, for training and for `slurm-rlhf sft`."""
    yield from out_of_range(config)
    data = config.data
    yield from row_problems(
        "keys",
        config,
        empty_stop="" in config.rollout.stop,
        first_scale=2.0 ** min(config.ds.initial_scale_power, 99),
        weight=sum(data.weights),
        holds_prompt=_holds_prompt(data.input_template),
    )
    for entry in data.map:
        if (condition(entry) or "  ")[1] != "=":
            yield f"data.map has {entry!r}: write NAME=COLUMN, as in input=question"
    for entry in data.filter:
        if condition(entry) is None:
            signs = "or !=, or one of <, <=, >, >= with a number after it"
            yield f"data.filter has {entry!r}: write COLUMN=VALUE, {signs}"


def layer_problems(config: Config) -> Iterator[str]:
    """Find keys that exclude each other where layers are trained, in a run or in a stage."""
    yield from row_problems("layers", config)
    yield from filter(None, [attention_problem(config.ds.attn_implementation)])


def _holds_prompt(template: str) -> bool:
    """Tell whether a template has one place, without a name, for the prompt."""
    try:
        return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None] == [""]
    except ValueError:
        return False


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
    """Check that ds.hpz_size divides the `ranks` ranks of a node, if ZeRO-3 keeps copies of parameters there."""
    inside = config.ds.hpz_size
    if config.ds.zero_stage == 3 and ranks % inside:
        yield f"ds.hpz_size = {inside} does not divide {group}.num_gpus_per_node = {ranks}: change one of them"


def shares_problem(config: Config, what: str, rows: int, sizes: str, ranks: int) -> Iterator[str]:
    """Check that `rows` divide over the ranks or their groups. `what` and `sizes` describe rows and ranks for users."""
    together = config.ds.ulysses_size
    if ranks % together:
        yield f"ds.ulysses_size = {together} does not divide {sizes} ranks: change the one or the other"
    elif rows % (many := ranks // together):
        shared = f" in groups of ds.ulysses_size = {together}" if together > 1 else ""
        yield f"{what} not divide over {sizes} ranks{shared}: use a multiple of {many}"


def _divisors(whole: int) -> list[int]:
    """List the divisors of `whole`; above 1e12 only some of them, so that it takes a tenth of a second at most."""
    pairs = ((n, whole // n) for n in range(1, min(math.isqrt(whole), 1_000_000) + 1) if whole % n == 0)
    return sorted({n for pair in pairs for n in pair})


def colocated(config: Config) -> Iterator[str]:
    """Check train.colocate_all: roles of one size, and no option that excludes it."""
    for role in (row for row in running_roles(config) if row.kind != "engine"):
        yield from row_problems("one_size", config, trainer=role.settings(config), name=role.group)
    actor, vllm = config.actor, config.vllm
    slots = actor.num_nodes * actor.num_gpus_per_node
    yield from row_problems(
        "colocation",
        config,
        slots=slots,
        taken=vllm.num_engines * vllm.tensor_parallel_size,
        uneven=actor.num_gpus_per_node % vllm.tensor_parallel_size,
        fits=" or ".join(f"{slots // width} x {width}" for width in _divisors(actor.num_gpus_per_node)),
    )
