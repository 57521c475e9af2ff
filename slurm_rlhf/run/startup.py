"""Starts a run: its processes, models and engines, each as soon as possible, and makes the parts of the run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_rlhf.algorithms.losses import KLController
from slurm_rlhf.checkpoint.directory import CheckpointDir, failures
from slurm_rlhf.config.roles import ACTOR, CRITIC, REWARD, ROLLOUT, algorithm_of
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import RunError
from slurm_rlhf.eval.sets import Evaluation
from slurm_rlhf.groups.engine_pool import EnginePool
from slurm_rlhf.groups.supervisor import Supervisor
from slurm_rlhf.groups.watchdog import Watchdog
from slurm_rlhf.nodes.environment import role_environment
from slurm_rlhf.nodes.ways import ways
from slurm_rlhf.observe.run_log import read_events
from slurm_rlhf.observe.timing import Phases
from slurm_rlhf.placement.topology import CPU, GPU
from slurm_rlhf.rewards.scored import ModelRewards, Scoring, reward_scale
from slurm_rlhf.rewards.sources import WeightedRewards
from slurm_rlhf.run.colocation import Colocation
from slurm_rlhf.run.gpu_account import GpuAccount
from slurm_rlhf.run.loop import TrainingLoop
from slurm_rlhf.run.prediction import Measurement
from slurm_rlhf.run.run_state import RunCheckpoints, SaveCadence
from slurm_rlhf.run.self_check import SelfCheck
from slurm_rlhf.run.step import TrainingStep
from slurm_rlhf.run.step_metrics import EngineMetrics
from slurm_rlhf.sampling.episodes import Episodes
from slurm_rlhf.sampling.scheduler import ActorWaves, Scheduler, Waves
from slurm_rlhf.weights.lead import WeightSync
from slurm_rlhf.wire.calls import EngineCalls, StartAnswer, StartCalls
from slurm_rlhf.wire.handles import EngineHandle, gather

if TYPE_CHECKING:
    from slurm_rlhf.run.conductor import Conductor, Inputs

log = logging.getLogger(__name__)

_TYPICAL = 1024  # prompts, whose median by length is the typical one


@dataclass(slots=True)
class Startup:
    """Starts processes, models, engines and the sync group, each as soon as its inputs are there."""

    run: Conductor  # has configuration and rank map, which a restart may change
    supervisor: Supervisor
    inputs: Inputs
    watchdog: Watchdog
    _sync: WeightSync | None = field(default=None, init=False)
    _checkpoints: RunCheckpoints | None = field(default=None, init=False)
    _gpu_sums: dict[str, float] = field(default_factory=dict, init=False)  # sums from before a restart

    def begin(self, checkpoint: Path | None) -> TrainingLoop:
        """Start everything, and take it back to `checkpoint`, whose state the run has already."""
        self.supervisor.start(role_environment(self.run.config, self.run.ranks, len(os.sched_getaffinity(0))))
        roles = [f"{role} x {n}" for role, n in self.run.ranks.worlds.items()]
        roles += [f"workers on {node}" for node in self.run.ranks.topology.workers]
        self.run.reporting.note("roles: " + ", ".join(roles))
        return self._lead(checkpoint)

    def drop_engine_work(self) -> bool:
        """Let the engines drop their work, because the trainers have ended; engines that cannot do so are lost.

        Blocks while they find out that a weight update has broken. Returns False if it cannot: all start again then.
        """
        engines, handle = self.supervisor.engines, self.supervisor.roles.get(ROLLOUT)
        if engines is None or not engines.armed or handle is None:
            return False
        for engine in engines.asked:
            engines.lost(engine, "its start was cut off by that of the trainers")
        calls = {engine: handle.call(engine, EngineCalls.drop) for engine in engines.up}
        done, _ = wait(calls.values(), 2 * self.run.config.timeout.sync_silence)
        for engine, call in calls.items():
            if call not in done or call.exception() is not None:
                why = call.exception() if call in done else "it does not answer"
                engines.lost(engine, f"{why}, after its trainers have ended", silent=True)
        return True

    def again(self, checkpoint: Path | None, roles: Collection[str]) -> TrainingLoop:
        """Start `roles` again as `begin` does; the others go on. The inputs from the user's files stay."""
        self._checkpoints = None
        if self.run.reporting.gpus is not None:
            self._gpu_sums = self.run.reporting.gpus.state_dict()
        self.inputs.order.rewind()
        environment = role_environment(self.run.config, self.run.ranks, len(os.sched_getaffinity(0)))
        self.supervisor.start_again(roles, self.run.ranks, environment)
        return self._lead(checkpoint)

    def spent_s(self) -> float:
        """Return how long the run has taken up to now, over all sessions."""
        since = self._checkpoints.clock if self._checkpoints else self.run.started
        return self.run.state.wall_s + time.monotonic() - since

    def _lead(self, checkpoint: Path | None) -> TrainingLoop:
        """Load models, engines and `checkpoint`, now that the processes are there."""
        config, state, roles = self.run.config, self.run.state, self.supervisor.roles
        self.run.reporting.recorder.watch(roles)
        engines, units = roles.get(ROLLOUT), self.supervisor.engines
        pool = colocation = None
        if isinstance(engines, EngineHandle) and units is not None:
            units.tell = self.run.reporting.note
            before, host = self._sync, self.supervisor.sync_host
            # The store and the groups of an actor that was started again are new ones, and so have other names.
            earlier = (0, False) if before is None else (before.generation, before.fell_back)
            weight_sync = self._sync = WeightSync(config, roles[ACTOR], engines, host, *earlier)
            self.run.reporting.recorder.transfer = lambda: weight_sync.connection
            colocation = Colocation(roles, engines, config.ds.enable_sleep) if config.train.colocate_all else None
            # Engines begin to start; colocated ones sleep before the trainers start.
            all_at_once = config.train.full_determinism or config.train.colocate_all
            pool = EnginePool(self.supervisor, units, engines, weight_sync, all_at_once)
            units.begin(all_at_once, self.run.reporting.note)
            if colocation is not None:
                log.info("engines %s have started, before any trainer", pool.wait([]))
                colocation.put_engines_to_sleep()
        gpus = self._gpus()
        self._start_trainers(pool)
        step = self._step(self._episodes(pool), pool, colocation)
        directory, saved = CheckpointDir(self.run.directory.root), self.run.reporting.saved
        nodes, ckpt = len(self.run.ranks.topology.nodes), config.ckpt
        known = failures(read_events(self.run.directory.events), nodes, ckpt.mtbf_hours)
        cadence = SaveCadence(ckpt.save_steps, known, self.run.reporting.note, last=state.step)
        checkpoints = RunCheckpoints(directory, state, step, saved, cadence, self.run.started, gpus, self.inputs.model)
        self._checkpoints = checkpoints
        if checkpoint is not None:
            checkpoints.load(checkpoint, self.run.reporting.note)
        self._measure_cpus(step)
        if gpus is not None and self._gpu_sums:
            gpus.load_state_dict(self._gpu_sums)
        final = self.run.directory.final
        return TrainingLoop(step, self._evaluation(step), state, checkpoints, self.run.reporting, final)

    def _evaluation(self, step: TrainingStep) -> Evaluation | None:
        config, sets = self.run.config, self.inputs.evaluation
        if not sets:
            return None
        overlapping = None
        if config.eval.overlap and ROLLOUT in self.supervisor.roles:
            # While the actor trains it cannot give its weights to engines that start late.
            overlapping = partial(step.episodes.sample, admits=False)
        return Evaluation(config, sets, self.run.directory.evaluations, step.generate, step.reward, overlapping)

    def _phase(self, name: str) -> None:
        self.run.reporting.phase(name)
        self.watchdog.phase(name)

    def _gpus(self) -> GpuAccount | None:
        if self.run.ranks.topology.accelerator == CPU:
            return None
        run, report, roles = self.run, self.run.reporting, self.supervisor.roles
        report.gpus = GpuAccount(run.config, run.ranks, roles, run.started, report.recorder.transfer, report.note)
        return report.gpus

    def _measure_cpus(self, step: TrainingStep) -> None:
        """Measure the speed of the CPUs, once; a rank that fails here fails again later, where that is handled."""
        run, report, pool, version = self.run, self.run.reporting, step.pool, self.run.state.policy_version
        if report.prediction is not None or report.gpus is not None:
            return
        unmeasured = "the speed of the CPUs was not measured, so no step is predicted"
        if pool is None or run.config.preflight != "auto":
            why = f"preflight is {run.config.preflight}, and auto measures it" if pool else "the actor samples itself"
            report.note(f"{unmeasured}: {why}")
            return
        lengths = sorted((prompt.token_ids for prompt in self.inputs.prompts.prompts[:_TYPICAL]), key=len)
        typical = lengths[len(lengths) // 2]
        with step.awake(version):
            try:
                found = Measurement(run.config, run.ranks, self.supervisor.roles, [*pool.engines.up], typical)
                report.prediction = found.prediction(partial(pool.update, version))
            except RunError as error:
                report.note(f"{unmeasured}: {error}")

    def _start_trainers(self, pool: EnginePool | None) -> None:
        """Start the trainers, while the engines of `pool` start, and wait for them and the first engine."""
        config = self.run.config
        trainers = {
            role: handle for role, handle in self.supervisor.roles.items() if not isinstance(handle, EngineHandle)
        }
        engines = f"; starting {self.supervisor.roles[ROLLOUT].world} engines" if pool else ""
        how = ", ".join(ways(config, trainers, self.run.ranks))
        self.run.reporting.note(f"loading {', '.join(trainers)}{engines}; {how}")
        starts: dict[str, list[Future[StartAnswer]]] = {
            role: handle.start_all(StartCalls.start, optimizer_steps(config, role, self.inputs.total_steps))
            for role, handle in trainers.items()
        }
        for role, futures in starts.items():
            self._tell_when_ready(role, futures)
        gather([future for futures in starts.values() for future in futures])
        for role in (ACTOR, CRITIC, REWARD):
            if role in starts and (note := starts[role][0].result().note):
                self.run.reporting.note(note)
        if pool is None:
            return
        first = pool.wait(starts[ACTOR][0].result().parameters or [])
        count = self.supervisor.roles[ROLLOUT].world
        if len(first) < count:
            self.run.reporting.note(f"{len(first)} of {count} engines are ready; the others join when they are")

    def _tell_when_ready(self, role: str, futures: list[Future[StartAnswer]]) -> None:
        """Note when all ranks of `role` have loaded their model; called back by the thread that gets the answers."""
        waiting = set(futures)

        def answered(future: Future[StartAnswer]) -> None:
            waiting.discard(future)
            if not waiting and all(each.exception() is None for each in futures):
                self.run.reporting.note(f"{role} is ready after {time.monotonic() - self.run.started:.0f} s")

        for future in futures:
            future.add_done_callback(answered)

    def _episodes(self, pool: EnginePool | None) -> Episodes:
        config, environments = self.run.config, self.inputs.environments
        seed, answered = config.train.seed, self.run.reporting.answered
        if pool is None:
            actor: Any = self.supervisor.roles[ACTOR]  # samples in place of engines
            at_once = config.rollout.hf_at_once(on_gpus=self.run.ranks.topology.accelerator == GPU)
            return Episodes(ActorWaves(actor, seed, at_once, answered), environments=environments)
        engines = self.supervisor.roles[ROLLOUT]
        assert isinstance(engines, EngineHandle)
        fixed, drain = config.train.full_determinism, config.vllm.sync_mode == "drain"
        common = engines, seed, config.vllm.max_num_seqs, answered
        urgent = not drain or config.algo.dynamic_filtering_enable

        def admit(version: int) -> list[int]:
            # While the actor trains it cannot give its weights: late engines get theirs with the next update.
            if engines.ready:
                return pool.admit(version) if drain and not fixed else []
            return pool.rescue()

        scheduler = Waves(*common) if fixed else Scheduler(*common, urgent=urgent)
        return Episodes(scheduler, admit, environments)

    def _step(self, episodes: Episodes, pool: EnginePool | None, colocation: Colocation | None) -> TrainingStep:
        config, inputs, roles, note = self.run.config, self.inputs, self.supervisor.roles, self.run.reporting.note
        scale, message = reward_scale(config)
        if message:
            note(message)
        for servers in inputs.servers():
            servers.waits = self.watchdog.waits
        model = ModelRewards(roles[REWARD], config.train.forward_tokens) if REWARD in roles else None
        if isinstance(inputs.reward, WeightedRewards):
            inputs.reward.model = model
        source = inputs.reward or model
        assert source is not None
        engines = self.supervisor.engines  # one that died may start again on another node
        actors = [share.node for share in self.run.ranks.roles[ACTOR] for _ in share.ranks]  # sample without engines
        node = actors.__getitem__ if engines is None else engines.node
        return TrainingStep(
            config=config,
            algorithm=algorithm_of(config),
            roles=roles,
            pool=pool,
            episodes=episodes,
            colocation=colocation,
            prompts=inputs.prompts,
            order=inputs.order,
            total_steps=inputs.total_steps,
            reward=Scoring(source, config.timeout.reward, self.run.directory.reward_log, note),
            kl=KLController(config.algo.kl.init_coef, config.algo.kl.target, config.algo.kl.horizon),
            scale=scale,
            self_check=SelfCheck(
                config, roles[ACTOR], note, inputs.findings, self.run.reporting.self_check, inputs.tokenizer
            ),
            engine_metrics=EngineMetrics(node, note),
            phases=Phases(self._phase, self.watchdog.ended),
            stop=self.run.stop,
        )


def optimizer_steps(config: Config, role: str, steps: int) -> int:
    """Count the optimizer steps of `role` in a run of `steps` training steps, for its learning-rate schedule.

    While the actor is frozen (critic.freezing_steps) it takes none, so its schedule begins after them and still ends
    with the run.
    """
    responses = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    frozen = config.critic.freezing_steps if role == ACTOR else 0
    return max(steps - frozen, 0) * config.train.max_epochs * responses // config.train.batch_size
