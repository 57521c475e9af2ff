"""The conductor: one process without a device that starts the roles, runs the algorithm and ends everything again."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.algorithms.kl import KLController
from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.cluster.session import Session
from slurm_rlhf.cluster.stop import Continuation, Stop, StopRequested
from slurm_rlhf.config.roles import algorithm_of, running_roles
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.values import dump_toml
from slurm_rlhf.control.handles import EngineHandle, gather
from slurm_rlhf.controller.batches import Ahead, OnDemand, Sampler
from slurm_rlhf.controller.colocation import TurnTakingEngines, TurnTakingGeneration
from slurm_rlhf.controller.dispatch import Generation
from slurm_rlhf.controller.engine_metrics import EngineWatch
from slurm_rlhf.controller.engine_pool import Engines
from slurm_rlhf.controller.environment import role_environment
from slurm_rlhf.controller.gpu_account import GpuAccount
from slurm_rlhf.controller.loop import UNEVALUATED, TrainingRun
from slurm_rlhf.controller.optimizer_steps import optimizer_steps
from slurm_rlhf.controller.reporting import Reporting
from slurm_rlhf.controller.restart_guard import refuse_standstill
from slurm_rlhf.controller.self_check import PromptFindings, SelfCheck
from slurm_rlhf.controller.state import RunState
from slurm_rlhf.controller.step import PPO
from slurm_rlhf.controller.supervisor import Fleet
from slurm_rlhf.controller.weight_updates import WeightSync
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.errors import ConfigError, RemoteError, RunError
from slurm_rlhf.launch.launcher import Launcher
from slurm_rlhf.observe.timing import Phases
from slurm_rlhf.placement.rank_plan import RankMap
from slurm_rlhf.placement.topology import CPU
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.model import ModelRewards, Scoring, reward_scale
from slurm_rlhf.run_directory import RunDirectory

log = logging.getLogger(__name__)


def run(config: Config, ranks: RankMap, launcher: Launcher, node: str, continuation: Continuation) -> int:
    """Train, from the newest checkpoint if there is one. Returns the exit code.

    A run that is told to stop saves first; `continuation` then makes it go on where the scheduler allows. Raises
    UserError and RunError with a message that is fit for the terminal; the traceback is in the conductor's log.
    Whatever happens, no process of the run is left when this returns.
    """
    directory = RunDirectory(Path(config.run_dir))
    directory.make()
    with _exclusive(directory), _logging(directory.role_log("conductor", node, 0)):
        Session.here(os.environ).write(directory.root)
        reporting = Reporting(config, directory, ranks.worlds)
        try:
            with Stop(directory.root, continuation.end_time(), config.slurm.signal_lead_s) as stop:
                try:
                    Conductor(config, directory, ranks, launcher, reporting, stop).run()
                except StopRequested as stopped:
                    reporting.stopped(stopped.reason.what)
                    if stopped.reason.requeue:
                        refuse_standstill(directory.standstill, reporting.moved, config.slurm.signal_lead_s)
                        # Last: Slurm may end this process before it returns.
                        reporting.note(continuation.go_on())
                    return stopped.reason.exit_code
        except BaseException as error:
            _log(error)
            reporting.failed(error)
            raise
        if called_off := continuation.finished():
            reporting.note(called_off)
        return 0


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the run reads from the user's files."""

    prompts: PromptSet
    evaluation: PromptSet | None
    order: PromptOrder
    reward: RewardFunction | None  # None: a model's
    total_steps: int
    findings: PromptFindings  # for the self-check


