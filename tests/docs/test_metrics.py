"""The glossary of metrics. That it has each name of a real run, `training_runs.metrics` asserts in every one."""

from __future__ import annotations

import re
from pathlib import Path

from glossary import explained, unexplained
from recorded_run import write_run

import slurm_rlhf
from slurm_rlhf.observe.run_log import read_rows

PACKAGE = Path(slurm_rlhf.__file__).parent


def test_a_name_that_is_not_explained_is_found(tmp_path: Path) -> None:
    assert unexplained(["reward", "reward/mine", "perf/engine/12/busy_s", "eval/a/b/pass@4"]) == []
    assert unexplained(["rewards", "perf/engine/busy_s", "eval/a/median"]) == [
        "eval/a/median",
        "perf/engine/busy_s",
        "rewards",
    ]
    for row in read_rows(write_run(tmp_path / "run").metrics):
        assert unexplained(row) == []


def test_each_name_is_explained_once_and_of_the_code() -> None:
    assert len(explained()) > 80
    assert len(set(explained())) == len(explained())
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if "docs" not in path.parts)
    for name in explained():
        words = [
            word
            for part in name.split("/")
            for word in re.split(r"[A-Z]+|@|^(?:actor|critic|first)_", part)
            if len(word) > 2
        ]
        assert [word for word in words if word.strip("_") not in code] == [], name


def test_what_the_report_draws_is_a_metric() -> None:
    """But for a plot of what nothing records, which would never be seen."""
    plots = (
        (PACKAGE / "report" / "page" / "curves.js").read_text(encoding="utf-8").split("const PLOTS")[1].split("];")[0]
    )
    named = set(re.findall(r'"?([a-z][\w/]+)"?: "', plots)) - {"absent"}
    assert len(named) > 30
    assert unexplained(named) == []
