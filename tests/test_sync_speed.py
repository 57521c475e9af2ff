"""How fast weights travel: ratios within one run of `slurm-rlhf bench sync`."""

from __future__ import annotations

import json
import math

import pytest
from shaped_links import available, shaped

from slurm_rlhf.cli.bench_sync import World, help_page, measure, model_of, run
from slurm_rlhf.errors import ConfigError


def test_the_bench_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size=3MB", "--actors=2x1", "--engines=1x2", "--zero=3", "--bucket_mb=1", "--repeats=1", "--json"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"seconds", "bytes", "raw_seconds", "share_of_raw", "naive_seconds", "peak_extra_bytes"} <= set(found)
    assert found["bytes"] == sum(2 * math.prod(shape) for _, shape, _ in model_of(3_000_000))
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
        run([word])
    assert "--peak" not in help_page()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not available(), reason="network namespaces and tc need root")
def test_links_of_400_mbit_are_full_and_twice_the_nodes_cost_little() -> None:
    """Two actor nodes of two ranks, ZeRO-3, to two and to four rollout nodes of two ranks; 100 MB."""
    found = {}
    for engines in (2, 4):
        nodes = [f"actor{i}" for i in range(2)] + [f"rollout{i}" for i in range(engines)]
        with shaped(nodes, "400mbit") as links:
            world = World(
                model_of(100_000_000),
                actors=[node for node in nodes[:2] for _ in range(2)],
                engines=[node for node in nodes[2:] for _ in range(2)],
                zero=3,
                bucket_bytes=16 << 20,
                naive=engines == 2,
                host=links.address("actor0"),
                prefix=links.inside,
            )
            found[engines] = measure(world)
            print(json.dumps(found[engines]))
    two, four = found[2], found[4]
    assert two["seconds"] <= 1.15 * two["raw_seconds"]
    assert four["seconds"] <= 1.10 * two["seconds"]
    assert two["naive_seconds"] >= 2 * two["seconds"]
    assert max(two["peak_extra_bytes"], four["peak_extra_bytes"]) <= 3 * (16 << 20) * 1.05
