"""Restarts a run when a trainer dies: all roles but the engines start again in the same job, from a checkpoint.

`TrainerRecovery.plan` decides, by `restarts` and `placement.replacement`; the conductor does it. Engines
that live stay as they are and get the weights of the new actor. The run ends all the same by a stop that was asked for,
by a user's error, by a failure of the program itself that comes twice in the same step, and after train.max_restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slurm_rlhf.cluster.stop import Stop, StopRequested
from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.roles import ROLES, ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError, RemoteError, RoleDied, RunError, shortened
from slurm_rlhf.groups.restarts import RunFailure, Unit, offenders, refusal, roles_again
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.groups.watchdog import Watchdog
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.placement.replacement import Fits, Replacement, passed_over, replaced, with_engine_on
from slurm_rlhf.placement.topology import Topology


@dataclass(frozen=True, slots=True)
class Plan:
    """Says which roles start again, and where."""

    why: str
    roles: tuple[str, ...]
    ranks: RankMap
    config: Config  # configuration from now on
    number: int  # number of this restart, from 1
    left_out: tuple[str, ...] = ()  # nodes that were left out since the start of the run

    @property
    def keeps_engines(self) -> bool:
        return ROLLOUT in self.ranks.roles and ROLLOUT not in self.roles

    def words(self, most: int) -> str:
        """Describe the restart; `most`: number of restarts that are allowed."""
        engines = "; the engines go on" if self.keeps_engines else ""
        return f"restart {self.number} of {most} in this job: {', '.join(self.roles)} start again{engines}"


@dataclass(slots=True)
class TrainerRecovery:
    """Decides for one start of a run whether and how it goes on."""

    config: Config
    supervisor: Supervisor
    watchdog: Watchdog
    launcher: Launcher
    stop: Stop
    note: Callable[[str], None]
    allocation: Callable[[], Topology]  # returns nodes and slots of the whole allocation
    here: str  # node of this process
    fits: Fits  # tells whether a configuration fits the memory of the GPUs
    failures: list[RunFailure] = field(default_factory=list, init=False)
    left_out: set[str] = field(default_factory=set, init=False)

    def plan(self, error: RunError, step: int, ranks: RankMap) -> Plan:
        """Plan how the run goes on after `error` in step `step`. Raises what ends it, after a note that says why."""
        cause = self._cause(error)
        broken = self._broken(cause)
        most = self.config.train.max_restarts
        if broken is None or not most or self.stop.reason is not None:
            raise cause from (None if cause is error else error)
        self.failures.append(RunFailure(step, str(cause), broken.nodes))
        try:
            if self.launcher.fixed:
                raise PlacementError(self.launcher.fixed)
            if why := refusal(self.failures, most):
                raise PlacementError(why)
            ranks = self._with_engines(ranks)
            moved = self._moved(ranks, broken)
            self.config = changed(self.config, moved.change) if moved.change else self.config
        except PlacementError as refused:
            self.note(f"the run is not restarted in this job: {refused}")
            raise cause from (None if cause is error else error)
        roles, number = self._roles(ranks, moved.ranks, broken), len(self.failures)
        return Plan(str(cause), roles, moved.ranks, self.config, number, tuple(self.left_out))

    def _cause(self, error: RunError) -> BaseException:
        """Return the error that really broke the run."""
        if (hung := self.watchdog.behind(error)) is not None:
            return hung
        try:
            self.supervisor.blame(error)
        except RunError as known:
            return known
        return error

    def _broken(self, cause: BaseException) -> Unit | None:
        """Return the role that failed with `cause`, if a restart can help."""
        if isinstance(cause, StopRequested):  # a hang, with train.on_hang = restart
            roles = self.watchdog.culprits()
            known = bool(roles) and all(role in ROLES for role in roles)
            return Unit(ROLLOUT if ROLLOUT in roles else roles[0]) if known else None
        found = None
        if isinstance(cause, RoleDied):
            found = self.supervisor.failed_role
        elif isinstance(cause, RemoteError) and not cause.user_error and cause.role:
            found = Unit(cause.role, (cause.node,))
        return None if found is None or (self._engines_alone and ROLES[found.role].kind == "engine") else found

    @property
    def _engines_alone(self) -> bool:
        """Tell whether engines start again alone: one that ends the run has used up its restarts."""
        return self.supervisor.engines is not None and self.supervisor.engines.alone

    def _moved(self, ranks: RankMap, broken: Unit) -> Replacement:
        """Place the ranks anew if nodes are gone, or ranks died on them twice. Raises PlacementError."""
        as_it_is = Replacement(ranks)
        if len(ranks.used_nodes) == 1:
            return as_it_is
        gone = self.supervisor.silent_nodes() - {self.here} if broken.silent else set()
        bad = (gone | offenders(self.failures) | self.left_out) - {self.here}
        if not bad & set(ranks.used_nodes):
            return as_it_is
        engines = self.supervisor.engines
        deserted = engines.deserted - set(ranks.used_nodes) if engines is not None else set()
        try:
            moved = replaced(ranks, bad | deserted, self.allocation(), self.config, self.fits, self.launcher.unfit)
        except PlacementError as error:
            if not gone:
                return as_it_is  # no other node is free, and all nodes of the map answer
            does = "does" if len(gone) == 1 else "do"
            raise PlacementError(f"{shortened(sorted(gone))} {does} not answer any more, and {error}") from None
        if moved.change and not gone:
            return as_it_is
        self.left_out |= bad
        passed = f"; {passed_over(self.launcher.unfit)}" if self.launcher.unfit else ""
        self.note(f"left out from now on: {', '.join(sorted(bad))}; {_changes(ranks, moved.ranks)}{passed}")
        if moved.change:
            self.note(
                f"warning: smaller from now on: {moved.words(self.config)}; the metrics differ from those of the "
                "full size, by the order in which sums are taken (1e-5 in fp32)"
            )
        return moved

    def _with_engines(self, ranks: RankMap) -> RankMap:
        """Return the map with the engines where they are: some have moved by themselves."""
        if (engines := self.supervisor.engines) is not None:
            for group in ranks.tp_groups:
                if (node := engines.node(group.engine)) != group.node:
                    ranks = with_engine_on(ranks, group.role, group.engine, node)
        return ranks

    def _roles(self, ranks: RankMap, moved: RankMap, broken: Unit) -> tuple[str, ...]:
        """List the roles that start again; engines have to if they share devices, or cannot move alone."""
        before, after = (_places(each) for each in (ranks, moved))
        stay = [engine for engine, (node, _) in before.items() if node not in self.left_out]
        moves = before.keys() != after.keys() or any(before[engine] != after[engine] for engine in stay)
        engines_too = self.config.train.colocate_all or moves or (before != after and not self._engines_alone)
        return roles_again(moved.roles, broken.role, engines_too)


def _places(ranks: RankMap) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Return engine -> its node and slots."""
    return {group.engine: (group.node, group.gpus) for group in ranks.tp_groups}


def _changes(before: RankMap, after: RankMap) -> str:
    fresh = sorted(set(after.used_nodes) - set(before.used_nodes))
    count = len(after.used_nodes)
    return f"{', '.join(fresh)} takes over" if fresh else f"the run goes on with {count} node{'s' * (count > 1)}"
