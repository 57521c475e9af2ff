"""`slurm-rlhf bench`: its words, and each bench once, tiny: both sides do the same work and are timed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from waiting import HANG_S

from slurm_rlhf.bench.compare import compare
from slurm_rlhf.cli.commands import commands
from slurm_rlhf.cli.main import main

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMMAND = [sys.executable, "-c", "import sys; from slurm_rlhf.cli.main import main; sys.exit(main())", "bench"]
TINY = ("--json", "--hidden=64", "--layers=2", "--vocab=512", "--repeats=2", "--threads=1")


def bench(*words: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *words, *TINY], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # nothing else on standard output


def assert_timed(result: dict[str, Any]) -> None:
    assert result["ours"] > 0
    assert result["bare"] > 0
    assert [len(runs) for runs in result["runs"].values()] == [2, 2]
    pairs = zip(result["runs"]["ours"], result["runs"]["bare"], strict=True)
    assert result["ratio"] == pytest.approx(sum(ours / bare for ours, bare in pairs) / 2)
    assert result["cpu_ratio"] > 0


def test_bench_rollout() -> None:
    words = ("--prompts=24", "--prompt_tokens=16", "--mean_response=12", "--vllm.max_num_seqs=8")
    result = bench("rollout", *words, "--rollout.max_new_tokens=32")
    assert_timed(result)
    assert result["bench"] == "rollout"
    assert (result["prompts"], result["max_num_seqs"], result["threads"]) == (24, 8, 1)
    assert 1 < result["response_tokens"] < 32  # the mean of unlike lengths
    assert result["same_tokens"] > 0.9  # the same seeds on both sides


def test_bench_train() -> None:
    """Both sides start from the same weights: the bench itself compares their first losses."""
    words = ("--sequences=8", "--prompt_tokens=8", "--rollout.max_new_tokens=56", "--train.max_tokens_per_gpu=128")
    result = bench("train", *words)
    assert_timed(result["equal"])
    assert_timed(result["ragged"])
    assert result["equal"]["tokens"] == 8 * 64
    assert result["equal"]["micro_batches"] == 4
    assert result["ragged"]["tokens"] < 8 * 64
    assert (result["micro_batch"], result["sequences"], result["longest"]) == (2, 8, 64)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "(commands: bench rollout, bench train, bench sync)"),
        (["rolout"], "unknown command 'bench rolout'; did you mean bench rollout?"),
        (["rollout", "--prompts=0"], "--prompts takes a whole number of at least 1, got '0'"),
        (["train", "--repeats", "x"], "--repeats takes a whole number of at least 1, got 'x'"),
        (["train", "--hidden=100"], "--hidden takes a multiple of 64, got 100"),
        (["train", "--vocab=20"], "--vocab takes a whole number of at least 258, got '20'"),
        (["train", "--train.sed=1"], "unknown key --train.sed; did you mean --train.seed"),
        (["train", "--rollout.max_new_tokens=0"], "rollout.max_new_tokens must be at least 1"),
        (["train", "nowhere.toml"], "nowhere.toml: no such file"),
        (["sync", "--zero=x"], "--zero takes a whole number of at least 0, got 'x'"),
        (["sync", "--actors=two"], "--actors takes nodes x ranks on each, as in 2x4, got 'two'"),
        (["sync", "--engines=1x0"], "--engines takes nodes x ranks on each, as in 2x4, got '1x0'"),
        (["sync", "--no-zero"], "unknown option 'no_zero'"),
        (["sync", "--one-node=1"], "unknown option --one-node=1; did you mean --one_node?"),
        (["rollout", "--prompt_tokens=400"], "more than data.max_len = 512"),
    ],
)
@pytest.mark.usefixtures("own_environment")
def test_what_the_user_has_to_mend(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err
    assert "Traceback" not in err


def test_help_of_all_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    names = capsys.readouterr().out
    benches = {name.removeprefix("bench "): row for name, row in commands().items() if name.startswith("bench ")}
    for name, found in benches.items():
        assert f"{name} (" in names
        assert main(["bench", name, "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: slurm-rlhf bench {name} ")
        assert all(re.search(rf"^  --{option} .*\w", out, re.MULTILINE) for option in found.options or ())
        assert max(map(len, out.splitlines())) <= 120


def test_a_comparison_alternates_and_leaves_the_first_repetition_out() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str, tokens: int) -> Any:
        def run(number: int) -> int:
            calls.append((name, number))
            sum(range(20_000))
            return tokens

        return run

    result = compare(side("ours", 300), side("bare", 100), 3)
    assert calls == [
        *[("bare", 0), ("ours", 0), ("ours", 1), ("bare", 1)],
        *[("bare", 2), ("ours", 2), ("ours", 3), ("bare", 3)],
    ]
    assert [len(rates) for rates in result["runs"].values()] == [3, 3]
    assert result["cpu_ratio"] == pytest.approx(3, rel=0.9)
