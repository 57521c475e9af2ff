"""Promises of the declarations of calls: types, deadlines, and a type checker that knows them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import inspect

import slurm_rlhf
from slurm_rlhf.config.schema_jobs import Timeout
from slurm_rlhf.ranks.follower_links import FollowerCalls
from slurm_rlhf.records import Record
from slurm_rlhf.wire import calls, timeouts
from slurm_rlhf.wire.calls import RankCalls, StacksAnswer
from slurm_rlhf.wire.codec import calls_of

ROLES = [calls.ActorCalls, calls.CriticCalls, calls.ReferenceCalls, calls.RewardCalls, calls.EngineCalls]


def within(kind: Any) -> Iterator[Any]:
    """The types that a type is made of, itself included."""
    yield kind
    match kind:
        case inspect.ListType(item_type=item):
            parts = [item]
        case inspect.DictType(key_type=key, value_type=value):
            parts = [key, value]
        case inspect.UnionType(types=types):
            parts = list(types)
        case inspect.StructType(fields=fields) | inspect.NamedTupleType(fields=fields):
            parts = [field.type for field in fields]
        case _:
            parts = []
    for part in parts:
        yield from within(part)


@pytest.mark.parametrize("role", [*ROLES, FollowerCalls], ids=lambda role: role.__name__)
def test_every_declaration_names_a_deadline_and_types_that_refuse_what_they_do_not_know(role: Any) -> None:
    declared = calls_of(role)
    assert "start" in declared
    for name, spec in declared.items():
        assert spec.name == name
        assert spec.deadline is None or spec.seconds(Timeout()) > 0
        assert spec.argument in (None, int, str) or issubclass(spec.argument, Record)
        for kind in (spec.argument, spec.result):
            for part in within(inspect.type_info(kind)):
                match part:
                    case inspect.StructType(cls=record, forbid_unknown_fields=strict):
                        assert strict, record
                    case inspect.CustomType(cls=custom):
                        assert custom is np.ndarray
                    case _:
                        assert not isinstance(part, inspect.DataclassType | inspect.AnyType), (name, part)


def test_an_implementation_has_the_declarations_of_its_role() -> None:
    class Half(RankCalls):
        def stacks(self) -> StacksAnswer:
            return StacksAnswer("", "")

    assert set(calls_of(Half)) == {"memory", "shutdown", "stacks"}
    with pytest.raises(TypeError, match=r"abstract methods '?memory'?, '?shutdown"):
        Half()  # type: ignore[abstract]


def test_every_time_out_of_the_table_bounds_something() -> None:
    names = {name for name in vars(timeouts) if name.isupper()}
    text = "\n".join(path.read_text(encoding="utf-8") for path in Path(slurm_rlhf.__file__).parent.rglob("*.py"))
    assert {name for name in names if f"timeouts.{name}" not in text} == set()


PROGRAM = """
from slurm_rlhf.wire.calls import ActorCalls, CriticCalls, ForwardBatch, TrainBatch
from slurm_rlhf.wire.handles import RoleHandle
from slurm_rlhf.records import F32

def step(actor: RoleHandle[ActorCalls], forward: ForwardBatch, train: TrainBatch) -> None:
    right: list[F32] = actor.call_all(ActorCalls.logprobs, forward)
    actor.call(0, ActorCalls.logprobs, train)  # wrong record
    actor.call(0, CriticCalls.values, forward)  # a call of another role
    actor.start_each(ActorCalls.train_step, [forward])  # wrong record
    wrong: str = actor.call(0, ActorCalls.train_step, train).result()  # wrong result
"""


def test_a_type_checker_finds_a_wrong_record(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(slurm_rlhf.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(program)]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    lines = {int(line.split(":")[1]) for line in found.splitlines() if ": error: " in line}
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), start=1) if "# " in line}
    assert lines == wrong, found
