"""How much memory reading examples takes, and how the ranks of a stage share the work."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from tiny_models import make_tiny
from waiting import HANG_S

from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.stages import examples as module
from slurm_rlhf.stages.examples import RefusedRows, fingerprint, load_pairs

RANK = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from slurm_rlhf.config.schema import Data
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.stages import examples
from slurm_rlhf.stages.examples import fingerprint

directory, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
examples.PART, read, whole = 4, [], examples._part
examples._part = lambda rows, *others: (read.extend(place for place, _ in rows), whole(rows, *others))[1]
try:
    examples.load_pairs(directory / "pairs.jsonl", Tokenizer.load(directory / "model"), Data(max_len=24))
except examples.RefusedRows as error:
    print(json.dumps([len(read), fingerprint(error.examples), error.examples.places, str(error)]))
dist.barrier()
dist.destroy_process_group()
"""


def written(directory: Path, count: int, longest: int) -> Path:
    """Pairs of lengths up to `longest` tokens."""
    make_tiny(directory / "model")
    rows = [{"input": f"{n}+{n}=", "chosen": "1" * (1 + n % longest), "rejected": "2"} for n in range(count)]
    file = directory / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_part_of_the_rows_is_in_memory_with_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 50)
    file = written(tmp_path, 3000, 90)
    tokenizer, data = Tokenizer.load(tmp_path / "model"), Data(max_len=128)
    load_pairs(file, tokenizer, Data(max_len=128, max_samples=10))  # imports, and compiles patterns
    tracemalloc.start()
    found = load_pairs(file, tokenizer, data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    whole = found.experience
    arrays = sum(each.nbytes for each in (whole.token_ids, whole.action_mask, whole.prompt_lens, whole.rewards))
    assert len(found) == 3000
    assert peak < 3 * arrays + sum(sys.getsizeof(place) for place in found.places)


@pytest.mark.slow
def test_ranks_read_a_share_each_and_have_what_one_reads_alone(tmp_path: Path) -> None:
    file = written(tmp_path, 19, 30)
    with file.open("a") as more:
        more.write('{"input": "1"}\n' * 2)
    with pytest.raises(RefusedRows) as alone:
        load_pairs(file, Tokenizer.load(tmp_path / "model"), Data(max_len=24))
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    stated = [json.loads(rank.communicate(timeout=HANG_S)[0]) for rank in ranks]
    whole = alone.value.examples
    assert [each[0] for each in stated] == [12, 9]
    assert [each[1:] for each in stated] == [[fingerprint(whole), whole.places, str(alone.value)]] * 2
    assert whole.dropped
