"""How fast weights travel: ratios within one run of `slurm-rlhf bench sync`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiny_models import make_tiny

from slurm_rlhf.bench.sync import Spec, measure, parameters_of
from slurm_rlhf.cli.bench import BENCHES
from slurm_rlhf.config.model_directory import stored_parameters
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.weights.rendezvous import interface_near, pick_interface

pytestmark = pytest.mark.slow


def test_the_bench_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size=3MB", "--actors=2x1", "--engines=1x2", "--zero=3", "--bucket_mb=1", "--repeats=1", "--json"]
    assert BENCHES["sync"].run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"seconds", "bytes", "raw_seconds", "share_of_raw", "naive_seconds", "peak_extra_bytes"} <= set(found)
    assert found["bytes"] == sum(2 * math.prod(shape) for _, shape, _ in parameters_of(3_000_000))
    assert found["share_of_raw"] == pytest.approx(found["raw_seconds"] / found["seconds"])
    assert (found["actors"], found["engines"], found["zero"]) == ("2x1", "1x2", 3)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--size=big", "--size takes a number and a unit, as in 500MB"),
        ("--actors=2", "--actors takes nodes x ranks on each, as in 2x4, got '2'"),
        ("--speed=9", "does not know '--speed=9'"),
        ("--load", "--load needs the model"),
    ],
)
def test_bad_words(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BENCHES["sync"].run([word])


def test_a_rank_takes_the_interface_near_its_device() -> None:
    interfaces, numa = ["ib0", "ib1", "ib2", "ib3"], {"ib0": 0, "ib1": 0, "ib2": 1, "ib3": 1}
    assert [pick_interface(interfaces, numa, 1, rank) for rank in range(4)] == ["ib2", "ib3", "ib2", "ib3"]
    assert [pick_interface(interfaces, {}, 1, rank) for rank in range(5)] == ["ib0", "ib1", "ib2", "ib3", "ib0"]
    assert pick_interface(interfaces, numa, -1, 6) == "ib2"
    assert interface_near(["lo"], "", 5) == "lo"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_loopback_reaches_four_fifths_of_what_gloo_does_with_the_same_bytes(tmp_path: Path) -> None:
    """500 MB of bf16 from one actor rank to two engine ranks; then into vLLM as well."""
    model = make_tiny(tmp_path / "model", hidden=2048, heads=16, kv_heads=2, layers=7, dtype="bf16")
    parameters = [[name, shape, "bfloat16"] for name, shape in stored_parameters(str(model))]
    apart = measure(Spec(parameters, ["actor0"], ["rollout0"] * 2, repeats=7))
    together = measure(Spec(parameters, ["node"], ["node"] * 2, repeats=7, model=str(model)))
    for found in (apart, together):
        print(json.dumps(found))
        assert found["bytes"] > 400e6
        assert found["share_of_raw"] >= 0.8
        # Three buckets, and the parameters that are copied out of them: a few at a time, of a few sizes.
        assert found["peak_extra_bytes"] <= 3 * (64 << 20) * 1.01 + 3 * max(2 * math.prod(p[1]) for p in parameters)
    assert together["seconds_with_loading"] > together["seconds"]


def test_the_memory_figure_counts_a_parameter_of_many_buckets_on_both_ends() -> None:
    sizes = [4096, 500, 3000, 100, 7000, 1]
    parameters = [["embed", [24000, 1024], "bfloat16"]]
    parameters += [[f"layer.{number}", [rows, 1024], "bfloat16"] for number, rows in enumerate(sizes)]
    found = measure(Spec(parameters, ["actor0"], ["rollout0"], bucket_bytes=1 << 20, repeats=1, naive=False))
    assert found["peak_extra_bytes"] > 2 * 24000 * 1024
