"""The table of roles: what a row is enough for, and which roles a run starts by its algorithm and the KL."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from types import ModuleType

import numpy as np
import pytest
from model_configs import SHAPES

from slurm_rlhf.algorithms import registry
from slurm_rlhf.algorithms.registry import Algorithm, register_algorithm
from slurm_rlhf.config.check import check
from slurm_rlhf.config.keys import get
from slurm_rlhf.config.roles import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD,
    ROLES,
    ROLLOUT,
    RoleSpec,
    colocations,
    roles_by_slots,
    running_roles,
)
from slurm_rlhf.config.schema import Config, Ref, Train
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.nodes.environment import role_environment
from slurm_rlhf.nodes.mpi.assignment import Launched, Process, place_processes
from slurm_rlhf.placement.memory import account
from slurm_rlhf.placement.model_shape import shape_of
from slurm_rlhf.placement.rank_map import RankMap, draw, place
from slurm_rlhf.placement.topology import Topology, role_sizes
from slurm_rlhf.ranks import rank_process as worker_main
from slurm_rlhf.records import Experience
from slurm_rlhf.run.gpu_account import StepFlops

TOY = Algorithm("toy", lambda inputs: (inputs.rewards, None), min_samples_per_prompt=2)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run by an algorithm without a critic, and without KL."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_algorithm(TOY)
    config = Config()
    config.algo.advantage.estimator = "toy"
    config.algo.kl.init_coef = 0.0
    config.rollout.n_samples_per_prompt = 4
    return config


def names(config: Config) -> list[str]:
    return [role.name for role in running_roles(config)]


def placed(config: Config, gpus: int = 8) -> RankMap:
    return place(Topology.uniform(["a"], gpus), role_sizes(config), colocations(config))


def problems(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_roles_follow_from_the_record_and_the_kl(config: Config) -> None:
    assert names(config) == [ACTOR, ROLLOUT]
    config.algo.kl.init_coef = 0.01
    assert names(config) == [ACTOR, REFERENCE, ROLLOUT]
    config.algo.kl.init_coef = 0.0
    register_algorithm(replace(TOY, needs_reference=True, needs_critic=True))
    assert names(config) == [ACTOR, CRITIC, REFERENCE, ROLLOUT]
    config.algo.advantage.estimator = "gae"
    assert names(config) == [ACTOR, CRITIC, ROLLOUT]


def test_without_a_critic_nothing_is_reckoned_for_it(config: Config) -> None:
    shape = shape_of(SHAPES["7B"])
    rows = account(config, {ACTOR: shape, ROLLOUT: shape}, 80 << 30).rows
    assert [row.role for row in rows] == [ACTOR, ROLLOUT]
    lengths = np.array([4, 4], dtype=np.int32)
    tokens = np.zeros(16, dtype=np.int32)
    experience = Experience(lengths, lengths, tokens, np.ones(8, dtype=np.bool_), np.zeros(2, dtype=np.float32))
    config.rollout.n_samples_per_prompt = 2
    alone, both = StepFlops(config, {ACTOR: shape}), StepFlops(config, {ACTOR: shape, CRITIC: shape})
    assert 0 < alone.update(experience, True) < both.update(experience, True)
    assert 0 < alone.others(experience) < both.others(experience)
    assert alone.update(experience, False) == 0


def test_slots_of_a_critic_that_does_not_run_are_the_others_alone(config: Config) -> None:
    config.reward.model_name_or_path = "/models/reward"
    config.train.colocate_critic_reward = True
    assert placed(config, gpus=3).worlds == {ACTOR: 1, REWARD: 1, ROLLOUT: 1}
    config.train.colocate_critic_reward, config.train.colocate_all = False, True
    config.critic.num_gpus_per_node = 7  # counts for nothing
    assert placed(config, gpus=1).worlds == {ACTOR: 1, REWARD: 1, ROLLOUT: 1}
    assert "critic" not in problems(config)


def test_the_rules_of_a_critic_hold_where_one_runs(config: Config) -> None:
    config.critic.num_gpus_per_node = 7
    assert "critic.num_gpus_per_node" not in problems(config)
    config.algo.advantage.estimator = "gae"
    assert "does not divide over critic.num_nodes * critic.num_gpus_per_node = 1 * 7 = 7 ranks" in problems(config)


def test_an_unknown_algorithm_is_shown_where_all_plugins_are_there(config: Config) -> None:
    config.algo.advantage.estimator = "tox"
    assert "algo.advantage.estimator = 'tox' is unknown; did you mean toy? (valid: " in problems(config)
    config.train.plugins = ["/no/such/file.py"]
    stated = problems(config)
    assert "train.plugins: no such file: /no/such/file.py: name a Python file" in stated
    assert "is unknown" not in stated


@pytest.mark.parametrize("estimator", sorted(registry.built_in()))
@pytest.mark.parametrize("coef", [0.0, 0.01])
def test_every_estimator_starts_the_roles_that_it_computes_with(config: Config, estimator: str, coef: float) -> None:
    """Only gae has values, none needs a reference; whoever reads roles, GPUs or memory agrees with the record."""
    config.algo.advantage.estimator, config.algo.kl.init_coef = estimator, coef
    wanted = [ACTOR, *([CRITIC] if estimator == "gae" else []), *([REFERENCE] if coef else []), ROLLOUT]
    assert names(config) == wanted
    ranks = placed(config)
    assert list(ranks.worlds) == wanted
    assert list(role_environment(config, ranks, cpus=8)) == wanted
    shape = shape_of(SHAPES["7B"])
    assert [row.role for row in account(config, dict.fromkeys(wanted, shape), 80 << 30).rows] == wanted
    processes = [Process("n1", (cpu,), ()) for cpu in range(len(wanted))]
    mpi = place_processes(config, processes, Launched("mpirun", "OMPI_COMM_WORLD_SIZE", len(wanted), 0))
    assert [assignment.role for assignment in mpi.assignments] == wanted
    config.train.colocate_all = True
    assert placed(config, gpus=1).worlds == dict.fromkeys(wanted, 1)
    assert [role.name for role in running_roles(config) if role.kind == "trained"] == wanted[: 1 + (estimator == "gae")]


# --- roles ------------------------------------------------------------------------------------------------------------


JUDGE = "judge"


@dataclass(slots=True)
class JudgeGroup(Ref):
    model_name_or_path: str = "/models/judge"


@dataclass(slots=True)
class TrainWithJudge(Train):
    colocate_actor_judge: bool = False


@dataclass(slots=True)
class ConfigWithJudge(Config):
    judge: JudgeGroup = field(default_factory=JudgeGroup)
    train: TrainWithJudge = field(default_factory=TrainWithJudge)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> ConfigWithJudge:
    """A second frozen model: a row, its worker's module, its config group, and nothing else."""
    module = ModuleType("judge_worker")
    module.JudgeRole = lambda *arguments: ("judge", *arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "judge_worker", module)
    row = RoleSpec(
        JUDGE,
        group="judge",
        letter="J",
        worker="judge_worker:JudgeRole",
        kind="frozen",
        model_keys=("judge.model_name_or_path",),
        colocates=ACTOR,
    )
    monkeypatch.setitem(ROLES, JUDGE, row)
    return ConfigWithJudge()


