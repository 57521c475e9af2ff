"""The table of roles: every kind of process group that a run may start, one row each.

Placement, `plan`, the memory table, environments and checkpoints read this table and name no role themselves. To add a
role: .github/CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slurm_rlhf.algorithms.layout import Layout
from slurm_rlhf.algorithms.registry import Algorithm, find_algorithm, load_plugins
from slurm_rlhf.config.architectures import PACKED
from slurm_rlhf.config.keys import changed, get
from slurm_rlhf.config.model_directory import read_config, text_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_jobs import STAGES, StageKeys
from slurm_rlhf.config.schema_models import REWARD_SOURCES, Ds
from slurm_rlhf.config.user_data import data_files
from slurm_rlhf.errors import ConfigError


def layout_of(ds: Ds, path: str, key: str = "the model") -> Layout:
    """Tell how the model in `path` reads micro-batches. Raises ModelError, and ConfigError for ds.ulysses_size.

    Attention costs 1 / (12 hidden size) for a pair of tokens: a layer has about 12 hidden^2 parameters, 2 FLOPs a token
    each, and attention, where tokens see half of the others, 2 hidden FLOPs a pair.
    """
    config = text_config(read_config(key, Path(path)))
    able = ds.packing_samples == "always" or config.get("model_type") in PACKED
    packed = ds.packing_samples != "never" and able and ds.attn_implementation not in ("eager", "flex_attention")
    if ds.ulysses_size > 1:
        _check_cut(ds, f"{key} = {path}", config, packed)
    return Layout(packed, 1 / (12 * int(config.get("hidden_size") or 1024)), ds.ulysses_size)


def _check_cut(ds: Ds, model: str, config: dict[str, Any], packed: bool) -> None:
    """Check that ds.ulysses_size ranks can compute a row of the model together. Raises ConfigError."""
    asked, heads = f"ds.ulysses_size = {ds.ulysses_size}", int(config.get("num_attention_heads") or 0)
    if ds.attn_implementation != "sdpa":
        raise ConfigError(
            f"{asked} exchanges heads around the trainer's own attention, and ds.attn_implementation = "
            f"{ds.attn_implementation} is another: leave one of the two keys out"
        )
    if not packed:
        raise ConfigError(
            f"{asked} cuts rows in which sequences lie end to end, and {model} has a row for each sequence, by "
            f"ds.packing_samples = {ds.packing_samples}: leave one of the two keys out, or use a model of `slurm-rlhf "
            "docs models`, No padding"
        )
    if not heads or heads % ds.ulysses_size:
        valid = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0) or "1"
        raise ConfigError(
            f"{asked} does not divide the {heads} attention heads (num_attention_heads) of {model}. Valid sizes: "
            f"{valid}"
        )


def algorithm_of(config: Config) -> Algorithm:
    """Find the algorithm that `config` names, after running the user's files. Raises ConfigError."""
    load_plugins(config.train.plugins)
    return find_algorithm(config.algo.advantage.estimator)


def has_teacher(config: Config) -> bool:
    """Tell whether a teacher takes the place of the reference."""
    return bool(config.algo.distill.model_name_or_path)


def has_reference(config: Config) -> bool:
    """Tell whether log-probs of a frozen model are needed: for the KL penalty, by the algorithm, or of a teacher."""
    return config.algo.kl.init_coef != 0 or algorithm_of(config).needs_reference or has_teacher(config)


def has_reward(config: Config) -> bool:
    """Tell whether the run has a source of rewards; a teacher is none."""
    return bool(config.env.path) or has_own_reward(config)


def has_own_reward(config: Config) -> bool:
    """Tell whether the run has a source of rewards other than an environment."""
    return bool(config.reward.sources) or any(getattr(config.reward, name) for name in REWARD_SOURCES)


def actor_is_reference(config: Config) -> bool:
    """Tell whether the actor computes the reference's log-probs: without its adapter it is what training began with."""
    return config.lora.rank > 0 and has_reference(config) and not has_teacher(config)


ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT = "actor", "critic", "reference", "reward", "rollout"

Kind = Literal["trained", "frozen", "engine"]


