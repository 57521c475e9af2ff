"""An engine in a process of its own, for tests: vLLM patches torch, which other tests in pytest's process use.

The functions run there, through `EngineProcess.run(function, *args)`; the engine they work on is the module's.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import rollout_async
from waiting import HANG_S

from slurm_rlhf.algorithms.lora import is_adapter
from slurm_rlhf.config.keys import put
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.schema_models import Lora
from slurm_rlhf.engine.engine import ActiveRequest, GenerateRequest, request_seed
from slurm_rlhf.engine.vllm import prepare_environment
from slurm_rlhf.records import Sampling, Trajectory
from slurm_rlhf.trainer.lora import attach

PROMPT_LENGTHS = (1, 5, 17, 33, 180, 260)  # two are longer than a block of the prefix cache (128 tokens on a CPU)

SAMPLING = Sampling(max_new_tokens=24, temperature=0.9)

engine: Any = None
directory = Path()
lora = Lora()  # settings of the engine's adapters
switches: list[Callable[[], None]] = []  # called before the next engine is made
models: dict[tuple[Path, int, int], Any] = {}


class EngineProcess:
    """One spawned process, the fixture `engine_process`. A module of tests starts the engine that it works on."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return self._pool.submit(function, *args, **named).result(timeout=HANG_S)

    def end(self) -> None:
        """End it without taking the interpreter down in style, which takes vLLM and torch seconds."""
        with suppress(BrokenProcessPool):
            self._pool.submit(os._exit, 0).result(timeout=HANG_S)
        self._pool.shutdown()


