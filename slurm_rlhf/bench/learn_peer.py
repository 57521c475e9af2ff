"""Run TRL's GRPO as a process of its own: `python -m slurm_rlhf.bench.learn_peer SPEC.json`; `learn` starts it.

Written for TRL 1.16. Its defaults stay as they are but for what makes both sides do the same: model, data, reward,
responses, optimizer steps, learning rate and its schedule, fp32, and no recomputation of activations, which costs time
and saves memory that nothing here needs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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


def main(spec: str) -> None:
    run = PeerRun(**json.loads(Path(spec).read_text(encoding="utf-8")))
    import torch

    torch.set_num_threads(run.threads)
    from datasets import Dataset
    from pyarrow import Table
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from slurm_rlhf.config.load import load_config

    config = load_config(run.config)
    path = config.actor.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    reward = _reward(config)
    per_step = config.train.batch_size
    arguments = GRPOConfig(
        output_dir=str(Path(run.output).parent / "trl"),
        per_device_train_batch_size=per_step,
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
    curve = Curve(run, lambda: _accuracy(model, tokenizer, config, reward))

    class Points(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            curve.point(0)

        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % run.every == 0 or state.global_step == run.steps:
                curve.point(state.global_step)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda prompts, completions, labels, **_: reward(prompts, completions, labels),
        args=arguments,
        # With a name of its own: pyarrow 26 has a type that datasets 5.2 cannot take into the one it would make up.
        train_dataset=Dataset(Table.from_pylist(_rows(config.data.prompt_dataset, config)), fingerprint="prompts"),
        processing_class=tokenizer,
        callbacks=[Points()],
    )
    trainer.train()


def _rows(file: str, config: Any) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    return [{"prompt": row[config.data.input_key], "labels": row.get(config.data.label_key)} for row in rows]


def _reward(config: Any) -> Callable[[list[str], list[str], list[Any]], list[float]]:
    """Return the reward function of the run, called with prompts, what follows them, and labels."""
    from slurm_rlhf.errors import ConfigError
    from slurm_rlhf.user_files import run_file

    function = run_file(Path(config.reward.remote_url), "reward.remote_url", ConfigError).reward_func

    def reward(prompts: list[str], completions: list[str], labels: list[Any]) -> list[float]:
        queries = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        answer = function(queries, prompts, labels)
        return [float(value) for value in (answer["rewards"] if isinstance(answer, dict) else answer)]

    return reward


def _accuracy(model: Any, tokenizer: Any, config: Any, reward: Any) -> float:
    """Average the rewards of greedy answers to the evaluation prompts."""
    import torch

    rows = _rows(config.eval.dataset, config)
    prompts = [row["prompt"] for row in rows]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    training = model.training
    model.eval()
    with torch.no_grad():
        tokens = model.generate(
            input_ids=encoded["input_ids"].to(model.device),
            attention_mask=encoded["attention_mask"].to(model.device),
            max_new_tokens=config.rollout.max_new_tokens,
            do_sample=False,
        )
    model.train(training)
    texts = tokenizer.batch_decode(tokens[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    found = reward(prompts, texts, [row["labels"] for row in rows])
    return sum(found) / len(found)


if __name__ == "__main__":
    main(sys.argv[1])
