"""Checks the first batch of a session before it is trained on, and every later batch for drift.

The self-check samples nothing and draws no random number: it compares the columns that the step computes anyway, and
four more forward passes of the actor over a few sequences. So a run with it writes the same metrics as one without.
`verdicts` decides what passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from slurm_rlhf.algorithms.batching import assemble
from slurm_rlhf.algorithms.losses import ages
from slurm_rlhf.algorithms.reward_shaping import clip_warning
from slurm_rlhf.config.roles import has_reward, has_teacher
from slurm_rlhf.config.rules import before_update, of_the_update
from slurm_rlhf.config.schema import Config, Data
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer, has_double_bos, missing_eos
from slurm_rlhf.errors import ModelError, SelfCheckError
from slurm_rlhf.eval import verdicts
from slurm_rlhf.records import F32, Bool, Experience, Trajectory, digest
from slurm_rlhf.run.update import skip_warning
from slurm_rlhf.wire.calls import ActorCalls, ForwardBatch, SelfCheckAnswer
from slurm_rlhf.wire.handles import RoleHandle, gather, send_shards

PER_RANK = 4
"""Number of sequences that each rank of the actor computes again."""


@dataclass(frozen=True, slots=True)
class PromptFindings:
    """Holds facts about the training prompts, known before anything is sampled."""

    shares: dict[str, float]  # name in verdicts.PROMPT_SHARES -> share of the prompts
    template: str = ""  # fault in the way in which the chat template ends an answer

    @classmethod
    def of(cls, prompts: PromptSet, tokenizer: Tokenizer, data: Data, played: bool = False) -> PromptFindings:
        """Look at the prompts, which were read as `data` says; `played`: environments may make others of their rows."""
        count = len(prompts)
        shares = {
            "prompts_dropped": prompts.dropped / (prompts.dropped + count),
            "prompts_double_bos": sum(has_double_bos(p.token_ids[:2].tolist(), tokenizer) for p in prompts) / count,
            "prompts_answered": prompts.answered / count,
            "prompts_repeated": 1.0 - len({repr(p.row) if played else p.token_ids.tobytes() for p in prompts}) / count,
        }
        if not data.apply_chat_template:
            return cls(shares)
        try:
            return cls(shares, missing_eos(tokenizer))
        except ModelError as error:
            return cls(shares, f"whether the chat template ends answers with an end token is not known: {error}")


@dataclass(slots=True)
class SelfCheck:
    """Compares what engines, actor and reference compute, in every step; thoroughly in the first one.

    `before_update` and `after_update` raise SelfCheckError, which ends the run.
    """

    config: Config
    actor: RoleHandle[ActorCalls]
    note: Callable[[str], None]
    prompts: PromptFindings
    figures: dict[str, float]  # check -> figure, filled by the first step
    tokenizer: Tokenizer
    _begun: bool = field(default=False, init=False)
    _updated: bool = field(default=False, init=False)
    _passed: F32 | None = field(default=None, init=False)  # log-probs to compare the first update's pass with, [A]
    _warned: dict[str, float] = field(default_factory=dict, init=False)  # check -> figure of the last warning

    def before_update(
        self, step: int, trajectories: list[Trajectory], exp: Experience, metrics: dict[str, float], version: int
    ) -> None:
        """Check the experience that `TrainingStep.collect` has made; the actor has policy `version`."""
        share = metrics.get("reward_clipped", 0.0)
        # Whether the self-check is on or not, and again when they become more.
        if warning := clip_warning(share, self._warned.get("clipped", 0.0), self.config.reward.clip_range):
            self._warned["clipped"] = share
            self.note(f"step {step}: {warning}")
        if wrong := other_tokens(trajectories, exp):
            raise SelfCheckError(wrong)
        if not self.config.train.self_check:
            return
        self._engine_finite(step, metrics.get("correction/not_finite", 0.0), exp)
        if self._begun:
            if (mean := metrics.get("rollout_logprob_diff")) is not None:
                self._watch(step, verdicts.drift(mean, self.config.ds.param_dtype))
            return
        self._begun = True
        self._shares("prompts", self.prompts.shares, verdicts.PROMPT_SHARES)
        if self.prompts.template:
            self.note(f"warning: {self.prompts.template}")
        if has_reward(self.config):
            self._shares("rewards", metrics, verdicts.REWARD_SHARES)
        if wrong := verdicts.not_finite(exp.rewards):
            raise SelfCheckError(wrong)
        if garbled := other_text(trajectories, self.tokenizer, bool(self.config.rollout.stop)):
            raise SelfCheckError(garbled)
        if not before_update(self.config):
            exp = self._with_pass(exp)
            self._passed = exp.columns["logprobs"]
        repeated = self._repeated(exp)
        self._line("actor's forward", repeated, {"again": "twice", "eval": "in eval mode", "alone": "alone"})
        agreement = self._agreement(trajectories, exp, version)
        self._line("sampled tokens", agreement, {"engine": "engine", "reference": "reference"})
        for verdict in [*repeated, *agreement]:
            self._insist(verdict)

    def after_update(self, step: int, exp: Experience, metrics: dict[str, float]) -> None:
        """Check the metrics of an update; `exp` has the old log-probs. Warns of skipped steps in any case."""
        # fp16 skips steps until it has found its loss scale.
        if self.config.ds.param_dtype != "fp16" and (skipped := skip_warning(metrics)):
            self.note(f"warning: step {step}: {skipped}")
        if not self.config.train.self_check or "first_ratio" not in metrics:  # critic.freezing_steps
            return
        if self.config.algo.correction.bypass or (of_the_update(self.config) and self._updated):
            # With bypass the first ratio is actor to engine, which may be any number for an older policy's tokens;
            # otherwise it is 1. So the engine is compared, which was not done before the update.
            if (mean := metrics.get("rollout_logprob_diff")) is not None:
                self._watch(step, verdicts.drift(mean, self.config.ds.param_dtype))
            return
        verdict = verdicts.first_ratio(*self._first_ratio(exp, metrics), self.config.ds.param_dtype)
        if self._updated:
            self._watch(step, verdict)
            return
        self._updated = True
        self.figures["ratio"] = metrics["first_ratio"]
        self.note(f"self-check, first update: {verdict.detail}; at most {verdict.bound.limit:g} off")
        self._insist(verdict)

    def _first_ratio(self, exp: Experience, metrics: dict[str, float]) -> tuple[float, float]:
        """Return mean ratio and k3 of the first optimizer step to the old log-probs.

        Where these are of the update's own pass, the step is compared with the pass of the self-check.
        """
        if self._passed is None or not of_the_update(self.config):
            return metrics["first_ratio"], metrics["first_approx_kl"]
        log_ratio = (exp.columns["logprobs"] - self._passed)[exp.action_mask].astype(np.float64)
        self._passed = None
        return float(np.exp(log_ratio).mean()), float((np.expm1(log_ratio) - log_ratio).mean())

    def _engine_finite(self, step: int, lost: float, exp: Experience) -> None:
        """Warn of tokens whose log-prob of the engine is not a number, and end the run if they are many."""
        tokens = int(lost) + int(exp.action_mask.sum())
        if not lost:
            return
        message = verdicts.engine_not_finite(lost, tokens)
        stop = 1.0 if not self._begun else self.config.train.self_check_stop
        if stop and lost > stop * verdicts.FEW_NOT_FINITE * tokens:
            raise SelfCheckError(f"self-check failed (engine): step {step}: {message}. {verdicts.ALL_THE_SAME}.")
        self._warn(step, "not_finite", lost / tokens, message)

    def _with_pass(self, exp: Experience) -> Experience:
        """Compute the log-probs that are not computed before the update; the step goes on with `exp` as it is."""
        parts, calls = send_shards(self.actor, ActorCalls.logprobs, ForwardBatch, exp, self.config.train.forward_tokens)
        return structs.replace(exp, columns=exp.columns | {"logprobs": assemble(exp, parts, gather(calls))})

    def _shares(self, title: str, shares: dict[str, float], names: tuple[str, ...]) -> None:
        self.figures |= {name: shares[name] for name in names if name in shares}
        self.note(verdicts.shares_line(title, shares, names))
        for warning in verdicts.warnings(shares, names):
            self.note(warning)

    def _line(self, title: str, results: list[verdicts.CheckResult], names: dict[str, str]) -> None:
        self.figures |= {verdict.check: verdict.figure for verdict in results}
        self.note(verdicts.agreement_line(title, results, names))

    def _insist(self, verdict: verdicts.CheckResult) -> None:
        if verdict.few:
            self.note(verdict.warning())
        elif not verdict.passed:
            raise SelfCheckError(verdict.error())

    def _watch(self, step: int, verdict: verdicts.CheckResult) -> None:
        """Warn of a figure beyond its bound, again when it has doubled; end the run at a multiple of it."""
        if verdict.passed:
            return
        stop = self.config.train.self_check_stop
        if stop and not verdict.figure < stop * verdict.bound.limit:
            raise SelfCheckError(
                f"step {step}: {verdict.describe()}. The run ends here, beyond {stop:g} times the bound "
                "(train.self_check_stop); its checkpoints are kept."
            )
        self._warn(step, verdict.check, verdict.figure, verdict.describe())

    def _warn(self, step: int, check: str, figure: float, message: str) -> None:
        """Warn of a figure, and again when it has doubled."""
        if not figure < 2 * self._warned.get(check, 0.0):
            self._warned[check] = figure
            self.note(f"warning: step {step}: {message}")

    def _with_cause(self, verdict: verdicts.CheckResult, exp: Experience, fresh: Bool) -> verdicts.CheckResult:
        """Have the actor compute the whole batch again, so that the error says which of the two is off."""
        dtype, engine = self.config.ds.param_dtype, exp.columns["rollout_logprobs"]
        first, again = exp.columns["logprobs"], self._with_pass(exp).columns["logprobs"]
        own, to_engine = (verdicts.compare("engine", again, other, fresh, dtype).figure for other in (first, engine))
        message = f"; computed again, the actor's are {own:.3g} from its first and {to_engine:.3g} from the engine's"
        return replace(verdict, detail=verdict.detail + message)

    def _repeated(self, exp: Experience) -> list[verdicts.CheckResult]:
        """Have the actor compute some sequences of the batch twice, in eval mode, and alone."""
        chosen = few(exp, self.actor.world // self.actor.layout.ranks)
        budget = self.config.train.max_tokens_per_gpu
        parts, calls = send_shards(self.actor, ActorCalls.self_check, ForwardBatch, chosen, budget)
        answers = gather(calls)
        found: dict[str, F32] = {
            name: assemble(chosen, parts, [getattr(answer, name) for answer in answers])
            for name in SelfCheckAnswer.__struct_fields__
        }
        dtype, mask = self.config.ds.param_dtype, chosen.action_mask
        results = [verdicts.compare(name, found[name], found["first"], mask, dtype) for name in ("again", "eval")]
        # The columns of the step are from other micro-batches, where sequences that are cut here were whole.
        among = [
            verdicts.compare("alone", found["alone"], others, mask, dtype)
            for others in (found["first"], chosen.columns["logprobs"])
        ]
        return [*results, max(among, key=lambda verdict: (not verdict.passed, verdict.figure))]

    def _agreement(self, trajectories: list[Trajectory], exp: Experience, version: int) -> list[verdicts.CheckResult]:
        """Compare engines and actor on tokens of the actor's version, and, before the first update, the reference."""
        columns, dtype = exp.columns, self.config.ds.param_dtype
        fresh = exp.action_mask & (ages(trajectories, version) == 0)
        engines = np.repeat([t.engine for t in trajectories], exp.response_lens).astype(np.int32)
        verdict = verdicts.compare("engine", columns["rollout_logprobs"], columns["logprobs"], fresh, dtype, engines)
        results = [verdict if verdict.passed or verdict.few else self._with_cause(verdict, exp, fresh)]
        if version == 0 and "ref_logprobs" in columns and not has_teacher(self.config):
            results.append(
                verdicts.compare("reference", columns["ref_logprobs"], columns["logprobs"], exp.action_mask, dtype)
            )
        return results