def has_engines(config: Config) -> bool:
    """Tell whether engines of their own sample; otherwise the actor's ranks do."""
    return config.rollout.engine != "hf"


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """Describe one role."""

    name: str
    group: str  # group of the configuration with num_nodes, and num_gpus_per_node unless the role is made of engines
    letter: str  # letter of its ranks in the grid of `plan`
    worker: str  # "module:name" of the callable that `ranks.rank_process` calls with (config, rank info, client)
    kind: Kind  # trained: checkpoints have its state, and ds.enable_sleep moves its optimizer states; frozen; engine
    model_keys: Sequence[str]  # name the directory of its model; the first that is set counts
    head: bool = False  # True: its model keeps the head over the vocabulary; False: it has one score for each token
    colocates: str = ""  # role whose slots it shares where train.colocate_<group>_<group> says so; "": none
    runs: Callable[[Config], bool] = lambda config: True  # whether a run with this configuration starts the role

    @property
    def colocation_key(self) -> str:
        """Return the key that puts this role on the slots of `colocates`; empty where there is none."""
        return f"train.colocate_{ROLES[self.colocates].group}_{self.group}" if self.colocates else ""

    def settings(self, config: Config) -> Any:
        """Return the group of the role in `config`."""
        return get(config, self.group)

    def ranks(self, config: Config) -> int:
        """Count the ranks of the role in `config`."""
        group = self.settings(config)
        if self.kind == "engine":
            return int(group.num_engines * group.tensor_parallel_size)
        return int(group.num_nodes * group.num_gpus_per_node)

    def model(self, config: Config) -> tuple[str, str]:
        """Return the key that names the model the role starts from, and its directory; empty where none is set."""
        return next(((key, path) for key in self.model_keys if (path := get(config, key))), (self.model_keys[0], ""))

    def layout(self, config: Config) -> Layout:
        """Tell how its model reads micro-batches. Raises as `layout_of` does."""
        return layout_of(config.ds, self.model(config)[1])

    def load_worker(self) -> Callable[..., Any]:
        """Import the module of the worker, and with it the libraries that this role needs."""
        module, _, name = self.worker.partition(":")
        worker: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return worker


_RUNS: dict[str, Callable[[Config], bool]] = {
    ACTOR: lambda config: True,
    CRITIC: lambda config: algorithm_of(config).needs_critic,
    REFERENCE: lambda config: has_reference(config) and not actor_is_reference(config),
    REWARD: lambda config: bool(config.reward.model_name_or_path),
    ROLLOUT: has_engines,
}
_ROWS = tomllib.loads(Path(__file__).with_name("roles.toml").read_text(encoding="utf-8"))

ROLES = {name: RoleSpec(name, **row, runs=_RUNS[name]) for name, row in _ROWS.items()}
"""Name -> row, in the order in which roles are printed, started and given the GPUs of a node they share."""


def running_roles(config: Config) -> list[RoleSpec]:
    """Return the roles that a run with `config` starts."""
    return [role for role in ROLES.values() if role.runs(config)]


def role_order(name: str) -> tuple[int, str]:
    """Sort roles by name as the table has them; names that are not in it follow by alphabet."""
    names = list(ROLES)
    return (names.index(name) if name in names else len(names), name)


def colocations(config: Config) -> list[frozenset[str]]:
    """Return the sets of roles that share their slots, as `train.colocate_...` says."""
    sets = [frozenset(ROLES)] if config.train.colocate_all else []
    pairs = [role for role in ROLES.values() if role.colocates and get(config, role.colocation_key)]
    return sets + [frozenset({role.colocates, role.name}) for role in pairs]


def roles_by_slots(config: Config, names: list[str]) -> list[list[str]]:
    """Group `names` by the slots they share, in the order of `names`."""
    sets = colocations(config)
    groups: list[list[str]] = []
    for name in names:
        if not any(name in group for group in groups):
            together = next((found for found in sets if name in found), frozenset({name}))
            groups.append([other for other in names if other in together])
    return groups


_ACTOR_ALONE: dict[str, Any] = {
    "rollout.engine": "hf",
    "algo.advantage.estimator": "reinforce",
    "algo.kl.init_coef": 0.0,
    "algo.distill.model_name_or_path": "",
    "reward.model_name_or_path": "",
    "reward.workers_num_nodes": 0,
}


def of_command(config: Config, command: str) -> Config:
    """Return the configuration by which a command's ranks are placed, its nodes examined and its job submitted.

    In a stage the actor is the only role, and the run directory is next to its output_dir. Its ranks read the data and
    write the model, also inside a container. Raises DataError if they are inside one and the data is missing.
    """
    if command not in STAGES:
        return config
    keys: StageKeys = get(config, command)
    out, mounts = Path(keys.output_dir), list(config.slurm.container_mounts)
    if config.slurm.container:
        files = [file for path in (keys.dataset, keys.eval_dataset) if path for file in data_files(path)]
        mounts += dict.fromkeys(str(place.parent) for place in (out, *files))
    own = {"run_dir": str(out.with_name(f"{out.name}.run")), "slurm.container_mounts": mounts}
    return changed(config, _ACTOR_ALONE | own)
