"""What a run reads from the user's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.config.check import warnings
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.eval.sets import EvalSet, answered, read_eval_sets
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.run.earlier_run import model_contents
from slurm_rlhf.run.self_check import PromptFindings


@dataclass(frozen=True, slots=True)
class Inputs:
    """Holds what the run reads from the user's files."""

    prompts: PromptSet
    evaluation: list[EvalSet]  # empty: nothing is evaluated
    order: PromptOrder
    reward: RewardFunction | None  # None: a model's
    total_steps: int
    findings: PromptFindings  # for the self-check
    tokenizer: Tokenizer
    model: dict[str, str]  # path of the actor's -> its contents

    @classmethod
    def read(cls, config: Config, note: Callable[[str], None]) -> Inputs:
        """Read everything that a user can have wrong; `note` tells the user. Raises UserError."""
        for told in warnings(config):
            note(f"warning: {told}")
        tokenizer = Tokenizer.load(config.actor.model_name_or_path)
        longest = config.data.max_len - config.rollout.max_new_tokens
        prompts = PromptSet.load(config.data.prompt_dataset, tokenizer, config.data, longest, config.data.max_samples)
        evaluation = read_eval_sets(config, tokenizer)
        sets = [(f"evaluation {one.settings.name}", one.prompts) for one in evaluation]
        for name, found in (("data.prompt_dataset", prompts), *sets):
            if found.dropped:
                note(f"{name}: {found.dropped} prompts longer than {longest} tokens were dropped")
        for told in answered(evaluation):
            note(told)
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
        reward = None if config.reward.model_name_or_path else RewardFunction.of(config.reward)
        findings = PromptFindings.of(prompts, tokenizer, config.data)
        path = config.actor.model_name_or_path
        model = {path: model_contents(Path(path))}
        return cls(prompts, evaluation, order, reward, total, findings, tokenizer, model)