def _prepare() -> None:
    # As torchrun would set them for rank 3 of 4: they must not reach the engine's own process group.
    os.environ |= {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_environment()


def config(path: Path, dtype: str = "fp32", fp32_head: bool = False, keys: dict[str, Any] | None = None) -> Config:
    config = Config()
    for name, value in (keys or {}).items():
        put(config, name, value)
    config.actor.model_name_or_path = str(path)
    config.ds.param_dtype = dtype
    config.ds.fp32_lm_head = fp32_head
    config.data.max_len = 320
    config.vllm.max_num_seqs = 64
    return config


def start(
    path: Path,
    dtype: str = "fp32",
    number: int = 0,
    asynchronous: bool = False,
    fp32_head: bool = False,
    keys: dict[str, Any] | None = None,
) -> None:
    """Start the engine, in place of the one before; `asynchronous`: with two batches in flight; `keys` of its config.

    With lora.rank the policies of `model` differ by their adapters.
    """
    from slurm_rlhf.engine.vllm import VllmEngine

    global engine, directory, lora
    if engine is not None:
        engine.close()
    while switches:
        switches.pop()()
    if asynchronous:
        switches.append(rollout_async.switch_on())
    made = config(path, dtype, fp32_head, keys)
    engine, directory, lora = VllmEngine(made, number), path, made.lora


def start_hf(path: Path, number: int = 0) -> None:
    """Start an engine of transformers instead, with the weights of the directory as policy 0."""
    from plain_policy import load_plain, plain_engine

    global engine, directory
    if engine is not None:
        engine.close()
    engine, directory = plain_engine(path, load_plain(path), number=number), path


def requests(sampling: Sampling, samples: int = 1, version: int = 0, run_seed: int = 1) -> list[GenerateRequest]:
    """`samples` requests for each of six prompts, which are the same in every call."""
    rng = np.random.default_rng(0)
    made = []
    for prompt, length in enumerate(PROMPT_LENGTHS):
        ids = rng.integers(2, 60, length).astype(np.int32)
        for sample in range(samples):
            seed = request_seed(run_seed, prompt, sample, version)
            made.append(GenerateRequest(f"{prompt}.{sample}", prompt, sample, ids, sampling, seed))
    return made


def logits_dtype() -> str:
    """The precision in which the head's product comes out of the engine's model."""
    import torch

    module = engine._core.model()
    hidden = torch.zeros(1, module.lm_head.weight.shape[1], dtype=module.lm_head.weight.dtype)
    return str(module.compute_logits(hidden).dtype)


def generate(
    wanted: list[GenerateRequest], update_after: int = 0, seed: int = 0, broken: bool = False
) -> list[Trajectory]:
    """Trajectories in the order of `wanted`; with `update_after`, `update(seed)` between that step and the next.

    `broken`: an update to `seed` that is cut off comes before it.
    """
    for request in wanted:
        engine.add(request)
    done, steps = [], 0
    while engine.status.unfinished:
        done += engine.step()
        steps += 1
        if steps == update_after:
            if broken:
                with suppress(ConnectionResetError):
                    update_with("cut", seed)
            update(seed)
    return sorted(done, key=lambda t: (t.prompt, t.sample))


def tokens(trajectories: list[Trajectory]) -> list[list[int]]:
    """Return the tokens of each response."""
    return [trajectory.response_ids.tolist() for trajectory in trajectories]


def model(seed: int) -> Any:
    """A transformers model with the weights of policy `seed`; 0: those of the directory."""
    import torch
    from transformers import AutoModelForCausalLM

    if (directory, lora.rank, seed) not in models:
        made = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        if lora.rank:
            attach(made, lora.rank, lora.alpha, lora.target_modules)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in made.named_parameters() if seed else ():
                if not lora.rank or is_adapter(name):
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        models[directory, lora.rank, seed] = made
    return models[directory, lora.rank, seed]


def sent(seed: int) -> Iterator[tuple[str, Any]]:
    """Yield the weights of an update to policy `seed`."""
    named = ((name, p.detach()) for name, p in model(seed).named_parameters())
    return ((name, p) for name, p in named if not lora.rank or is_adapter(name))


def update(seed: int, version: int | None = None) -> None:
    """Make the weights of policy `seed` the engine's, and `seed` or `version` its version."""
    engine.load(sent(seed), seed if version is None else version)


def adapters() -> list[str]:
    """The adapters that the engine has."""
    return [one.request.lora_name for one in engine._adapters._kept]


def adapters_in_vllm() -> int:
    return len(engine._core.llm.list_loras())


def usable() -> None:
    """Let the engine go on after an update that it refused before anything was loaded."""
    engine._ready.unusable = ""


def rooms(ranks: list[int]) -> list[int]:
    """The rank for which vLLM has room, for each of `ranks`."""
    from slurm_rlhf.engine._vllm_updates import adapter_rank

    return [adapter_rank(rank) for rank in ranks]


def unsupported(layers: list[str]) -> list[str]:
    return list(engine._adapters.unsupported(layers))


def read_by_vllm(directory: Path) -> dict[str, tuple[int, float]]:
    """Rank and scaling of each layer, as vLLM reads the adapter in `directory`, a folder of PEFT's files."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(directory), None)
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    read = LoRAModel.from_local_checkpoint(str(directory), expected, peft_helper=helper, device="cpu")
    return {name: (layer.lora_a.shape[0], layer.scaling) for name, layer in read.loras.items()}


def update_with(change: str, seed: int) -> None:
    """An update in which one parameter is missing or of another shape, or cut off by the sender."""
    import torch

    weights = [(name, p.detach()) for name, p in model(seed).named_parameters()]
    name = next(n for n, _ in weights if n.endswith("layers.1.self_attn.k_proj.weight"))
    changed = {
        "missing": [pair for pair in weights if pair[0] != name],
        "shape": [(n, torch.zeros(p.shape[0], 1) if n == name else p) for n, p in weights],
        "cut": weights[:9],
    }

    def stream() -> Iterator[tuple[str, Any]]:
        yield from changed[change]
        if change == "cut":
            raise ConnectionResetError("the sender is gone")

    engine.load(stream(), seed)


def differences(trajectories: list[Trajectory], seeds: list[int], temperature: float, top_k: int = -1) -> list[float]:
    """Largest difference of the rollout log-probs from a transformers forward of each policy in `seeds`.

    Over tokens whose version is in `seeds` where there are several, over all tokens where there is one.
    """
    from plain_policy import expected_logprobs

    largest = [0.0] * len(seeds)
    for t in trajectories:
        versions = np.concatenate([np.full(s.end - s.start, s.version) for s in t.versions])
        for i, seed in enumerate(seeds):
            expected = expected_logprobs(model(seed), t, temperature, top_k)
            chosen = versions == seed if len(seeds) > 1 else np.ones(len(versions), dtype=bool)
            gaps = np.abs(expected - t.rollout_logprobs)[chosen]
            largest[i] = max([largest[i], *gaps.tolist()])
    return largest


def differences_with_old_keys(trajectories: list[Trajectory], seeds: tuple[int, int], temperature: float) -> float:
    """Largest difference from a forward of the second policy over keys and values that the first one has made.

    The last token that the first has sampled comes to the second without keys and values.
    """
    import torch

    largest = 0.0
    for t in trajectories:
        (first, second), length = t.versions, len(t.prompt_ids)
        assert [first.version, second.version] == [*seeds]
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))[None]
        known = length + first.end - 1
        with torch.no_grad():
            past = model(seeds[0])(ids[:, :known], use_cache=True).past_key_values
            logits = model(seeds[1])(ids[:, known:], past_key_values=past).logits[0, :-1].double() / temperature
        expected = logits.log_softmax(-1).gather(1, ids[0, known + 1 :, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(expected - t.rollout_logprobs[first.end :]).max()))
    return largest


def isolation() -> dict[str, Any]:
    """The engine's default process group, and what it left on the host."""
    import torch.distributed as dist

    identity = os.environ["VLLM_DIST_IDENT"]
    return {
        "world": dist.get_world_size(),
        "rank": dist.get_rank(),
        "shared_memory": [name for name in os.listdir("/dev/shm") if identity in name],
        "multiprocessing": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"],
        "in_flight": engine._core.client.engine_core.batch_queue_size,
        "async": engine._config.scheduler_config.async_scheduling,
        "policy": engine._config.scheduler_config.policy,
        "kv_bytes": engine._config.cache_config.kv_cache_memory_bytes,
    }


def kv_cache() -> dict[str, Any]:
    """Return vLLM's layout of the bytes for the engine's KV cache."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    made = engine._core.client.engine_core.scheduler.kv_cache_config
    return {
        "bytes": engine._config.cache_config.kv_cache_memory_bytes,
        "block": engine._config.cache_config.block_size,
        "length": engine._config.model_config.max_model_len,
        "blocks": made.num_blocks,
        "sequences": get_max_concurrency_for_kv_cache_config(engine._config, made),
    }


def kv_caches(cases: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(blocks, sequences) that vLLM would have in each case: windows of the layers, key-value heads of a rank, ..."""
    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_max_concurrency_for_kv_cache_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    found = []
    for case in cases:
        dtype = {2: torch.bfloat16, 4: torch.float32}[case["dtype"]]
        common = {
            "block_size": case["block"],
            "num_kv_heads": case["heads"],
            "head_size": case["width"],
            "dtype": dtype,
        }
        specs = {
            f"layers.{layer}": SlidingWindowSpec(**common, sliding_window=window)
            if window
            else FullAttentionSpec(**common)
            for layer, window in enumerate(case["windows"])
        }
        (made,) = get_kv_cache_configs(engine._config, [specs], [case["bytes"]])
        found.append((made.num_blocks, get_max_concurrency_for_kv_cache_config(engine._config, made)))
    return found


def do(name: str, *arguments: Any) -> Any:
    """Call a method of the engine, or read what it has."""
    found = attrgetter(name)(engine)
    return found(*arguments) if callable(found) else found


def queue(key: str = "") -> list[bool]:
    """Whether each batch in flight, the newest first, holds a request of `key`, or any where `key` is empty."""
    batches = [scheduled.num_scheduled_tokens for _, scheduled, _ in engine._core.client.engine_core.batch_queue]
    return [any(name.startswith(f"{key}#" if key else "") for name in batch) for batch in batches]


def fail_once(where: str) -> str:
    """Run steps until one fails, and return its error.

    "model": the model does not run. "text": the text cannot be made. "abort": neither can vLLM end a request then.
    """
    model = engine._core.llm.model_executor
    target, name = (model, "execute_model") if where == "model" else (ActiveRequest, "finish")

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"no {where}")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(target, name, failing))
        if where == "abort":
            stack.enter_context(mock.patch.object(engine._core.client, "abort_requests", failing))
        try:
            while engine.status.unfinished:
                engine.step()
        except RuntimeError as error:
            return str(error)
    return "it did not fail"


def refused(path: Path, changes: dict[str, Any]) -> str:
    """The message with which an engine on `path` does not start."""
    from slurm_rlhf.engine.vllm import VllmEngine
    from slurm_rlhf.errors import UserError

    bad = config(path, keys={f"vllm.{name}": value for name, value in changes.items()})
    try:
        VllmEngine(bad)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "it started"


def sample_before_and_after(path: Path, update: Path) -> tuple[list[Trajectory], list[Trajectory]]:
    """Trajectories under the weights in directory `path`, and under those in the safetensors file `update`."""
    from safetensors.torch import load_file

    global engine
    start(path)
    before = generate(requests(SAMPLING, samples=2))
    engine.load(iter(sorted(load_file(update).items())), 1)
    after = generate(requests(SAMPLING, samples=2, version=1))
    engine.close()
    engine = None
    return before, after
