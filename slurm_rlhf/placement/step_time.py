"""Estimate the seconds of a training step from the models' shapes and the rates of the hardware.

A phase takes the time of its FLOPs at a share of the card's peak, or of its bytes at a share of its bandwidth,
whichever is longer. The shares (`Rates`) are round figures from published runs: torchtitan's Llama 3 8B on H100 updates
at 36 to 41 % of the peak, decoding reads memory at about 80 % of the data sheet's rate. The rates of CPUs are not known
beforehand: a run measures its own (`measured`).

Lengths of responses follow a log-normal distribution that is cut off at rollout.max_new_tokens. Balance and padding are
those of `algorithms.batching` for these lengths. Rewards by a function need no GPU and are left out; for rewards by a
model, only the seconds count in which no other forward pass runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from slurm_rlhf.config.keys import get
from slurm_rlhf.config.roles import ACTOR, REWARD, ROLES, ROLLOUT, actor_is_reference, roles_by_slots
from slurm_rlhf.config.rules import before_update
from slurm_rlhf.config.schema import Config
from slurm_rlhf.placement.gpus import GIB, Gpu
from slurm_rlhf.placement.memory import Models
from slurm_rlhf.placement.model_shape import ModelShape, batch_flops
from slurm_rlhf.placement.rank_memory import engine, half, tensors, trained, weights

ADAM_BYTES = 36
"""Bytes of a parameter in a step of AdamW: gradient, parameter and two moments in fp32, read and written."""
CPU_BLOCK = 128  # tokens of a block of vLLM's prefix cache on CPUs
CPU_RESPONSE_S = 170e-6  # CPU time of the conductor to request, receive and decode a response, measured
SIGMA = 0.7  # standard deviation of the logarithm of a response's length
MEAN = 0.42  # mean length of responses, as a share of the longest, where none is given
PROMPT = 300  # mean tokens of a prompt, where none is given
AGAIN = {"full": 0.53, "selective": 0.49, "off": 0.0}
"""Share of a forward pass by which recomputation makes the backward pass longer, by train.gradient_checkpointing.

An update took 1 / 0.85 (full) and 1 / 0.86 (selective) times as long as with off, of which a forward pass is a third.
0.49 and the rate below give torchtitan's 36 % for Llama 3 8B. Source: a model of 0.8 B on an H200, docs/cluster.md.
"""
FASTER = (("ds.compile", 1.21), ("ds.use_liger_kernel", 1.17))
"""Key -> how many times as fast passes are with it; at most one is on. Measured for updates; source: as for AGAIN."""


@dataclass(frozen=True, slots=True)
class Rates:
    """State which share of a card's peak each kind of work reaches."""

    update: float = 0.42
    forward: float = 0.50
    prefill: float = 0.50
    memory: float = 0.80
    optimizer: float = 0.80
    step_s: float = 1.5e-3  # seconds of an engine's step beyond those of the model
    layer_s: float = 20e-6  # seconds of a layer's two all-reduces over TP ranks beyond those of their bytes
    block: int = 1  # tokens; whole blocks of a prompt are computed once for all of its responses
    faster: Sequence[tuple[str, float]] = FASTER
    response_s: float = 0.0  # the conductor's work for a response, while it shares its cores with the engines
    overlap: bool = True  # ranks exchange gradients and parameters while layers compute


RATES = Rates()


@dataclass(frozen=True, slots=True)
class Cores:
    """Count the CPU cores of all nodes; ranks that compute at the same time share them."""

    count: int
    threads: int  # threads that a rank of a trained or frozen role has


@dataclass(frozen=True, slots=True)
class Probe:
    """Hold the work that a rank has done, and the seconds that it took."""

    work: float  # FLOPs
    seconds: float
    steps: int = 1  # micro-batches, or an engine's steps

    @staticmethod
    def line(small: Probe, large: Probe) -> tuple[float, float]:
        """Fit seconds = work / rate + rest * steps to two probes; return (rate in FLOP/s, rest in seconds)."""
        apart = small.work * large.steps - large.work * small.steps or math.nan
        rate = apart / (small.seconds * large.steps - large.seconds * small.steps or math.nan)
        rest = (large.seconds - large.work / rate) / large.steps
        if not (0 < rate < math.inf and rest >= 0):  # noise: all of it is FLOPs
            return large.work / large.seconds, 0.0
        return rate, rest


