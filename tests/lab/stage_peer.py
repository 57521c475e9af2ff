"""Train a stage with TRL as a process of its own: `python stage_peer.py SPEC.json`; `stage_race` starts it.

Written for TRL 1.16. Its defaults stay as they are but for what makes both sides do the same: model, data and their
order, batches, optimizer, constant learning rate, fp32, and no recomputation of activations, as ours on such models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stage_task import MAX_LEN

from slurm_rlhf.config.keys import get
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.schema import Config


def arguments(config: Config, stage: str, output: Path, **more: Any) -> dict[str, Any]:
    """Say in the words of transformers' `TrainingArguments` what the stage is asked to do."""
    import torch

    keys, actor = get(config, stage), config.actor
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": keys.batch_size,
        "max_steps": keys.max_steps or -1,
        "num_train_epochs": keys.max_epochs,
        "learning_rate": keys.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": actor.adam_betas[0],
        "adam_beta2": actor.adam_betas[1],
        "weight_decay": actor.weight_decay,
        "max_grad_norm": actor.max_norm,
        "train_sampling_strategy": "sequential",
        "max_length": MAX_LEN,
        "seed": config.train.seed,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **more,
    }


def dataset(rows: list[dict[str, Any]]) -> Any:
    """Make the data set, with a name of its own: what datasets 5.2 would make up fails with pyarrow 26."""
    from datasets import Dataset
    from pyarrow import Table

    return Dataset(Table.from_pylist(rows), fingerprint="examples")


def causal(path: str | Path) -> Any:
    """Load a language model in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)


def scoring(path: str | Path) -> Any:
    """Load a reward model in fp32."""
    import torch
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32, local_files_only=True
    )


def tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def main(spec: str) -> None:
    given = json.loads(Path(spec).read_text(encoding="utf-8"))
    import torch

    torch.set_num_threads(given["threads"])
    import trl
    from transformers import TrainerCallback

    config, stage, losses = load_config(given["config"]), given["stage"], Path(given["losses"])
    path = config.actor.model_name_or_path

    class Steps(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            print("begin", flush=True)

        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print(f"step {state.global_step}/{state.max_steps}", flush=True)

        def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                with losses.open("a", encoding="utf-8") as file:
                    line = {"step": state.global_step, "loss": float(logs["loss"]), "tokens": logs["num_tokens"]}
                    file.write(json.dumps(line) + "\n")

    trainer, settings, load = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, causal),
        "rm": (trl.RewardTrainer, trl.RewardConfig, scoring),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, causal),
    }[stage]
    more = {"beta": config.dpo.beta} if stage == "dpo" else {}
    file = Path(get(config, stage).dataset)
    trainer(
        model=load(path),
        args=settings(**arguments(config, stage, losses.parent / "trl", **more)),
        train_dataset=dataset([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]),
        processing_class=tokenizer(path),
        callbacks=[Steps()],
    ).train()


if __name__ == "__main__":
    main(sys.argv[1])
