"""Puts a job together and runs it: claims the output, starts the engines, hands out rows, and writes the answers.

`slurm-rlhf eval` is a job with the rows of several files: after it was killed it goes on with the missing rows, and an
engine that dies costs its share. Then comes a report. The code that evaluates in training makes figures and files.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_rlhf.cluster.resources import node_name
from slurm_rlhf.cluster.stop import Stop, StopRequested
from slurm_rlhf.config.check import GENERATED_BY, check_eval, check_generate
from slurm_rlhf.config.contents import data_contents
from slurm_rlhf.config.roles import ROLLOUT
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import PlacementError, RoleDied, UserError, printable
from slurm_rlhf.eval.report import ScoredResponse
from slurm_rlhf.eval.sets import EvalSet, Evaluated, answered, keep, read_eval_sets, scored_response
from slurm_rlhf.generate.identity import OF_ROWS, ROWS, SHARD, Identity, RowShard, claim, identity_of, merge, shard_here
from slurm_rlhf.generate.model_source import Source, check_model, find_source, provide
from slurm_rlhf.generate.output import MERGED, OUTPUT, JobProgress, OutputFile, whole_lines
from slurm_rlhf.generate.rows import VERSION, Answered, Gone, PendingRows, PromptsOf, RowCalls, Scores, read_dataset
from slurm_rlhf.groups.run_lock import lead, occupied
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.nodes.environment import role_environment
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.nodes.requeue import continuation_of
from slurm_rlhf.observe.run_status import write_summary
from slurm_rlhf.placement.rank_map import RankMap, place, process_slots
from slurm_rlhf.placement.topology import CPU, RoleSize, Topology
from slurm_rlhf.records import Sampling
from slurm_rlhf.run_directory import RunDirectory, run_directory_kept
from slurm_rlhf.sampling.batches import sampling_of
from slurm_rlhf.sampling.environment import Environments
from slurm_rlhf.wire.handles import EngineHandle

WAIT_S = 0.2


@dataclass(slots=True)
class GenerateJob:
    """Answers the rows of one output. `config`: the engines' configuration, by `engine_config`."""

    config: Config
    directory: RunDirectory
    ranks: RankMap
    launcher: Launcher
    output: OutputFile
    pending: PendingRows
    progress: JobProgress
    environments: Environments | None  # None: each prompt has one turn
    calls: RowCalls | None = field(default=None, init=False)

    def work(self, stop: Stop) -> None:
        """Answer every row, and write the summary. Raises as `run`."""
        self.run(stop)
        self.output.sync(time.monotonic(), 0.0)
        self.finish("finished")

    def stopped(self, request: StopRequested) -> bool:
        """Write the summary of a job that stops; return whether this start has written any row."""
        self.output.sync(time.monotonic(), 0.0)
        self.finish("stopped")
        return len(self.output.counts.done) > self.progress.before

    def failed(self, error: BaseException) -> None:
        """Write the summary of a job that fails."""
        with contextlib.suppress(OSError):  # the disk does not take the summary: `error` says so already
            self.finish("failed", str(error))

    def run(self, stop: Stop) -> None:
        """Answer every row. Raises StopRequested, RunError when no engine is left, RewardError, OSError."""
        refused = [line for row in self.pending.bad for line in self.pending.errors(row.index, row.text, row.error)]
        self.output.append(refused)
        self.progress.refused = len(refused)
        if not self.pending.queue.unfinished:
            return
        supervisor = Supervisor(self.config, self.directory, self.ranks, self.launcher)
        try:
            with stop.droppable():
                supervisor.start(role_environment(self.config, self.ranks, len(os.sched_getaffinity(0))))
                handle, engines = supervisor.roles[ROLLOUT], supervisor.engines
                assert isinstance(handle, EngineHandle)
                assert engines is not None
                seed, width = self.config.train.seed, self.config.vllm.max_num_seqs
                self.calls = RowCalls(handle, engines, seed, width, self.environments)
                engines.begin_apart(VERSION)
                self.tell(f"starting {handle.world} engines")
                while self.pending.queue.unfinished:
                    self._turn(self.calls)
                    if supervisor.failure is not None:
                        raise supervisor.failure
        finally:
            stop.ignore_signals()
            if self.calls:
                self.calls.close()
            supervisor.stop()
            ready = len(self.calls.ready) if self.calls else 0
            self.tell(self.progress.line(self.output.counts, ready, time.monotonic()))

    def _turn(self, calls: RowCalls) -> None:
        """Write the answers that have come, and hand out rows to engines that have room."""
        answered: list[Answered] = []
        for news in calls.wait(WAIT_S):
            if isinstance(news, Answered):
                answered.append(news)
            else:
                self._lose(calls, news)
        self.output.append(self.pending.take(calls, answered, self.progress))
        now = time.monotonic()
        self.output.sync(now)
        for engine in calls.ready:
            self.progress.since = self.progress.since or now
            self.pending.feed(calls.ask_row, engine, len(calls.ready), now)
        if calls.ready and self.progress.due(now):
            self.tell(self.progress.line(self.output.counts, len(calls.ready), now))
            self._write_summary("running")

    def _lose(self, calls: RowCalls, news: Gone) -> None:
        rows = self.pending.queue.lose(news.engine)
        rest = calls.handle.world - len(calls.gone)
        self.tell(
            f"engine {news.engine} on {calls.engines.node(news.engine)} is lost: {news.why}\n"
            f"its {len(rows)} rows go to others; {rest} of {calls.handle.world} engines are left"
        )
        if rest:
            return
        for error in calls.engines.refused:
            raise error
        raise RoleDied(
            f"no engine is left; the last one: {news.why}\nThe {len(self.output.counts.done)} responses so far are in "
            f"{self.output.path}; the same command goes on from there."
        )

    def _write_summary(self, status: str, **more: Any) -> None:
        lost = self.calls.gone if self.calls else {}
        summary = self.progress.summary(status, self.output.counts, lost, time.monotonic(), **more)
        write_summary(self.directory.summary, summary)

    def tell(self, line: str) -> None:
        """Print a line, unless logger.progress = none."""
        if self.config.logger.progress != "none":
            print(printable(line), flush=True)

    def finish(self, status: str, error: str = "") -> None:
        """Write the summary, and the ordered file if it is wanted and all rows are done."""
        more = {"output": str(self.output.path), **({"error": error} if error else {})}
        if status == "finished" and self.config.generate.ordered and not (self.directory.root / MERGED).exists():
            merge(self.directory.root, None)
        self._write_summary(status, **more)
        self.tell(f"{status}: {len(self.output.counts.done)} of {self.progress.total} responses in {self.output.path}")


