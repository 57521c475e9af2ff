"""Which failures a restart can mend, and which end the run: pure rules, and a plan with the parts that it asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_rlhf.cluster.stop import TERM, Reason, StopRequested
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import CallTimeout, RemoteError, RoleDied, RunError
from slurm_rlhf.groups.restarts import RunFailure, Unit, offenders, refusal
from slurm_rlhf.groups.trainer_recovery import Plan, TrainerRecovery
from slurm_rlhf.placement.rank_map import RankMap, place
from slurm_rlhf.placement.topology import Topology, role_sizes

KILLED = "role critic died: rank 0 on n2 (pid {}) was killed by SIGKILL.\nThe last lines of critic.log:\n    none"
CRASHED = (
    "role actor died: rank 1 on n1 (pid {}) ended with status 1.\nThe last lines of actor.log:\n    IndexError: {}"
)


def test_as_many_restarts_as_the_key_says_and_then_all_failures_are_listed() -> None:
    failures = [RunFailure(step, KILLED.format(step)) for step in (2, 2, 9)]
    assert refusal(failures[:1], 1) == ""
    assert refusal(failures, 3) == ""
    assert refusal(failures, 2).splitlines() == [
        "train.max_restarts = 2 restarts are used up. What failed:",
        "  1. step 2: role critic died: rank 0 on n2 (pid 2) was killed by SIGKILL.",
        "  2. step 2: role critic died: rank 0 on n2 (pid 2) was killed by SIGKILL.",
        "  3. step 9: role critic died: rank 0 on n2 (pid 9) was killed by SIGKILL.",
    ]


@pytest.mark.parametrize(
    ("first", "second", "repeats"),
    [
        (RunFailure(3, CRASHED.format(17, "5")), RunFailure(3, CRASHED.format(99, "5")), True),
        (RunFailure(3, CRASHED.format(17, "5")), RunFailure(4, CRASHED.format(99, "5")), False),
        (RunFailure(3, CRASHED.format(17, "5")), RunFailure(3, KILLED.format(99)), False),
        (RunFailure(3, CRASHED.format(17, "a")), RunFailure(3, CRASHED.format(99, "b")), False),
        # A kill from outside is no fault of the step.
        (RunFailure(3, KILLED.format(17)), RunFailure(3, KILLED.format(99)), False),
        (
            RunFailure(3, "role actor died: rank 0 on n1 is lost: x"),
            RunFailure(3, "role actor died: rank 0 on n1 is lost: x"),
            False,
        ),
    ],
)
def test_the_same_failure_of_the_program_in_the_same_step_is_met_once_more_and_no_more(
    first: RunFailure, second: RunFailure, repeats: bool
) -> None:
    assert second.repeats(first) == repeats
    assert bool(refusal([first, second], 9)) == repeats
    assert refusal([first, RunFailure(8, "x"), second], 9) == ""


def test_a_node_on_which_ranks_die_twice_is_an_offender() -> None:
    once = RunFailure(1, "x", ("n1",))
    assert offenders([once, RunFailure(1, "x", ("n2",)), RunFailure(2, "x", ("n1", "n2"))]) == set()
    assert offenders([once, RunFailure(1, "x", ("n2",)), once]) == {"n1"}


@dataclass
class Parts:
    """Facts that a plan asks for: who died, which nodes are silent, what hangs."""

    config: Config = field(default_factory=Config)
    failed_role: Unit | None = None
    silent: set[str] = field(default_factory=set)
    behind: BaseException | None = None
    culprits: list[str] = field(default_factory=list)
    fixed: str = ""
    stopped: Reason | None = None
    spares: int = 0
    engines_alone: bool = True  # each engine can be started again by itself
    moved: dict[int, str] = field(default_factory=dict)  # engine -> node
    unfit: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config.actor.num_nodes, self.config.vllm.num_nodes, self.config.vllm.num_engines = 2, 1, 1
        self.config.algo.kl.init_coef = 0

    @property
    def ranks(self) -> RankMap:
        """Actors on n1 and n2, the critic and the engine each on a node of its own behind them."""
        return place(Topology.uniform(["n1", "n2", "n3", "n4"], 1), role_sizes(self.config))

    def recovery(self) -> TrainerRecovery:
        def blame(error: RunError) -> None:
            if self.failed_role is not None and isinstance(error, CallTimeout):
                raise RoleDied("role actor died: the true cause")

        deserted = {"n4"} if self.moved else set()
        homes = {group.engine: group.node for group in self.ranks.tp_groups} | self.moved
        supervisor: Any = SimpleNamespace(
            blame=blame,
            failed_role=self.failed_role,
            silent_nodes=lambda: set(self.silent),
            engines=SimpleNamespace(node=homes.get, deserted=deserted, alone=self.engines_alone),
        )
        watchdog: Any = SimpleNamespace(behind=lambda error: self.behind, culprits=lambda: self.culprits)
        names = [f"n{number}" for number in range(1, 5 + self.spares)]
        return TrainerRecovery(
            self.config,
            supervisor,
            watchdog,
            SimpleNamespace(fixed=self.fixed, unfit=self.unfit),  # type: ignore[arg-type]
            SimpleNamespace(reason=self.stopped),  # type: ignore[arg-type]
            self.notes.append,
            lambda: Topology.uniform(names, 1),
            "n1",
            lambda config: True,
        )

    def plan(self, error: RunError, step: int = 5) -> Plan:
        return self.recovery().plan(error, step, self.ranks)


DIED = RoleDied("role actor died: rank 1 on n2 (pid 7) was killed by SIGKILL")
ACTOR = Unit("actor", ("n2",))
LOST = Unit("actor", ("n2",), silent=True)


def test_the_trainers_start_again_where_they_were_and_the_engines_stay() -> None:
    parts = Parts(failed_role=ACTOR)
    plan = parts.plan(DIED)
    assert (plan.roles, plan.keeps_engines, plan.left_out) == (("actor", "critic"), True, ())
    assert plan.ranks == parts.ranks
    assert plan.words(3) == "restart 1 of 3 in this job: actor, critic start again; the engines go on"
    assert parts.plan(CallTimeout("late")).why == "role actor died: the true cause"
    raised = RemoteError("train_step failed on actor rank 0: OutOfMemoryError", role="actor", node="n1")
    assert Parts().plan(raised).roles == ("actor", "critic")


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_engines_that_share_the_devices_start_again_with_the_trainers_whoever_died(role: str) -> None:
    parts = Parts(failed_role=Unit(role, ("n2",)), engines_alone=False)
    parts.config.train.colocate_all = True
    plan = parts.recovery().plan(DIED, 5, parts.ranks)
    assert set(plan.roles) == {"actor", "critic", "rollout"}
    assert not plan.keeps_engines


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        (Parts(failed_role=Unit("rollout", ("n4",))), RoleDied("role rollout died"), ""),
        (Parts(), RemoteError("reward.py returned NaN", user_error=True, role="actor"), ""),
        (Parts(), RemoteError("generate failed", role="rollout"), ""),
        (Parts(), RunError("control server"), ""),
        (Parts(failed_role=ACTOR, stopped=TERM), DIED, ""),
        (
            Parts(failed_role=ACTOR, fixed="under MPI no role can"),
            DIED,
            "not restarted in this job: under MPI no role can",
        ),
        (
            Parts(failed_role=Unit("rollout", ("n4",)), engines_alone=False, fixed="under MPI no role can"),
            RoleDied("role rollout died"),
            "not restarted in this job: under MPI no role can",
        ),
    ],
)
def test_what_no_restart_mends_ends_the_run_as_it_did(parts: Parts, error: RunError, said: str) -> None:
    with pytest.raises(type(error)) as ended:
        parts.plan(error)
    assert ended.value is error
    assert (said in "".join(parts.notes)) if said else parts.notes == []


def test_zero_restarts_is_the_end_without_a_word() -> None:
    parts = Parts(failed_role=ACTOR)
    parts.config.train.max_restarts = 0
    with pytest.raises(RoleDied):
        parts.plan(DIED)
    assert parts.notes == []


def test_restarts_end_when_they_are_used_up() -> None:
    parts = Parts(failed_role=ACTOR)
    recovery, ranks = parts.recovery(), parts.ranks
    assert [recovery.plan(DIED, step, ranks).number for step in (1, 4, 4)] == [1, 2, 3]
    with pytest.raises(RoleDied):
        recovery.plan(DIED, 5, ranks)
    assert "train.max_restarts = 3 restarts are used up" in parts.notes[-1]
    assert parts.notes[-1].count("rank 1 on n2") == 4


def test_a_node_that_is_gone_is_left_out_and_a_spare_takes_its_ranks() -> None:
    parts = Parts(failed_role=LOST, silent={"n2"}, spares=1)
    plan = parts.plan(DIED)
    assert [share.node for share in plan.ranks.roles["actor"]] == ["n1", "n5"]
    assert plan.ranks.roles["critic"] == parts.ranks.roles["critic"]
    assert plan.left_out == ("n2",)
    assert plan.keeps_engines
    assert parts.notes == ["left out from now on: n2; n5 takes over"]


def test_a_spare_that_preflight_found_bad_takes_over_nothing_and_the_reason_is_reported() -> None:
    parts = Parts(failed_role=LOST, silent={"n2"}, spares=2, unfit={"n5": "/dev/shm is full"})
    plan = parts.plan(DIED)
    assert [share.node for share in plan.ranks.roles["actor"]] == ["n1", "n6"]
    assert parts.notes == ["left out from now on: n2; n6 takes over; n5 is free and not taken: /dev/shm is full"]
    alone = Parts(failed_role=LOST, silent={"n2"}, spares=1, unfit={"n5": "/dev/shm is full"})
    assert alone.plan(DIED).ranks.used_nodes == ["n1", "n3", "n4"]
    assert alone.notes[0] == (
        "left out from now on: n2; the run goes on with 3 nodes; n5 is free and not taken: /dev/shm is full"
    )


def test_without_a_spare_the_run_goes_on_with_smaller_roles_and_says_which() -> None:
    parts = Parts(failed_role=LOST, silent={"n2"})
    recovery, before = parts.recovery(), parts.ranks
    plan = recovery.plan(DIED, 5, before)
    assert (plan.config.actor.num_nodes, parts.config.actor.num_nodes) == (1, 2)
    assert recovery.config is plan.config
    assert plan.ranks.worlds == {"actor": 1, "critic": 1, "rollout": 1}
    assert plan.ranks.roles["rollout"] == before.roles["rollout"]
    assert (plan.keeps_engines, plan.left_out) == (True, ("n2",))
    assert parts.notes == [
        "left out from now on: n2; the run goes on with 3 nodes",
        "warning: smaller from now on: actor.num_nodes = 1 (it was 2); the metrics differ from those of the full "
        "size, by the order in which sums are taken (1e-5 in fp32)",
    ]


def test_without_a_spare_and_a_smaller_layout_the_run_ends_and_says_what_is_missing() -> None:
    parts = Parts(failed_role=Unit("critic", ("n3",), silent=True), silent={"n2", "n3"})
    with pytest.raises(RoleDied):
        parts.plan(DIED)
    (stated,) = parts.notes
    assert stated.startswith("the run is not restarted in this job: n2, n3 do not answer any more, and no free node")
    assert "the roles do not fit what is left (n1, n4)" in stated
    assert "the smallest that the rules of the configuration allow needs 3 slots" in stated
    assert "Keep a node in reserve: cluster.spares" in stated


def test_engines_that_have_moved_stay_where_they_are_and_the_nodes_they_left_are_not_taken() -> None:
    """The engine has left n4, which is gone, for the first of two spares; then the node of an actor's rank goes."""
    parts = Parts(failed_role=LOST, silent={"n2"}, spares=2, moved={0: "n5"})
    plan = parts.plan(DIED)
    assert [share.node for share in plan.ranks.roles["actor"]] == ["n1", "n6"]
    assert [share.node for share in plan.ranks.roles["rollout"]] == ["n5"]
    assert plan.keeps_engines


