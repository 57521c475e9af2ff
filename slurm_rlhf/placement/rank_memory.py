"""Estimate what one rank of each role holds: at rest, while engines work, and in each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slurm_rlhf.config.roles import ACTOR, ROLES, ROLLOUT, RoleSpec, has_engines, running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ModelError
from slurm_rlhf.placement import trainer_memory as tm
from slurm_rlhf.placement.engine_memory import GIB, Engine, engine, fits_whole, hf_terms
from slurm_rlhf.placement.model_shape import ModelShape, read_shape
from slurm_rlhf.placement.trainer_memory import Pass

# Not measured here, where no GPU is: a context with its libraries, and the buffers of a group's communicators.
CONTEXT = 3 * GIB // 4
GROUP = GIB // 2
SYNC_GROUP = GIB // 4

Bytes = Mapping[str, int]
"""Term -> bytes."""


Models = Mapping[str, ModelShape]
"""Role -> the shape of its model."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Hold the bytes of one rank of a role."""

    role: str
    resting: Bytes  # for as long as it lives
    phases: Mapping[str, Bytes]  # phase -> bytes beside `resting`, released afterwards
    parked: Bytes = field(default_factory=dict)  # of `resting`: what is moved away while the engines work

    def at(self, phase: str) -> dict[str, int]:
        """Return all terms in `phase`; "" is rest, "parked" is while the engines work."""
        if phase == "parked":
            return {name: size - self.parked.get(name, 0) for name, size in self.resting.items()}
        return {**self.resting, **self.phases.get(phase, {})}

    def worst(self) -> dict[str, int]:
        """Return all terms in the phase that takes most."""
        return max((self.at(phase) for phase in self.phases), key=lambda terms: sum(terms.values()))


def read_models(config: Config) -> Models:
    """Read the config.json of every role that `config` starts, each directory once. Raises ModelError."""
    shapes: dict[str, ModelShape] = {}
    found: dict[str, ModelShape] = {}
    for role in running_roles(config):
        key, directory = role.model(config)
        if directory not in shapes:
            shapes[directory] = read_shape(key, directory)
        found[role.name] = shapes[directory]
    return found


def rank_memories(config: Config, models: Models, gpu: int) -> dict[str, RankMemory]:
    """Estimate what a rank of each role that `config` starts holds, on GPUs of `gpu` bytes."""
    found = _alone(config, models, gpu)
    if not has_engines(config):
        generation = {"generation": hf_terms(config, models[ACTOR], gathers_once(config, gpu, models))}
        found[ACTOR] = replace(found[ACTOR], phases={**found[ACTOR].phases, **generation})
    return found


def gathers_once(config: Config, gpu: int, models: Models | None = None) -> bool:
    """Decide whether every rank of the actor has all parameters while it samples (rollout.engine = hf).

    Otherwise it gathers layer by layer. `gpu`: its bytes; 0: a CPU, whose memory is not estimated. Without `models` it
    reads their directories. A model of unknown shape is gathered layer by layer, which needs least.
    """
    if config.ds.zero_stage != 3 or config.rollout.hf_gather != "auto":
        return config.ds.zero_stage != 3 or config.rollout.hf_gather == "batch"
    if not gpu:
        return True
    try:
        models = models or read_models(config)
        held = {role: sum(one.resting.values()) for role, one in _alone(config, models, gpu).items()}
    except ModelError:
        return False
    return fits_whole(config, models[ACTOR], held, gpu)


def _alone(config: Config, models: Models, gpu: int) -> dict[str, RankMemory]:
    """Estimate the roles without what the actor needs to sample."""
    found = {}
    for role in running_roles(config):
        shape = models[role.name]
        if role.kind == "engine":
            found[role.name] = _engine(config, shape, gpu)
        else:
            found[role.name] = (_trainer if role.kind == "trained" else _frozen)(config, shape, role)
    return found


def the_engine(config: Config, shape: ModelShape, gpu: int) -> Engine:
    """Estimate one rank of an engine of `config`."""
    vllm = config.vllm
    wanted = config.ds.param_dtype if vllm.dtype == "auto" else vllm.dtype
    return engine(
        shape,
        vllm.tensor_parallel_size,
        4 if wanted == "fp32" else 2,
        vllm.gpu_memory_utilization,
        gpu,
        config.data.max_len,
        vllm.max_num_seqs,
        vllm.enforce_eager,
    )


