"""Ranks in a container: what stands before their commands, whole, against files that are committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_files import LOGS, assert_golden, lines, ranks

from slurm_rlhf.config.roles import of_command
from slurm_rlhf.config.schema import Config
from slurm_rlhf.nodes.network_checks import answers
from slurm_rlhf.nodes.srun import HOST, container_of, role_step, step_command


def config(runtime: str) -> Config:
    config = Config(run_dir="/runs/a")
    config.actor.model_name_or_path = config.critic.model_name_or_path = "/models/7b"
    config.slurm.container = "/images/rlhf.sif" if runtime != "pyxis" else "/images/rlhf.sqsh"
    config.slurm.container_runtime = runtime  # type: ignore[assignment]
    config.slurm.container_mounts = ["/data", "/scratch/me:/cache"]
    return config


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_srun_lines(runtime: str) -> None:
    container = container_of(config(runtime))
    command = container.command("slurm_rlhf.nodes.agent", gpus=True)
    text = lines(step_command(role_step(ranks(), "actor", LOGS, container), command))
    assert_golden(f"srun_actor_{runtime}.txt", text)


def test_without_gpus_none_are_shown_and_singularity_is_apptainer() -> None:
    words = container_of(config("singularity")).command("m", gpus=False)
    assert words[:2] == ["singularity", "exec"]
    assert "--nv" not in words


def test_ranks_of_a_stage_see_their_data_and_where_the_model_goes(tmp_path: Path) -> None:
    stage, data = config("apptainer"), tmp_path / "data"
    data.mkdir()
    for name in ("a", "b"):
        (data / f"{name}.jsonl").touch()
    stage.rm.dataset, stage.rm.output_dir = f"{data}/a.jsonl,{data}/b.jsonl", "/models/reward"
    mounts = container_of(of_command(stage, "rm")).mounts
    assert mounts == ("/models/reward.run", "/models/7b", "/data", "/scratch/me:/cache", "/models", str(data))
    assert of_command(stage, "train") is stage


def test_without_a_container_nothing_changes() -> None:
    assert container_of(Config(run_dir="/runs/a")) == HOST
    assert HOST.step_options() == ()


def test_a_container_that_does_not_start_is_named() -> None:
    started = container_of(config("apptainer")).command("...", gpus=False)[:-2]
    check = answers({}, ["n1"], "srun: error: apptainer: not found", " ".join(started))
    assert "apptainer: not found" in check.findings[0].said
    assert "/images/rlhf.sif python3 did not run there" in check.findings[0].remedy
