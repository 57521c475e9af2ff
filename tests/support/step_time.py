"""Estimate where the time of a training step goes: enough to see which GPUs would idle, not to predict seconds."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_rlhf.config.roles import ROLLOUT, roles_by_slots, running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.gpus import Gpu
from slurm_rlhf.placement.memory import Models
from slurm_rlhf.placement.model_shape import forward_flops

# Rates that large dense models reach on H100 nodes. None was measured here.
TRAINING_MFU = 0.36
FORWARD_MFU = 0.40
DECODE_BYTES_PER_S = {989.4: 2.9e12, 312.0: 1.7e12}  # peak TFLOP/s -> what decoding reads of 3.35 and 2.0 TB/s
DECODE_OVERHEAD_S = 1.5e-3  # of a step: launch, sampling, scheduling that does not hide behind the GPU
TP_OVERHEAD_S = 25e-6  # of a layer of a TP group: two all-reduces
SYNC_BYTES_PER_S = 12e9  # of a weight update, per node
TURN_S = 3.0  # engines waking and falling asleep with train.colocate_all


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and of them how long the GPUs of each role compute; roles that share GPUs are one."""

    step: float
    busy: dict[str, float]  # "actor+reference" -> seconds
    generation: float
    forward: float
    update: float
    sync: float

    def idle(self, roles: str) -> float:
        """Share of the step for which these GPUs do not compute."""
        return 1 - self.busy[roles] / self.step


def step_time(config: Config, models: Models, gpu: Gpu, prompt: int, response: int) -> StepTime:
    """The estimate for prompts and responses of these mean lengths in tokens.

    Forwards of all roles run side by side, then the updates; those that share GPUs one after the other. With
    vllm.sync_mode = inflight sampling runs beside both, otherwise before them.
    """
    responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    work = _work(config, models, gpu, responses * (prompt + response), prompt + response, response)
    forward = {role: done[0] for role, done in work.items()}
    update = {role: done[1] for role, done in work.items()}
    generation = _generation(config, models, gpu, responses, prompt, response)
    sync = 2 * models[ROLLOUT].parameters / SYNC_BYTES_PER_S
    groups = {"+".join(group): group for group in roles_by_slots(config, list(work))}
    of = {name: (sum(forward[r] for r in group), sum(update[r] for r in group)) for name, group in groups.items()}
    forwards, updates = max(f for f, _ in of.values()), max(u for _, u in of.values())
    training = forwards + updates * config.train.max_epochs
    busy = {name: f + u * config.train.max_epochs for name, (f, u) in of.items()}
    if config.train.colocate_all:
        name = next(iter(busy))
        step = generation + training + sync + TURN_S
        return StepTime(step, {f"{name}+{ROLLOUT}": generation + busy[name]}, generation, forwards, updates, sync)
    ahead = config.vllm.sync_mode == "inflight"
    step = (max(generation, training) if ahead else generation + training) + sync
    return StepTime(step, busy | {ROLLOUT: generation}, generation, forwards, updates, sync)


def _work(
    config: Config, models: Models, gpu: Gpu, tokens: int, length: int, response: int
) -> dict[str, tuple[float, float]]:
    """Role -> seconds of its forward pass and of one pass of updates."""
    rate = gpu.bf16_tflops * 1e12
    logits = response / length
    found: dict[str, tuple[float, float]] = {}
    for role in running_roles(config):
        if role.kind != "engine":
            group, shape, head = role.settings(config), models[role.name], logits if role.head else 0.0
            gpus = group.num_nodes * group.num_gpus_per_node
            forward = tokens * forward_flops(shape, length, head) / (gpus * rate * FORWARD_MFU)
            update = 3 * tokens * forward_flops(shape, length, head) / (gpus * rate * TRAINING_MFU)
            found[role.name] = (forward, update if role.kind == "trained" else 0.0)
    return found


def _generation(config: Config, models: Models, gpu: Gpu, responses: int, prompt: int, response: int) -> float:
    """Every token of a response is a step that reads all weights and the KV cache of all sequences."""
    shape, tp = models[ROLLOUT], config.vllm.tensor_parallel_size
    together = min(config.vllm.max_num_seqs, -(-responses // config.vllm.num_engines))
    rounds = -(-responses // (config.vllm.num_engines * together))
    bandwidth = DECODE_BYTES_PER_S.get(gpu.bf16_tflops, 2.9e12 * gpu.bf16_tflops / 989.4)
    weights = 2 * (shape.active - shape.of_kind("embedding"))
    cache = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * (prompt + response / 2) * together
    step = (weights + cache) / tp / bandwidth + DECODE_OVERHEAD_S + (TP_OVERHEAD_S * shape.layers if tp > 1 else 0)
    prefill = together * prompt * forward_flops(shape, prompt, 0.0) / (gpu.bf16_tflops * 1e12 * FORWARD_MFU * tp)
    return rounds * (response * step + prefill)
