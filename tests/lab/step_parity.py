"""Whole optimizer steps on tiny random models of known architectures, against plain PyTorch in fp32: parameters after.

    python tests/lab/step_parity.py                  # every architecture
    python tests/lab/step_parity.py gemma2 mistral

The other side is transformers' own model with eager attention, a row for each sequence, a loss written out, and
torch's AdamW. The table has the largest difference of a parameter. Run by torchrun, this file is a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from random_models import ARCHITECTURES, make_model
from training_ranks import TEMPERATURE, as_rank, make_config, make_experience, parameters, share, weigh

from slurm_rlhf.config.keys import put

NAMED = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3_moe")
STEPS, ROWS, RATE, DECAY = 2, 9, 5e-5, 0.1
LORA = {"lora.rank": 4, "lora.alpha": 8.0}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "packed": (1, {}),
    "padded": (1, {"ds.packing_samples": "never"}),
    "selective": (1, {"train.gradient_checkpointing": "selective"}),
    "full": (1, {"train.gradient_checkpointing": "full"}),
    "LoRA": (1, LORA),
    "3 ranks": (3, {}),
    "ZeRO-3, 3": (3, {"ds.zero_stage": 3}),
    "LoRA, 3": (3, LORA),
    "Ulysses, 2": (2, {"ds.ulysses_size": 2}),
}
"""Column of the table -> ranks, and keys in addition to those of `make_config`."""
BOUND = 1e-6


def ways(arch: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """List those that are known for an architecture: experts have no adapters, which is refused by name."""
    return {way: row for way, row in WAYS.items() if arch != "qwen3_moe" or "lora.rank" not in row[1]}


def steps(model: Path, keys: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Take the steps as a rank of a run; return all parameters before and after."""
    from slurm_rlhf.trainer.trainers import PolicyTrainer

    config = make_config(model)
    config.actor.lr_scheduler, config.actor.lr_warmup_ratio, config.actor.learning_rate = "constant", 0.0, RATE
    config.actor.weight_decay = DECAY
    config.data.max_len = 30  # phi3 has other angles for longer texts
    for key, value in keys.items():
        put(config, key, value)
    trainer = PolicyTrainer(config, STEPS)
    before, world = parameters(trainer), trainer.world
    for step in range(STEPS):
        exp = make_experience(step, ROWS)
        denominator = weigh(config, exp)
        trainer.train_step(*share(exp, world.rank, world.size, 60, trainer.layout), denominator)
    return before, parameters(trainer)


def plain(model: Path, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take them without the trainer; adapters begin as in `before`, and then they alone are trained."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    named = {f"model.{name}": parameter for name, parameter in policy.named_parameters()}
    adapters = {name: value.clone().requires_grad_() for name, value in before.items() if ".lora_" in name}
    for name, value in adapters.items():
        layer, _, side = name.rpartition(".lora_")
        if side == "A.weight":
            adapt(policy.get_submodule(layer.removeprefix("model.")), value, adapters[f"{layer}.lora_B.weight"])
    trained = [*(adapters or named).values()]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(policy, make_experience(step, ROWS)).backward()
        torch.nn.utils.clip_grad_norm_(trained, make_config(model).actor.max_norm)
        optimizer.step()
    return {name: p.detach() for name, p in (named | adapters).items()}


def adapt(layer: torch.nn.Module, a: torch.Tensor, b: torch.Tensor) -> None:
    factor = LORA["lora.alpha"] / LORA["lora.rank"]
    layer.register_forward_hook(lambda _, given, out: out + factor * (given[0] @ a.T) @ b.T)


def loss(policy: Any, exp: Any) -> torch.Tensor:
    """PPO's clipped loss over the policy's tokens, each sequence in a row of its own."""
    terms = []
    rows = zip(pairwise(exp.token_offsets), pairwise(exp.action_offsets), exp.prompt_lens.tolist(), strict=True)
    for (start, end), (first, last), prompt in rows:
        if first == last:
            continue
        ids = torch.from_numpy(exp.token_ids[start:end]).long()
        logits = policy(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1] / TEMPERATURE
        new = logits.log_softmax(-1).gather(-1, ids[prompt:, None])[:, 0]
        old, gain = (torch.from_numpy(exp.columns[name][first:last]) for name in ("logprobs", "advantages"))
        ratio = (new - old).exp()
        clipped = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        terms.append(clipped[torch.from_numpy(exp.action_mask[first:last])])
    return torch.cat(terms).mean()


def measure(architectures: list[str], scratch: Path) -> dict[str, dict[str, float]]:
    """Return the largest difference by architecture and way. Raises CalledProcessError."""
    for arch in architectures:
        short = {name: 6 for name in ARCHITECTURES[arch] if name == "sliding_window"}  # than most texts
        make_model(scratch / arch, arch, **short)
    for ranks in sorted({count for count, _ in WAYS.values()}):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, __file__, json.dumps({"scratch": str(scratch), "architectures": architectures})]
        quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(Path(__file__).parents[2])}
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **quiet})
    found: dict[str, dict[str, float]] = {}
    for arch in architectures:
        for way in ways(arch):
            before, after = torch.load(scratch / f"{arch} {way}", weights_only=True)
            wanted = plain(scratch / arch, before)
            if after.keys() != wanted.keys():
                raise AssertionError(f"{arch}, {way}: other parameters: {sorted(after.keys() ^ wanted.keys())}")
            gaps = [float((value - wanted[name]).abs().max()) for name, value in after.items()]
            moved = max(float((value - before[name]).abs().max()) for name, value in after.items())
            assert moved > RATE
            found.setdefault(arch, {})[way] = max(gaps)
    return found


def show(found: dict[str, dict[str, float]]) -> str:
    """Write the table for a reader."""
    lines = [f"{'':12}" + "".join(f"{way:>12}" for way in WAYS)]
    for arch, row in found.items():
        lines.append(f"{arch:12}" + "".join(f"{row[way]:12.1e}" if way in row else f"{'-':>12}" for way in WAYS))
    return "\n".join(lines)


def rank(request: dict[str, Any]) -> None:
    """Take the steps of all architectures and ways with so many ranks, and write them."""
    scratch = Path(request["scratch"])
    for arch in request["architectures"]:
        for way, (ranks, keys) in ways(arch).items():
            if ranks == int(os.environ["WORLD_SIZE"]):
                found = steps(scratch / arch, keys)
                if os.environ["RANK"] == "0":
                    torch.save(found, scratch / f"{arch} {way}")


def main(words: list[str] | None = None) -> int:
    """Show the table; returns 1 where a difference is above the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="MODEL_TYPE", help=f"{', '.join(NAMED)} [all]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="step-parity-") as scratch:
        found = measure(options.architectures or [*NAMED], Path(scratch))
    print(json.dumps(found) if options.json else show(found))
    return int(max(gap for row in found.values() for gap in row.values()) > BOUND)


if __name__ == "__main__":
    if "RANK" in os.environ:
        as_rank(rank)
    sys.exit(main())
