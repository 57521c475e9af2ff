"""Leads a training run: a process without a device, which starts the roles, runs the algorithm and ends everything.

`Inputs` are read from the files that the configuration names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slurm_rlhf.checkpoint.directory import CheckpointDir, WayBack
from slurm_rlhf.checkpoint.resume import changed_keys, load_state, refuse_other_adapters, refuse_other_model
from slurm_rlhf.cluster.resources import current_topology, fits_gpus
from slurm_rlhf.cluster.stop import Continuation, Stop, StopRequested
from slurm_rlhf.config.check import warnings
from slurm_rlhf.config.contents import model_contents
from slurm_rlhf.config.roles import ROLLOUT, running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import dump_toml
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import CheckpointError, ConfigError, DiskError, RunError
from slurm_rlhf.eval.sets import EvalSet, answered, read_eval_sets
from slurm_rlhf.groups.run_lock import lead, occupied
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.groups.trainer_recovery import Plan, TrainerRecovery
from slurm_rlhf.groups.watchdog import Watchdog
from slurm_rlhf.nodes.launcher import Launcher
from slurm_rlhf.observe import run_log
from slurm_rlhf.observe.run_status import read_run_status
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.rewards.reasoning_gym import task_rows
from slurm_rlhf.rewards.scored import RewardSource
from slurm_rlhf.rewards.sources import close_source, reward_source, servers_in
from slurm_rlhf.run.loop import TrainingLoop
from slurm_rlhf.run.reporting import Reporting
from slurm_rlhf.run.run_state import MODEL, UNEVALUATED, RunState
from slurm_rlhf.run.self_check import PromptFindings
from slurm_rlhf.run.startup import Startup
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.sampling.environment import Environments
from slurm_rlhf.workers.http import Servers
from slurm_rlhf.workers.pool import WorkerNodes


@dataclass(frozen=True, slots=True)
class Inputs:
    """Holds the inputs that a run reads from the user's files."""

    prompts: PromptSet
    evaluation: list[EvalSet]  # empty: nothing is evaluated
    order: PromptOrder
    reward: RewardSource | None  # None: a reward model scores
    environments: Environments | None  # None: each prompt has one turn
    total_steps: int
    findings: PromptFindings  # facts about the prompts, for the self-check
    tokenizer: Tokenizer
    model: dict[str, str]  # path of the actor's model -> hash of its contents

    @classmethod
    def read(
        cls, config: Config, note: Callable[[str], None], printed: Path | None = None, nodes: WorkerNodes = ()
    ) -> Inputs:
        """Read and check the user's files; `note` informs the user. `close` ends what it has started.

        `printed`: the file for the output of reward functions; None: this process's output. `nodes`: where workers
        run; empty: here. Raises UserError.
        """
        for message in warnings(config):
            note(f"warning: {message}")
        tokenizer = Tokenizer.load(config.actor.model_name_or_path)
        longest = config.data.max_len - config.rollout.max_new_tokens
        data = config.data
        if data.reasoning_gym:
            prompts = PromptSet.of(task_rows(data), Path(data.reasoning_gym), tokenizer, data, longest)
        else:
            prompts = PromptSet.load(data.prompt_dataset, tokenizer, data, longest, data.max_samples)
        evaluation = read_eval_sets(config, tokenizer)
        sets = [(f"evaluation {one.settings.name}", one.prompts) for one in evaluation]
        for name, found in (("data.prompt_dataset", prompts), *sets):
            if found.dropped:
                note(f"{name}: {found.dropped} prompts longer than {longest} tokens were dropped")
        for message in answered(evaluation):
            note(message)
        per_episode = max(len(prompts) // config.rollout.batch_size, 1)
        order = PromptOrder(
            len(prompts),
            config.rollout.batch_size,
            # As many as train.max_steps needs, which goes beyond the episodes. Source: TRL, `TrainingArguments`.
            max(config.train.num_episodes, -(-config.train.max_steps // per_episode)),
            config.train.seed,
            config.data.shuffle,
            prompts.fingerprint(),
        )
        total = config.train.max_steps or order.total
        reward, environments = reward_source(config, printed, note, nodes), None
        findings = PromptFindings.of(prompts, tokenizer, config.data, bool(config.env.path))
        path = config.actor.model_name_or_path
        model = {path: model_contents(Path(path))}
        if config.env.path:  # last: it starts processes
            environments = Environments(config, tokenizer, printed, note, nodes)
            environments.check_rewards()
            for name, found in (("data.prompt_dataset", prompts), *sets):
                environments.check_rows(found, name)
        return cls(prompts, evaluation, order, reward, environments, total, findings, tokenizer, model)

    def servers(self) -> list[Servers]:
        """List the connections to servers of rewards and environments."""
        own = self.environments and self.environments.host.servers
        return [*servers_in(self.reward), *([own] if own else [])]

    def close(self) -> None:
        """End the processes of environments and of the source of rewards."""
        close_source(self.reward)
        if self.environments is not None:
            self.environments.close()


def lead_run(config: Config, ranks: RankMap, launcher: Launcher, node: str, continuation: Continuation) -> int:
    """Train, from the newest checkpoint if there is one. Returns the exit code.

    A run that is asked to stop saves first; `continuation` then makes it go on where the scheduler allows. Raises
    UserError and RunError with a message that is fit for the terminal; the traceback is in the conductor's log.
    Whatever happens, no process of the run is left when this returns.
    """
    directory, lead_s, end = RunDirectory(Path(config.run_dir)), config.slurm.signal_lead_s, continuation.end_time()
    with occupied(directory, node, end, lead_s):
        reporting = Reporting(config, directory, ranks.worlds)
        with reporting.recorder.listening():
            conductor = Conductor(config, directory, ranks, launcher, reporting, node)
            return lead(conductor, directory, end, lead_s, continuation)


@dataclass(slots=True)
class Conductor:
    """Reads what the run needs, starts the roles, and hands over to `TrainingLoop`."""

    config: Config
    directory: RunDirectory
    ranks: RankMap
    launcher: Launcher
    reporting: Reporting
    node: str  # name of the node where this process runs
    stop: Stop = field(init=False)
    state: RunState = field(init=False)
    started: float = field(default_factory=time.monotonic)

    def stopped(self, request: StopRequested) -> bool:
        """Tell that the run stops; return whether it did a step."""
        newest = None if request.saved else CheckpointDir(self.directory.root).resolve("auto")
        self.reporting.stopped(request.reason.what, request.saved, newest, request.reason.requeue)
        return self.reporting.moved

    def failed(self, error: BaseException) -> None:
        """Tell that `error` ends the run, and how the user can go on."""
        try:
            self.reporting.failed(error)
        except OSError:  # the disk does not take the summary: `error` says so already
            self.tell(f"{self.directory.summary} cannot be written, so it does not say how the run ended")
        if isinstance(error, RunError | DiskError) and self.directory.root.is_dir():
            self.tell(way_on(self.directory.root, self.config.resume))

    def tell(self, line: str) -> None:
        """Tell the user something."""
        self.reporting.note(line)

    def work(self, stop: Stop) -> None:
        """Train to the end, or until `stop` is asked for.

        All that a user may have got wrong is checked before the first process starts.
        """
        self.stop = stop
        self.directory.reward_log.parent.mkdir(parents=True, exist_ok=True)
        note, nodes = self.reporting.note, self.launcher.agents.worker_nodes(self.reporting.note)
        with closing(Inputs.read(self.config, note, self.directory.reward_log, nodes)) as inputs:
            self._work(inputs)

    def _work(self, inputs: Inputs) -> None:
        self.state, checkpoint, complete = self._resume(inputs)
        # The run that wrote the checkpoint keeps its keys in its own directory.
        changed = changed_keys(RunDirectory(checkpoint.parents[1]).config, self.config) if checkpoint else []
        if checkpoint and complete and self.state.step >= inputs.total_steps and self._exported():
            ignored = f"; these keys were changed and are not used: {', '.join(changed)}" if changed else ""
            self.reporting.note(
                f"already finished: {self.state.step} steps are done in {self.directory.root}{ignored} (raise "
                "train.max_steps to go on, or give another --run_dir)"
            )
            return
        refuse_other_adapters(changed)
        self._write_config()
        self.reporting.begin(self.state, inputs.total_steps, checkpoint)
        if changed:
            self.reporting.note(f"changed since step {self.state.step}: {', '.join(changed)}", run_log.WARNING)
        self.reporting.place(self.ranks)
        self.reporting.recorder.pieces = inputs.tokenizer.pieces
        supervisor = Supervisor(self.config, self.directory, self.ranks, self.launcher)
        tell = (self.reporting.note, partial(self.reporting.note, kind=run_log.HANG))
        watchdog = Watchdog(self.config, self.directory, supervisor, self.stop, *tell, lambda: self.state.step + 1)
        startup = Startup(self, supervisor, inputs, watchdog)
        allocation = partial(current_topology, self.config)
        recovery = TrainerRecovery(
            self.config,
            supervisor,
            watchdog,
            self.launcher,
            self.stop,
            self.reporting.note,
            allocation,
            self.node,
            fits_gpus,
        )
        back = WayBack.of(CheckpointDir(self.directory.root), checkpoint)
        start: Callable[[], TrainingLoop] = partial(startup.begin, checkpoint)
        watchdog.start()
        try:
            while (plan := self._train(start, recovery)) is not None:
                start = self._restart(plan, startup, back)
        finally:
            watchdog.close()
            self.stop.ignore_signals()
            supervisor.stop()
        self.reporting.finished()

    def _train(self, start: Callable[[], TrainingLoop], recovery: TrainerRecovery) -> Plan | None:
        """Train to the end; after a failure return how the run goes on. Raises the error that ends it."""
        try:
            with self.stop.droppable():
                loop = start()
            loop.run()
        except RunError as error:
            return recovery.plan(error, self.state.step + 1, self.ranks)
        return None

    def _restart(self, plan: Plan, startup: Startup, back: WayBack) -> Callable[[], TrainingLoop]:
        """End the roles that start again, go back to the newest checkpoint, and return what starts them."""
        supervisor, roles, spent_s = startup.supervisor, plan.roles, startup.spent_s()
        self.reporting.restarting(plan.why, plan.words(self.config.train.max_restarts))
        supervisor.end(roles, plan.ranks)
        if plan.keeps_engines and not startup.drop_engine_work():
            self.reporting.note("not all engines answer: they start again, too")
            supervisor.end((ROLLOUT,), plan.ranks)
            roles = tuple(plan.ranks.roles)
        elif plan.keeps_engines and supervisor.engines is not None:
            supervisor.engines.leave_out(plan.ranks.engine_nodes, plan.left_out)
        checkpoint = back.find(self.reporting.note)
        self.state = RunState(seed=self.config.train.seed)
        if checkpoint is not None:
            self.state = RunState.from_json(load_state(checkpoint)["run"])
        else:
            self.reporting.note("there is no checkpoint yet: the run begins anew, with the initial weights")
        self.state.wall_s, self.started = spent_s, time.monotonic()
        startup.watchdog.begin_again()
        self.reporting.begin(self.state, startup.inputs.total_steps, checkpoint)
        if plan.ranks is not self.ranks:
            self.ranks = plan.ranks
            self.reporting.place(plan.ranks)
        if plan.config is not self.config:
            self.config = plan.config
            self._write_config()
        return partial(startup.again, checkpoint, roles)

    def _write_config(self) -> None:
        """Write the configuration that the ranks read when they start."""
        self.directory.config.write_text(dump_toml(self.config), encoding="utf-8")

    def _exported(self) -> bool:
        """Tell whether the model of the last step was written: a run may be killed between checkpoint and model."""
        status = read_run_status(self.directory.metrics, self.directory.summary).status
        return status == "finished" and self.directory.final.is_dir()

    def _resume(self, inputs: Inputs) -> tuple[RunState, Path | None, bool]:
        """Return the state of the run, the checkpoint it goes on from, and whether that step's evaluation is done."""
        if self.config.resume == "never" and self.directory.metrics.exists():
            raise ConfigError(
                f"{self.directory.root} holds a run already and --resume never would overwrite it. "
                "Give another --run_dir, or leave --resume at auto to go on."
            )
        checkpoint = CheckpointDir(self.directory.root).resolve(self.config.resume)
        if checkpoint is None:
            return RunState(seed=self.config.train.seed), None, True
        saving = [role.name for role in running_roles(self.config) if role.kind == "trained"]
        state = load_state(checkpoint, saving)
        refuse_other_model(state.get(MODEL, {}), inputs.model)
        inputs.order.check(state["order"])
        return RunState.from_json(state["run"]), checkpoint, UNEVALUATED not in state


def way_on(root: Path, resume: str) -> str:
    """Say how to go on with the run in `root`, which has failed; `resume`: the key's value in the failed run."""
    try:
        newest = CheckpointDir(root).resolve("auto")
    except CheckpointError as error:
        return str(error)
    command = "the same command" if resume == "auto" else "--resume=auto"
    if newest is None:
        return f"there is no checkpoint yet: {command} begins anew"
    return f"{command} goes on from the newest checkpoint, {newest}"
