"""Undisturbed runs that others are compared with, made once for all modules of a session, and files for other runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import finished, workspace
from whole_run import SMALL, WORLD, Whole


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run of two actor ranks, a critic, a reference and two engines."""
    file = workspace(tmp_path_factory.mktemp("runs"))
    greedy = '{ path = "eval.jsonl", name = "greedy", temperature = 0, n_samples_per_prompt = 1 }'
    sets = f'datasets = [{greedy}, {{ path = "eval.jsonl", name = "sampled", source_key = "label" }}]'
    file.write_text(file.read_text().replace('dataset = "eval.jsonl"', sets))
    run_dir = file.parent / "whole"
    return Whole(file, run_dir, finished(file, run_dir, *WORLD))


@pytest.fixture(scope="session")
def small(whole_run: Whole) -> Path:
    """The directory of a run of an actor's rank, a critic and an engine, on the same files."""
    run_dir = whole_run.config.parent / "small"
    finished(whole_run.config, run_dir, *SMALL)
    return run_dir
