"""Who is behind: the rules, on stacks as ranks have them."""

from __future__ import annotations

from pathlib import Path

import pytest

import slurm_rlhf
from slurm_rlhf.groups import hang_rules
from slurm_rlhf.groups.hang_rules import RankState, Sighting, judge, rank_state
from slurm_rlhf.observe.stacks import MAIN, Frame, ThreadStack
from slurm_rlhf.workers.pool import WORKER

SITE = "/env/lib/python3.11/site-packages"
COLLECTIVE = Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
BARRIER = Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 4800, "barrier")
TRAIN = Frame("/home/me/slurm_rlhf/trainer/policy.py", 58, "accumulate")
PLUGIN = Frame("/home/me/plugin.py", 21, "policy_loss")
IDLE = Frame("/home/me/slurm_rlhf/wire/client.py", 101, "receive")
SYNC = Frame("/home/me/slurm_rlhf/weights/ends.py", 80, "update")
FOLLOWS = Frame("/home/me/slurm_rlhf/ranks/engine_follower.py", 50, "run")
STEP = Frame("/home/me/slurm_rlhf/engine/vllm.py", 70, "step")
SLEEP = Frame("/usr/lib/python3.11/threading.py", 324, "wait")


def stack(*frames: Frame) -> tuple[ThreadStack, ...]:
    return (ThreadStack(MAIN, frames), ThreadStack("control-client", (IDLE,)))


def rank(number: int, *frames: Frame, role: str = "actor", call: str = "train_step", **more: object) -> Sighting:
    threads = stack(*frames) if frames else ()
    return Sighting(role, number, f"n{number}", 100 + number, call, 31.0, threads=threads, **more)  # type: ignore[arg-type]


IDLE_ENGINE = rank(0, IDLE, role="rollout", call="")


def behind(*ranks: Sighting, width: int = 1) -> list[str]:
    return [seen.name for seen in judge(ranks, (), width).behind]


@pytest.mark.parametrize("path", [part for part in (*dict(hang_rules._WAITS), *hang_rules._WAITERS) if "rlhf" in part])
def test_the_files_in_which_a_rank_waits_are_there(path: str) -> None:
    assert (Path(slurm_rlhf.__file__).parent.parent / path.strip("/")).exists()


def test_the_rank_that_is_not_in_the_collective_is_behind() -> None:
    ranks = [rank(0, COLLECTIVE, TRAIN), rank(1, PLUGIN, TRAIN), rank(2, COLLECTIVE, TRAIN), IDLE_ENGINE]
    verdict = judge(ranks, ())
    assert [seen.name for seen in verdict.behind] == ["actor rank 1"]
    assert verdict.words == (
        "behind is actor rank 1 on n1 (pid 101, in train_step for 31 s): it is in policy_loss (me/plugin.py:21). "
        "actor ranks 0, 2 wait in all_reduce, called from accumulate (trainer/policy.py:58)"
    )


def test_a_rank_without_an_answer_is_behind_when_its_role_waits_for_it() -> None:
    stopped = rank(1, silent_s=31.0, process="T (stopped by a signal; SIGCONT lets it go on)")
    verdict = judge([rank(0, COLLECTIVE, TRAIN), stopped], ())
    assert [seen.name for seen in verdict.behind] == ["actor rank 1"]
    assert "not heard from for 31 s" in verdict.words
    assert "SIGCONT" in verdict.words
    assert verdict.alive


def test_a_rank_in_another_collective_than_the_others_is_behind() -> None:
    ranks = [rank(0, COLLECTIVE, TRAIN), rank(1, BARRIER, TRAIN), rank(2, COLLECTIVE, TRAIN)]
    assert behind(*ranks) == ["actor rank 1"]
    assert "barrier" in judge(ranks, ()).words


def test_all_in_one_collective_is_the_network() -> None:
    verdict = judge([rank(0, COLLECTIVE, TRAIN), rank(1, COLLECTIVE, TRAIN)], ())
    assert verdict.words.startswith("no rank is behind: actor ranks 0, 1 wait in all_reduce")
    assert "network between its nodes (n0, n1)" in verdict.words


def test_what_holds_the_interpreters_lock_comes_first() -> None:
    held = rank(1, PLUGIN, TRAIN, source="lock")
    verdict = judge([rank(0, COLLECTIVE, TRAIN), held, rank(0, STEP, role="rollout", call="generate")], ())
    assert [seen.name for seen in verdict.behind] == ["actor rank 1"]
    assert "holds the interpreter's lock, in policy_loss (me/plugin.py:21)" in verdict.words


