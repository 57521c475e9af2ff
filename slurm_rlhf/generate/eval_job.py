"""Evaluate a model with engines only: `slurm-rlhf eval`. One job answers the prompts of all data sets; then a report.

It is a job of `slurm-rlhf generate` with rows of several files: after it was killed it goes on with the missing rows,
and an engine that dies costs its share. The code that evaluates in training makes figures and files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.config.check import GENERATED_BY, check_eval
from slurm_rlhf.config.contents import data_contents
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import UserError
from slurm_rlhf.eval.report import ScoredResponse
from slurm_rlhf.eval.sets import EvalSet, Evaluated, answered, keep, read_eval_sets, scored_response
from slurm_rlhf.generate.identity import Identity, identity_of
from slurm_rlhf.generate.job import JobRows, answer_rows, engine_config
from slurm_rlhf.generate.model_source import Source, check_model, find_source
from slurm_rlhf.generate.output import OUTPUT, whole_lines
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.records import Prompt, Sampling
from slurm_rlhf.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class EvalRows:
    """Numbers the prompts of several data sets from 0; the numbers are the rows of the job's output."""

    sets: list[EvalSet]

    def prompts(self) -> list[Prompt]:
        """Return all prompts, with the numbers of their rows."""
        found = [prompt for one in self.sets for prompt in one.prompts]
        return [replace(prompt, index=row) for row, prompt in enumerate(found)]

    def sampling(self, config: Config) -> dict[int, Sampling]:
        """Return the sampling of each row."""
        each = [how for one in self.sets for how in [one.sampling(config)] * len(one.prompts)]
        return dict(enumerate(each))

    def responses(self, lines: Iterable[dict[str, Any]]) -> list[list[ScoredResponse]]:
        """Make the scored responses of each data set from the lines of the output."""
        places = [(number, prompt) for number, one in enumerate(self.sets) for prompt in one.prompts]
        found: list[list[ScoredResponse]] = [[] for _ in self.sets]
        for line in lines:
            number, prompt = places[line["row"]]
            found[number].append(scored_response(self.sets[number].settings, prompt, line))
        return [sorted(each, key=lambda one: (one.index, one.sample)) for each in found]


REPORT = "eval"
"""Stem of the files of the report: eval.json, eval.jsonl."""


@dataclass(frozen=True, slots=True)
class EvalJob:
    """Holds what is evaluated and where its files go."""

    config: Config
    source: Source
    sets: list[EvalSet]
    root: Path

    @classmethod
    def prepare(cls, config: Config, model: Path, output: Path | None) -> EvalJob:
        """Read and check the user's files and settings.

        `model`: any value that generate.model_name_or_path may have. `output`: None is eval/<name of the model> in the
        run that has made the model; in run_dir if no run has. Raises UserError.
        """
        check_eval(config)
        made = copy.deepcopy(config)
        made.generate.model_name_or_path = str(model)
        made.generate.ordered = made.generate.logprobs = False
        run = next((place for place in (model, *model.parents[:2]) if RunDirectory(place).metrics.is_file()), None)
        root = output or RunDirectory(run or Path(config.run_dir)).evaluations / model.name
        try:
            source = find_source(made, root)
            there = source.base or source.model
            check_model(made, there)
        except UserError as error:
            raise type(error)(str(error).replace(GENERATED_BY, "--model")) from None
        return cls(made, source, read_eval_sets(made, Tokenizer.load(there)), root)

    def run(self, ranks: RankMap, launcher: Launcher) -> int:
        """Answer the rows that are left, and return the exit code. Raises SlurmRlhfError."""
        made = engine_config(self.config, self.source.model, ranks, self.root)
        return answer_rows(made, self.root, ranks, launcher, self.source, self._rows, "--output")

    def _rows(self, model: Path) -> JobRows:
        for message in answered(self.sets):
            print(message)
        rows = EvalRows(self.sets)
        named = ", ".join(f"{one.settings.name} ({len(one.prompts)} prompts)" for one in self.sets)
        prompts = rows.prompts()
        sampling, identity = rows.sampling(self.config), self._identity(model)
        return JobRows(sampling, lambda numbers: [prompts[number] for number in numbers], identity, named)

    def report(self) -> Evaluated:
        """Sum up the output, which is complete, into eval.json and eval.jsonl. Raises DataError, OSError."""
        lines = (line for _, _, line in whole_lines(self.root / OUTPUT))
        scored = EvalRows(self.sets).responses(lines)
        about = {"model": self.config.generate.model_name_or_path, "seed": self.config.train.seed}
        return keep(self.config, self.sets, scored, self.root, REPORT, about)

    def _identity(self, model: Path) -> Identity:
        """Describe prompts, model and sampling for `claim`, without settings that only the report uses."""
        config = self.config
        sets = {
            f"eval.datasets, {one.settings.name}": {
                **{name: value for name, value in asdict(one.settings).items() if name in _OF_RESPONSES},
                "fingerprint": data_contents(one.settings.path),
            }
            for one in self.sets
        }
        return {"model": config.generate.model_name_or_path} | identity_of(config, model) | sets


_OF_RESPONSES = ("path", "n_samples_per_prompt", "temperature", "max_samples", "input_key", "label_key")
