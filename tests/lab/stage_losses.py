"""The losses of `slurm-rlhf sft`, `rm` and `dpo` compared with TRL's, on the same batch, model and reference, in fp32.

    python tests/lab/stage_losses.py

Ours go through the stages, with their packing; TRL's through its trainers, with their padding. Prints the loss of
both, and how far the gradients are apart, relative to TRL's. TRL (1.16) comes with `pip install '.[peer]'`.
"""

from __future__ import annotations

import importlib
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stage_peer
import task
from stage_task import Lengths, Row, config_of, need_trl, rows, write

sys.path.append(str(Path(__file__).parents[1] / "support"))

from tiny_models import make_reward, make_tiny

from slurm_rlhf.data.tokenizer import Tokenizer
from slurm_rlhf.stages.kinds import stage_trainer

COUNT = 12
"""Examples of the batch."""
LENGTHS = Lengths(20, 1.0, 200)


@dataclass(frozen=True, slots=True)
class Case:
    """Names a loss, with its keys on both sides."""

    name: str
    stage: str
    keys: dict[str, Any]  # ours, of the group of the stage
    trainer: str  # a class of TRL, or of its experimental part where it has a dot
    theirs: dict[str, Any]  # keys of TRL
    kind: str = ""  # kind of the rows, where it is not the stage's
    note: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds a loss and its gradient, by the names that transformers gives parameters."""

    loss: float
    gradient: dict[str, Any]

    def apart(self, other: Answer) -> float:
        """Return the norm of the difference of the gradients over the norm of this one. Raises KeyError."""
        names = self.gradient.keys() | other.gradient.keys()
        apart = sum(float((self.gradient[name] - other.gradient[name]).double().square().sum()) for name in names)
        return math.sqrt(apart / sum(float(each.double().square().sum()) for each in self.gradient.values()))


PAIRED = {"beta": 0.1}
SMOOTHED = {**PAIRED, "label_smoothing": 0.2}
CASES = (
    Case("SFT, answers alone", "sft", {}, "SFT", {}),
    Case("Bradley-Terry, margins", "rm", {}, "Reward", {}),
    Case("DPO", "dpo", PAIRED, "DPO", {**PAIRED, "loss_type": ["sigmoid"]}),
    Case("DPO, first step", "dpo", PAIRED, "DPO", {**PAIRED, "loss_type": ["sigmoid"]}),
    Case(
        *("cDPO, smoothing 0.2", "dpo", SMOOTHED, "cpo.CPO", SMOOTHED, ""),
        "TRL's DPO has none: its cpo_loss, with ratios to the reference in place of log-probs",
    ),
    Case("IPO", "dpo", {"beta": 0.3, "loss_type": "ipo"}, "DPO", {"beta": 0.3, "loss_type": ["ipo"]}),
    Case(
        *("SimPO", "dpo", {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.5}, "cpo.CPO"),
        {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0},
    ),
    Case(
        *("KTO", "dpo", {**PAIRED, "loss_type": "kto", "desirable_weight": 1.5}, "KTO"),
        *({**PAIRED, "desirable_weight": 1.5}, "kto"),
    ),
    Case("ORPO, odds ratio", "dpo", {**PAIRED, "loss_type": "orpo"}, "orpo.ORPO", PAIRED),
    Case(
        *("ORPO", "dpo", {**PAIRED, "loss_type": "orpo"}, "orpo.ORPO", PAIRED, ""),
        "TRL's cross-entropy is that of prompts, too, and of a token in the mean of the batch; ours that of an answer",
    ),
)
ODDS = "ORPO, odds ratio"
"""The row without the cross-entropy of the chosen answer."""


def main(words: list[str] | None = None) -> int:
    """Compare all losses."""
    options = task.parser(__doc__, seed=1).parse_args(words)
    return task.printed(lambda: measure(options.seed), show, options.json)


def measure(seed: int) -> dict[str, Any]:
    """Compute every loss on both sides. Raises ConfigError."""
    need_trl()
    found = []
    with tempfile.TemporaryDirectory(prefix="slurm-rlhf-losses-") as scratch:
        directory = Path(scratch)
        model, reference = (make_tiny(directory / f"model_{place}", seed=place) for place in (0, 1))
        scores = make_reward(directory / "scores")
        for case in CASES:
            examples = rows(case.kind or case.stage, COUNT, LENGTHS, seed)
            start = scores if case.stage == "rm" else reference if case.name.endswith("first step") else model
            ours = _ours(case, directory, start, reference, examples)
            theirs = _peer(case, directory, start, reference, examples)
            found.append([case.name, ours.loss, theirs.loss, theirs.apart(ours), case.note])
    return {"bench": "stage_losses", "rows": found}


def show(result: dict[str, Any]) -> str:
    """Write the table for a reader."""
    lines = [f"{'loss':24}{'ours':>12}{'TRL':>12}{'difference':>12}{'gradients':>11}"]
    for name, ours, theirs, apart, note in result["rows"]:
        line = f"{name:24}{ours:12.7f}{theirs:12.7f}{abs(ours - theirs):12.1e}{apart:11.1e}"
        lines.append(f"{line}  {note}" if note else line)
    return "\n".join(lines)


def _ours(case: Case, directory: Path, model: Path, reference: Path, examples: list[Row]) -> Answer:
    """Take the loss of a step from the stage, which has no optimizer step."""
    file = write(directory / "rows.jsonl", examples)
    config = config_of(case.stage, model, file, directory / "out", {**case.keys, "batch_size": len(examples)})
    kind = stage_trainer(config, case.stage)
    found = kind.read(file, Tokenizer.load(model), config.data)
    assert len(found) == len(examples)
    if case.stage == "dpo":
        config.actor.model_name_or_path = str(reference)
        other: Any = kind(config, 1)
        found.experience.columns["ref_logprobs"] = other.of_all(found, other.logprobs, of_rows=False)
        config.actor.model_name_or_path = str(model)
    trainer: Any = kind(config, 1)
    batch = found.experience.select(found.rows(range(len(found))))
    gradient: dict[str, Any] = {}

    def kept() -> dict[str, float]:  # stands in for the optimizer's step
        for name, parameter in trainer.backend.module.named_parameters():
            known = name.replace("value_head", "score") if case.stage == "rm" else name.removeprefix("model.")
            gradient[known] = parameter.grad.clone()
            parameter.grad = None
        return {}

    trainer.backend.step = kept
    denominator = trainer.denominator(batch)

    def loss() -> float:
        return float(trainer.train_step(batch, trainer.micro_batches(batch, found), denominator)["loss"] / denominator)

    whole = loss()
    if case.name == ODDS:
        with_odds = dict(gradient)
        trainer.config.dpo.beta = 0.0
        whole -= loss()
        gradient = {name: with_odds[name] - value for name, value in gradient.items()}
    return Answer(whole, gradient)


def _peer(case: Case, directory: Path, model: Path, reference: Path, examples: list[Row]) -> Answer:
    import torch

    config = config_of(case.stage, model, directory, directory, {"batch_size": len(examples)})
    policy = (stage_peer.scoring if case.stage == "rm" else stage_peer.causal)(model)
    other = stage_peer.causal(reference)
    trainer_of, config_class = _classes(case.trainer)
    more = {"ref_model": other} if case.trainer in ("DPO", "KTO") else {}
    trainer = trainer_of(
        model=policy,
        args=config_class(**stage_peer.arguments(config, case.stage, directory / "trl", **case.theirs)),
        train_dataset=stage_peer.dataset(examples),
        processing_class=stage_peer.tokenizer(model),
        **more,
    )
    [batch] = _batches(case, trainer)
    if case.name == ODDS:
        loss = -trainer.odds_ratio_loss(*trainer.concatenated_forward(policy, batch)[:2])[0].mean()
    elif case.name.startswith("cDPO"):
        # TRL's DPO knows no smoothing for it: its CPO does, with log-probs in place of the ratios to the reference.
        with torch.no_grad():
            known = trainer.concatenated_forward(other, batch)[:2]
        ratios = [mine - its for mine, its in zip(trainer.concatenated_forward(policy, batch)[:2], known, strict=True)]
        loss = trainer.cpo_loss(*ratios)[0].mean()
    else:
        loss = trainer.compute_loss(policy, batch)
    loss.backward()
    return Answer(loss.item(), {name: each.grad for name, each in policy.named_parameters()})


def _classes(name: str) -> tuple[Any, Any]:
    part, _, short = name.rpartition(".")
    module = importlib.import_module(f"trl.experimental.{part}" if part else "trl")
    return getattr(module, f"{short}Trainer"), getattr(module, f"{short}Config")


def _batches(case: Case, trainer: Any) -> list[Any]:
    """Return TRL's batches; KTO's with the answers to other prompts that ours has, half of the file away."""
    if case.kind != "kto":
        return list(trainer.get_train_dataloader())
    given = list(trainer.train_dataset)
    for place, row in enumerate(given):
        row["KL_completion_ids"] = given[(place + len(given) // 2) % len(given)]["completion_ids"]
    return [trainer.data_collator(given)]


if __name__ == "__main__":
    sys.exit(main())
