"""Reads the inputs of a run from the files that its configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_rlhf.config.check import warnings
from slurm_rlhf.config.contents import model_contents
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.order import PromptOrder
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.eval.sets import EvalSet, answered, read_eval_sets
from slurm_rlhf.rewards.model import RewardSource
from slurm_rlhf.rewards.reasoning_gym import task_rows
from slurm_rlhf.rewards.sources import close_source, reward_source, servers_in
from slurm_rlhf.run.self_check import PromptFindings
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

        `printed`: the file for what reward functions print; None: it is printed as usual. `nodes`: where workers run;
        empty: here. Raises UserError.
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
        findings = PromptFindings.of(prompts, tokenizer, config.data)
        path = config.actor.model_name_or_path
        model = {path: model_contents(Path(path))}
        if config.env.path:  # last: it starts processes
            environments = Environments(config, tokenizer, printed, note, nodes)
            for name, found in (("data.prompt_dataset", prompts), *sets):
                environments.check_rows(found, name)
        return cls(prompts, evaluation, order, reward, environments, total, findings, tokenizer, model)

    def servers(self) -> list[Servers]:
        """List what asks servers of rewards and environments."""
        own = self.environments and self.environments.host.servers
        return [*servers_in(self.reward), *([own] if own else [])]

    def close(self) -> None:
        """End the processes of environments and of the source of rewards."""
        close_source(self.reward)
        if self.environments is not None:
            self.environments.close()