@dataclass(frozen=True, slots=True)
class JobRows:
    """Holds the rows of a job, and what their output is made with."""

    sampling: Mapping[int, Sampling]  # row -> how its responses are sampled
    prompts: PromptsOf
    identity: Identity
    words: str  # says what the rows are


def answer_rows(
    config: Config,
    root: Path,
    ranks: RankMap,
    launcher: Launcher,
    source: Source,
    read: Callable[[Path], JobRows],
    option: str = "run_dir",
) -> int:
    """Answer the rows that are left with engines of `config`, in `root`, and return the exit code.

    `read` gets the directory of the model, which is made first where it has to be. `option` names `root`. When this
    returns, no engine is left, and every row that was answered is in the output. Raises SlurmRlhfError.
    """
    began, directory = time.monotonic(), RunDirectory(root)
    continuation = continuation_of(config.slurm, root, os.environ)
    end, lead_s = continuation.end_time(), config.slurm.signal_lead_s
    with occupied(directory, node_name(), end, lead_s):
        with run_directory_kept(directory.root):
            scores = Scores.of(config, directory.reward_log)
            model = provide(source, print, directory.role_log("model", node_name(), 0))
            rows = read(model)
            claim(root, rows.identity, option)
            output = OutputFile(root / OUTPUT)
            done = output.counts.done
            left = [row for row, how in rows.sampling.items() if any((row, k) not in done for k in range(how.n))]
            pending = PendingRows(config, rows.prompts(left), rows.sampling, scores, done)
            total, before = sum(how.n for how in rows.sampling.values()), len(done)
            progress = JobProgress(total, {group.engine: group for group in ranks.tp_groups}, began, before)
            there = f"; {before} are there from before" if before else ""
            print(f"output directory {root}: {total} responses to {rows.words}{there}", flush=True)
            directory.config.write_text(dump_toml(config), encoding="utf-8")
        environments = None
        if config.env.path:
            environments = Environments(config, Tokenizer.load(model), directory.reward_log, print)
        job = GenerateJob(config, directory, ranks, launcher, output, pending, progress, environments)
        try:
            if environments is not None:
                environments.check_rows(pending.prompts.values(), rows.words)
            return lead(job, directory, end, lead_s, continuation)
        finally:
            if environments is not None:
                environments.close()
            scores.close()
            with contextlib.suppress(OSError):
                output.close()


