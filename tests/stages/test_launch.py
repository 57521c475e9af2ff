"""A stage on several ranks of this machine: `actor.num_gpus_per_node`, without torchrun on the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from stage_runs import run
from tiny_models import make_tiny

pytestmark = pytest.mark.slow


def test_the_ranks_of_a_stage_are_started_and_their_errors_told(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model")
    rows = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(10) for b in range(10)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "slurm-rlhf").write_text("import sys\nfrom slurm_rlhf.cli.main import main\nsys.exit(main())\n")
    (tmp_path / "job.toml").write_text(
        '[actor]\nmodel_name_or_path = "model"\nnum_gpus_per_node = 2\n[data]\nmax_len = 16\n[ds]\n'
        'param_dtype = "fp32"\n[sft]\ndataset = "sums.jsonl"\noutput_dir = "out"\nbatch_size = 20\nmax_epochs = 4\n'
    )
    command = [sys.executable, str(tmp_path / "slurm-rlhf"), "sft", "job.toml"]
    done = run(command, tmp_path, {})
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^sft: step 20/20 loss ", done.stdout, re.MULTILINE)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert len(list((tmp_path / "out.run" / "logs").glob("actor.*.[01].log"))) == 2
    assert not (tmp_path / "out.run" / ".control" / "keys.json").exists()
    bad = run([*command, "--sft.output_dir=other", "--sft.batch_size=102"], tmp_path, {})
    assert bad.returncode == 1
    assert "and no model was written" in bad.stderr
    assert "100 usable examples, fewer than sft.batch_size = 102: lower it" in bad.stderr
    odd = run([*command, "--sft.output_dir=other", "--sft.batch_size=7"], tmp_path, {})
    assert odd.returncode == 2
    assert "sft.batch_size = 7 does not divide over 2 ranks: use a multiple of 2" in odd.stderr
