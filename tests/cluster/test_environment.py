"""Slurm's variables: batch script, step, salloc, requeued job; counts and GPUs in all spellings; contradictions."""

from __future__ import annotations

import pytest
from programs import first_on_path

from slurm_rlhf.cluster.resources import current_topology
from slurm_rlhf.cluster.slurm_environment import SlurmEnvironment, expand_counts, parse_gpus, read_slurm
from slurm_rlhf.cluster.slurm_job import ask_scontrol, parse_job_details
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import PlacementError

BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NAME": "ppo",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_NODELIST": "gpu[001-003]",
    "SLURM_NODELIST": "gpu[001-003]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_JOB_CPUS_PER_NODE": "64(x2),32",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7",
    "SLURMD_NODENAME": "gpu001",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_SUBMIT_DIR": "/home/me",
    "SLURM_TOPOLOGY_ADDR": "spine.leaf1.gpu001",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[002-003]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_GPUS_ON_NODE": "2",
}


def read(environ: dict[str, str], **changed: str) -> SlurmEnvironment:
    slurm = read_slurm({**environ, **changed})
    assert slurm is not None
    return slurm


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_outside_slurm() -> None:
    assert read_slurm({"PATH": "/bin"}) is None
    assert read_slurm({"SLURM_JOB_ID": ""}) is None


def test_batch_script() -> None:
    slurm = read(BATCH)
    assert slurm.job_id == 4711
    assert slurm.job_nodes == ("gpu001", "gpu002", "gpu003")
    assert slurm.cpus_per_node == (64, 64, 32)
    assert slurm.gpus() is None  # nodes may differ
    assert read(BATCH, SLURM_GPUS_PER_NODE="8").gpus() == (8, 8, 8)
    assert slurm.step_id is None
    assert slurm.restart_count == 0
    topology = slurm.topology((8, 8, 4))
    assert [(node.name, node.gpus, node.cpus) for node in topology.nodes] == [
        ("gpu001", 8, 64),
        ("gpu002", 8, 64),
        ("gpu003", 4, 32),
    ]
    assert topology.accelerator == "gpu"


def test_requeued_job_of_an_array() -> None:
    slurm = read(BATCH, SLURM_RESTART_COUNT="2", SLURM_ARRAY_JOB_ID="4700", SLURM_ARRAY_TASK_ID="11")
    assert (slurm.restart_count, slurm.array_job_id, slurm.array_task_id) == (2, 4700, 11)


def test_a_step_knows_the_nodes_of_the_job() -> None:
    slurm = read(STEP)
    assert slurm.step_id == 3
    assert slurm.job_nodes == ("gpu001", "gpu002", "gpu003")
    assert slurm.gpus() is None  # 2 are the step's
    assert read(STEP, SLURM_GPUS_PER_NODE="8").gpus() == (8, 8, 8)


UNREAD = [
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_TASKS_PER_NODE",
    "SLURM_JOB_GPUS",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_JOB_PARTITION",
    "SLURM_CLUSTER_NAME",
    "SLURM_TOPOLOGY_ADDR",
    "SLURM_NTASKS",
    "SLURM_DISTRIBUTION",
]


@pytest.mark.parametrize("environ", [BATCH, STEP])
@pytest.mark.parametrize("name", UNREAD)
def test_a_malformed_variable_that_nobody_reads_does_not_stop_a_run(environ: dict[str, str], name: str) -> None:
    assert read(environ, **{name: "gpu[0-,\t(x"}) == read(environ)


@pytest.mark.parametrize("step_id", ["4294967290", "4294967291", "4294967292", "batch", "interactive"])
def test_reserved_steps_are_not_steps(step_id: str) -> None:
    # The interactive step of salloc lists the first node only, while the job has all of them.
    slurm = read(BATCH, SLURM_STEP_ID=step_id, SLURM_STEP_NODELIST="gpu001", SLURM_STEP_NUM_NODES="1")
    assert slurm.step_id is None
    assert slurm.job_nodes == ("gpu001", "gpu002", "gpu003")


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        ({"SLURM_GPUS_PER_NODE": "8"}, (8, 8, 8)),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, (4, 4, 4)),
        ({"SLURM_GPUS_PER_NODE": "a100:4,v100:2"}, (6, 6, 6)),
        ({"SLURM_GPUS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8"}, (8, 8, 8)),
        ({}, (0, 0, 0)),
        ({"SLURM_GPUS_ON_NODE": "4"}, None),
        ({"SLURM_GPUS": "12", "SLURM_GPUS_ON_NODE": "4"}, None),
        # Left behind by a shell inside another job: this node has another number of GPUs.
        ({"SLURM_GPUS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}, None),
        ({"SLURMD_NODENAME": ""}, None),
    ],
)
def test_gpus_of_the_job(asked: dict[str, str], gpus: tuple[int, ...] | None) -> None:
    assert read(without(BATCH, "SLURM_GPUS_ON_NODE"), **asked).gpus() == gpus


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8", 8),
        ("a100:4", 4),
        ("gpu", 1),
        ("gpu:8", 8),
        ("gpu:a100", 1),
        ("gpu:a100:4", 4),
        ("gpu:a100_80gb:4", 4),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", 8),
        ("gpu:8(IDX:0-3,5-8)", 8),
        ("gres:gpu:2", 2),
        ("gres/gpu:a100:4", 4),
        ("gres/gpu=16", 16),
        ("gres/gpu:a100=16", 16),
        ("gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2)", 3),
        ("gpu:4,nic:2", 4),
        ("gres/gpu:2,gres/shard:10", 2),
        ("cpu=8,mem=64G,gres/gpu=2", 2),
        ("cpu:8", 0),
    ],
)
def test_spellings_of_gpus(text: str, count: int) -> None:
    assert parse_gpus(text) == count