def test_an_engine_that_samples_with_the_training_is_not_behind() -> None:
    engine = rank(0, STEP, role="rollout", call="generate")
    assert behind(engine, rank(0, COLLECTIVE, TRAIN), rank(1, PLUGIN, TRAIN)) == ["actor rank 1"]


def test_an_engine_that_does_not_take_part_in_a_weight_sync_is_behind() -> None:
    ranks = [rank(0, SYNC, call="sync_push"), rank(0, STEP, role="rollout", call="sync_receive")]
    assert behind(*ranks) == ["rollout rank 0"]


def test_an_endless_step_is_behind_and_so_may_be_its_follower() -> None:
    leader = rank(0, COLLECTIVE, STEP, role="rollout", call="generate")
    late = rank(1, STEP, role="rollout", call="")
    assert behind(leader, late, width=2) == ["rollout rank 1"]
    assert behind(
        rank(0, STEP, role="rollout", call="generate"), rank(1, FOLLOWS, role="rollout", call=""), width=2
    ) == ["rollout rank 0"]


@pytest.mark.parametrize(
    ("thread", "caller", "what"),
    [
        ("reward", "rewards/function.py", "reward function"),
        (WORKER, "rewards/function.py", "reward function"),
        (WORKER, "environments/served.py", "environment"),
    ],
)
def test_without_a_call_in_flight_it_is_the_users_code_with_its_line(thread: str, caller: str, what: str) -> None:
    own = Frame(str(Path(slurm_rlhf.__file__).parent / caller), 5, "answer")
    users = ThreadStack(thread, (Frame("/home/me/reward.py", 9, "reward_func"), own))
    verdict = judge([IDLE_ENGINE], [ThreadStack(MAIN, (SLEEP,)), ThreadStack("worker 0", (own,)), users])
    assert verdict.words == (
        f"behind is the {what}, at reward_func (/home/me/reward.py:9); no call to a rank is in flight"
    )


def test_without_users_code_it_is_the_conductor_with_the_call_that_is_no_librarys() -> None:
    assert judge([IDLE_ENGINE], stack(SLEEP, TRAIN)).words == (
        "behind is the conductor, in wait (python3.11/threading.py:324), called from "
        "accumulate (trainer/policy.py:58); no call to a rank is in flight"
    )


def test_of_many_that_are_behind_three_are_described_and_one_whose_call_has_not_come() -> None:
    words = judge([rank(0, COLLECTIVE, TRAIN), rank(1, IDLE), *(rank(n, PLUGIN, TRAIN) for n in range(2, 5))], ()).words
    assert words.startswith(
        "behind are actor rank 1 on n1 (pid 101, in train_step for 31 s): it waits for its next call"
    )
    assert "(me/plugin.py:21); and 1 more. actor rank 0 waits in all_reduce, called from" in words


def test_a_call_that_never_arrived_is_said_to_be_lost() -> None:
    assert judge([rank(0, IDLE)], ()).words == (
        "actor rank 0 did not answer, and nobody computes: the call or its answer is lost"
    )


@pytest.mark.parametrize(
    ("frames", "line", "kind"),
    [
        ((SLEEP, PLUGIN), "", "busy"),
        ((SLEEP, IDLE), "", "idle"),
        ((Frame(f"{SITE}/deepspeed/runtime/zero/x.py", 3, "fetch"), TRAIN), "handle.wait()", "collective"),
        ((Frame(f"{SITE}/deepspeed/runtime/zero/x.py", 3, "fetch"), TRAIN), "a = b + c", "busy"),
        ((Frame("/home/me/plugin.py", 3, "f"),), "event.wait()", "busy"),
        ((Frame(f"{SITE}/torch/cuda/__init__.py", 9, "synchronize"),), "torch._C._cuda_synchronize()", "device"),
        ((Frame("/home/me/slurm_rlhf/trainer/loss_scale.py", 9, "f"),), "x = norm.item()", "device"),
        ((Frame(f"{SITE}/vllm/distributed/parallel_state.py", 9, "all_reduce"), STEP), "", "collective"),
    ],
)
def test_where_a_main_thread_stands(frames: tuple[Frame, ...], line: str, kind: str) -> None:
    seen = rank(0, *frames)
    assert rank_state(seen, lambda file, number: line).kind == kind


def test_the_call_that_is_no_librarys_is_named_with_the_innermost() -> None:
    inner = Frame(f"{SITE}/torch/_ops.py", 1279, "__call__")
    assert rank_state(rank(0, inner, STEP)) == RankState("busy", inner, STEP)
