"""The predicted seconds of a step: what they are made of, how they follow the keys, and those of shipped files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from model_configs import SHAPES

from slurm_rlhf.algorithms.layout import Layout
from slurm_rlhf.config import roles
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import running_roles
from slurm_rlhf.placement.gpus import find_gpu
from slurm_rlhf.placement.model_shape import batch_flops, shape_of
from slurm_rlhf.placement.rank_memory import weights
from slurm_rlhf.placement.step_time import (
    RATES,
    Cores,
    Links,
    Probe,
    StepLengths,
    StepTime,
    Work,
    measured,
    predict,
    response_lengths,
)

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
GBIT = 125e6
KEYS = ("compile", "use_liger_kernel")
LENGTHS = [(384, 850, 2048), (96, 100, 4096), (1, 300, 400), (64, 4000, 4096)]


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the files are not here: all pack their sequences."""
    monkeypatch.setattr(roles, "layout_of", lambda ds, path: Layout(ds.packing_samples != "never", 1 / 43008))


def step(name: str, *keys: str, model: str = "7B", card: str = "h100", network: float = 100) -> StepTime:
    config = load_config(SBATCH / f"{name}.toml", list(keys))
    models = {role.name: shape_of(SHAPES[model]) for role in running_roles(config)}
    gpu = find_gpu(card)
    assert gpu is not None
    alone = config.actor.num_nodes == 1 or config.lora.rank > 0
    sync = 0.0 if alone else 2.0 * models["actor"].parameters / (network * GBIT)
    return predict(config, models, gpu, Links(network * GBIT, 800 * GBIT), sync, StepLengths.expected(config))


