"""`slurm-rlhf sft`: supervised fine-tuning from a TOML file."""

from __future__ import annotations

from slurm_rlhf.cli.arguments import page, parse
from slurm_rlhf.config.check import check_sft
from slurm_rlhf.config.load import load_config

USAGE = "usage: slurm-rlhf sft FILE.toml [--KEY=VALUE ...]"
ABOUT = (
    "Trains actor.model_name_or_path on the examples in sft.dataset (data.input_key, data.output_key) and writes a "
    "Hugging Face model with its tokenizer to sft.output_dir. One process; start it under torchrun for more."
)
GROUPS = ["sft", "data", "actor", "ds", "train", "timeout"]


def help_page() -> str:
    """All of `slurm-rlhf sft --help`."""
    return page(USAGE, ABOUT, GROUPS)


def run(words: list[str]) -> int:
    """Trains and writes the model. Raises SlurmRlhfError."""
    arguments = parse(words, USAGE)
    config = load_config(arguments.file, arguments.overrides)
    check_sft(config)
    from slurm_rlhf.training.sft import run as train_on_examples

    train_on_examples(config)
    return 0
