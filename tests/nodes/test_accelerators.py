"""Verdicts on GPUs that nodes show, and on attention kernels that are missing: all before weights are loaded."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from gpu_smi import card, write_smi
from training_runs import workspace

from slurm_rlhf.cli.main import main
from slurm_rlhf.cluster.gpu_query import parse_gpus, with_processes
from slurm_rlhf.config import architectures
from slurm_rlhf.config.check import check
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.nodes import node_look
from slurm_rlhf.nodes.needs import Wanted, judge_accelerators, seen_by_processes
from slurm_rlhf.nodes.report import FAILED, WARNING, Finding
from slurm_rlhf.placement.rank_map import place
from slurm_rlhf.placement.topology import CPU, Node, Topology, role_sizes

MODULES = dict.fromkeys(architectures.wanted_modules(), False)
GRANTED = "ask for them with sbatch --gpus-per-node"


def said(*cards: str, processes: str = "", **changes: Any) -> dict[str, Any]:
    """The equipment of a good node, with `cards` in place of two H100."""
    gpus = with_processes(parse_gpus("\n".join(cards or (card(0), card(1)))), processes)
    found = {"cuda_build": "13.0", "modules": MODULES, "gpus": [asdict(gpu) for gpu in gpus], "slices": 0}
    return {**found, "driver": "580.95.05", "driver_cuda": "13.0", "said": "", **changes}


def judged(*nodes: dict[str, Any], slots: int = 2, attention: str = "sdpa") -> list[Finding]:
    answers = {f"n{number}": words for number, words in enumerate(nodes, 1)}
    return judge_accelerators(answers, Wanted(dict.fromkeys(answers, slots), attention), GRANTED)


def refused(findings: list[Finding]) -> str:
    """Return the text of the only finding, with which a run cannot start."""
    (finding,) = findings
    assert finding.verdict == FAILED
    return finding.said


def test_good_nodes_pass_without_a_word() -> None:
    assert judged(said(), said()) == []
    # A newer driver runs an older build, and a little memory is always in use.
    assert judged(said(card(0, used=900), card(1), cuda_build="12.8")) == []


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (
            {"gpus": [], "said": "nvidia-smi fails: couldn't communicate with the NVIDIA driver"},
            r"n2: no GPU can be used, the run needs 2: nvidia-smi fails: couldn't communicate(?s:.)*"
            r"Ask for them with sbatch --gpus-per-node; leave a node with a broken driver out",
        ),
        ({"gpus": [], "said": ""}, "n2: no GPU can be used, the run needs 2: CUDA_VISIBLE_DEVICES hides them"),
        ({"gpus": said(card(0))["gpus"]}, "n2: 1 GPU can be used, the run needs 2"),
        (
            {"gpus": said(card(0), card(1, mig="Enabled"))["gpus"]},
            "n2: GPU 1 is cut into MIG slices(?s:.)*ask for whole GPUs",
        ),
        ({"gpus": [], "slices": 2}, "n2: CUDA_VISIBLE_DEVICES names 2 MIG slices"),
        (
            {"driver": "535.104.05", "driver_cuda": "12.2"},
            r"n2: driver 535.104.05 \(CUDA 12.2\) is too old for torch's CUDA 13.0, which needs driver 580 or newer",
        ),
        ({"driver": "570.86.15", "driver_cuda": ""}, "n2: driver 570.86.15 is too old for torch's CUDA 13.0"),
        (
            {"gpus": said(card(0), card(1, used=70000))["gpus"]},
            "n2: 68.4 of 80 GiB of GPU 1 are taken already by processes that are not seen from here",
        ),
    ],
)
def test_what_is_wrong_with_a_node_is_said_with_the_remedy(odd: dict[str, Any], expected: str) -> None:
    found = judged(said(), {**said(), **odd}, said())
    assert re.search(expected, refused(found))
    assert found[0].nodes == ("n2",)
    assert "n1" not in refused(found)


def test_another_users_process_is_named() -> None:
    busy = said(card(0, used=50000), processes=f"{card(0).split(', ')[1]}, 1, /usr/bin/python3, 49000")
    assert re.search(r"by python3 \(pid 1 of root\)(?s:.)*--exclude=NODE", refused(judged(busy, slots=1)))
    # A card that the run does not use may be as busy as it likes.
    assert judged(said(card(0), card(1, used=50000)), slots=1) == []


def test_many_nodes_with_one_trouble_make_a_short_message() -> None:
    (finding,) = judged(*[said(driver="535.1", driver_cuda="12.2")] * 20)
    assert "and 12 more" in finding.said
    assert len(finding.said.splitlines()) == 11
    assert len(finding.nodes) == 20  # all of them are bad, those that are not listed too


def test_unlike_gpus_are_a_note() -> None:
    (finding,) = judged(said(), said(card(0, "NVIDIA A100-PCIE-40GB", 40960), card(1, "NVIDIA A100-PCIE-40GB", 40960)))
    assert "2 x NVIDIA A100-PCIE-40GB (40 GiB), 2 x NVIDIA H100 80GB HBM3 (80 GiB)" in finding.said
    assert finding.verdict == WARNING


def test_a_cpu_build_on_gpus_is_a_note_and_a_cuda_build_without_gpus_an_error() -> None:
    bare = {"cuda_build": "", "modules": MODULES}
    (finding,) = judged(bare, bare)
    assert "torch is a CPU build here, so the ranks compute on CPUs" in finding.said
    assert finding.verdict == WARNING
    assert judge_accelerators({"n1": bare}, Wanted({}), GRANTED) == []
    stated = refused(judge_accelerators({"n1": said()}, Wanted({}), GRANTED))
    assert "there is no GPU here, and the environment holds the CUDA builds" in stated
    stated = refused(judge_accelerators({"n1": said(said="nvidia-smi fails: no driver")}, Wanted({}), GRANTED))
    assert "there is no GPU here (nvidia-smi fails: no driver), and" in stated


@pytest.mark.parametrize(
    ("name", "installed", "expected"),
    [
        ("sdpa", {}, ""),
        ("flash_attention_2", {"flash_attn": True}, ""),
        ("flash_attention_2", {"kernels": True}, ""),
        ("flash_atention_2", {}, "is not known; did you mean flash_attention_2"),
        ("flash_attention_2", {"flash_attn_interface": True}, "needs the module flash_attn .pip install flash-attn."),
        ("kernels-community/flash-attn3", {"flash_attn": True}, "needs the package kernels: pip install kernels"),
        ("kernels-community/flash-attn3", {"kernels": True}, ""),
    ],
)
def test_an_attention_kernel_that_is_not_installed(name: str, installed: dict[str, bool], expected: str) -> None:
    node = said(modules={**MODULES, **installed})
    if not expected:
        assert judged(node, attention=name) == []
        return
    found = judged(node, said(modules=MODULES), attention=name)
    assert re.search(expected, refused(found))
    assert "It is missing on n1, n2" in refused(found)
    assert found[0].nodes == ("n1", "n2")


def test_processes_of_a_node_are_taken_together() -> None:
    one, two = ({**said(line), "node": "n1"} for line in (card(0), card(1, used=60000)))
    wanted, merged = seen_by_processes([one, two, {**said(), "node": "n2"}], gpus=True, attention="sdpa")
    assert wanted.slots == {"n1": 2, "n2": 2}
    assert re.search(r"n1: .* GPU 1 are taken", refused(judge_accelerators(merged, wanted, GRANTED)))


def test_the_rank_map_says_how_many_gpus_a_node_needs() -> None:
    config = Config()
    config.actor.num_gpus_per_node, config.algo.kl.init_coef = 2, 0.0
    topology = Topology((Node("a", 8), Node("b", 8)))
    assert Wanted.by(place(topology, role_sizes(config)), config).slots == {"a": 3, "b": 1}
    assert Wanted.by(place(Topology((Node("a", 8),), CPU), role_sizes(config)), config).slots == {}


def test_a_node_says_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_look.cuda_build() == ""  # torch is a build for CPUs here
    assert node_look.equipment(gpus=True) == {"cuda_build": "", "modules": MODULES}
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    (tmp_path / "site" / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "site" / "torch-2.13.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    write_smi(tmp_path / "bin", [card(0), card(1), card(2)])
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    found = node_look.equipment(gpus=True)
    assert (found["cuda_build"], found["driver"], found["slices"]) == ("13.0", "580.95.05", 0)
    assert [gpu["index"] for gpu in found["gpus"]] == [2, 0]
    assert judge_accelerators({"n": json.loads(json.dumps(found))}, Wanted({"n": 2}), GRANTED) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa,MIG-bbbb")
    assert node_look.equipment(gpus=True)["slices"] == 2


def test_unknown_names_of_attention_and_missing_kernels_end_a_run_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = workspace(tmp_path / "work")
    with pytest.raises(ConfigError, match="'flash_atention_2' is not known; did you mean flash_attention_2"):
        check(load_config(file, ["--ds.attn_implementation=flash_atention_2"]))
    assert main(["train", str(file), "--ds.attn_implementation=flash_attention_2", "--ds.param_dtype=bf16"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "needs the module flash_attn" in err
    assert not list(tmp_path.rglob("*.log"))  # nothing was started
