"""Describe algorithms as records, find the one that `algo.advantage.estimator` names, and run the files of users."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slurm_rlhf.errors import ConfigError, meant
from slurm_rlhf.user_files import file_of, run_file, same_place

if TYPE_CHECKING:  # the command line and the planner read records, and start without numpy
    import numpy as np
    from numpy.typing import NDArray

    from slurm_rlhf.algorithms.losses import PolicyLoss
    from slurm_rlhf.records import F32, Bool


KEY = "algo.advantage.estimator"

OF_PEERS = {
    "grpo": "group_norm",
    "reinforce++": "reinforce",
    "reinforce_plus_plus": "reinforce",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
    "drgrpo": "dr_grpo",
    "ppo": "gae",
}
"""Names that verl, TRL and papers have -> ours."""


@dataclass(slots=True)
class AdvantageInputs:
    """Hold everything that an advantage function may look at: one batch of N responses, packed.

    Responses come in (prompt, sample) order: those of one prompt stand together.
    """

    rewards: NDArray[Any]  # [N], normalised if reward.normalize_enable says so
    kl: F32 | None  # [A], None without a reference
    values: F32 | None  # [A], None without a critic
    action_mask: Bool  # [A], without the responses that leave the loss (rollout.mask_truncated)
    offsets: NDArray[np.int64]  # [N + 1], where each response starts
    groups: NDArray[np.int64]  # [N], which prompt each response answers: 0, 0, 1, 1, ...
    kl_coef: float
    clip_range: Sequence[float]
    gamma: float
    lambd: float
    lambd_critic: float | None = None  # lambda of the returns that the critic learns; None: `lambd`
    no_std_norm: bool = False  # do not divide by a standard deviation
    components: Mapping[str, F32] = field(default_factory=dict)  # name -> [N], the parts of the reward, as returned
    component_weights: Mapping[str, float] = field(default_factory=dict)  # weights of those to use; empty: all, with 1
    lengths: NDArray[np.int64] | None = None  # [N], actions of each response, left out or not; None: by action_mask


AdvantageFunction = Callable[[AdvantageInputs], "tuple[F32, F32 | None]"]
"""Inputs -> (advantages [A], returns [A] for the critic to learn or None without one), zero at masked positions."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Describe an algorithm: which roles it needs and what it computes."""

    name: str
    """The value of `algo.advantage.estimator` that chooses it."""
    advantages: AdvantageFunction
    needs_critic: bool = False
    """True: a value model is trained along with the policy. False: no critic is started."""
    needs_reference: bool = False
    """True: the reference model always runs. False: it runs where algo.kl.init_coef is not 0."""
    min_samples_per_prompt: int = 1
    """The smallest rollout.n_samples_per_prompt with which the advantages mean something."""
    whiten: bool = False
    """Give the advantages of a batch mean 0 and standard deviation 1, unless algo.advantage.no_whitening is set."""
    divides_by_spread: bool = False
    """The function divides by a standard deviation, unless `AdvantageInputs.no_std_norm` is set."""
    refuses_negative_rewards: bool = False
    """The function takes rewards of 0 and above only, so no penalty may make one negative."""
    needs_components: bool = False
    """The function takes `AdvantageInputs.components` in place of the reward."""
    policy_loss: PolicyLoss | None = None
    """The loss of the policy, computed in the actor's ranks; None: what `actor.policy_loss_type` chooses."""
    aggregation: str = "token-mean"
    """How the losses of tokens become one number, unless `actor.loss_agg_mode` or the loss says it: a name in
    `losses.AGGREGATIONS`."""


_REGISTERED: dict[str, Algorithm] = {}


def register_algorithm(algorithm: Algorithm, *, replace: bool = False) -> Algorithm:
    """Make an algorithm known by its name, so that `algo.advantage.estimator` can choose it.

    Call it in a Python file that `train.plugins` names. Raises ConfigError for a name that is taken, unless `replace`
    is set; built-in algorithms cannot be replaced.
    """
    from slurm_rlhf.algorithms.losses import AGGREGATIONS

    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"register_algorithm takes a slurm_rlhf.Algorithm(name=..., advantages=...), got {type(algorithm).__name__}"
        )
    name = algorithm.name
    owner = built_in().get(name) or (None if replace else _REGISTERED.get(name))
    if owner is not None and not same_place(owner.advantages, algorithm.advantages):
        raise ConfigError(
            f"the algorithm name {name!r} is taken by {file_of(owner.advantages)}: register yours by another name"
        )
    if algorithm.aggregation not in AGGREGATIONS:
        raise ConfigError(
            f"algorithm {name!r}: unknown aggregation {algorithm.aggregation!r}; valid: {', '.join(AGGREGATIONS)}"
        )
    _REGISTERED[name] = algorithm
    return algorithm


