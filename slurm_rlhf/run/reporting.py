"""Reports the progress of a run: on the terminal, in metrics.jsonl, to trackers, in summary.json."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm_rlhf.checkpoint.directory import CheckpointDir
from slurm_rlhf.config.schema import Config
from slurm_rlhf.errors import printable
from slurm_rlhf.observe import run_log
from slurm_rlhf.observe.live import make_progress
from slurm_rlhf.observe.run_log import truncate_after
from slurm_rlhf.observe.run_status import Summary, append_metrics
from slurm_rlhf.observe.trackers import Trackers
from slurm_rlhf.placement.rank_map import RankMap
from slurm_rlhf.records import Experience
from slurm_rlhf.run.gpu_account import GpuAccount
from slurm_rlhf.run.prediction import PhaseSeconds, Prediction, words
from slurm_rlhf.run.recording import Recorder
from slurm_rlhf.run.run_state import Best, RunState
from slurm_rlhf.run_directory import RunDirectory
from slurm_rlhf.sampling.batches import Batch

log = logging.getLogger(__name__)

_OF_STATE = ("eval_before", "eval_after", "reward_first", "reward_last", "wall_s", "policy_version", "seed")
"""Fields of `Summary` that are in `RunState`, too."""


class Reporting:
    """Reports on one run. `begin` comes before `step`; `finished`, `stopped` or `failed` comes last."""

    def __init__(self, config: Config, directory: RunDirectory, world: dict[str, int]) -> None:
        self._directory = directory
        self._world = world
        self._progress = make_progress(config.logger)
        self._config = config
        self._trackers = Trackers(config, directory, self.note)
        rollout, filtered = config.rollout, config.algo.dynamic_filtering_enable
        known = config.vllm.sync_mode != "inflight" and not filtered
        self._batch = rollout.batch_size * rollout.n_samples_per_prompt if known else 0
        self._state: RunState | None = None
        self._total = 0
        self._warned = False
        self._starting = False
        self.self_check: dict[str, float] = {}
        """Figures of the self-check of this start; `SelfCheck` fills them in."""
        self.moved = False
        """True: a step was done since `begin`."""
        self.gpus: GpuAccount | None = None
        """Measures the GPUs, for the summary; None: the run has none."""
        self.prediction: Prediction | None = None
        """Predicts the steps on CPUs; None: on GPUs `gpus` does, or the CPUs were not measured."""
        self.recorder = Recorder(config, directory, self.note)
        """Records the contents of the report that are not metrics."""
        self.restarts: list[str] = []
        """Reasons of all restarts of roles so far."""
        self.best: Best | None = None
        """The best step so far, by ckpt.best_metric."""

    def note(self, text: str, kind: str = "", engine: int | None = None) -> None:
        """Write a line for the user, and into the log; keep an event, such as a warning, for the report.

        `kind`: kind of the event; empty: the beginning of `text` decides. `engine`: engine that the event is about.
        """
        text = printable(text)
        log.info("%s", text)
        self._progress.note(text)
        if self._starting:
            self._write("running", starting=text)  # `slurm-rlhf status` shows it
        if kind := kind or run_log.kind_of_note(text):
            self.recorder.event(kind, text, engine)

    def place(self, ranks: RankMap) -> None:
        """Note where the ranks are, and how many each role has."""
        self._world = ranks.worlds
        self.recorder.place(ranks)

    def restarting(self, why: str, what: str) -> None:
        """Report a failure (`why`), and what is done about it (`what`); `begin` follows."""
        self._starting = True  # roles are starting
        self.note(why)
        self.note(what)
        self.restarts.append(why.partition("\n")[0])
        self.recorder.event(run_log.RESTART, f"{self.restarts[-1]}; {what}")

    def begin(self, state: RunState, total: int, checkpoint: Path | None) -> None:
        """Report that a run of `total` steps starts, or goes on from `checkpoint` at `state`."""
        self._state, self._total = state, total
        self._starting = True
        if self.restarts:
            self._trackers.close(failed=False)
            self._trackers = Trackers(self._config, self._directory, self.note)
        # Lines after the checkpoint belong to steps that will be done again.
        if checkpoint is None and (kept := self._directory.put_aside()):
            self.note(
                "there is no checkpoint to go on from, so the run starts at step 1; what an earlier start has measured "
                f"is kept as {kept}"
            )
        dropped = truncate_after(self._directory.metrics, state.step)
        self.recorder.begin(state.step)
        self._trackers.open()
        if not self.restarts:
            self.recorder.event(
                run_log.START if checkpoint is None else run_log.RESUME, f"step {state.step} of {total}"
            )
        if checkpoint is not None:
            again = f", {dropped} later steps are done again" if dropped else ""
            self.note(f"resuming from {checkpoint} at step {state.step}/{total}{again}")
        self.note(f"run directory {self._directory.root}, {total} steps")

    def stepping(self) -> None:
        """Report that start-up is over."""
        assert self._state is not None
        self._starting = False
        self._write("running")
        self._progress.begin(self._state.step, self._total)
        self.recorder.stepping()

    def phase(self, name: str) -> None:
        """Show the phase of the step that begins; empty: none."""
        self._progress.phase(name, self._batch if name == "rollout" else 0)
        self.recorder.phase(name)

    def answered(self, responses: int, tokens: int) -> None:
        """Count responses of the phase as engines finish them. Any thread may call it."""
        self._progress.answered(responses, tokens)

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step that is done."""
        self.moved = True
        append_metrics(self._directory.metrics, step, metrics)
        self._trackers.metrics(step, metrics)
        self._progress.step(step, total, metrics)
        self.recorder.done(step)

    def samples(self, batch: Batch, experience: Experience) -> None:
        """Record a few responses of a step, and send them to the trackers."""
        if found := self.recorder.samples(batch, experience):
            self._trackers.samples(batch.step, found)

    def step_again(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step in place of the line that it may have already."""
        truncate_after(self._directory.metrics, step - 1)
        self.step(step, total, metrics)

    def evaluated(self, step: int, line: dict[str, float], found: dict[str, float], message: str) -> None:
        """Replace the line of a step that is evaluated late by `line`, in which the metrics `found` are new."""
        truncate_after(self._directory.metrics, step - 1)
        append_metrics(self._directory.metrics, step, line)
        self._trackers.metrics(step, found)
        self.note(f"evaluation of step {step}: {message}")

    def finished(self) -> None:
        """Report that all steps are done and everything is written."""
        state = self._state
        assert state is not None
        self._end("finished", (run_log.FINISH, f"{state.step} steps in {state.wall_s:.0f} s"))
        if state.eval_before is not None and state.eval_after is not None:
            self.note(f"evaluation, mean score: {state.eval_before:.4f} before, {state.eval_after:.4f} after")
        if (best := self.best) is not None:
            place = CheckpointDir(self._directory.root).of(best.step)
            self.note(f"best checkpoint by {best.metric}: {best.value:.4f} at step {best.step}, {place}")
        for message in (self._gpu_words(), words(self._compared())):
            if message:
                self.note(message)
        self.note(f"finished {state.step} steps in {state.wall_s:.0f} s; the model is in {self._directory.final}")

    def _compared(self) -> dict[str, PhaseSeconds]:
        source = self.gpus or self.prediction
        return source.compared() if source else {}

    def _gpu_words(self) -> str:
        gpus = self.gpus.summary() if self.gpus else None
        if gpus is None:
            return ""
        mfu = "" if gpus["mfu"] is None else f"MFU {100 * gpus['mfu']:.1f} %, "
        return f"GPUs: {mfu}idle {100 * gpus['idle_share']:.0f} % of the steps; {gpus['hours']:.2f} GPU-hours"

    def saved(self, step: int, seconds: float, waited_s: float) -> None:
        """Report that a checkpoint is on disk; warn if saving may take longer than Slurm's signal leaves time for.

        `seconds`: time until it was there; the run waited for `waited_s` of it.
        """
        rest = f", {seconds - waited_s:.1f} s of it during the steps" if waited_s < seconds else ""
        log.info("checkpoint of step %d saved in %.1f s%s", step, seconds, rest)
        self.recorder.event(run_log.CHECKPOINT, f"saved in {seconds:.1f} s" + (f", of step {step}{rest}" * bool(rest)))
        lead = self._config.slurm.signal_lead_s
        if seconds > lead / 2 and not self._warned:
            self._warned = True
            self.note(
                f"warning: saving took {seconds:.0f} s, and the signal before the end of the allocation leaves "
                f"{lead:.0f} s (slurm.signal_lead_s): raise it and --signal=B:USR1@SECONDS to {3 * seconds:.0f} or more"
            )

    def stopped(self, why: str, saved: bool = True, newest: Path | None = None, goes_on: bool = False) -> None:
        """Report that the run stops before its last step.

        `newest`: the checkpoint to go on from, if the last step is not saved. `goes_on`: the run asks for another
        allocation.
        """
        step = self._state.step if self._state else 0
        if not saved:
            kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        elif step:
            kept = f"saved at step {step}/{self._total}"
        else:
            kept = "no step was done, so there is nothing to save"
        text = f"stopped by {why}; {kept}"
        # Before the request for another allocation: Slurm may end this process by it.
        asked = [(run_log.REQUEUE, f"asks to go on later, because {why}")] if goes_on else []
        self._end("stopped", (run_log.STOP, text), *asked)
        if self._state is not None:
            self.note(text)

    def failed(self, error: BaseException) -> None:
        """Report that `error` ends the run; the function that catches it prints the message."""
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        kind, status = run_log.kind_of_failure(error), "failed"
        if stopped:
            kind, status = run_log.STOP, "interrupted"
        self._end(status, (kind, str(error) or type(error).__name__), error=str(error), failed=not stopped)

    def _end(self, status: str, *events: tuple[str, str], error: str = "", failed: bool = False) -> None:
        """Write how the run has ended, if it has begun."""
        self._starting = False
        self._progress.end()
        if self._state is None:
            return
        try:
            self._write(status, error)
        finally:
            self._trackers.close(failed=failed)
        for kind, text in events:
            self.recorder.event(kind, text)
        self.recorder.end()

    def _best_checkpoint(self) -> dict[str, Any] | None:
        if self.best is None:
            return None
        place = CheckpointDir(self._directory.root).of(self.best.step)
        return {**asdict(self.best), "checkpoint": str(place.relative_to(self._directory.root))}

    def _write(self, status: str, error: str = "", starting: str = "") -> None:
        state = self._state
        assert state is not None
        Summary(
            status=status,
            steps=state.step,
            total_steps=self._total,
            **{name: getattr(state, name) for name in _OF_STATE},
            tokens_per_s=state.response_tokens / state.wall_s if state.wall_s else 0.0,
            world=self._world,
            self_check=self.self_check,
            error=error,
            starting=starting,
            gpus=self.gpus.summary() if self.gpus else None,
            phases={phase: asdict(each) for phase, each in self._compared().items()},
            best=self._best_checkpoint(),
            restarts=self.restarts,
        ).write(self._directory.summary)
