"""Run TRL's GRPO as a process of its own: `python learn_peer.py SPEC.json`; `learn` starts it.

Written for TRL 1.16. Its defaults stay as they are but for what makes both sides do the same: model, data, reward,
responses, optimizer steps, learning rate and its schedule, fp32, and no recomputation of activations, which costs time
and saves memory that nothing here needs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import stage_peer

from slurm_rlhf.algorithms.registry import load_plugins
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config
from slurm_rlhf.data.prompts import PromptSet
from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.records import LENGTH, STOP, Prompt, Trajectory
from slurm_rlhf.rewards.function import RewardFunction
from slurm_rlhf.rewards.scored import Rewards


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Say what the peer trains; all sizes as in our own run."""

    config: str  # TOML file of our run: model, data, reward, sampling
    output: str  # JSONL: one line for each evaluation
    seed: int
    steps: int
    every: int  # optimizer steps between two evaluations
    threads: int
    began: float  # time.monotonic(), the same for all processes of a machine

    def write(self, file: Path) -> None:
        """Write it where `main` reads it."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


class Curve:
    """Writes the accuracy after so many steps, and the seconds of training: the clock stands while it evaluates."""

    def __init__(self, run: PeerRun, evaluate: Callable[[], float]) -> None:
        self._run = run
        self._output = Path(run.output)
        self._evaluate = evaluate
        self._trained = 0.0
        self._since: float | None = None

    def point(self, step: int) -> None:
        """Evaluate after step `step`, 0: before the first."""
        now = time.monotonic()
        if self._since is not None:
            self._trained += now - self._since
        line = {"step": step, "seconds": self._trained, "eval": self._evaluate()}
        if step == 0:
            line["start_up_s"] = time.monotonic() - self._run.began
        with self._output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._since = time.monotonic()


class Judge:
    """Calls the reward function of the run on what the peer has sampled, with what its signature asks for."""

    def __init__(self, config: Config, eos: int) -> None:
        """`eos`: the token that ends a response. Raises as `RewardFunction.of`."""
        load_plugins(config.train.plugins)
        self._function = RewardFunction.of(config.reward)
        self.longest = config.rollout.max_new_tokens
        self.eos = eos
        self.step = 0  # so many are done

    def __call__(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[Sequence[int]], *, training: bool
    ) -> Rewards:
        """Judge one response to each of `prompts`, given as text and as tokens."""
        found = [self._trajectory(*response) for response in zip(prompts, texts, ids, strict=True)]
        return self._function(list(prompts), found, self.step + training)

    def _trajectory(self, prompt: Prompt, text: str, ids: Sequence[int]) -> Trajectory:
        ended = STOP if self.eos in ids or len(ids) < self.longest else LENGTH
        tokens, unknown = np.asarray(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.float32)
        mask = np.ones(len(ids), dtype=np.bool_)
        return Trajectory(prompt.index, 0, prompt.token_ids, tokens, unknown, mask, ended, text, [])


def prompt_set(config: Config, file: str) -> PromptSet:
    """Read prompts as the run does, its templates included."""
    tokenizer = Tokenizer.load(config.actor.model_name_or_path)
    return PromptSet.load(file, tokenizer, config.data, config.data.max_len - config.rollout.max_new_tokens)


def accuracy(model: Any, tokenizer: Any, prompts: PromptSet, judge: Judge) -> float:
    """Average the scores of greedy answers, or their rewards where the function gives no scores, as the run does."""
    import torch

    encoded = tokenizer.pad(
        {"input_ids": [prompt.token_ids.tolist() for prompt in prompts]}, return_tensors="pt", padding_side="left"
    )
    training = model.training
    model.eval()
    with torch.no_grad():
        whole = model.generate(
            input_ids=encoded["input_ids"].to(model.device),
            attention_mask=encoded["attention_mask"].to(model.device),
            max_new_tokens=judge.longest,
            do_sample=False,
        )
    model.train(training)
    rows = whole[:, encoded["input_ids"].shape[1] :].tolist()
    ids = [row[: row.index(judge.eos) + 1] if judge.eos in row else row for row in rows]
    found = judge(list(prompts), tokenizer.batch_decode(ids, skip_special_tokens=True), ids, training=False)
    return float(np.mean(found.rewards if found.scores is None else found.scores, dtype=np.float64))


def main(spec: str) -> None:
    run = PeerRun(**json.loads(Path(spec).read_text(encoding="utf-8")))
    import torch

    torch.set_num_threads(run.threads)
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    config = load_config(run.config)
    path = config.actor.model_name_or_path
    tokenizer, model = stage_peer.tokenizer(path), stage_peer.causal(path)
    judge = Judge(config, tokenizer.eos_token_id)
    prompts, evaluation = (prompt_set(config, file) for file in (config.data.prompt_dataset, config.eval.dataset))
    curve = Curve(run, lambda: accuracy(model, tokenizer, evaluation, judge))

    class Points(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            curve.point(0)

        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            judge.step = state.global_step
            if state.global_step % run.every == 0 or state.global_step == run.steps:
                curve.point(state.global_step)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, completion_ids, place, **_: judge(
            [prompts[each] for each in place], completions, completion_ids, training=True
        ).rewards.tolist(),
        args=_arguments(config, run),
        train_dataset=stage_peer.dataset(
            [{"prompt": prompt.text, "place": place} for place, prompt in enumerate(prompts)]
        ),
        processing_class=tokenizer,
        callbacks=[Points()],
    )
    trainer.train()


def _arguments(config: Config, run: PeerRun) -> Any:
    """Say in TRL's words what the run is asked to do."""
    import torch
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(Path(run.output).parent / "trl"),
        per_device_train_batch_size=config.train.batch_size,
        num_generations=config.rollout.n_samples_per_prompt,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        learning_rate=config.actor.learning_rate,
        lr_scheduler_type=config.actor.lr_scheduler,
        warmup_steps=round(config.actor.lr_warmup_ratio * run.steps),
        max_steps=run.steps,
        seed=run.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=run.every,
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