def _half(config: Config) -> bool:
    """Return whether models compute in 16 bits."""
    return config.ds.param_dtype != "fp32"


def _pass(config: Config, budget: int, training: bool) -> Pass:
    """Describe a pass over a micro-batch; a sequence that is longer than the budget is a micro-batch by itself."""
    autocast = training and _half(config) and config.ds.zero_stage == 0
    return Pass(
        tokens=max(budget, config.data.max_len),
        length=config.data.max_len,
        dtype=2 if _half(config) else 4,
        checkpointing=training and config.actor.gradient_checkpointing_enable,
        attention=config.ds.attn_implementation,
        autocast=autocast,
    )


def trainer_states(config: Config, shape: ModelShape, role: str) -> tm.States:
    """Estimate parameters, gradients and optimizer states of a rank of a trained role."""
    row = ROLES[role]
    elements, sizes = _tensors(shape, row.head)
    small = tm.persistent(sizes, elements) if config.ds.zero_stage == 3 else 0
    return tm.states(elements, row.ranks(config), config.ds.zero_stage, config.ds.param_dtype, small)


def save_copies(config: Config, models: Models) -> dict[str, int]:
    """Count the bytes of host memory that ckpt.async_save takes on a rank of each trained role.

    They are fp32 masters and AdamW's two moments, which its ranks divide under every ZeRO stage.
    """
    if not config.ckpt.async_save:
        return {}
    roles = [ROLES[role] for role in models if ROLES[role].saves]
    return {role.name: 12 * -(-_tensors(models[role.name], role.head)[0] // role.ranks(config)) for role in roles}


def _tensors(shape: ModelShape, head: bool) -> tuple[int, list[tuple[int, int]]]:
    """Count the elements of all parameters and of each; a model without vocabulary head has one of a single row."""
    if head:
        return shape.parameters, [(tensor.elements, tensor.count) for tensor in shape.tensors]
    body = [(tensor.elements, tensor.count) for tensor in shape.tensors if tensor.kind != "head"]
    return shape.body + shape.hidden, [*body, (shape.hidden, 1)]


def _trainer(config: Config, shape: ModelShape, role: RoleSpec) -> RankMemory:
    ds = config.ds
    ranks = role.ranks(config)
    elements, sizes = _tensors(shape, role.head)
    largest = max(size for size, _ in sizes)
    held = trainer_states(config, shape, role.name)
    grad_bf16 = ds.grad_comm_dtype == "bf16"
    buckets = tm.reduce_buckets(elements, ds.zero_stage, grad_bf16) if ranks > 1 or ds.zero_stage else 0
    resting = {"parameters": held.parameters, "optimizer states": held.optimizer, **_context(role.name, ranks)}
    moment = {"gradients": held.gradients, "reduce buckets": buckets}
    if held.resting_gradients:
        resting["gradients"] = held.resting_gradients
        moment["gradients"] = held.gradients
    if ds.zero_stage == 3:
        resting["reduce buckets"] = buckets
    parked = {}
    if ds.enable_sleep:
        parked = {"optimizer states": held.optimizer if held.parked else 0}
        if ds.zero_stage == 3:
            parked |= {"gradients": held.resting_gradients, "reduce buckets": buckets}
    phases = {
        "update": moment | _update(config, shape, role, elements, largest),
        "forward": _forward(config, shape, role.head, ds.zero_stage == 3, elements, largest),
        "step": moment | {"optimizer's work": _step_work(elements, ranks, ds.zero_stage, largest)},
    }
    if role.name == ACTOR and has_engines(config):
        sent = {"sync buffers": _sync_buffers(config, elements)}
        if config.train.colocate_all:
            resting |= sent  # slots that the engines of the GPU have mapped
        else:
            phases["sync"] = sent
    return RankMemory(role.name, resting, phases, parked)


def _update(config: Config, shape: ModelShape, role: RoleSpec, elements: int, largest: int) -> dict[str, int]:
    """Estimate forward and backward of a micro-batch."""
    half = _half(config)
    how = _pass(config, config.train.max_tokens_per_gpu, training=True)
    terms = {
        "activations": tm.saved(shape, how) + tm.recomputed(shape, how) + tm.autocast_weights(shape, how),
        "backward": tm.backward_work(shape, how),
        "loose gradient": tm.loose_gradient(elements, largest, half, config.ds.grad_comm_dtype == "bf16"),
    }
    if role.head:
        chunk = min(config.train.logprob_chunk_tokens, how.tokens)
        width = 4 if config.ds.fp32_lm_head else how.dtype
        terms["logits"] = tm.logits(shape, chunk, width, True, config.actor.entropy_coef != 0)
        if config.ds.fp32_lm_head and half and config.ds.zero_stage:  # at stage 0 parameters are fp32
            terms["fp32 head"] = tm.fp32_head(shape, backward=True)
    if config.ds.zero_stage == 3:
        terms["gathered layers"] = tm.gathered(elements, largest, half)
    return terms


def _forward(config: Config, shape: ModelShape, head: bool, cut: bool, elements: int, largest: int) -> dict[str, int]:
    """Estimate a pass without gradients."""
    how = _pass(config, config.train.forward_tokens, training=False)
    terms = {"forward activations": tm.forward_work(shape, how)}
    if head:
        terms["logits"] = tm.logits(shape, min(config.train.logprob_chunk_tokens, how.tokens), how.dtype, False)
        if config.ds.fp32_lm_head and _half(config):
            terms["fp32 head"] = tm.fp32_head(shape, backward=False)
    if cut:
        terms["gathered layers"] = tm.gathered(elements, largest, _half(config))
    return terms


def _step_work(elements: int, ranks: int, stage: int, largest: int) -> int:
    """Estimate an optimizer step beside states and gradients: square roots of AdamW, flat gradients, their norm.

    DeepSpeed takes the norm of each piece of the gradient in fp64.
    """
    part = -(-elements // ranks) if stage else elements
    return 4 * part + max(4 * part if stage else 0, 8 * min(largest, part))


def _frozen(config: Config, shape: ModelShape, role: RoleSpec) -> RankMemory:
    group = role.settings(config)
    ranks, cut = role.ranks(config), group.zero_stage == 3
    width = 2 if _half(config) else 4
    elements, sizes = _tensors(shape, role.head)
    largest = max(size for size, _ in sizes)
    held = elements
    if cut:
        held = tm.persistent(sizes, elements) + (0 if group.offload else -(-elements // ranks))
    resting = {"parameters": width * held, **_context(role.name, ranks if cut else 1)}
    return RankMemory(role.name, resting, {"forward": _forward(config, shape, role.head, cut, elements, largest)})


def _engine(config: Config, shape: ModelShape, gpu: int) -> RankMemory:
    """Estimate a rank of an engine, which takes its whole share of the GPU, whatever it needs."""
    rank = the_engine(config, shape, gpu)
    bucket = config.sync.bucket_size_mb(on_gpus=True) << 20
    module = 2 * rank.weights * max(shape.head, 2 * shape.hidden * shape.width) // shape.parameters
    resting = {"CUDA graphs": rank.graphs, **_context(ROLLOUT, config.vllm.tensor_parallel_size)}
    awake = {"weights": rank.weights, "a step's work": rank.work, "KV cache": max(rank.kv, 0)}
    return RankMemory(ROLLOUT, resting, {"generation": awake | {"weight update": 3 * bucket + module}})


def _sync_buffers(config: Config, elements: int) -> int:
    """Count the bytes of the buckets that an actor rank has at a time, in transfers between GPUs."""
    width = 2 if _half(config) else 4
    return 3 * min(config.sync.bucket_size_mb(on_gpus=True) << 20, width * elements)


def _context(role: str, ranks: int) -> dict[str, int]:
    group = GROUP if ranks > 1 and role != ROLLOUT else 0  # an engine's is in its share
    sync = SYNC_GROUP if role in (ACTOR, ROLLOUT) else 0
    return {"CUDA and NCCL": CONTEXT + group + sync}
