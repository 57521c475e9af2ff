"""Checkpoints of two ranks, under every ZeRO stage and in both precisions, as models; those that are torn are refused.

Run as a program, this file is the rank that torchrun starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from training_ranks import as_rank, make_config, parameters, torchrun, train

from slurm_rlhf.errors import CheckpointError

pytestmark = pytest.mark.slow

# ZeRO without cuts is last: DeepSpeed's autocast changes how later engines of the same process add up gradients.
CASES = [(2, "fp32"), (1, "bf16"), (3, "bf16"), (0, "fp32"), (0, "bf16")]


def main(request: dict[str, str]) -> None:
    """Train, save, and write down what the model has then."""
    from slurm_rlhf.trainer.trainers import PolicyTrainer

    out = Path(request["out"])
    for zero_stage, param_dtype in CASES:
        trainer = PolicyTrainer(make_config(out / "model", zero_stage=zero_stage, param_dtype=param_dtype), 4)
        train(trainer, range(2), 40)
        directory = out / f"zero{zero_stage}-{param_dtype}"
        directory.mkdir(exist_ok=True)
        trainer.save(directory)
        whole = parameters(trainer)
        if trainer.world.rank == 0:
            save_file(whole, f"{directory}.safetensors")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    make_tiny(path / "model")
    torchrun(2, program=__file__, out=str(path))
    return path


@pytest.mark.parametrize(("zero_stage", "param_dtype"), CASES)
def test_a_checkpoint_becomes_a_model_without_a_process_group(
    out: Path, tmp_path: Path, zero_stage: int, param_dtype: str
) -> None:
    """Two ranks' weights, of whatever ZeRO stage, become a model, from which `slurm-rlhf generate` could sample."""
    from slurm_rlhf.trainer.export import export
    from slurm_rlhf.trainer.trainer import DTYPES

    saved = out / f"zero{zero_stage}-{param_dtype}"
    export(saved, out / "model", tmp_path / "model", param_dtype)
    found, start = (load_file(path / "model.safetensors") for path in (tmp_path / "model", out / "model"))
    expected = {key.removeprefix("model."): value for key, value in load_file(f"{saved}.safetensors").items()}
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert tensor.dtype == DTYPES[param_dtype]
        assert torch.equal(tensor, expected[key].to(tensor.dtype))
    assert any(not torch.equal(tensor, start[key].to(tensor.dtype)) for key, tensor in found.items())
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (out / "model" / "tokenizer.json").read_bytes()


def test_a_checkpoint_of_another_model_or_with_a_missing_file_is_refused(out: Path) -> None:
    from slurm_rlhf.trainer.optimizer_state import Fragment, ShardReader

    torn = out / "zero2-fp32"
    key = "model.model.embed_tokens.weight"
    size = torch.load(torn / "rank_00000.pt", weights_only=True)["sizes"][key]
    wanted = Fragment(key, 0, {"fp32": torch.zeros(size)})
    ShardReader(torn, rank=0).fill(wanted)
    assert wanted.tensors["fp32"].abs().min() > 0
    for file in torn.glob("rank_00000.*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=rf"elements of {key} \(fp32\) from element 0 on are in none"):
        ShardReader(torn, rank=0).fill(wanted)
    next(iter(torn.glob("rank_00001.*.safetensors"))).write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match=r"rank_00001\.000\.safetensors cannot be read"):
        ShardReader(torn, rank=0).fill(wanted)


if __name__ == "__main__":
    as_rank(main)