@cache
def built_in() -> dict[str, Algorithm]:
    """Find the records of all files in `algorithms/methods`, by name."""
    from slurm_rlhf.algorithms import methods

    modules = [
        importlib.import_module(f"{methods.__name__}.{module.name}")
        for module in pkgutil.iter_modules(methods.__path__)
    ]
    records = [found for module in modules for found in vars(module).values() if isinstance(found, Algorithm)]
    return {record.name: record for record in records}


def find_algorithm(name: str) -> Algorithm:
    """Look an algorithm up by its name. Raises ConfigError that names the nearest and all valid ones."""
    found = built_in().get(name) or _REGISTERED.get(name)
    if found is None:
        names, same = sorted({*built_in(), *_REGISTERED}), OF_PEERS.get(name.lower())
        near = f": it is called {same} here" if same else meant(name, names)
        raise ConfigError(
            f"{KEY} = {name!r} is unknown{near} (valid: {', '.join(names)}; more come with files that "
            "train.plugins names)"
        )
    return found


def policy_loss_of(name: str, loss_type: str) -> PolicyLoss:
    """Find the policy loss of an algorithm, in a rank of the actor: its own, else that of `actor.policy_loss_type`.

    An algorithm that a rank does not know was given to `slurm_rlhf.train` as an object, which is refused if it has a
    loss of its own.
    """
    from slurm_rlhf.algorithms.losses import checked_loss
    from slurm_rlhf.algorithms.policy_losses import POLICY_LOSSES

    known = built_in().get(name) or _REGISTERED.get(name)
    return checked_loss(name, known.policy_loss) if known and known.policy_loss else POLICY_LOSSES[loss_type].function


_LOADED: dict[str, str] = {}
"""Path of a plugin -> hash of the text that this process has run."""


def load_plugins(files: Sequence[str]) -> dict[str, str]:
    """Run each file once in this process; returns a hash of each by its path.

    Raises ConfigError for a file that is not there, or that raises: with its line, and what to do.
    """
    for name in files:
        if name not in _LOADED:
            _LOADED[name] = _load(Path(name))
    return {name: _LOADED[name] for name in files}


def _load(file: Path) -> str:
    if not file.is_file():
        what = "is a directory, not a file" if file.is_dir() else "no such file"
        raise ConfigError(
            f"train.plugins: {what}: {file}: name a Python file that calls slurm_rlhf.register_algorithm(...)"
        )
    text = file.read_bytes()
    run_file(file, "train.plugins", ConfigError, ". Correct the file, or take it out of train.plugins")
    return hashlib.sha256(text).hexdigest()[:16]


def changed_plugins(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say which plugins differ from those that a checkpoint was written with; nothing if none does.

    A plugin that was only moved is the same one.
    """
    old, new = ({Path(name).name: digest for name, digest in each.items()} for each in (before, now))
    changes = [f"{name} has changed" for name in old if new.get(name, old[name]) != old[name]]
    changes += [f"{name} is gone" for name in old if name not in new]
    return changes + [f"{name} is new" for name in new if name not in old]


Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask", "clip"]


@dataclass(frozen=True, slots=True)
class CorrectionRule:
    """Say how the ratio of actor to engine becomes the weight of a token: `correction.correct` computes the weights."""

    level: Level
    """The ratio: of the token, of its response (product over the actions), or the geometric mean of its response."""
    mode: Mode
    """truncate: at most `high`. clip: into [low, high]. mask: 0 outside of [low, high], else the token's ratio."""
    low: float
    high: float


PRESETS: dict[str, CorrectionRule] = {
    "tis": CorrectionRule("token", "truncate", 0.0, 2.0),
    "icepop": CorrectionRule("token", "mask", 0.5, 5.0),
    "seq_mask": CorrectionRule("geometric", "mask", 0.99, 1.01),
}
"""Name -> rule.

tis: truncated importance sampling. Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training (2025), fengyao.notion.site/off-policy-rl; the bound of verl and slime.
icepop: drops the tokens on which engine and actor disagree. Source: Ling team, Every Step Evolves (2025), arXiv
2510.18855.
seq_mask: drops the responses on which they disagree on average. Source: Trust region masking for long-horizon LLM
reinforcement learning (2025), arXiv 2512.23075; the bounds of SkyRL. OpenRLHF's seq-mask-tis has [0.5, 5] here.
"""
