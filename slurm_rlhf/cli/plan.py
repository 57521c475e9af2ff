"""`slurm-rlhf plan`: the rank map of a configuration."""

from __future__ import annotations

import json
import math
import sys

from slurm_rlhf.cli.arguments import page, parse
from slurm_rlhf.cli.layout import draw_layout, layout_on, layout_somewhere
from slurm_rlhf.cli.memory import draw_memory, memory_json, memory_of, memory_on, refuse
from slurm_rlhf.cli.transfer import INSIDE_GBITS, NETWORK_GBITS, draw_transfer, transfer_json, transfer_plan
from slurm_rlhf.cluster.nodelist import expand
from slurm_rlhf.config.load import load_config
from slurm_rlhf.config.roles import ROLES
from slurm_rlhf.errors import ConfigError
from slurm_rlhf.placement.render import draw
from slurm_rlhf.placement.topology import numbered_names

USAGE = (
    "usage: slurm-rlhf plan FILE.toml [--KEY=VALUE ...] [--json]\n"
    "                       [--gpus_per_node=N (--nodes=N | --nodelist=LIST)]\n"
    "                       [--gpu=NAME | --gpu_memory_gb=GB] [--network_gbits=RATE] [--inside_gbits=RATE]"
)
ABOUT = (
    "Shows which rank of which role goes on which accelerator slot of which node, and starts nothing: in the Slurm "
    "allocation it runs in, on the nodes that the options name, else on as many as the configuration asks for. Where "
    "the model's config.json is there and the kind of GPU is known, it adds the memory that each role needs, and fails "
    "where that is not there; where the weights are, what a weight transfer sends over each link, and for how long. "
    "These keys decide."
)
FLAGS = {
    "json": "print one JSON object: accelerator, nodes, roles (role -> node, gpus, ranks), tp_groups, world, memory, "
    "transfer"
}
OPTIONS = {
    "nodes": "plan for this many nodes",
    "nodelist": "plan for these nodes, in Slurm's words: gpu[001-003,007]",
    "gpus_per_node": "GPUs of each of them",
}
GPU = {
    "gpu": "kind of the GPUs, as train.gpu: h100, a100_40gb, h200, ...",
    "gpu_memory_gb": "memory of a GPU as it is sold, as train.gpu_memory_gb",
}
DEFAULTS = (str(NETWORK_GBITS), str(INSIDE_GBITS))
RATES = {
    "network_gbits": f"rate of a node's links in each direction, for the predicted seconds [{NETWORK_GBITS:g}]",
    "inside_gbits": f"the same between ranks of one node [{INSIDE_GBITS:g}]",
}
SIZES = ("num_nodes", "num_gpus_per_node")
KEYS = [f"{role.group}.{size}" for role in ROLES.values() if role.kind != "engine" for size in SIZES]
KEYS += ["vllm.num_engines", "vllm.tensor_parallel_size", "vllm.num_nodes"]
KEYS += ["algo.kl.init_coef", "reward.model_name_or_path"]
KEYS += ["train.colocate_all", *filter(None, (role.colocation_key for role in ROLES.values()))]
KEYS += ["ds.zero_stage", "ds.param_dtype", "sync.bucket_mb"]
KEYS += ["train.gpu", "train.gpu_memory_gb", "train.max_tokens_per_gpu", "train.forward_max_tokens_per_gpu"]
KEYS += ["train.logprob_chunk_tokens", "actor.gradient_checkpointing_enable", "data.max_len", "ds.enable_sleep"]
KEYS += ["ref.zero_stage", "ref.offload", "vllm.gpu_memory_utilization", "vllm.max_num_seqs"]


def help_page() -> str:
    """All of `slurm-rlhf plan --help`."""
    return page(USAGE, ABOUT, KEYS, FLAGS | OPTIONS | GPU | RATES)


def run(words: list[str]) -> int:
    """Prints the rank map. Raises ConfigError, and PlacementError where the roles or their memory do not fit."""
    options, rest = take_options(words)
    rest += [f"--train.{name}={options.pop(name)}" for name in GPU if name in options]
    arguments = parse(rest, USAGE, FLAGS)
    config = load_config(arguments.file, arguments.overrides)
    rates = [_rate(name, options.pop(name, default)) for name, default in zip(RATES, DEFAULTS, strict=True)]
    wanted = wanted_nodes(options)
    ranks = layout_on(config, *wanted) if wanted else layout_somewhere(config)
    memory = memory_of(config, None) if wanted else memory_on(config, ranks)
    transfer = transfer_plan(config, ranks)
    if "json" in arguments.flags:
        cost = {"transfer": transfer_json(transfer, *rates)} if transfer else {}
        print(json.dumps(ranks.to_json() | {"memory": memory_json(memory)} | cost))
    else:
        print(draw(ranks) if wanted else draw_layout(config))
        print(f"\n{draw_memory(config, memory)}")
        if transfer:
            print(f"\n{draw_transfer(transfer, *rates)}")
    sys.stdout.flush()
    refuse(config, memory)
    return 0


def take_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of OPTIONS, GPU and RATES with their values, and the words that are left."""
    options: dict[str, str] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        if name in OPTIONS | GPU | RATES:
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


def _rate(name: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(f"--{name} takes a rate in Gbit/s above 0, got {text!r}")
    return rate
