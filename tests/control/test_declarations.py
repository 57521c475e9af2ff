"""What is declared of calls: types that travel, deadlines that exist, and a type checker that finds a wrong record."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

import slurm_rlhf
from slurm_rlhf.config.schema_cluster import Timeout
from slurm_rlhf.control import calls
from slurm_rlhf.control.calls import RankCalls, StacksAnswer
from slurm_rlhf.control.codec import decode, encode
from slurm_rlhf.control.declarations import call, calls_of, read, reader, spec_of
from slurm_rlhf.errors import RunError, WireError
from slurm_rlhf.records import Experience, ParameterSpec, Sampling, Trajectory, VersionSpan, pack

ROLES = [calls.ActorCalls, calls.CriticCalls, calls.ReferenceCalls, calls.RewardCalls, calls.EngineCalls]


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.__name__)
def test_every_declaration_names_a_deadline_and_types_that_travel(role: Any) -> None:
    declared = calls_of(role)
    assert {"about", "shutdown", "start"} < set(declared)
    for name, spec in declared.items():
        assert spec.name == name
        assert spec.seconds(Timeout()) > 0
        assert spec.argument is None or dataclasses.is_dataclass(spec.argument), name
        reader(spec.result)
        if spec.argument is not None:
            reader(spec.argument)


def test_an_implementation_has_the_declarations_of_its_role() -> None:
    class Half(RankCalls):
        def about(self) -> None:
            return None

        def stacks(self) -> StacksAnswer:
            return StacksAnswer("", "")

    assert set(calls_of(Half)) == {"about", "memory", "shutdown", "stacks"}
    with pytest.raises(TypeError, match=r"abstract methods '?memory'?, '?shutdown"):
        Half()  # type: ignore[abstract]


def test_what_is_no_declaration_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'forwards' is no deadline; the fields of Timeout: .*forward,"):
        call(deadline="forwards")
    with pytest.raises(RunError, match="is not declared as a call"):
        spec_of(Timeout.__init__)

    class Two(Protocol):
        @call(deadline="forward")
        def add(self, a: int, b: int) -> int: ...

        @call(deadline=None)
        def drop(self) -> None: ...

    assert spec_of(Two.drop).argument is None
    with pytest.raises(RunError, match="drop has no answer to wait for"):
        spec_of(Two.drop).seconds(Timeout())
    with pytest.raises(RunError, match=r"Two\.add has 2 arguments; a call has one at most"):
        spec_of(Two.add)


@dataclasses.dataclass(frozen=True)
class Inner:
    name: str
    sizes: list[int]


@dataclasses.dataclass
class Outer:
    number: float
    inner: Inner
    others: dict[str, Inner]
    array: NDArray[np.float32]
    anything: NDArray[Any]
    way: Literal["a", "b"]
    perhaps: Inner | None
    flags: list[bool]
    specs: list[ParameterSpec]


GOOD: dict[str, Any] = {
    "number": 1,
    "inner": {"name": "x", "sizes": [1, 2]},
    "others": {"y": {"name": "y", "sizes": []}},
    "array": np.zeros(2, np.float32),
    "anything": np.zeros(2, np.int8),
    "way": "a",
    "perhaps": None,
    "flags": [True],
    "specs": [["w", [2, 3], "float32"]],
}


def test_nested_records_arrive() -> None:
    record = read(Outer, decode(encode(GOOD)), "it")
    assert (record.number, type(record.number)) == (1.0, float)
    assert record.inner == Inner("x", [1, 2])
    assert record.others == {"y": Inner("y", [])}
    assert record.specs == [ParameterSpec("w", [2, 3], "float32")]
    again = read(Outer, decode(encode(record)), "it")
    assert (again.inner, again.others, again.specs) == (record.inner, record.others, record.specs)
    assert again.array.dtype == np.float32
    assert read(Outer, GOOD | {"perhaps": GOOD["inner"]}, "it").perhaps == record.inner


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"more": 1}, "it is no Outer: more is unknown; its fields: anything, "),
        ({"number": "1"}, r"it\.number must be a float, and is '1' \(str\)"),
        ({"number": True}, r"it\.number must be a float"),
        ({"inner": {"name": "x"}}, r"it\.inner is no Inner: sizes is missing; its fields: name, sizes"),
        ({"inner": {"name": b"x", "sizes": []}}, r"it\.inner\.name must be of type str"),
        ({"inner": {"name": "x", "sizes": [1, True]}}, r"it\.inner\.sizes\[1\] must be of type int"),
        ({"others": {"y": {"name": 3, "sizes": []}}}, r"it\.others\['y'\]\.name must be of type str"),
        ({"others": [1]}, r"it\.others must be a dict"),
        ({"array": np.zeros(2)}, r"it\.array must be an array of float32, and is an array of float64"),
        ({"anything": [1]}, r"it\.anything must be an array, and is "),
        ({"way": "c"}, r"it\.way must be one of 'a', 'b', and is 'c'"),
        ({"perhaps": {"name": "x", "sizes": ["1"]}}, r"it\.perhaps\.sizes\[0\] must be of type int"),
        ({"flags": [1]}, r"it\.flags\[0\] must be of type bool"),
        ({"specs": [["w", [2]]]}, r"it\.specs\[0\] must be a ParameterSpec of 3 values"),
        ({"specs": [["w", [2, "3"], "float32"]]}, r"it\.specs\[0\]\.shape\[1\] must be of type int"),
    ],
    ids=str,
)
def test_everything_else_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    with pytest.raises(WireError, match=f"^{told}"):
        read(Outer, GOOD | change, "it")


def test_a_type_that_cannot_travel_is_a_mistake_of_the_declaration() -> None:
    for kind in (set[int], tuple[int, ...], object, Path, int | str):
        with pytest.raises(TypeError, match="cannot travel"):
            reader(kind)


def test_records_of_the_run_arrive_as_they_were() -> None:
    trajectory = Trajectory(
        7,
        1,
        np.arange(4, dtype=np.int32),
        np.arange(2, dtype=np.int32),
        np.array([-0.5, -1.5], np.float32),
        np.array([True, False]),
        "stop",
        "4",
        [VersionSpan(0, 1, 3), VersionSpan(1, 2, 4)],
    )
    batch = calls.TrainBatch(pack([trajectory] * 3, [1.0, 2.0, 3.0]), [[0, 1], [2]], 6.0)
    found = read(calls.TrainBatch, decode(encode(batch)), "batch")
    assert (found.micro, found.denominator) == (batch.micro, 6.0)
    assert isinstance(found.experience, Experience)
    assert found.experience.rewards.tolist() == [1.0, 2.0, 3.0]
    assert found.experience.columns["rollout_logprobs"].tobytes() == np.tile(trajectory.rollout_logprobs, 3).tobytes()
    answer = calls.GenerateAnswer([calls.Sampled(5, trajectory)], calls.EngineLoad(tokens=3))
    back = read(calls.GenerateAnswer, decode(encode(answer)), "answer")
    assert back.found[0].position == 5
    assert back.found[0].trajectory.versions == trajectory.versions
    assert back.load == answer.load
    assert read(Sampling, decode(encode(Sampling(stop=["."]))), "how") == Sampling(stop=["."])


PROGRAM = """
from slurm_rlhf.control.calls import ActorCalls, CriticCalls, ForwardBatch, TrainBatch
from slurm_rlhf.control.handles import RoleHandle
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
