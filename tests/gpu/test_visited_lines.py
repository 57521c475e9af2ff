"""Nothing that is written for GPUs goes unrun: the stand-ins' tests reach it all, see gpu_coverage.py."""

from __future__ import annotations

from pathlib import Path

import gpu_coverage
import pytest
from gpu_coverage import ENOUGH, GPU_FILES, ROOMS, Recorder, branches, untaken, wanted

pytestmark = [pytest.mark.slow]

PACKAGE = Path(gpu_coverage.ROOT) / "slurm_rlhf"

SAMPLE = '''
def where(tensor):
    """Says where."""
    if torch.cuda.is_available():
        return 1
    if not tensor.device.type == "cuda":
        return 2
    if current_platform.is_cpu():
        x = 3
    else:
        x = 4
    if state["cuda_rng"] is not None and on_gpu:
        return 6
    return x if on_cpu else 5
'''


@pytest.fixture(scope="module")
def reached(request: pytest.FixtureRequest) -> dict[str, set[int]]:
    recorder = request.config.pluginmanager.get_plugin("gpu_coverage")
    assert isinstance(recorder, Recorder)
    return recorder.reached()


@pytest.mark.parametrize("name", GPU_FILES)
def test_the_lines_of_a_file_for_gpus_run(name: str, reached: dict[str, set[int]]):
    lines = wanted((PACKAGE / name).read_text())
    missed = sorted(lines - reached.get(name, set()))
    assert len(missed) <= (1 - ENOUGH) * len(lines), f"{name}: lines {missed} of {len(lines)} never ran"


def test_every_cuda_branch_is_taken(reached: dict[str, set[int]]):
    missed = []
    files = {path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")}
    commands = set((PACKAGE / "bench").glob("*_command.py"))  # start ranks, and are none
    for path in sorted(files - commands):
        name = str(path.relative_to(PACKAGE))
        for branch in untaken(path.read_text(), reached.get(name, set()), reached.get(f"{name}:arcs", set())):
            missed.append(f"slurm_rlhf/{name}:{branch.line}: {branch.text}")
    assert not missed, "no test with stand-ins takes the GPU's side of\n" + "\n".join(missed)


def test_what_counts_as_a_branch():
    found = {branch.line: branch for branch in branches(SAMPLE)}
    assert sorted(found) == [4, 6, 8, 12, 14]
    goes = tuple(found[line].goes for line in (4, 8, 12, 14))
    assert (goes, found[6].avoids) == (((5,), (11,), (13,), (14,)), (7,))


def test_an_unvisited_branch_is_found():
    lines = {4, 5}
    assert [branch.line for branch in untaken(SAMPLE, lines, set())] == [6, 8, 12, 14]
    on = gpu_coverage._packed(6, 8)
    assert [branch.line for branch in untaken(SAMPLE, lines | {6, 8, 11, 12, 13, 14}, {on})] == []
    assert [branch.line for branch in untaken(SAMPLE, {6, 7}, {gpu_coverage._packed(6, 7)})] == [4, 6, 8, 12, 14]


def test_lines_are_those_of_functions():
    assert wanted(SAMPLE) == {4, 5, 6, 7, 8, 9, 11, 12, 13, 14}
