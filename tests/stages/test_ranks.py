"""Three ranks of a stage compute what one computes, on examples of unlike lengths."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from stage_runs import run, timeless_metrics
from stage_task import Lengths, rows, write
from tiny_models import make_tiny

STAGES = """
import sys
from slurm_rlhf.cli.main import main
for stage in ("sft", "rm", "dpo"):
    words = [f"--{stage}.{key}" for key in (f"dataset={stage}.jsonl", f"output_dir={sys.argv[1]}/{stage}")]
    words += [f"--{stage}.{key}" for key in ("batch_size=12", "max_steps=5", "learning_rate=1e-4")]
    if main([stage, "job.toml", *words]):
        sys.exit(f"{stage} failed")
"""
JOB = """
[actor]
model_name_or_path = "model"
[data]
input_key = "prompt"
output_key = "completion"
max_len = 220
[ds]
param_dtype = "fp32"
[train]
max_tokens_per_gpu = 512
threads_per_rank = 1
"""


@pytest.mark.slow
@pytest.mark.full  # test_sft and test_dpo have two ranks
def test_three_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Sums are divided by the numbers of the whole step: the micro-batches of the ranks have unlike ones."""
    make_tiny(tmp_path / "model")
    for stage in ("sft", "rm", "dpo"):
        write(tmp_path / f"{stage}.jsonl", rows(stage, 60, Lengths(20, 1.0, 180), seed=1))
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "stages.py").write_text(STAGES)
    for ranks in (1, 3):
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        done = run([sys.executable, *launcher, "stages.py", str(ranks)], tmp_path, {})
        assert done.returncode == 0, done.stderr[-3000:]
    for stage in ("sft", "rm", "dpo"):
        alone, three = (timeless_metrics(tmp_path / str(ranks) / f"{stage}.run") for ranks in (1, 3))
        assert len(alone) == 5
        for one, other in zip(map(json.loads, alone), map(json.loads, three), strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-6), stage
