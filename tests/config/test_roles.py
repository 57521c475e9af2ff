"""The table of roles: a row is all that the rooms around the workers need to know of a role."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from types import ModuleType

import pytest
from model_configs import SHAPES

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
from slurm_rlhf.groups.role_environment import role_environment
from slurm_rlhf.placement.memory import account
from slurm_rlhf.placement.model_shape import shape_of
from slurm_rlhf.placement.rank_map import RankMap, draw, place
from slurm_rlhf.placement.topology import Topology, role_sizes
from slurm_rlhf.ranks import rank_process as worker_main

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
def config(monkeypatch: pytest.MonkeyPatch) -> ConfigWithJudge:
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


def placed(config: Config, gpus: int = 8) -> RankMap:
    return place(Topology.uniform(["a"], gpus), role_sizes(config), colocations(config))


def test_a_new_role_is_placed_and_drawn(config: ConfigWithJudge) -> None:
    config.judge.num_gpus_per_node = 2
    ranks = placed(config)
    assert ranks.worlds == {ACTOR: 1, CRITIC: 1, REFERENCE: 1, ROLLOUT: 1, JUDGE: 2}
    assert "J0    J1" in draw(ranks)
    assert "J judge: 2 ranks on 1 node" in draw(ranks)


def test_a_new_role_shares_slots_by_its_key(config: ConfigWithJudge) -> None:
    assert ROLES[JUDGE].colocation_key == "train.colocate_actor_judge"
    config.train.colocate_actor_judge = True
    assert frozenset({ACTOR, JUDGE}) in colocations(config)
    assert "A0+J0" in draw(placed(config, 4))
    names = [role.name for role in running_roles(config)]
    assert roles_by_slots(config, names) == [[ACTOR, JUDGE], [CRITIC], [REFERENCE], [ROLLOUT]]


def test_a_new_role_gets_an_environment_and_its_share_of_the_cpus(config: ConfigWithJudge) -> None:
    environment = role_environment(config, placed(config), cpus=8)
    # Four trainers compute side by side, an engine alone.
    threads = {role: nodes["a"]["OMP_NUM_THREADS"] for role, nodes in environment.items()}
    assert threads == {ACTOR: "2", CRITIC: "2", REFERENCE: "2", JUDGE: "2", ROLLOUT: "8"}


def test_a_new_role_has_a_row_of_memory(config: ConfigWithJudge) -> None:
    models = dict.fromkeys(ROLES, shape_of(SHAPES["7B"]))
    rows = {row.name: row for row in account(config, models, 80 << 30).rows}
    assert rows[JUDGE].ranks == 1
    assert rows[JUDGE].role == JUDGE
    assert rows[JUDGE].terms[0][0] == "parameters"


def test_a_new_role_is_checked(config: ConfigWithJudge) -> None:
    config.judge.zero_stage = 2
    with pytest.raises(ConfigError, match=r"judge\.zero_stage takes 0 or 3, got 2"):
        check(config)


def test_a_new_role_is_started_by_the_workers_main(
    config: ConfigWithJudge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    config.reward.model_name_or_path = "/r"
    assert ROLES[CRITIC].model(config) == ("reward.model_name_or_path", "/r")
    config.critic.model_name_or_path = "/c"
    assert ROLES[CRITIC].model(config) == ("critic.model_name_or_path", "/c")
    assert [role.name for role in running_roles(config)] == [ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT]