def other_tokens(trajectories: list[Trajectory], exp: Experience) -> str:
    """Name a response whose tokens that are trained on are not those that its engine has sampled, turn by turn."""
    sequences, responses = exp.token_offsets, exp.action_offsets
    for row, found in enumerate(trajectories):
        ids = exp.token_ids[sequences[row] + exp.prompt_lens[row] : sequences[row + 1]]
        trained = exp.action_mask[responses[row] : responses[row + 1]]
        ends = np.cumsum([0, *(count for count, _ in found.digests)])[:-1]
        turns = [digest(turn) for turn in np.split(ids[found.action_mask], ends[1:])] if found.digests else []
        if turns != found.digests or (trained & ~found.action_mask).any():
            return (
                f"self-check failed (tokens): sample {found.sample} of row {found.prompt} would be trained on tokens "
                f"that engine {found.engine} has not sampled: this is a defect of slurm_rlhf, please report it"
            )
    return ""


def other_text(trajectories: list[Trajectory], tokenizer: Tokenizer, cut: bool) -> str:
    """Name a response whose text is not the text of its tokens; `cut`: stop strings may end the text earlier."""
    for found in trajectories:
        text = tokenizer.response_text(found.prompt_ids.tolist(), found.response_ids.tolist())
        if not (text == found.text or (cut and text.startswith(found.text))):
            return (
                f"self-check failed (text): the reward got {found.text[:80]!r}, and the tokens of that response are "
                f"{text[:80]!r}: engine {found.engine} reads another tokenizer than {tokenizer.directory}. "
                f"{verdicts.ALL_THE_SAME}."
            )
    return ""


def few(exp: Experience, ranks: int) -> Experience:
    """Choose `PER_RANK` sequences for each of `ranks`, of all lengths; every other one keeps half of its response.

    So each shares its micro-batch with sequences of other lengths, whatever was sampled. What is left of a response has
    the log-probs that it had, because the models are causal. Needs at least as many sequences as ranks.
    """
    count = min(PER_RANK, len(exp) // ranks) * ranks
    order = np.argsort(exp.lengths, kind="stable")
    rows = order[np.linspace(0, len(exp) - 1, count).round().astype(np.int64)]
    return _cut(exp.select(sorted(int(row) for row in rows)))


def _cut(exp: Experience) -> Experience:
    lens = exp.response_lens.copy()
    lens[::2] = -(-lens[::2] // 2)
    tokens, actions = (
        np.concatenate([np.arange(start, start + length) for start, length in zip(offsets[:-1], kept, strict=True)])
        for offsets, kept in ((exp.token_offsets, exp.prompt_lens + lens), (exp.action_offsets, lens))
    )
    return Experience(
        exp.prompt_lens,
        lens,
        exp.token_ids[tokens],
        exp.action_mask[actions],
        exp.rewards,
        {name: column[actions] for name, column in exp.columns.items()},
    )
