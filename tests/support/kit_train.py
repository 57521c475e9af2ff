"""Checks of the acceptance kit: DeepSpeed's ranks against one, and whole PPO runs."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from kit import Finding, Place
from kit_gpus import gpu_environment
from tiny_models import make_tiny
from training_runs import metrics, train, workspace

STEPS = 3
APART = 2e-5
"""Bound between one rank and two, for any parameter after three steps of at most 1e-4 in fp32: sums differ in order."""
LOGPROBS = {"fp32": 1e-4, "bf16": 6e-2}
"""Bound of `rollout_logprob_diff`, as in kit_engine."""


def zero2(place: Place) -> Finding:
    return _zero(place, 2)


def zero3(place: Place) -> Finding:
    return _zero(place, 3)


def ulysses(place: Place) -> Finding:
    """Two ranks that compute each row together."""
    return _zero(place, 2, {"ds.ulysses_size": 2})


def lora(place: Place) -> Finding:
    """Adapters go to an engine that has the base model, on the GPU that both share."""
    words = ["--lora.rank=8", "--lora.alpha=16", "--actor.learning_rate=0.01", "--algo.kl.init_coef=0.05"]
    words += ["--algo.advantage.estimator=group_norm", "--vllm.enforce_eager=true"]
    finding, rows = ppo_run(place, "bf16", "ipc", *words, *colocated(1))
    moved = max(row["kl"] for row in rows)
    assert moved > 1e-4, f"the policy with its adapter is still the base model: KL {moved:.1e} after {STEPS} steps"
    return Finding(f"{finding.figure}; KL to the base {moved:.1e}", {**finding.figures, "kl": moved})


def ppo_colocated(place: Place) -> Finding:
    """Engine, actor, critic and reference in turns on one GPU; with CUDA graphs, which sleep has to keep.

    On two of four or more: then each role has ranks on both, and an engine on each takes the weights of its GPU.
    """
    words = [f"--vllm.enforce_eager={str(place.rehearse).lower()}", "--ds.enable_sleep=true"]
    finding, rows = ppo_run(place, "fp32", "ipc", *words, *colocated(2 if len(place.gpus) >= 4 else 1))
    freed = min(row["perf/sleep_freed_bytes"] for row in rows) / 2**30
    assert place.rehearse or freed > 0.5, f"the sleeping engine freed {freed:.2f} GiB only"
    stated = "sleep frees nothing on CPUs" if place.rehearse else f"{freed:.1f} GiB freed by sleep"
    return Finding(f"{finding.figure}; {stated}", {**finding.figures, "sleep_freed_gib": freed})


def ppo_tp1(place: Place) -> Finding:
    """Weights go from GPU to GPU."""
    return ppo_run(place, "bf16", place.backend("nccl"), "--algo.kl.init_coef=0", "--vllm.enforce_eager=true")[0]


def ppo_tp2(place: Place) -> Finding:
    """Run with engines of two ranks, which are colocated where there are fewer than four GPUs."""
    words = ["--vllm.tensor_parallel_size=2", "--vllm.enforce_eager=true"]
    if len(place.gpus) >= 4:
        return ppo_run(place, "bf16", place.backend("nccl"), "--algo.kl.init_coef=0", *words)[0]
    return ppo_run(place, "bf16", "ipc", *words, *colocated(2, engines=1))[0]


def colocated(gpus: int, engines: int = 0) -> list[str]:
    """All roles on the same GPUs; `engines`: 0 for one on each."""
    words = ["--train.colocate_all=true", "--vllm.gpu_memory_utilization=0.3", f"--vllm.num_engines={engines or gpus}"]
    return words + [f"--{role}.num_gpus_per_node={gpus}" for role in ("actor", "critic", "ref")]


def ppo_run(place: Place, dtype: str, backend: str, *words: str) -> tuple[Finding, list[dict[str, Any]]]:
    """A run of the tests' workspace."""
    config = workspace(Path(place.scratch, "work"))
    stated = [f"--ds.param_dtype={dtype}", f"--train.max_steps={STEPS}", "--train.full_determinism=false"]
    run_dir = Path(place.scratch, "run")
    code, output = train(config, run_dir, *stated, *words)  # the check's own deadline comes first
    assert code == 0, last_words(run_dir, output)
    log = "".join(path.read_text(errors="replace") for path in (run_dir / "logs").glob("conductor.*.log"))
    return judged(metrics(run_dir), log, dtype, backend)