def measured(forward: Probe, update: Probe, sampling: tuple[Probe, Probe], optimizer: float) -> tuple[Gpu, Rates]:
    """Describe CPUs by measured passes of a rank, and by two measurements of an engine, a small and a larger one.

    `optimizer`: bytes a second of AdamW.
    """
    peak, trained = (probe.work / probe.seconds for probe in (forward, update))
    decoded, step_s = Probe.line(*sampling)
    # `step_s` includes the time in which an engine reads weights and cache.
    shares = {"update": trained / peak, "forward": 1.0, "prefill": decoded / peak, "memory": math.inf, "optimizer": 1.0}
    rates = Rates(
        **shares, step_s=step_s, layer_s=0.0, block=CPU_BLOCK, faster=(), response_s=CPU_RESPONSE_S, overlap=False
    )
    return Gpu("CPU", 1 << 20, peak / 1e12, optimizer / 1e9, ""), rates


@dataclass(frozen=True, slots=True)
class Links:
    """State the bytes a second of a node's network, and between GPUs of a node."""

    network: float
    inside: float


GIGABIT = 125_000_000  # bytes
USUAL_LINKS = Links(100 * GIGABIT, 800 * GIGABIT)
"""Links that are assumed where nothing is known: a network of 100 Gbit/s per node, NVLink inside."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Hold the predicted seconds of a step and what follows from them."""

    phases: Mapping[str, float]  # sampling, forward, update; sync, where it is known; reward, where a model gives it
    step: float
    binds: str  # name of the phase or part that a step waits for longest
    idle: float  # share of all GPU seconds in which the GPU has no work
    mfu_update: float
    mfu: float
    tokens_per_gpu: float  # tokens of prompts and responses, a second and GPU
    mean_prompt: float
    mean_response: float
    real: Mapping[str, float]  # trained role -> share of the tokens on an update's critical path that are no padding


def response_lengths(count: int, mean: float, longest: int) -> list[int]:
    """Return `count` lengths of about this mean, at most `longest`: quantiles of a log-normal, shuffled."""
    points = [NormalDist().inv_cdf((number + 0.5) / count) for number in range(count)]
    low, high = 0.0, 4.0 * math.log(longest + 1)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(min(longest, math.exp(middle + SIGMA * point)) for point in points) < mean * count:
            low = middle
        else:
            high = middle
    lengths = [max(1, min(longest, round(math.exp(low + SIGMA * point)))) for point in points]
    stride = next((step for step in range(int(count * 0.618) or 1, 0, -1) if math.gcd(step, count) == 1), 1)
    return [lengths[number * stride % count] for number in range(count)]


def predict(
    config: Config,
    models: Models,
    gpu: Gpu,
    links: Links,
    sync_s: float | None,
    batch: StepLengths,
    rates: Rates = RATES,
    cores: Cores | None = None,
) -> StepTime:
    """Predict a step of a run with engines. `sync_s`: seconds of a weight transfer; None: not known.

    For CPUs, `gpu` and `rates` are those of `measured`, and `cores` is given.
    """
    count, responses = len(batch.responses), batch.responses
    engines = min(config.vllm.num_engines, count)
    work = {
        role: Work(config, role, shape, gpu, links, batch, rates) for role, shape in models.items() if role != ROLLOUT
    }
    forward = {role: one.forward() for role, one in work.items()}
    forward[ACTOR] *= before_update(config) + actor_is_reference(config)
    update = {role: one.update() for role, one in work.items() if ROLES[role].kind == "trained"}
    slots = roles_by_slots(config, list(work))
    shares = (responses[n::engines] for n in range(engines))

    def together(seconds: Mapping[str, float]) -> float:
        """Return the seconds until all roles are done, each after its own `seconds` of work."""
        crowd = sum(ROLES[role].ranks(config) * each for role, each in seconds.items())
        crowd *= cores.threads / cores.count if cores else 0.0
        return max(crowd, apart(seconds))

    def apart(seconds: Mapping[str, float]) -> float:
        """Return the same where roles on the same slots take turns, and roles share nothing else."""
        return max(sum(seconds.get(role, 0.0) for role in group) for group in slots)

    sampled = max(sampling(config, models[ROLLOUT], gpu, share, batch.prompt, rates) for share in shares)
    rest = apart(forward) - apart({role: seconds for role, seconds in forward.items() if role != REWARD})
    phases = {
        "sampling": sampled + count * rates.response_s,
        "forward": together(forward) - rest,
        "update": together(update),
        **({} if sync_s is None else {"sync": sync_s}),
    }
    if REWARD in work:
        phases["reward"] = rest
    training = sum(phases.values()) - phases["sampling"]
    ahead = config.vllm.sync_mode == "inflight"
    parts = {"sampling": phases["sampling"], "training": training} if ahead else phases
    step = max(phases["sampling"], training) if ahead else phases["sampling"] + training
    ranks = {role: ROLES[role].ranks(config) for role in models}
    trainers = sum(max(ranks[role] for role in group) for group in slots)
    gpus = trainers if config.train.colocate_all else trainers + ranks[ROLLOUT]
    busy = phases["sampling"] * ranks[ROLLOUT] + sum(ranks[r] * (forward[r] + update.get(r, 0.0)) for r in work)
    learned = sum(work[role].flops(backward=True) for role in update) * config.train.max_epochs
    others = sum(work[role].flops() * (forward[role] > 0) for role in work) + work[ACTOR].flops()  # and sampling
    peak = gpu.bf16_tflops * 1e12
    return StepTime(
        phases,
        step,
        max(parts, key=parts.__getitem__),
        max(0.0, 1.0 - busy / (gpus * step)),
        learned / (peak * sum(ranks[role] * seconds for role, seconds in update.items())),
        (learned + others) / (peak * gpus * step),
        sum(batch.lengths) / step / gpus,
        batch.prompt,
        sum(responses) / count,
        {role: 1 / work[role].imbalance(config.train.max_tokens_per_gpu) for role in update},
    )


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Hold the lengths of a step's sequences."""

    responses: Sequence[int]
    lengths: Sequence[int]  # with their prompts
    prompt: int  # mean

    @classmethod
    def expected(cls, config: Config, mean_response: float = 0, prompt: int = PROMPT) -> StepLengths:
        """Guess the lengths from the means of responses and prompts; a missing mean of responses, from their limit."""
        count, longest = config.rollout.batch_size * config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens
        prompt = max(1, min(prompt, config.data.max_len - longest))
        responses = response_lengths(count, mean_response or MEAN * longest, longest)
        return cls(responses, [prompt + response for response in responses], prompt)


