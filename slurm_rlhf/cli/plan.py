"""`slurm-rlhf plan`: the rank map of a configuration."""

from __future__ import annotations

from slurm_rlhf.cli.arguments import page, parse
from slurm_rlhf.cli.layout import draw_layout
from slurm_rlhf.config.load import load_config

USAGE = "usage: slurm-rlhf plan FILE.toml [--KEY=VALUE ...]"
ABOUT = (
    "Shows which rank of which role goes on which accelerator slot of which node, and starts nothing: in the Slurm "
    "allocation it runs in, else on as many nodes as the configuration asks for. These keys decide."
)
KEYS = [f"{role}.{size}" for role in ("actor", "critic", "ref") for size in ("num_nodes", "num_gpus_per_node")]
KEYS += ["vllm.num_engines", "vllm.tensor_parallel_size", "vllm.num_nodes", "algo.kl.init_coef"]


def help_page() -> str:
    """All of `slurm-rlhf plan --help`."""
    return page(USAGE, ABOUT, KEYS)


def run(words: list[str]) -> int:
    """Prints the rank map. Raises ConfigError and PlacementError."""
    arguments = parse(words, USAGE)
    print(draw_layout(load_config(arguments.file, arguments.overrides)))
    return 0