def judged(rows: list[dict[str, Any]], log: str, dtype: str, backend: str) -> tuple[Finding, list[dict[str, Any]]]:
    """Judge a run's metrics and the conductor's log by the bounds. AssertionError."""
    assert len(rows) == STEPS, f"{len(rows)} steps of {STEPS} have a line in metrics.jsonl"
    for row in rows:
        odd = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not odd, f"step {row['step']}: not finite: {', '.join(odd)}"
    gap = max(row["rollout_logprob_diff"] for row in rows)
    assert gap <= LOGPROBS[dtype], f"rollout_logprob_diff is {gap:.2e} in {dtype}, limit {LOGPROBS[dtype]:g}"
    used = set(re.findall(r"weight transfer.*\bbackend\W+(\w+)", log))
    assert used == {backend}, f"weights went by {' and '.join(sorted(used)) or 'nobody knows what'}, expected {backend}"
    seconds = statistics.median(row["time/step"] for row in rows[1:])
    rate = statistics.median(row["perf/tokens_per_s"] for row in rows[1:])
    figures = {"step_s": seconds, "tokens_per_s": rate, "rollout_logprob_diff": gap, "backend": backend}
    return Finding(
        f"{STEPS} steps over {backend}, {seconds:.1f} s each; engine and actor {gap:.1e} apart", figures
    ), rows


def _zero(place: Place, stage: int, keys: dict[str, Any] | None = None) -> Finding:
    """`training_ranks`'s steps by one rank and by two, with `keys`; with one GPU both are on it."""
    scratch = Path(place.scratch)
    model = make_tiny(scratch / "model")
    case = {"name": "case", "kind": "policy", "zero_stage": stage, "max_tokens": 40}
    found = []
    for ranks in (1, 2):
        out = scratch / f"ranks{ranks}"
        out.mkdir()
        cases = [case | {"keys": keys or {}} if ranks > 1 else case]
        _start_ranks(ranks, {"model": str(model), "out": str(out), "cases": cases}, out)
        found.append(out / "case")
    return compared(*found, stage)


def compared(one: Path, two: Path, stage: int) -> Finding:
    """Compare the parameters that one rank and two ranks have written."""
    from safetensors.torch import load_file

    mine, theirs = (load_file(path.with_suffix(".safetensors")) for path in (one, two))
    assert mine.keys() == theirs.keys()
    apart = max(float((mine[name].cpu() - theirs[name].cpu()).abs().max()) for name in mine)
    norms = [[step["grad_norm"] for step in json.loads(path.with_suffix(".json").read_text())] for path in (one, two)]
    assert apart <= APART, f"parameters of one rank and of two are {apart:.1e} apart after 3 steps, limit {APART:g}"
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*norms, strict=True)), f"gradient norms differ: {norms}"
    return Finding(
        f"ZeRO-{stage}: parameters at most {apart:.1e} apart after 3 steps", {"apart": apart, "limit": APART}
    )


def _start_ranks(ranks: int, request: dict[str, Any], out: Path) -> None:
    """Ranks of `training_ranks`, each with a GPU of its own: torchrun would count on a GPU for each."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stated = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    stated |= {"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("training_ranks.py")
    logs = [out / f"{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as opened:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(program), json.dumps(request)],
                    env={**os.environ, **stated, "RANK": str(rank), **gpu_environment(rank)},
                    stdout=opened,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = [process.wait() for process in processes]
    for rank, code in enumerate(codes):
        assert code == 0, f"rank {rank} of {ranks} ended with {code}: {_tail(logs[rank])}"


def last_words(run_dir: Path, output: str) -> str:
    """The run's own error, and where it is from."""
    print(output)
    for log in sorted((run_dir / "logs").glob("*.log")):
        print(f"--- {log.name}\n{_tail(log, 40)}")
    return " ".join(output.strip().splitlines()[-3:])


def _tail(log: Path, lines: int = 4) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])