@dataclass(frozen=True, slots=True)
class Work:
    """Describe what a trained or frozen role computes in a step."""

    config: Config
    role: str
    shape: ModelShape
    gpu: Gpu
    links: Links
    batch: StepLengths
    rates: Rates = RATES

    def flops(self, backward: bool = False) -> float:
        """Count the FLOPs of a pass over all sequences."""
        head = sum(self.batch.responses) if ROLES[self.role].head else 0
        # Frozen weights have no gradients of their own, which are a third of an update.
        share = 2 / 3 if backward and self.config.lora.rank else 1.0
        return share * batch_flops(self.shape, self.batch.lengths, backward, head)

    def update_flops(self) -> float:
        """Count the FLOPs of a pass with gradients, recomputation included."""
        return self.flops(backward=True) + AGAIN[self.config.checkpointing] * self.flops()

    def forward(self) -> float:
        """Return the seconds of a pass without gradients."""
        return self._seconds(self.flops(), self.rates.forward, self.config.train.forward_tokens)

    def update(self) -> float:
        """Return the seconds of all optimizer steps: passes, sums of gradients, and AdamW itself."""
        config, ds = self.config, self.config.ds
        flops = self.update_flops()
        ranks, tokens = ROLES[self.role].ranks(config), config.train.max_tokens_per_gpu
        steps = len(self.batch.lengths) / config.train.batch_size
        computed = self._seconds(flops, self.rates.update, tokens, steps, passes=2)
        elements = trained(config, self.shape, ROLES[self.role].head)[0]
        part = elements / ranks if ds.zero_stage else elements
        # Gradient, master and moments are read and written.
        own = ADAM_BYTES * part / (self.rates.optimizer * self.gpu.bandwidth_gbs * 1e9)
        gradient = elements * (2 if ds.grad_comm_dtype == "bf16" else 4) * (ranks - 1) / ranks / self._link()
        parameters = elements * (2 if half(config) else 4) * (ranks - 1) / ranks / self._link()
        if ds.zero_stage >= 2:  # in each micro-batch, while the next layers compute
            micros = max(steps, math.ceil(sum(self.batch.lengths) / ranks / tokens))
            computed = self._meanwhile(computed, micros * gradient)
            sums = parameters if ds.zero_stage == 2 else 0.0
        else:
            sums = gradient + (parameters if ds.zero_stage else gradient)
        return config.train.max_epochs * (computed + steps * (own + sums))

    def _seconds(self, flops: float, share: float, tokens: int, least: float = 1, passes: int = 1) -> float:
        """Return the seconds of `flops` over the ranks; the rank with most work decides.

        `least`: the number of optimizer steps. `passes`: 1 for forward, 2 for forward and backward.
        """
        seconds = flops * self.imbalance(tokens) / ROLES[self.role].ranks(self.config)
        seconds /= share * self.gpu.bf16_tflops * 1e12
        seconds /= math.prod(times for key, times in self.rates.faster if get(self.config, key))
        if self.config.ds.zero_stage == 3 and ROLES[self.role].kind == "trained":
            micros = math.ceil(sum(self.batch.lengths) / ROLES[self.role].ranks(self.config) / tokens)
            size = (2 if half(self.config) else 4) * tensors(self.shape, ROLES[self.role].head)[0]
            # Copies inside nodes are filled by the first pass after each optimizer step.
            far = least if self.config.ds.hpz_size > 1 else passes * micros
            gathered = size * (far / self._link() + max(0, passes * micros - far) / self.links.inside)
            seconds = self._meanwhile(seconds, gathered)  # while a layer computes the next one is gathered
        return seconds + passes * self._exchanged() / self._link()

    def _meanwhile(self, computed: float, exchanged: float) -> float:
        """Return the seconds of both; CPUs copy what they send, and compute nothing then."""
        return max(computed, exchanged) if self.rates.overlap else computed + exchanged

    def _exchanged(self) -> float:
        """Count the bytes that a rank sends in a pass for ds.ulysses_size: queries, keys, values, attention's output.

        Keys and values are sent as often as the ranks need (`trainer.ulysses`), and layers wait for them.
        """
        shape, size = self.shape, self.config.ds.ulysses_size
        heads = 2 * shape.heads + 2 * math.lcm(shape.kv_heads, size)
        tokens = sum(self.batch.lengths) / ROLES[self.role].ranks(self.config)
        of_token = heads * shape.head_dim * (2 if half(self.config) else 4) * shape.layers
        return tokens * of_token * (size - 1) / size

    def imbalance(self, tokens: int) -> float:
        """Return (tokens of the longest micro-batches) / (mean tokens of a rank), as `cut_batch` cuts a batch."""
        from slurm_rlhf.algorithms.batching import cut_batch

        layout, ranks = ROLES[self.role].layout(self.config), ROLES[self.role].ranks(self.config)
        size = min(self.config.train.batch_size, len(self.batch.lengths))
        lengths = [*self.batch.lengths[:size]]
        _, micros = cut_batch(lengths, ranks, tokens, layout)
        path = sum(
            max(layout.size([lengths[row] for row in group[micro]]) for group in micros)
            for micro in range(len(micros[0]))
        )
        return path * len(micros) / sum(lengths)

    def _link(self) -> float:
        """Return the bytes a second of a ring over the ranks: by a node's network if there are several nodes."""
        return self.links.inside if ROLES[self.role].settings(self.config).num_nodes == 1 else self.links.network


