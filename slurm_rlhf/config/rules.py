"""The rules over the keys of a configuration, without a look at files: rows of `rules.toml`, and how to read them."""

from __future__ import annotations

import math
import operator
import string
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from slurm_rlhf.config.entries import eval_problems, in_workers, runs_programs
from slurm_rlhf.config.key_decisions import correction_problems
from slurm_rlhf.config.keys import INTERVALS, all_keys, changed_keys, get
from slurm_rlhf.config.roles import ROLES, algorithm_of, has_engines, has_teacher, running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.user_data import condition
from slurm_rlhf.errors import ConfigError

_SIGNS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def facts(config: Config) -> dict[str, Any]:
    """Return what conditions and sentences may name: the groups of keys, and what several keys say together."""
    return {field.name: getattr(config, field.name) for field in fields(config)} | {
        "checkpointing": config.checkpointing,
        "engines": has_engines(config),
        "programs": runs_programs(config),
        "teacher": has_teacher(config),
        "turns": in_turns(config),
        "workers": in_workers(config),
    }


def in_turns(config: Config) -> bool:
    """Tell whether engines and trainers take turns on the same accelerators."""
    return config.train.colocate_all and has_engines(config)


def row_problems(group: str, config: Config, **values: Any) -> Iterator[str]:
    """Find the broken rules among the rows of a group; `values` are further facts."""
    known = facts(config) | values
    for row in _rows()[group]:
        if any(all(_holds(each, known) for each in way.split(" and ")) for way in row["when"].split(" or ")):
            sentence = row["says"].format_map(known)
            yield from where_set(config, row["set"], sentence) if "set" in row else [sentence]


def _holds(condition: str, known: Mapping[str, Any]) -> bool:
    """Tell whether a condition is true: `NAME`, `not NAME`, or a comparison with a value or another name."""
    name, *compared = condition.removeprefix("not ").split(" ")
    value = _named(name, known)
    if not compared:
        return bool(value) != condition.startswith("not ")
    sign, text = compared
    first, dot, _ = text.partition(".")
    if first in known and (dot or not isinstance(value, str)):
        return bool(_SIGNS[sign](value, _named(text, known)))
    return bool(_SIGNS[sign](value, text if isinstance(value, str) else float(text)))


def _named(name: str, known: Mapping[str, Any]) -> Any:
    value, _ = Formatter().get_field(name, (), known)
    return len(value) if isinstance(value, list) else value


def where_set(config: Config, names: Iterable[str], says: str) -> Iterator[str]:
    """Find those of the keys `names` that were set; `says` goes on behind `KEY = VALUE`."""
    for name in names:
        value = get(config, name)
        if value != all_keys()[name].default:
            shown = f"{value:g}" if isinstance(value, float) else str(value).lower() if value is True else value
            yield f"{name} = {shown} {says}"


@cache
def _rows() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def rule_problems(config: Config) -> Iterator[str]:
    """Find the broken rules of a training run; rules over several numbers wait until each is in its range."""
    algorithm = list(_algorithm_problems(config))
    yield from key_problems(config)
    for role in (row for row in ROLES.values() if row.kind == "frozen"):
        yield from row_problems("frozen", config, frozen=role.settings(config), name=role.group)
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
    yield from correction_problems(config)


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
        if leaf not in chosen.keys:  # the run would be another than its author thinks
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
            signs = "or !=, or one of <, <=, >, >= with a number behind it"
            yield f"data.filter has {entry!r}: write COLUMN=VALUE, {signs}"


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