def test_a_new_role_is_placed_and_drawn(judged: ConfigWithJudge) -> None:
    judged.judge.num_gpus_per_node = 2
    ranks = placed(judged)
    assert ranks.worlds == {ACTOR: 1, CRITIC: 1, REFERENCE: 1, ROLLOUT: 1, JUDGE: 2}
    assert "J0    J1" in draw(ranks)
    assert "J judge: 2 ranks on 1 node" in draw(ranks)


def test_a_new_role_shares_slots_by_its_key(judged: ConfigWithJudge) -> None:
    assert ROLES[JUDGE].colocation_key == "train.colocate_actor_judge"
    judged.train.colocate_actor_judge = True
    assert frozenset({ACTOR, JUDGE}) in colocations(judged)
    assert "A0+J0" in draw(placed(judged, 4))
    names = [role.name for role in running_roles(judged)]
    assert roles_by_slots(judged, names) == [[ACTOR, JUDGE], [CRITIC], [REFERENCE], [ROLLOUT]]


def test_a_new_role_gets_an_environment_and_its_share_of_the_cpus(judged: ConfigWithJudge) -> None:
    environment = role_environment(judged, placed(judged), cpus=8)
    # Four trainers compute side by side, an engine alone.
    threads = {role: nodes["a"]["OMP_NUM_THREADS"] for role, nodes in environment.items()}
    assert threads == {ACTOR: "2", CRITIC: "2", REFERENCE: "2", JUDGE: "2", ROLLOUT: "8"}


def test_a_new_role_has_a_row_of_memory(judged: ConfigWithJudge) -> None:
    models = dict.fromkeys(ROLES, shape_of(SHAPES["7B"]))
    rows = {row.name: row for row in account(judged, models, 80 << 30).rows}
    assert rows[JUDGE].ranks == 1
    assert rows[JUDGE].role == JUDGE
    assert rows[JUDGE].terms[0][0] == "parameters"


def test_a_new_role_is_checked(judged: ConfigWithJudge) -> None:
    judged.judge.zero_stage = 2
    with pytest.raises(ConfigError, match=r"judge\.zero_stage takes 0 or 3, got 2"):
        check(judged)


def test_a_new_role_is_started_by_the_workers_main(
    judged: ConfigWithJudge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["main", "--role=judge"])
    with pytest.raises(SystemExit):
        worker_main.main()
    problem = capsys.readouterr().err
    assert "invalid choice" not in problem
    assert "--run_dir" in problem
    assert ROLES[JUDGE].load_worker()(1) == ("judge", 1)


def test_every_row_names_a_group_keys_and_another_role() -> None:
    config = Config()
    names = {field.name for field in fields(config)}
    for name, role in ROLES.items():
        assert role.name == name
        assert role.group in names
        assert all(get(config, key) == "" for key in role.model_keys)
        assert role.settings(config).num_nodes is not None
        if role.colocates:
            assert role.colocates in ROLES
            assert get(config, role.colocation_key) is False
    assert len({role.letter for role in ROLES.values()}) == len(ROLES)


def test_the_critic_starts_from_the_reward_model() -> None:
    config = Config()
    assert ROLES[CRITIC].model(config) == ("critic.model_name_or_path", "")
    config.actor.model_name_or_path = "/a"
    assert ROLES[CRITIC].model(config)[1] == "/a"
    config.reward.model_name_or_path = "/r"
    assert ROLES[CRITIC].model(config) == ("reward.model_name_or_path", "/r")
    config.critic.model_name_or_path = "/c"
    assert ROLES[CRITIC].model(config) == ("critic.model_name_or_path", "/c")
    assert [role.name for role in running_roles(config)] == [ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT]