def test_a_node_that_kills_ranks_twice_is_left_out_where_another_is_free() -> None:
    parts = Parts(failed_role=ACTOR, spares=1)
    recovery = parts.recovery()
    first = recovery.plan(DIED, 2, parts.ranks)
    assert first.ranks == parts.ranks
    second = recovery.plan(DIED, 3, first.ranks)
    assert [share.node for share in second.ranks.roles["actor"]] == ["n1", "n5"]
    lonely, critic = Parts(failed_role=ACTOR), Unit("critic", ("n3",))
    lonely.config.train.max_restarts = 4
    recovery = lonely.recovery()
    for step, died in enumerate((ACTOR, ACTOR, critic, critic), start=2):  # without both no layout is left
        recovery.supervisor.failed_role = died  # type: ignore[misc]
        assert recovery.plan(DIED, step, lonely.ranks).ranks == lonely.ranks


def test_a_hang_of_trainers_is_restarted_here_and_one_of_the_reward_function_is_not() -> None:
    asked = StopRequested(Reason("a hang in phase update of step 5", True, 1), saved=False)
    assert Parts(behind=asked, culprits=["actor"]).plan(DIED).roles == ("actor", "critic")
    assert "rollout" in Parts(behind=asked, culprits=["actor", "rollout"]).plan(DIED).roles
    with pytest.raises(StopRequested):
        Parts(behind=asked, culprits=["conductor"]).plan(DIED)