def engines_everywhere(topology: Topology, tp: int, per_node: int = 0) -> RankMap:
    """Put `per_node` engines of `tp` neighbouring slots on each node; 0: as many as its GPUs hold.

    Nodes without GPUs have as many process slots as that takes, for one engine where `per_node` is 0. Raises
    PlacementError where a node holds fewer engines than were asked for, or none holds one.
    """
    on_cpus = topology.accelerator == CPU
    for node in topology.nodes:
        if per_node * tp > node.gpus and not on_cpus:
            raise PlacementError(
                f"generate.engines_per_node = {per_node} engines of vllm.tensor_parallel_size = {tp} need "
                f"{per_node * tp} GPUs, and {node.name} has {node.gpus}: lower one of them, or set "
                "generate.engines_per_node = 0 for as many as fit"
            )
    per_node = per_node or int(on_cpus)
    count = per_node * len(topology.nodes) or sum(node.gpus // tp for node in topology.nodes)
    if not count:
        most = max(node.gpus for node in topology.nodes)
        raise PlacementError(
            f"vllm.tensor_parallel_size = {tp}, and the largest node has {most} GPUs: an engine does not leave its "
            f"node. Use at most {most}, or ask for more GPUs with --gpus-per-node"
        )
    engines = [RoleSize(ROLLOUT, len(topology.nodes) if per_node else 0, tp=tp, engines=count)]
    return place(process_slots(topology, engines) if on_cpus else topology, engines)


def prepare(config: Config, environ: Mapping[str, str]) -> tuple[RowShard, Source]:
    """Check all that is known before anything is written. Raises UserError."""
    check_generate(config)
    root = Path(config.run_dir)
    shard = shard_here(root, environ)
    source = find_source(config, root)
    check_model(config, source.base or source.model)
    return shard, source


def engine_config(config: Config, model: Path, ranks: RankMap, directory: Path) -> Config:
    """Return the configuration that the engines read, of a rollout role without trainers."""
    made = copy.deepcopy(config)
    made.run_dir = str(directory)
    made.actor.model_name_or_path = str(model)
    made.vllm.num_engines, made.vllm.num_nodes = len(ranks.tp_groups), len(ranks.roles[ROLLOUT])
    made.vllm.sync_mode = "drain"
    made.train.colocate_all = made.ds.enable_sleep = False
    return made


def generate(config: Config, shard: RowShard, source: Source, ranks: RankMap, launcher: Launcher) -> int:
    """Answer the rows of `shard` that are left, and return the exit code. Raises SlurmRlhfError."""

    def read(model: Path) -> JobRows:
        total, prompts = read_dataset(config, model)
        own = shard.rows(total)
        words = f"{len(own)} rows" + (f", part {shard.index} of {shard.count}" if shard.count > 1 else "")
        sampling = dict.fromkeys(own, sampling_of(config))
        own_keys = {
            "dataset_fingerprint": data_contents(config.generate.dataset),
            ROWS: total,
            SHARD: f"{shard.index} of {shard.count}",
        }
        return JobRows(sampling, prompts, identity_of(config, model, OF_ROWS) | own_keys, words)

    root = shard.directory(Path(config.run_dir))
    return answer_rows(engine_config(config, source.model, ranks, root), root, ranks, launcher, source, read)


REPORT = "eval"
"""Stem of the files of the report: eval.json, eval.jsonl."""


@dataclass(frozen=True, slots=True)
class EvalJob:
    """Holds what is evaluated and where its files go.

    The prompts of all data sets are numbered from 0; the numbers are the rows of the job's output.
    """

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

    def responses(self, lines: Iterable[dict[str, Any]]) -> list[list[ScoredResponse]]:
        """Make the scored responses of each data set from the lines of the output."""
        places = [(number, prompt) for number, one in enumerate(self.sets) for prompt in one.prompts]
        found: list[list[ScoredResponse]] = [[] for _ in self.sets]
        for line in lines:
            number, prompt = places[line["row"]]
            found[number].append(scored_response(self.sets[number].settings, prompt, line))
        return [sorted(each, key=lambda one: (one.index, one.sample)) for each in found]

    def _rows(self, model: Path) -> JobRows:
        for message in answered(self.sets):
            print(message)
        named = ", ".join(f"{one.settings.name} ({len(one.prompts)} prompts)" for one in self.sets)
        found = [prompt for one in self.sets for prompt in one.prompts]
        each = [how for one in self.sets for how in [one.sampling(self.config)] * len(one.prompts)]
        prompts, own = [replace(prompt, index=row) for row, prompt in enumerate(found)], self._identity(model)
        return JobRows(dict(enumerate(each)), lambda numbers: [prompts[number] for number in numbers], own, named)

    def report(self) -> Evaluated:
        """Sum up the output, which is complete, into eval.json and eval.jsonl. Raises DataError, OSError."""
        scored = self.responses(line for _, _, line in whole_lines(self.root / OUTPUT))
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
