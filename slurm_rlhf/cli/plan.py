"""`slurm-rlhf plan`: the rank map of a configuration."""

from __future__ import annotations

import json

from slurm_rlhf.cli.arguments import page, parse
from slurm_rlhf.cli.layout import draw_layout, layout_on, layout_somewhere
from slurm_rlhf.cluster.draw import draw
from slurm_rlhf.cluster.nodelist import expand
from slurm_rlhf.cluster.topology import numbered_names
from slurm_rlhf.config.load import load_config
from slurm_rlhf.errors import ConfigError

USAGE = (
    "usage: slurm-rlhf plan FILE.toml [--KEY=VALUE ...] [--json]\n"
    "                       [--gpus_per_node=N (--nodes=N | --nodelist=LIST)]"
)
ABOUT = (
    "Shows which rank of which role goes on which accelerator slot of which node, and starts nothing: in the Slurm "
    "allocation it runs in, on the nodes that the options name, else on as many as the configuration asks for. "
    "These keys decide."
)
FLAGS = {"json": "print one JSON object: accelerator, nodes, roles (role -> node, gpus, ranks), tp_groups, world"}
OPTIONS = {
    "nodes": "plan for this many nodes",
    "nodelist": "plan for these nodes, in Slurm's words: gpu[001-003,007]",
    "gpus_per_node": "GPUs of each of them",
}
ROLES = ("actor", "critic", "ref", "reward")
KEYS = [f"{role}.{size}" for role in ROLES for size in ("num_nodes", "num_gpus_per_node")]
KEYS += ["vllm.num_engines", "vllm.tensor_parallel_size", "vllm.num_nodes"]
KEYS += ["algo.kl.init_coef", "reward.model_name_or_path"]


def help_page() -> str:
    """All of `slurm-rlhf plan --help`."""
    return page(USAGE, ABOUT, KEYS, FLAGS | OPTIONS)


def run(words: list[str]) -> int:
    """Prints the rank map. Raises ConfigError and PlacementError."""
    options, rest = take_options(words)
    arguments = parse(rest, USAGE, FLAGS)
    config = load_config(arguments.file, arguments.overrides)
    wanted = wanted_nodes(options)
    if "json" in arguments.flags:
        print(json.dumps((layout_on(config, *wanted) if wanted else layout_somewhere(config)).to_json()))
    else:
        print(draw(layout_on(config, *wanted)) if wanted else draw_layout(config))
    return 0


def take_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of OPTIONS with their values, and the words that are left."""
    options: dict[str, str] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        if name in OPTIONS:
            options[name] = value if equals else next(left, "")
        else:
            rest.append(word)
    return options, rest


def wanted_nodes(options: dict[str, str]) -> tuple[list[str], int] | None:
    """Names and GPUs per node that the options ask for; None when they say nothing. Raises ConfigError."""
    if not options:
        return None
    if "gpus_per_node" not in options or ("nodes" in options) == ("nodelist" in options):
        raise ConfigError(f"--gpus_per_node goes with one of --nodes and --nodelist\n{USAGE}")
    names = expand(options["nodelist"]) if "nodelist" in options else numbered_names(_count("nodes", options))
    return names, _count("gpus_per_node", options)


def _count(name: str, options: dict[str, str]) -> int:
    text = options[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{name} takes a whole number of at least 1, got {text!r}")
    return int(text)
