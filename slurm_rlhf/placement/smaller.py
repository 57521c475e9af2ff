"""Smaller layouts of a run: the sizes of its roles that its rules allow, the largest first. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slurm_rlhf.config.keys import get
from slurm_rlhf.config.roles import ROLES, RoleSpec, roles_by_slots, running_roles
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.remedies import Change, changed

MOST = 5000
"""Layouts that are looked at."""


@dataclass(frozen=True, slots=True)
class _Size:
    """Is one size of the roles that share their slots."""

    slots: int
    change: Change  # of keys; empty: as the configuration has it


@dataclass(frozen=True, slots=True)
class Smaller:
    """Holds the layouts of a configuration on `nodes` nodes, whatever room these have."""

    groups: tuple[tuple[_Size, ...], ...]  # of roles that share slots: their sizes, the largest first

    @classmethod
    def of(cls, config: Config, nodes: int) -> Smaller:
        """Look up which sizes the rules allow: batches have to divide over the ranks, say."""
        names = roles_by_slots(config, [role.name for role in running_roles(config)])
        return cls(tuple(tuple(_sizes(config, [ROLES[name] for name in group], nodes)) for group in names))

    @property
    def least(self) -> int:
        """Count the slots of the smallest layout; 0: there is none."""
        return sum(sizes[-1].slots for sizes in self.groups) if all(self.groups) else 0

    def changes(self) -> Iterator[Change]:
        """Yield what each layout changes, those that give up fewest slots first, and of these what changes least."""
        if not all(self.groups):
            return
        first = (0,) * len(self.groups)
        queue, seen = [(0, 0, first)], {first}
        for _ in range(MOST):
            if not queue:
                return
            _, _, chosen = heapq.heappop(queue)
            yield {key: value for change in self._chosen(chosen) for key, value in change.change.items()}
            for group, sizes in enumerate(self.groups):
                after = (*chosen[:group], chosen[group] + 1, *chosen[group + 1 :])
                if after[group] < len(sizes) and after not in seen:
                    seen.add(after)
                    heapq.heappush(queue, (self._given_up(after), sum(map(bool, after)), after))

    def _chosen(self, places: Sequence[int]) -> list[_Size]:
        return [sizes[place] for sizes, place in zip(self.groups, places, strict=True)]

    def _given_up(self, places: Sequence[int]) -> int:
        return sum(sizes[0].slots for sizes in self.groups) - sum(size.slots for size in self._chosen(places))


def _sizes(config: Config, roles: list[RoleSpec], nodes: int) -> list[_Size]:
    """List the sizes of roles that share their slots."""
    trainers = [role for role in roles if role.kind != "engine"]
    candidates = _of_trainers(config, trainers, roles, nodes) if trainers else _of_engines(config, roles[0], nodes)
    found = []
    for slots, change in candidates:
        new = {key: value for key, value in change.items() if get(config, key) != value}
        if not new or next(rule_problems(changed(config, new)), None) is None:
            found.append(_Size(slots, new))
    return sorted(found, key=lambda size: (-size.slots, len(size.change)))


def _of_trainers(
    config: Config, trainers: list[RoleSpec], roles: list[RoleSpec], nodes: int
) -> Iterator[tuple[int, Change]]:
    """Yield slots and keys of fewer nodes, of fewer slots on each, and of both."""
    largest = trainers[0].settings(config)
    for count in range(min(largest.num_nodes, nodes), 0, -1):
        for per_node in range(largest.num_gpus_per_node, 0, -1):
            change: Change = {}
            for role in roles:
                if role.kind != "engine":
                    sizes = {"num_nodes": count, "num_gpus_per_node": per_node}
                else:
                    vllm = role.settings(config)
                    engines = count * per_node // vllm.tensor_parallel_size
                    sizes = {"num_engines": engines, "num_nodes": count if vllm.num_nodes else 0}
                change |= {f"{role.group}.{key}": value for key, value in sizes.items()}
            yield count * per_node, change


def _of_engines(config: Config, role: RoleSpec, nodes: int) -> Iterator[tuple[int, Change]]:
    vllm = role.settings(config)
    for engines in range(vllm.num_engines, 0, -1):
        change = {"num_engines": engines, "num_nodes": min(vllm.num_nodes, engines, nodes)}
        yield engines * vllm.tensor_parallel_size, {f"{role.group}.{key}": value for key, value in change.items()}
