"""The command lines and environments that a run starts its processes with, whole, against files that are committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_files import LOGS, assert_golden, lines, ranks

from slurm_rlhf.config.keys import changed
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError
from slurm_rlhf.nodes.environment import node_environment, role_environment
from slurm_rlhf.nodes.facts import StepSpec, share_on, torchrun_command
from slurm_rlhf.nodes.srun import Step, role_step, step_command, step_environment
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import CPU, Node, RoleSize, Topology


@pytest.mark.parametrize("role", ["actor", "critic", "rollout"])
def test_srun_lines(role: str) -> None:
    assert_golden(f"srun_{role}.txt", lines(step_command(role_step(ranks(), role, LOGS), ["shim", "order.json"])))


@pytest.mark.parametrize(
    ("role", "node", "store"),
    [("actor", "gpu1", ""), ("actor", "gpu2", "10.0.0.1:24001"), ("critic", "gpu3", "")],
)
def test_torchrun_lines(role: str, node: str, store: str) -> None:
    spec = StepSpec(role, "/runs/a", "77.0.abc", [f"--role={role}", "--run_dir=/runs/a"], {}, store=store)
    text = lines(torchrun_command(spec, ranks(), node, "/tmp/own/torchrun"))
    assert_golden(f"torchrun_{role}_{node}.txt", text)


def test_environment_of_a_node() -> None:
    step = {
        "PATH": "/bin",
        "RANK": "3",
        "MASTER_ADDR": "injected",
        "PMIX_RANK": "0",
        "PMI_SIZE": "9",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "ib0",
        "TRITON_CACHE_DIR": "/home/me/.triton",
        "OMP_NUM_THREADS": "1",
        "SLINGSHOT_VNIS": "1024,1025",  # the step's own number, and the job's
    }
    found = node_environment(step, "actor", LOGS, Path("/tmp/own"), {"OMP_NUM_THREADS": "8"}, "eth0")
    assert_golden("environment_actor.txt", "".join(f"{name}={value}\n" for name, value in sorted(found.items())))


def test_srun_is_not_led_astray_by_the_jobs_own_options() -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}
    options = {"SLURM_CPUS_PER_TASK": "2", "SLURM_EXPORT_ENV": "NONE", "SLURM_MEM_PER_CPU": "100", "SLURM_GPUS": "4"}
    options |= {"SLURM_EXCLUSIVE": "1", "SLURM_CONSTRAINT": "a100", "SRUN_EXPORT_ENV": "NONE"}
    assert step_environment(kept | options) == kept


def test_without_gpus_a_step_asks_for_none_of_the_jobs() -> None:
    words = step_command(Step("x", ("n1",)), [])
    assert "--gres=none" in words
    assert not [word for word in words if word.startswith("--cpus")]
    on_cpus = Topology((Node("a", 2, 64),), CPU)
    assert role_step(place(on_cpus, [RoleSize("actor", 1, 2)]), "actor", LOGS).gpus == ()


def test_on_uneven_nodes_each_asks_for_its_own_gpus() -> None:
    uneven = Topology((Node("a", 8, 64), Node("b", 4, 32), Node("c", 8, 64)))
    step = role_step(place(uneven, [RoleSize("actor", 3, 2)]), "actor", LOGS)
    assert step.cpus == 32
    words = step_command(step, ["shim"])
    assert (words.count("srun"), words.count(":"), words.count("shim"), words.count("--nodes=1")) == (1, 2, 3, 3)
    asked = [word for word in words if word.startswith(("--nodelist", "--gpus", "--gres"))]
    assert asked == ["--nodelist=a", "--gpus=8", "--nodelist=b", "--gpus=4", "--nodelist=c", "--gpus=8"]
    alone = step_command(role_step(place(uneven, [RoleSize("critic", 1, 8)]), "critic", LOGS), ["shim"])
    assert "--gpus=8" in alone  # also where the role itself has one node


def test_a_node_that_the_map_does_not_give_the_role_is_refused() -> None:
    with pytest.raises(PlacementError, match="critic was started on gpu1, but the rank map has it on gpu3"):
        share_on(ranks(), "critic", "gpu1")


def test_threads_are_shared_by_what_computes_at_the_same_time_on_the_same_node() -> None:
    found = role_environment(Config(), ranks(), cpus=1)
    assert [variables["OMP_NUM_THREADS"] for variables in found["actor"].values()] == ["10", "10"]
    assert found["rollout"]["gpu1"]["OMP_NUM_THREADS"] == "32"
    assert found["critic"]["gpu3"]["OMP_NUM_THREADS"] == "16"
    assert "GLOO_SOCKET_IFNAME" not in found["actor"]["gpu1"]
    growing = {
        role for role, on in found.items() if any("PYTORCH_ALLOC_CONF" in variables for variables in on.values())
    }
    assert growing == {"critic"}  # the actor's memory is mapped by engines, which have pools of their own
    for on_nodes in found.values():
        for variables in on_nodes.values():  # nothing of a run calls home, or a hub
            assert (variables["HF_HUB_OFFLINE"], variables["DO_NOT_TRACK"]) == ("1", "1")
    alone = place(Topology((Node("vm", 4),), CPU), [RoleSize("actor", 1, 2), RoleSize("rollout", 1, engines=1)])
    found = role_environment(Config(), alone, cpus=6)
    assert found["actor"]["vm"]["OMP_NUM_THREADS"] == "3"
    assert found["actor"]["vm"]["GLOO_SOCKET_IFNAME"] == "lo"
    named = role_environment(changed(Config(), {"sync.interface": "ib0"}), ranks(), cpus=1)
    assert {role: on["gpu1" if "gpu1" in on else "gpu3"].get("NCCL_SOCKET_IFNAME") for role, on in named.items()} == {
        "actor": "=ib0",
        "rollout": "=ib0",
        "critic": None,
    }
    together = changed(Config(), {"train.colocate_all": True})
    assert "PYTORCH_ALLOC_CONF" not in role_environment(together, ranks(), cpus=1)["critic"]["gpu3"]