@pytest.mark.parametrize(("count", "wanted", "longest"), LENGTHS)
def test_lengths_have_the_mean_and_are_mixed(count: int, wanted: float, longest: int) -> None:
    lengths = response_lengths(count, wanted, longest)
    assert len(lengths) == count
    assert max(lengths) <= longest
    assert mean(lengths) == pytest.approx(wanted, rel=0.01)
    if count > 9:
        halves = mean(lengths[: count // 2]), mean(lengths[count // 2 :])
        assert halves[0] == pytest.approx(halves[1], rel=0.3)


def test_one_response_takes_a_reading_of_the_weights_for_each_token() -> None:
    one = ("--rollout.batch_size=8", "--rollout.n_samples_per_prompt=1", "--train.batch_size=8")
    gpu, shape = find_gpu("h100"), shape_of(SHAPES["7B"])
    found = step("recipes/grpo", *one, "--rollout.max_new_tokens=1000")
    longest = max(response_lengths(8, 420, 1000))
    token = weights(shape, 1, 2) / (RATES.memory * gpu.bandwidth_gbs * 1e9) + RATES.step_s
    assert found.phases["sampling"] == pytest.approx(longest * token, rel=0.03)  # eight engines, one response for each


def test_phases_follow_the_keys() -> None:
    usual = step("recipes/grpo")
    full = step("recipes/grpo", "--train.gradient_checkpointing=full")
    assert full.phases["update"] / usual.phases["update"] == pytest.approx(1 / 0.85, rel=0.02)
    packs, pads = (
        step("recipes/grpo", "--train.max_tokens_per_gpu=8192", f"--ds.packing_samples={how}").phases["update"]
        for how in ("auto", "never")
    )
    assert pads > 1.04 * packs
    assert step("recipes/grpo_lora").phases["update"] < 0.75 * usual.phases["update"]
    slower = step("recipes/grpo", card="a100").phases["update"] / usual.phases["update"]
    assert slower == pytest.approx(989.4 / 312, rel=0.03)
    assert usual.step == pytest.approx(sum(usual.phases.values()))
    ahead = step("recipes/async_grpo")
    training = ahead.phases["forward"] + ahead.phases["update"] + ahead.phases["sync"]
    assert ahead.step == max(ahead.phases["sampling"], training)
    assert ahead.binds == "training"
    slow, fast = (step("ppo_32b", "--vllm.keep_kv_cache=true", model="32B", network=rate) for rate in (100, 1600))
    assert fast.step < slow.step
    keys = ("--ds.grad_comm_dtype=bf16", "--train.max_tokens_per_gpu=8192")
    slow, copies = (step("ppo_32b", f"--ds.hpz_size={size}", *keys, model="32B", network=20) for size in (1, 3))
    assert copies.phases["update"] < 0.7 * slow.phases["update"]
    assert copies.phases["forward"] <= slow.phases["forward"]
    for found in (usual, full, ahead):
        assert 0 <= found.idle < 0.35
        assert 0 < found.mfu < found.mfu_update < RATES.update


def test_keys_change_the_seconds_by_what_was_measured() -> None:
    usual, (compiled, fused) = (step("recipes/gspo"), [step("recipes/gspo", f"--ds.{key}=true") for key in KEYS])
    for found, times in ((compiled, 1.21), (fused, 1.17)):
        for phase in ("forward", "update"):
            assert usual.phases[phase] / found.phases[phase] == pytest.approx(times, rel=0.02)
    kept, anew = (step("ppo_7b", f"--vllm.keep_kv_cache={value}").phases for value in ("true", "false"))
    assert {name for name in kept if kept[name] != anew[name]} == {"sampling"}
    assert kept["sampling"] < 0.95 * anew["sampling"]
    shape = shape_of(SHAPES["7B"])
    # Each rank sends half of the queries, keys, values and results of its tokens, in each pass and layer.
    batch = StepLengths.expected(load_config(SBATCH / "recipes/gspo.toml"))
    heads = 2 * shape.heads + 2 * shape.kv_heads
    sent = sum(batch.lengths) / 8 * heads * shape.head_dim * 2 * shape.layers / 2
    cut = step("recipes/gspo", "--ds.ulysses_size=2").phases
    assert cut["forward"] - usual.phases["forward"] == pytest.approx(sent / (800 * GBIT), rel=0.25)


@pytest.mark.parametrize(("colocated", "ranks", "passes"), [("true", 8, 1 / 3), ("false", 2, 3.0), ("false", 8, 0.0)])
def test_a_reward_model_has_a_phase_of_what_other_passes_leave(colocated: str, ranks: int, passes: float) -> None:
    """It takes turns with actor, critic and reference; is late on a fourth of their GPUs; and is not on as many."""
    keys = (f"--train.colocate_all={colocated}", f"--reward.num_gpus_per_node={ranks}")
    plain = step("recipes/ppo", *keys)
    found = step("recipes/ppo", *keys, "--reward.model_name_or_path=rm", "--reward.remote_url=")
    assert found.phases["reward"] == pytest.approx(passes * plain.phases["forward"], rel=0.1)
    assert {name: found.phases[name] for name in plain.phases} == pytest.approx(plain.phases)
    assert found.step == pytest.approx(sum(found.phases.values()))


def test_the_update_of_7b_on_8_h100_reaches_two_fifths_of_the_peak() -> None:
    assert step("recipes/grpo").mfu_update >= 0.40


@pytest.mark.parametrize("name", ["ppo_7b", "ppo_7b_1node", "ppo_32b", "grpo_7b", "grpo_32b", "grpo_lora_7b"])
def test_the_figures_in_the_heads_of_shipped_files_are_predicted(name: str) -> None:
    model = "32B" if "32b" in name else "7B"
    text = (SBATCH / f"{name}.toml").read_text(encoding="utf-8")
    head = " ".join(line.removeprefix("# ") for line in text[: text.index("\n\n")].splitlines())
    numbers, four = r"(\d+) s: (\d+), (\d+), (\d+)", []
    if name == "grpo_lora_7b":
        script = (SBATCH / f"{name}.sh").read_text(encoding="utf-8").partition("--gres=gpu:4")[2]
        four = re.findall(r"--\S+=\S+", script.partition("4 x 40 GB")[0])
    for card, figures, words in (
        ("h100", r"takes (\d+) s on H100, sampling (\d+), forward (\d+), update (\d+)", []),
        ("a100", f"on A100 {numbers}", []),
        *([("a100_40gb", f"on four A100 of 40 GB {numbers}", four)] if four else []),
    ):
        said = re.search(figures, head, re.IGNORECASE)
        found = step(name, *words, model=model, card=card)
        wanted = [found.step, *(found.phases[phase] for phase in ("sampling", "forward", "update"))]
        assert [int(number) for number in said.groups()] == pytest.approx(wanted, abs=1)
        assert 0.95 < min(found.real.values()) <= max(found.real.values()) <= 1


def test_the_real_tokens_of_an_update_are_those_of_its_fullest_ranks() -> None:
    """Five sequences for each of two ranks: in a row each they are as long as the longest one."""
    keys = ("--rollout.batch_size=10", "--rollout.n_samples_per_prompt=1", "--train.batch_size=10")
    two = ("--actor.num_gpus_per_node=2", "--train.max_tokens_per_gpu=100000")
    config = load_config(SBATCH / "recipes/grpo.toml", [*keys, *two])
    lengths = sorted(StepLengths.expected(config).lengths)
    padded = step("recipes/grpo", *keys, *two, "--ds.packing_samples=never").real["actor"]
    assert padded == pytest.approx(sum(lengths) / (2 * 5 * lengths[-1]))
    assert padded < 0.6
    assert 0.95 < step("recipes/grpo", *keys, *two).real["actor"] <= 1


def test_two_probes_give_a_rate_and_what_a_step_takes_with() -> None:
    rate, rest = Probe.line(Probe(1e9, 0.35, 1), Probe(6e9, 1.7, 2))  # 4 GFLOP/s, 0.1 s for each step
    assert (rate, rest) == (pytest.approx(4e9), pytest.approx(0.1))
    assert Probe.line(Probe(1e9, 0.5), Probe(4e9, 0.4)) == (1e10, 0.0)  # less seconds for more work: noise
    assert Probe.line(Probe(2e9, 0.5), Probe(2e9, 0.5)) == (4e9, 0.0)  # one sequence is all there is room for


@pytest.mark.parametrize(("stage", "all_of_it"), [(2, 1.0), (3, 1.5)])
def test_cpus_exchange_before_or_after_they_compute_and_gpus_meanwhile(stage: int, all_of_it: float) -> None:
    """ZeRO-3 gathers parameters twice, and sums gradients, which takes half as long and is hidden by it on GPUs."""
    config = load_config(None, [f"--ds.zero_stage={stage}", "--actor.num_gpus_per_node=2"])
    shape, lengths = shape_of(SHAPES["7B"]), StepLengths.expected(config, 8, 8)
    card = find_gpu("H100")
    assert card is not None
    work = [Work(config, "actor", shape, card, Links(speed, speed), lengths) for speed in (1e18, 1e9)]
    own, exchange = (one.update() for one in work)
    alone, after = (replace(one, rates=replace(RATES, overlap=False)).update() for one in work)
    assert exchange > 2 * own
    assert alone == pytest.approx(own)
    assert after == pytest.approx(all_of_it * exchange + own, rel=0.1)


def test_on_cpus_a_step_takes_what_was_measured_and_ranks_share_the_cores() -> None:
    keys = ("--rollout.batch_size=4", "--rollout.n_samples_per_prompt=2", "--train.batch_size=8", "--data.max_len=64")
    config = load_config(None, [*keys, "--rollout.max_new_tokens=8", "--vllm.num_engines=1"])
    shape = shape_of(SHAPES["7B"])
    models = {role.name: shape for role in running_roles(config)}
    one = Probe(1e12, 1.0)  # 1 TFLOP/s
    gpu, rates = measured(one, one, (Probe(0.0, 0.01), Probe(1e12, 1.01)), 36e9)
    lengths = StepLengths.expected(config, 8, 8)
    alone, crowded = (
        predict(config, models, gpu, Links(1e9, 1e9), 0.0, lengths, rates, Cores(count, 1)).phases for count in (99, 1)
    )
    flops = batch_flops(shape, [16] * 8, False, 64)
    assert alone["forward"] == pytest.approx(flops / 1e12, rel=0.02)
    assert crowded["forward"] == pytest.approx(3 * alone["forward"], rel=0.1)  # the critic has no head, and so less
    assert crowded["update"] == pytest.approx(2 * alone["update"], rel=0.1)
    prefill = batch_flops(shape, [8] * 8, False, 0) / 1e12  # nothing is shared of prompts below a block
    assert alone["sampling"] == pytest.approx(prefill + 8 * (0.01 + 8 * 2 * shape.active / 1e12), rel=0.02)
    assert alone["sampling"] == crowded["sampling"]
    slow = replace(rates, response_s=rates.response_s + 1.0)  # one conductor, for all engines
    slowed = predict(config, models, gpu, Links(1e9, 1e9), 0.0, lengths, slow, Cores(99, 1)).phases
    assert slowed["sampling"] == pytest.approx(alone["sampling"] + 8)
    config.reward.model_name_or_path = "rm"
    judged = predict(config, models | {"reward": shape}, gpu, Links(1e9, 1e9), 0.0, lengths, rates, Cores(1, 1)).phases
    assert judged["reward"] == 0  # it shares the core with the other passes, and is ready when they are
    assert judged["forward"] == pytest.approx(4 * alone["forward"], rel=0.1)
