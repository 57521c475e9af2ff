"""Checks of the acceptance kit: the benches of `slurm-rlhf bench`, at sizes that a GPU is busy with for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kit import Finding, Place
from kit_gpus import visible

SMALL = ("--hidden=64", "--layers=2", "--vocab=512", "--repeats=1", "--threads=1")
"""A rehearsal's model."""
MODEL = ("--hidden=2048", "--layers=16", "--vocab=32000", "--repeats=3", "--ds.param_dtype=bf16")
"""0.8 billion parameters: 13 GB with its optimizer, twice for the two sides of `bench train`."""


def sync(place: Place) -> Finding:
    """Two actor ranks of ZeRO-3, two engine ranks."""
    backend = place.backend("nccl")
    size = "20MB" if place.rehearse else "2GB"
    words = [f"--size={size}", "--actors=1x2", "--engines=1x2", "--zero=3", f"--backend={backend}"]
    found = bench(place, "sync", *words, f"--bucket_mb={4 if place.rehearse else 256}")
    return shown_sync(found)


def shown_sync(found: dict[str, Any]) -> Finding:
    """The share of the raw transfer, as the report has it."""
    rate = found["bytes_per_s"] / 1e9
    stated = f"{found['share_of_raw']:.0%} of raw {found['backend']}: {found['bytes'] / 1e9:.2g} GB at {rate:.2g} GB/s"
    names = ("bytes", "backend", "seconds", "raw_seconds", "share_of_raw", "bytes_per_s", "checksum_seconds")
    return Finding(stated, {name: found[name] for name in names})


def train(place: Place) -> Finding:
    words = ["--sequences=8", "--prompt_tokens=8", "--rollout.max_new_tokens=56", "--train.max_tokens_per_gpu=128"]
    if not place.rehearse:
        words = ["--sequences=64", "--prompt_tokens=128", "--rollout.max_new_tokens=896", "--data.max_len=1024"]
        words += ["--train.max_tokens_per_gpu=8192", "--actor.gradient_checkpointing_enable=true"]
    found = bench(place, "train", *words, *(SMALL if place.rehearse else MODEL))
    row = found["ragged"]
    share = f"MFU {row['mfu']:.1%}" if row["mfu"] else "no peak known for MFU"
    stated = f"{row['ours']:.0f} tokens/s, {row['ratio']:.2f} x bare, {row['tflops']:.3g} TFLOP/s, {share}"
    names = ("ours", "bare", "ratio", "tflops", "mfu")
    return Finding(stated, {length: {name: found[length][name] for name in names} for length in ("equal", "ragged")})


def rollout(place: Place) -> Finding:
    words = ["--prompts=24", "--prompt_tokens=16", "--mean_response=12", "--vllm.max_num_seqs=8"]
    words += ["--rollout.max_new_tokens=32"]
    if not place.rehearse:
        words = ["--prompts=256", "--prompt_tokens=128", "--mean_response=256", "--vllm.max_num_seqs=128"]
        words += ["--rollout.max_new_tokens=512", "--data.max_len=1024", "--vllm.gpu_memory_utilization=0.4"]
    found = bench(place, "rollout", *words, *(SMALL if place.rehearse else MODEL))
    stated = f"{found['ours']:.0f} tokens/s, {found['ratio']:.2f} x bare LLM.generate"
    names = ("ours", "bare", "ratio", "same_tokens", "prompts", "response_tokens")
    return Finding(stated, {name: found[name] for name in names})


def bench(place: Place, *words: str) -> dict[str, Any]:
    """Return what `slurm-rlhf bench ... --json` prints; train and rollout have the first GPU, sync all of them."""
    gpus = visible() if words[0] == "sync" else visible().partition(",")[0]
    done = subprocess.run(
        [sys.executable, "-m", "slurm_rlhf.cli", "bench", *words, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=place.scratch or Path.cwd(),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
    )
    assert done.returncode == 0, f"bench {words[0]} ended with {done.returncode}: its last words are in the log"
    found: dict[str, Any] = json.loads(done.stdout)
    return found