@pytest.mark.parametrize("text", ["", "gpu:", "gpu:a100:x", "4:a100", "gpu:4(IDX", "-1", "4,,4"])
def test_what_is_no_number_of_gpus(text: str) -> None:
    with pytest.raises(ValueError, match="expected GPUs"):
        parse_gpus(text)


def test_counts() -> None:
    assert expand_counts("8(x15),4") == (8,) * 15 + (4,)
    assert expand_counts("2,3(x2),1") == (2, 3, 3, 1)
    for text in ("", "8(15)", "8x3", "8(x)", "8,", "-1", "1(x99999999999)"):
        with pytest.raises(ValueError, match="expected counts"):
            expand_counts(text)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_JOB_NODELIST": "gpu[001-"}, "SLURM_JOB_NODELIST='gpu\\[001-'"),
        ({"SLURM_JOB_CPUS_PER_NODE": "64(2)"}, "SLURM_JOB_CPUS_PER_NODE='64\\(2\\)'"),
        ({"SLURM_JOB_CPUS_PER_NODE": "64,32"}, "SLURM_JOB_CPUS_PER_NODE: 2 counts for 3 nodes"),
        ({"SLURM_RESTART_COUNT": "two"}, "SLURM_RESTART_COUNT='two'"),
        ({"SLURM_JOB_NUM_NODES": "4"}, "is 4, but SLURM_JOB_NODELIST names 3"),
        ({"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_HET_SIZE": "2"}, "heterogeneous"),
        ({"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""}, "heterogeneous job of 2 components"),
    ],
)
def test_contradictions_name_the_variable(changed: dict[str, str], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        read_slurm({**BATCH, **changed})


DETAILS = """JobId=4711 JobName=ppo
   NumNodes=3 NumCPUs=160 NumTasks=3 CPUs/Task=1
   JOB_GRES=gpu:20
     Nodes=gpu[001-002] CPU_IDs=0-63 Mem=0 GRES=gpu:a100:8(IDX:0-7)
     Nodes=gpu003 CPU_IDs=0-31 Mem=0 GRES=gpu:a100:4(IDX:0-1,6-7)
     Nodes=cpu001 CPU_IDs=0-31 Mem=0 GRES=
   TresPerNode=gres:gpu:8
"""


def test_details_of_uneven_nodes() -> None:
    assert parse_job_details(DETAILS) == {"gpu001": 8, "gpu002": 8, "gpu003": 4, "cpu001": 0}
    asked = DETAILS.replace("TresPerNode=gres:gpu:8", "TresPerNode=gres/gpu:a100:4")
    assert parse_job_details(asked) == {"gpu001": 4, "gpu002": 4, "gpu003": 4, "cpu001": 0}
    assert parse_job_details(DETAILS.replace("TresPerNode", "TresPerJob"))["gpu002"] == 8


def test_scontrol_is_asked_where_the_environment_does_not_tell(tmp_path, monkeypatch) -> None:
    (tmp_path / "details").write_text(DETAILS)
    script = f'[ "$*" = "show job --details 4711" ] && exec cat {tmp_path}/details\nexit 1'
    first_on_path(monkeypatch, tmp_path, scontrol=script)
    topology = current_topology(Config(), environ={**BATCH, "SLURM_GPUS": "20"})
    assert [node.gpus for node in topology.nodes] == [8, 8, 4]
    seen_here = {**without(BATCH, "SLURM_JOB_GPUS"), "SLURM_GPUS_ON_NODE": "8"}  # as --gres=gpu:4 --exclusive leaves it
    assert [node.gpus for node in current_topology(Config(), environ=seen_here).nodes] == [8, 8, 4]
    login = {**without(BATCH, "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURMD_NODENAME"), "SLURM_GPUS": "24"}  # salloc
    assert [node.gpus for node in current_topology(Config(), environ=login).nodes] == [8, 8, 4]
    (tmp_path / "details").write_text("")
    for total in ({}, {"SLURM_GPUS": "24"}):
        assert [node.gpus for node in current_topology(Config(), environ=seen_here | total).nodes] == [8, 8, 8]
    with pytest.raises(PlacementError, match="--gpus-per-node"):  # 20 GPUs are not 8 on each of three nodes
        current_topology(Config(), environ={**seen_here, "SLURM_GPUS": "20"})
    (tmp_path / "details").write_text(DETAILS)
    with pytest.raises(PlacementError, match=r"failed \(exit code 1\): request the GPUs with --gpus-per-node"):
        ask_scontrol(4712, ["gpu001"])
    with pytest.raises(PlacementError, match="gpu009"):
        ask_scontrol(4711, ["gpu009"])


def test_allocation_without_gpus_gets_process_slots() -> None:
    config = Config()
    config.vllm.num_engines = 4
    topology = current_topology(config, environ=without(BATCH, "SLURM_GPUS_ON_NODE"))
    assert topology.accelerator == "cpu"
    assert [node.gpus for node in topology.nodes] == [5, 5, 5]  # actor, critic, reference, two of four engines


def test_a_job_submitted_from_inside_another_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch never clears SLURM_GPUS_PER_TASK of the allocation around it; the job itself has four GPUs."""
    monkeypatch.setenv("PATH", "")  # no scontrol either
    one = {"SLURM_JOB_NODELIST": "gpu001", "SLURM_NODELIST": "gpu001", "SLURM_JOB_NUM_NODES": "1"}
    counts = {"SLURM_JOB_CPUS_PER_NODE": "64", "SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS_PER_TASK": "1"}
    found = current_topology(Config(), {**BATCH, **one, **counts, "SLURM_GPUS_ON_NODE": "4"})
    assert [node.gpus for node in found.nodes] == [4]