def sampling(
    config: Config, shape: ModelShape, gpu: Gpu, share: Sequence[int], prompt: int, rates: Rates = RATES
) -> float:
    """Return the seconds in which an engine samples responses of these lengths, with continuous batching."""
    tp, samples = config.vllm.tensor_parallel_size, config.rollout.n_samples_per_prompt
    width = 2 if half(config) else 4
    memory, peak = rates.memory * gpu.bandwidth_gbs * 1e9 * tp, rates.prefill * gpu.bf16_tflops * 1e12 * tp
    held = weights(shape, 1, width)
    of_token = 2 * shape.kv_heads * shape.head_dim * width * shape.layers
    kv = engine(config, shape, int(gpu.memory_gib * GIB)).kv * tp / of_token
    places = int(max(1, min(config.vllm.max_num_seqs, kv / (prompt + sum(share) / len(share)))))
    shared = prompt // rates.block * rates.block / prompt if config.vllm.enable_prefix_caching else 0.0
    prompts = len(share) * (1 - shared + shared / samples)
    seconds = prompts * batch_flops(shape, [prompt], backward=False, head_tokens=0) / peak
    sums = (rates.layer_s + 4e-9) * shape.layers if tp > 1 else 0.0
    waiting, now, context, held_tokens = [*share[::-1]], 0, 0.0, 0.0
    running: list[int] = []  # step at whose end each running response is done
    while waiting or running:
        while waiting and len(running) < places:
            heapq.heappush(running, now + waiting.pop())
            context += prompt
        steps = running[0] - now
        context += len(running) * steps / 2
        read = (held * min(1.0, _touched(shape, len(running))) + context * of_token) / memory
        computed = 2.0 * shape.active * len(running) / peak
        seconds += steps * (max(read, computed) + rates.step_s + sums)
        held_tokens += steps * context
        context += len(running) * steps / 2
        now = running[0]
        while running and running[0] == now:
            heapq.heappop(running)
            context -= context / (len(running) + 1)
    # The mean number of tokens in flight at an update, whose keys and values are computed anew after it.
    if config.vllm.sync_mode == "inflight" and not config.vllm.keep_kv_cache and not config.lora.rank:
        seconds += 2.0 * shape.active * held_tokens / now / peak
    return seconds


def _touched(shape: ModelShape, tokens: int) -> float:
    """Return the share of a model's weights that a step of `tokens` reads; unused experts are not read."""
    if not shape.experts:
        return 1.0
    experts = shape.of_kind("experts") / shape.parameters
    return 1.0 - experts * (1.0 - shape.experts_per_token / shape.experts) ** tokens
