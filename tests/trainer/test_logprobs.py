"""Log-probs and entropy in chunks, and the loss scale of fp16."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurm_rlhf.config.schema import Config, Ds
from slurm_rlhf.errors import ConfigError, ModelError, RunError
from slurm_rlhf.run.update import Trained, skip_warning, update_metrics
from slurm_rlhf.trainer import deepspeed as backend
from slurm_rlhf.trainer import logprobs as logprobs_module
from slurm_rlhf.trainer._deepspeed import import_deepspeed, local_shard, master_range
from slurm_rlhf.trainer.deepspeed import deepspeed_config, start_deepspeed
from slurm_rlhf.trainer.distributed import World
from slurm_rlhf.trainer.logprobs import HeadMath, LogprobHead, chunked_logprobs
from slurm_rlhf.trainer.trainer import LossScale, Schedule, TrainSettings, learning_rate

TOKENS, HIDDEN, VOCAB, CHUNK = 50, 16, 97, 8


class LiveLogits:
    """Counts logits that exist at once, in tokens, through a hook on the head."""

    def __init__(self, head: nn.Module) -> None:
        self.live: list[weakref.ref[Tensor]] = []
        self.largest = self.peak = self.calls = 0
        head.register_forward_hook(self._hook)

    def _hook(self, _module: nn.Module, _inputs: object, logits: Tensor) -> None:
        self.live = [ref for ref in self.live if ref() is not None] + [weakref.ref(logits)]
        self.calls += 1
        self.largest = max(self.largest, len(logits))
        self.peak = max(self.peak, sum(len(tensor) for ref in self.live if (tensor := ref()) is not None))


def make_inputs() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    return head, torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randint(VOCAB, (TOKENS,))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("chunk", [CHUNK, 1, 1000])
def test_values_and_gradients_equal_the_plain_formula_in_float64(temperature: float, chunk: int) -> None:
    head, hidden, targets = make_inputs()
    logprobs, entropy = chunked_logprobs(head, hidden, targets, temperature, chunk, entropy_grad=True)
    weights = torch.randn(TOKENS)
    grads = torch.autograd.grad((logprobs * weights + entropy).sum(), [hidden, head.weight])

    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, head.weight))
    z = exact_hidden @ exact_weight.T / temperature
    p = z.softmax(-1)
    exact_logprobs = z[torch.arange(TOKENS), targets] - z.logsumexp(-1)
    exact_entropy = -(p * p.log()).sum(-1)
    exact_grads = torch.autograd.grad(
        (exact_logprobs * weights.double() + exact_entropy).sum(), [exact_hidden, exact_weight]
    )
    torch.testing.assert_close(logprobs.double(), exact_logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=0, atol=2e-5)
    for ours, exact in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


def test_logits_of_one_chunk_exist_at_a_time_forward_and_backward() -> None:
    head, hidden, targets = make_inputs()
    watch = LiveLogits(head)
    logprobs, _ = chunked_logprobs(head, hidden, targets, 1.0, CHUNK)
    chunks = -(-TOKENS // CHUNK)
    assert (watch.calls, watch.largest) == (chunks, CHUNK)
    logprobs.sum().backward()
    assert watch.calls == 2 * chunks, "the backward pass must compute each chunk's logits again"
    assert watch.largest == CHUNK
    assert watch.peak <= 2 * CHUNK  # the one that the hook sees, and its predecessor on the way out


def test_one_chunk_is_not_computed_twice() -> None:
    head, hidden, targets = make_inputs()
    watch = LiveLogits(head)
    chunked_logprobs(head, hidden, targets, 1.0, TOKENS)[0].sum().backward()
    assert watch.calls == 1


def test_entropy_has_no_gradient_unless_asked_for() -> None:
    head, hidden, targets = make_inputs()
    assert not chunked_logprobs(head, hidden, targets, 1.0, CHUNK)[1].requires_grad
    assert chunked_logprobs(head, hidden, targets, 1.0, CHUNK, entropy_grad=True)[1].requires_grad


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_the_backward_pass_computes_no_entropy_that_has_no_gradient(
    monkeypatch: pytest.MonkeyPatch, entropy_grad: bool
) -> None:
    head, hidden, targets = make_inputs()
    asked: list[int] = []
    plain = logprobs_module._entropy
    monkeypatch.setattr(logprobs_module, "_entropy", lambda log_p: asked.append(len(log_p)) or plain(log_p))
    logprobs, entropy = chunked_logprobs(head, hidden, targets, 1.0, CHUNK, entropy_grad=entropy_grad)
    chunks = -(-TOKENS // CHUNK)
    assert len(asked) == chunks
    (logprobs.sum() + (entropy.sum() if entropy_grad else 0.0)).backward()
    assert len(asked) == (2 if entropy_grad else 1) * chunks


def test_no_actions_at_all_still_give_a_gradient() -> None:
    head, hidden, targets = make_inputs()
    logprobs, entropy = chunked_logprobs(head, hidden[:0], targets[:0], 1.0, CHUNK)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not head.weight.grad.any()


def test_half_precision_states_give_fp32_numbers() -> None:
    head, hidden, targets = make_inputs()
    exact, _ = chunked_logprobs(head, hidden, targets, 1.0, CHUNK)
    logprobs, entropy = chunked_logprobs(head.bfloat16(), hidden.bfloat16(), targets, 1.0, CHUNK)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=0.05)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [CHUNK, 1000])
def test_an_fp32_head_is_far_nearer_to_float64_than_a_bf16_one(chunk: int, bias: bool) -> None:
    torch.manual_seed(0)
    head, math = nn.Linear(64, 997, bias=bias).bfloat16(), HeadMath(1.5, 30.0)
    hidden, targets, weights = (torch.randn(50, 64) * 3).bfloat16(), torch.randint(997, (50,)), torch.randn(50)
    hidden.requires_grad_()
    wanted = [hidden, *head.parameters()]

    exact = [x.detach().double().requires_grad_() for x in wanted]
    logits = math(nn.functional.linear(*exact)) / 0.7
    expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    gradients = torch.autograd.grad((expected * weights.double()).sum(), exact)

    off, off_gradient = {}, {}
    for fp32 in (False, True):
        logprobs, _ = LogprobHead(head, chunk, math, fp32)(hidden, targets, 0.7)
        found = torch.autograd.grad((logprobs * weights).sum(), wanted)
        off[fp32] = float((logprobs.double() - expected).abs().max().detach())
        pairs = zip(found, gradients, strict=True)
        off_gradient[fp32] = [float((a.double() - b).abs().mean()) for a, b in pairs]
        assert [a.dtype for a in found] == [torch.bfloat16] * len(found)
    assert off[True] < 1e-5
    assert off[False] > 1e-3
    for better, worse in zip(off_gradient[True], off_gradient[False], strict=True):
        assert 0.0 < better < worse


def test_an_fp32_head_computes_in_fp32_under_autocast() -> None:
    head, hidden, targets = make_inputs()
    plain, _ = chunked_logprobs(head, hidden, targets, 1.0, CHUNK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, _ = LogprobHead(head, CHUNK)(hidden, targets, 1.0)
        logprobs, _ = LogprobHead(head, CHUNK, fp32=True)(hidden, targets, 1.0)
    assert torch.equal(logprobs, plain)
    assert not torch.equal(rounded, plain)


def test_an_fp32_head_that_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"ds\.fp32_lm_head: the head of this model is a Sequential"):
        LogprobHead(nn.Sequential(nn.Linear(2, 3)), CHUNK, fp32=True)


# Peak 1, 10 steps of which 2 are warm-up, down to 0.1: worked by hand.
@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("constant", 0, 0.5),
        ("constant", 1, 1.0),
        ("constant", 9, 1.0),
        ("linear", 2, 1.0),
        ("linear", 9, 0.1),
        ("linear", 99, 0.1),
        ("linear", 3, 1.0 - 0.9 / 7),
        ("cosine", 2, 1.0),
        ("cosine", 9, 0.1),
        ("cosine", 99, 0.1),
        ("cosine", 3, 0.1 + 0.9 * 0.9504844339512095),
    ],
)
def test_schedules(kind: str, step: int, expected: float) -> None:
    schedule = Schedule(kind, 1.0, 10, warmup_ratio=0.2, min_ratio=0.1)
    assert learning_rate(step, schedule) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_trains_at_the_peak_and_one_of_two_down_to_the_end(kind: str) -> None:
    assert learning_rate(0, Schedule(kind, 0.5, 1)) == 0.5
    assert learning_rate(1, Schedule(kind, 0.5, 2)) == (0.5 if kind == "constant" else 0.0)


# --- loss scale -------------------------------------------------------------------------------------------------------


def made(power: int = 3, window: int = 2, least: float = 2.0) -> LossScale:
    ds = Ds(param_dtype="fp16", initial_scale_power=power, loss_scale_window=window, min_loss_scale=least)
    scale = LossScale.of(ds)
    assert scale is not None
    return scale


def test_the_scale_by_hand() -> None:
    """8, overflow: 4, two steps: 8, two: 16, a step and an overflow: 8, two: 16."""
    scale, seen = made(), []
    for passed in (0, 1, 1, 1, 1, 1, 0, 1, 1):
        seen.append(scale.scale)
        if passed:
            scale.step_passed()
        else:
            scale.step_overflowed(0)
    assert [*seen, scale.scale] == [8, 4, 4, 8, 8, 16, 16, 8, 8, 16]


def test_overflows_in_a_row_end_at_the_smallest_scale() -> None:
    scale = made(least=3.0)
    scale.step_overflowed(5)
    scale.step_overflowed(5)
    assert scale.scale == 3.0
    with pytest.raises(RunError, match=r"step 5 is not finite, 3 times .* ds\.min_loss_scale = 3;.* ds\.param_dtype"):
        scale.step_overflowed(5)


def test_a_checkpoint_keeps_where_it_was() -> None:
    scale, other = made(), made()
    for _ in range(3):
        scale.step_passed()
    other.load(scale.state())
    assert other == scale != made()


def test_gradients_of_bf16_and_fp32_are_not_scaled() -> None:
    assert LossScale.of(Ds(param_dtype="bf16")) is None
    assert LossScale.of(Ds(param_dtype="fp32")) is None


def test_skipped_steps_are_counted_and_have_no_gradient_norm() -> None:
    skipped = {"loss": 2.0, "lr": 0.1, "loss_scale": 8.0, "skipped_steps": 1.0}
    taken = {"loss": 4.0, "lr": 0.1, "loss_scale": 4.0, "skipped_steps": 0.0, "grad_norm": 3.0}
    steps = [Trained("actor", 2.0, [answer]) for answer in (skipped, skipped, taken)]
    metrics = update_metrics(steps)
    assert metrics["actor_skipped_steps"] == 2.0
    assert metrics["actor_grad_norm"] == 3.0
    assert math.isclose(metrics["loss"], 4 / 3)  # the loss of a skipped step counts if it is finite
    assert math.isclose(metrics["actor_loss_scale"], 20 / 3)
    assert "actor_grad_norm" not in update_metrics(steps[:2])


def test_what_is_not_finite_in_a_skipped_step_is_left_out_and_reported() -> None:
    nan = math.nan
    skipped = {"loss": nan, "ratio": nan, "approx_kl": nan, "lr": 0.1, "skipped_steps": 1.0}
    taken = {"loss": 4.0, "ratio": 2.0, "approx_kl": 0.0, "lr": 0.1, "skipped_steps": 0.0, "grad_norm": 3.0}
    metrics = update_metrics([Trained("actor", 2.0, [answer, answer]) for answer in (skipped, taken)])
    assert metrics["loss"] == 4.0
    assert metrics["first_ratio"] == 2.0  # nothing has changed since the old log-probs
    assert metrics["actor_skipped_steps"] == 1.0
    assert "1 of the actor. After train.max_skipped_steps" in skip_warning(metrics)
    assert "1 of the actor and 2 of the critic" in skip_warning(metrics | {"critic_skipped_steps": 2.0})
    assert skip_warning(update_metrics([Trained("actor", 2.0, [taken])])) == ""
    assert "first_ratio" not in update_metrics([Trained("actor", 2.0, [skipped])])


def test_the_shards_of_a_parameter_are_its_elements_without_the_padding() -> None:
    found = []
    for rank, shard in enumerate(torch.tensor([[0, 1, 2], [3, 4, 5], [6, -1, -1], [-1, -1, -1]])):
        shard.ds_numel = 3  # type: ignore[attr-defined]
        first, elements = local_shard(SimpleNamespace(ds_tensor=shard, ds_numel=7), rank)
        found.append((first, elements.tolist()))
    assert found == [(0, [0, 1, 2]), (3, [3, 4, 5]), (6, [6]), (7, [])]


def test_where_a_rank_has_its_elements_of_a_parameter() -> None:
    optimizer: Any = SimpleNamespace(
        grad_position={7: (1, 40, 3)}, get_param_id=lambda _: 7, _get_param_partition_rank=lambda each: each.rank
    )
    sharded = [SimpleNamespace(ds_id=0, ds_numel=8, rank=rank) for rank in range(4)]
    assert [master_range(each, optimizer) for each in sharded] == [
        (1, 40, 0, 3),
        (1, 40, 3, 3),
        (1, 40, 6, 2),
        (1, 40, 9, 0),
    ]
    at = SimpleNamespace(hp_fragment_address=SimpleNamespace(start=5, numel=6), param_group_index=2)
    at.lp_fragment_address = SimpleNamespace(start=9)
    assert [master_range(SimpleNamespace(_hp_mapping=each), optimizer) for each in (at, None)] == [
        (2, 5, 9, 6),
        (0,) * 4,
    ]


@pytest.mark.parametrize(("stage", "dtype", "ranks"), [(1, "bf16", 1), (3, "fp16", 2)])
def test_the_configuration_of_deepspeed(stage: int, dtype: str, ranks: int) -> None:
    from deepspeed.utils.config import get_timers_config

    settings: Any = SimpleNamespace(config=Config(), zero_stage=stage)
    settings.config.ds.param_dtype, settings.config.ds.grad_comm_dtype, settings.config.ds.hpz_size = dtype, "fp32", 4
    sharded = {"stage3_param_persistence_threshold": 10, "zero_hpz_partition_size": 4} if stage == 3 else {}
    buckets = {"reduce_bucket_size": 1002, "allgather_bucket_size": 1002}
    found = deepspeed_config(settings, 1001, ranks)
    assert not get_timers_config(found).enabled  # DeepSpeed's reads the key
    assert found == {
        **{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": None},
        **{"gradient_clipping": settings.config.actor.max_norm, "data_types": {"grad_accum_dtype": "fp32"}},
        **{"bf16": {"enabled": stage == 1}, "fp16": {"enabled": stage == 3, "loss_scale": 1.0}},
        **{"communication_data_type": "fp32", "timers": {"throughput": {"enabled": False}}},
        "zero_optimization": {"stage": stage, **buckets, "overlap_comm": ranks == 2, **sharded},
    }


def test_no_compiler_is_asked_what_deepspeed_could_build(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.ops
    from deepspeed.comm.torch import build_shm_op

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", lambda: pytest.fail("it was probed"))
    import_deepspeed(torch.device("cpu"))
    assert build_shm_op() is None


def test_a_device_without_fp16_is_reported_before_a_model_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = import_deepspeed(torch.device("cpu"))
    accelerator = deepspeed.accelerator.get_accelerator()
    assert accelerator.is_fp16_supported()  # as torch computes it on every CPU
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda: False)
    monkeypatch.setattr(backend, "import_deepspeed", lambda device: deepspeed)
    config = Config()
    config.ds.param_dtype = "fp16"
    settings = TrainSettings(config, Schedule.of(config, 1e-3, 1), ranks=1)
    with pytest.raises(ConfigError, match=r"ds\.param_dtype = fp16: DeepSpeed does not train in it on this device"):
        start_deepspeed(torch.nn.Linear(1, 1), {}, settings, World(0, 1, torch.device("cpu")))