class Conductor:
    """Reads what the run needs, starts the roles, and hands over to `TrainingRun`."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        ranks: RankMap,
        launcher: Launcher,
        reporting: Reporting,
        stop: Stop,
    ) -> None:
        self.config = config
        self.directory = directory
        self.ranks = ranks
        self.launcher = launcher
        self.reporting = reporting
        self.stop = stop
        self.checkpoints = CheckpointDir(directory.root)
        self.started = time.monotonic()

    def run(self) -> None:
        """Everything that a user can have wrong is looked at before the first process starts."""
        inputs = self._read_inputs()
        state, checkpoint, complete = self._resume()
        if checkpoint and complete and state.step >= inputs.total_steps:
            self.reporting.note(f"already finished: {state.step} steps are done (raise train.max_steps to go on)")
            return
        self.directory.config.write_text(dump_toml(self.config), encoding="utf-8")
        self.reporting.begin(state, inputs.total_steps, checkpoint)
        fleet = Fleet(self.config, self.directory, self.ranks, self.launcher)
        try:
            with self.stop.droppable():
                training = self._start(fleet, inputs, state, checkpoint)
            training.run()
        except RunError as error:
            fleet.blame(error)
            raise
        finally:
            self.stop.ignore_signals()
            fleet.stop()
        self.reporting.finished()

    def _read_inputs(self) -> Inputs:
        config = self.config
        tokenizer = Tokenizer.load(config.actor.model_name_or_path)
        longest = config.data.max_len - config.rollout.max_new_tokens
        prompts = PromptSet.load(config.data.prompt_dataset, tokenizer, config.data, longest, config.data.max_samples)
        evaluation = None
        if config.eval.dataset:
            evaluation = PromptSet.load(config.eval.dataset, tokenizer, config.data, longest, config.eval.max_samples)
        for name, found in (("data.prompt_dataset", prompts), ("eval.dataset", evaluation)):
            if found and found.dropped:
                self.reporting.note(f"{name}: {found.dropped} prompts longer than {longest} tokens were dropped")
        order = PromptOrder(
            len(prompts),
            config.rollout.batch_size,
            config.train.num_episodes,
            config.train.seed,
            config.data.shuffle,
            prompts.fingerprint(),
        )
        total = min(order.total, config.train.max_steps or order.total)
        reward = None if config.reward.model_name_or_path else RewardFunction.of(config.reward)
        findings = PromptFindings.of(prompts, tokenizer, config.data.apply_chat_template)
        return Inputs(prompts, evaluation, order, reward, total, findings)

    def _resume(self) -> tuple[RunState, Path | None, bool]:
        """Where the run stands, the checkpoint it goes on from, and whether that step's evaluation is done."""
        if self.config.resume == "never" and self.directory.metrics.exists():
            raise ConfigError(
                f"{self.directory.root} holds a run already and --resume never would overwrite it. "
                "Give another --run_dir, or leave --resume at auto to go on."
            )
        checkpoint = self.checkpoints.resolve(self.config.resume)
        if checkpoint is None:
            return RunState(seed=self.config.train.seed), None, True
        saving = [role.name for role in running_roles(self.config) if role.saves]
        state = self.checkpoints.load_state(checkpoint, saving)
        return RunState.from_json(state["run"]), checkpoint, UNEVALUATED not in state

    def _start(self, fleet: Fleet, inputs: Inputs, state: RunState, checkpoint: Path | None) -> TrainingRun:
        """Processes, models, engines and the sync group, each as soon as what it needs is there."""
        config, phases = self.config, Phases(self.reporting.phase)
        fleet.start(role_environment(config, self.ranks, len(os.sched_getaffinity(0))))
        self.reporting.note("roles: " + ", ".join(f"{role} x {n}" for role, n in self.ranks.worlds.items()))
        rollout = fleet.roles["rollout"]
        assert isinstance(rollout, EngineHandle)
        weights = WeightSync(config, fleet.roles["actor"], rollout, fleet.sync_host)
        engines, generate = self._engines(fleet, rollout, weights, phases)
        gpus = self._gpus(fleet, weights)
        engines.begin()
        log.info("trainers start")
        starts = {
            role: handle.start_all("start", total_steps=optimizer_steps(config, role, inputs.total_steps))
            for role, handle in fleet.roles.items()
            if handle is not rollout
        }
        gather([future for futures in starts.values() for future in futures])
        for role in ("critic", "reward"):
            if role in starts:
                self.reporting.note(starts[role][0].result())
        first = engines.wait(starts["actor"][0].result())
        if len(first) < rollout.world:
            self.reporting.note(f"{len(first)} of {rollout.world} engines are ready; the others join when they are")
        ahead = config.vllm.sync_mode == "inflight"
        generation = generate(
            rollout,
            config.train.seed,
            config.vllm.max_num_seqs,
            config.train.full_determinism,
            # While the actor trains it has no weights to give: late engines get theirs with the next update.
            None if ahead else engines,
        )
        source = inputs.reward or ModelRewards(fleet.roles["reward"], config.train.forward_tokens)
        kl = KLController(config.algo.kl.init_coef, config.algo.kl.target, config.algo.kl.horizon)
        scale, told = reward_scale(config)
        if told:
            self.reporting.note(told)
        ppo = PPO(
            config,
            algorithm_of(config),
            fleet.roles,
            generation,
            Scoring(source, config.timeout.reward),
            kl,
            phases,
            scale,
        )
        sample = Sampler(inputs.prompts, inputs.order, generation, ppo.sampling())
        training = TrainingRun(
            config=config,
            directory=self.directory,
            fleet=fleet,
            eval_prompts=inputs.evaluation,
            order=inputs.order,
            ppo=ppo,
            batches=Ahead(sample, config.train.async_queue_size, inputs.total_steps) if ahead else OnDemand(sample),
            weights=engines,
            checkpoints=self.checkpoints,
            state=state,
            total_steps=inputs.total_steps,
            reporting=self.reporting,
            self_check=SelfCheck(
                config, fleet.roles["actor"], self.reporting.note, inputs.findings, self.reporting.self_check
            ),
            phases=phases,
            engines=EngineWatch([group.node for group in self.ranks.tp_groups if group.role == "rollout"]),
            stop=self.stop,
            clock=self.started,
            gpus=gpus,
        )
        if checkpoint is not None:
            training.load(checkpoint)
        return training

    def _gpus(self, fleet: Fleet, weights: WeightSync) -> GpuAccount | None:
        if self.ranks.topology.accelerator == CPU:
            return None
        self.reporting.gpus = GpuAccount(self.config, self.ranks, self.started, lambda: weights.way)
        self.reporting.gpus.watch(fleet.roles)
        return self.reporting.gpus

    def _engines(
        self, fleet: Fleet, rollout: EngineHandle, weights: WeightSync, phases: Phases
    ) -> tuple[Engines, type[Generation]]:
        config = self.config
        if config.train.colocate_all:
            return TurnTakingEngines(fleet, rollout, weights, config, phases), TurnTakingGeneration
        return Engines(fleet, rollout, weights, config.timeout.connect, config.train.full_determinism), Generation


@contextlib.contextmanager
def _exclusive(directory: RunDirectory) -> Iterator[None]:
    """Keep a second run out of the directory."""
    with open(directory.lock, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{directory.root} is in use by another run. Wait for it, or give this one its own --run_dir."
            ) from None
        yield


@contextlib.contextmanager
def _logging(path: Path) -> Iterator[None]:
    """The package's log messages into the conductor's own file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("slurm_rlhf")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def _log(error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    if isinstance(error, RemoteError) and error.remote_traceback:
        text += f"\nin the role:\n{error.remote_traceback}"
    log.error("%s", text)
