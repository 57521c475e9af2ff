"""Whatever a user, a file, Slurm or the network says: a result or one of our own errors, never a traceback or a hang.

10,700 inputs a run, the same each time; `COUNTS` says how many of each kind. The control port on a real socket is
attacked in tests/runs/test_run_training.py.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slurm_rlhf.cluster.slurm_environment import expand, expand_counts, per_node, read_slurm, slurm_order
from slurm_rlhf.config.keys import all_keys
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.rules import rule_problems
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.data.rows import read_rows
from slurm_rlhf.errors import DataError, SlurmRlhfError
from slurm_rlhf.wire.codec import decode, encode
from slurm_rlhf.wire.messages import CallFailure, Envelope, unpack

pytestmark = pytest.mark.slow

COUNTS = {"toml": 1500, "values": 800, "overrides": 1700, "jsonl": 2200, "nodes": 2200, "slurm": 800, "wire": 1500}
LIMIT_S = 10.0
"""Limit for one input, which takes a thousandth of that."""


def fuzz(name: str) -> Callable[[Any], Any]:
    return settings(
        max_examples=COUNTS[name],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """An error of the project's own may be raised, with a text; nothing may take LIMIT_S."""

    def late(*_: object) -> None:
        raise AssertionError(f"no end within {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    except SlurmRlhfError as error:
        if not str(error).strip():
            raise AssertionError(f"{error!r} says nothing") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# --- configuration ----------------------------------------------------------------------------------------------------

KEYS = sorted(all_keys())
WORDS = st.sampled_from(
    [*KEYS, "actor", "algo.kl", "actor.adam.lr", "pretrain", "trainer.nnodes", "x", ".", "a..b", ""]
)
ODD = st.sampled_from(["", "-1", "1e999", "nan", "inf", "0x10", "1_000", "true", "TRUE", "[", "[]", "[1,2]", "a,b", "é",
                       "\0", "9" * 400, "--", "\ud800", "1.5", "null", "{}", "'", '"', "a\nb", "-0", "٣"])  # fmt: skip
TEXT = st.text(st.characters(categories=None), max_size=12)


@given(st.binary(max_size=80) | st.text(max_size=80).map(lambda text: text.encode("utf-8", "surrogatepass")))
@fuzz("toml")
def test_a_file_of_any_bytes(folder: Path, content: bytes) -> None:
    file = folder / "any.toml"
    file.write_bytes(content)
    with ours():
        load_config(file)


TOML_VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(WORDS.filter(bool), TOML_VALUES, min_size=1, max_size=4))
@fuzz("values")
def test_keys_with_any_values(folder: Path, table: dict[str, Any]) -> None:
    """A configuration that loads is written and read back as the same, and its rules can be asked."""
    bare = [key for key in table if all(key.split("."))]
    file = folder / "values.toml"
    for keys in ([json.dumps(key) for key in table], bare):
        lines = [f"{key} = {json.dumps(table[key.strip(chr(34))])}" for key in keys]
        file.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        with ours():
            config = load_config(file)
            list(rule_problems(config))
            tomllib.loads(dump_toml(config))


@given(st.lists(st.tuples(WORDS, ODD | TEXT, st.booleans()), min_size=1, max_size=3))
@example([("rollout.batch_size", "9" * 400, False)])
@example([("rm.dataset", "9" * 400, False)])
@example([("train.plugins", "9" * 400, False)])
@fuzz("overrides")
def test_any_words_on_the_command_line(words: list[tuple[str, str, bool]]) -> None:
    line = [part for key, value, joined in words for part in ([f"--{key}={value}"] if joined else [f"--{key}", value])]
    with ours():
        list(rule_problems(load_config(None, line)))


# --- data -------------------------------------------------------------------------------------------------------------

ROWS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
LINES = st.one_of(
    st.binary(max_size=30),
    ROWS.map(lambda row: json.dumps(row).encode()),
    ROWS.map(lambda row: json.dumps(row)[:-1].encode()),
    st.sampled_from([b"", b" ", b"{", b"[" * 5000, b'{"a": ' * 3000, b"\xef\xbb\xbf{}", b'{"a":1}{"b":2}', b"NaN",
                     b"1" * 5000, b'{"a": ' + b"1" * 5000 + b"}"]),
)  # fmt: skip


@given(st.lists(LINES, max_size=4), st.sampled_from([b"\n", b"\r\n", b"\r"]))
@fuzz("jsonl")
def test_lines_of_any_kind(folder: Path, lines: list[bytes], end: bytes) -> None:
    file = folder / "rows.jsonl"
    file.write_bytes(end.join(lines))
    with ours():
        for _, row in read_rows(file):
            assert isinstance(row, dict | DataError)


# --- Slurm ------------------------------------------------------------------------------------------------------------

NODES = st.text("ab0129-,[]() x*:_.", max_size=25) | TEXT
COUNT = st.text("0123456789(x),:-*", max_size=15) | TEXT
HUGE = st.sampled_from(
    ["n[0-999999999999]", "n[1-9][1-9][1-9][1-9][1-9][1-9][1-9]", "[" * 1000, "n[9-1]", "1(x99999999)"]
)


@given(NODES | HUGE, COUNT | HUGE)
@fuzz("nodes")
def test_node_lists_and_counts(nodes: str, counts: str) -> None:
    with ours():
        names = expand(nodes)
        assert sorted(slurm_order(names)) == sorted(names)
    # ValueError is what they promise: their callers put the variable or the option before it.
    with ours(), contextlib.suppress(ValueError):
        per_node(expand_counts(counts), 3)


VARIABLES = st.sampled_from(
    ["SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_JOB_CPUS_PER_NODE", "SLURM_STEP_ID", "SLURM_TASKS_PER_NODE",
     "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS",
     "SLURM_JOB_GPUS", "SLURMD_NODENAME", "SLURM_NODEID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID",
     "SLURM_ARRAY_TASK_ID", "SLURM_JOB_END_TIME", "SLURM_HET_SIZE"]
)  # fmt: skip


@given(st.sampled_from(["7", "", "x", "-1"]), st.dictionaries(VARIABLES, NODES | COUNT | ODD | HUGE, max_size=5))
@fuzz("slurm")
def test_any_environment(job: str, variables: dict[str, str]) -> None:
    with ours():
        found = read_slurm({"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[1-2]", **variables})
        if found is not None:
            gpus = found.gpus()
            assert gpus is None or found.topology(gpus).nodes


# --- the control port -------------------------------------------------------------------------------------------------


def mutated(frames: list[bytes], position: int, byte: int, cut: int) -> list[bytes]:
    """One byte of a frame replaced, its end cut off."""
    which = position % len(frames)
    frame = bytearray(frames[which])
    if frame:
        frame[position % len(frame)] = byte
    return [*frames[:which], bytes(frame[: len(frame) - cut % (len(frame) + 1)]), *frames[which + 1 :]]


SOUND = [Envelope("call", 1, 2).pack(), *map(bytes, encode({"a": [1, "x", None], "b": b"12"}))]
MESSAGES = st.one_of(
    st.lists(st.binary(max_size=40), max_size=4),
    ROWS.map(lambda row: [Envelope("call", 1, 2).pack(), *encode(row)]),
    st.builds(mutated, st.just(SOUND), st.integers(0, 200), st.integers(0, 255), st.integers(0, 8)),
)


@given(MESSAGES)
@fuzz("wire")
def test_messages_of_any_kind(frames: list[bytes]) -> None:
    with ours():
        decode(frames)
    with ours():
        _, rest = unpack(frames)
        decode(rest, CallFailure)
