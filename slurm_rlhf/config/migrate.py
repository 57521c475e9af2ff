"""Translate a script or a command of OpenRLHF, verl or TRL into a TOML file of keys here. Pure: text in, text out.

The same steps for all three: `peer_script` finds the program and its settings (name, words), the tables in `peers.toml`
map names to keys, functions here compute keys that follow from several names, and keys that break a rule are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_rlhf.config.keys import INTERVALS, VALUES, Key, all_keys, changed, key_of, meaning, nearest, peers
from slurm_rlhf.config.peer_script import Setting, commands, python_settings, settings
from slurm_rlhf.config.rule import row_problems
from slurm_rlhf.config.rules import key_problems, rule_problems
from slurm_rlhf.config.schema import Config
from slurm_rlhf.config.text import BadValue, from_text, listed, toml_value
from slurm_rlhf.errors import ConfigError

Values = dict[str, Any]
"""Key -> its value; None: it is not set, nan: it follows from a number that is not known."""


class PeerFigures:
    """Holds the settings of a script, the first one of each name, and the peer's defaults."""

    def __init__(self, said: Sequence[Setting]) -> None:
        self._words = {each.name: each.words or ["true"] for each in reversed(said)}

    def text(self, name: str) -> str:
        return " ".join(self._words.get(name, ()))

    def true(self, name: str) -> bool:
        return self.text(name).lower() == "true"

    def number(self, name: str) -> float:
        """Return a number; 0 if it is not set, nan if its text is no number."""
        try:
            return float(self.text(name) or 0)
        except ValueError:
            return math.nan


def _over(whole: float, part: float) -> float:
    return whole // part if part else math.nan


def openrlhf(said: PeerFigures, values: Mapping[str, Any], command: str) -> Values:
    """Choose rollout.max_new_tokens where the default does not fit, because OpenRLHF gives a response all that is left.

    There a chat template replaces the input template; here it is put around it. There frozen models are cut, too, when
    trained ones are at stage 3.
    """
    if command != "train":
        return {"data.input_template": None} if values.get("data.apply_chat_template") else {}
    most, stage = values.get("data.max_len", math.inf), 3 if values.get("ds.zero_stage") == 3 else None
    found: Values = {"ref.zero_stage": stage, "reward.zero_stage": stage}
    if most <= Config().rollout.max_new_tokens and "rollout.max_new_tokens" not in values:
        found["rollout.max_new_tokens"] = most // 2
    kinds = map(said.text, ("algo.advantage.is_correction_type", "vllm_is_correction_type"))
    if "algo.correction.level" in values and "seq-mask-tis" in kinds:
        found["algo.correction.level"] = "geometric"
    return found


def verl(said: PeerFigures, values: Mapping[str, Any], command: str) -> Values:
    """Give all GPUs to engines, in turns, and take the KL penalty and the source of rewards that are switched on."""
    actor, gpus = "actor_rollout_ref.actor.", said.number("trainer.nnodes") * said.number("trainer.n_gpus_per_node")
    clip = [said.number(f"{actor}clip_ratio_{side}") for side in ("low", "high")]
    width = said.number("actor_rollout_ref.rollout.tensor_model_parallel_size")
    clip = clip if clip != [0.2, 0.2] else []
    found: Values = {"vllm.num_engines": _over(gpus, width), "actor.eps_clip_low_high": clip or None}
    if not (said.true(f"{actor}use_kl_loss") or said.true("algorithm.use_kl_in_reward")):
        found["algo.kl.init_coef"] = 0.0
    alone = said.true("distillation.enabled") and not said.true("distillation.distillation_loss.use_task_rewards")
    if not (alone or values.keys() & {"reward.model_name_or_path", "reward.remote_url"}):
        found["reward.preset"] = "math"
    return found


def trl(said: PeerFigures, values: Mapping[str, Any], command: str) -> Values:
    """Count prompts, where TRL counts responses; choose engines, loss, correction and reward of GRPO and RLOO."""
    if command != "train":
        return {}
    gpus, engines = said.number("num_processes"), said.true("use_vllm")
    served = engines and said.text("vllm_mode") == "server"
    steps = said.number("steps_per_generation") or said.number("gradient_accumulation_steps")
    responses = said.number("generation_batch_size") or steps * gpus * said.number("per_device_train_batch_size")
    loss, near, far = said.text("loss_type"), said.number("epsilon"), said.number("epsilon_high")
    usual = "gspo" if said.text("importance_sampling_level") == "sequence" else "ppo"
    policy = loss if loss in ("cispo", "sapo") else usual
    ranges = {"ppo": [near, far] if far else None, "gspo": [near, far or near], "cispo": [1.0, (far or near) - 1]}
    found: Values = {
        "rollout.batch_size": _over(responses, said.number("num_generations")),
        "train.colocate_all": not served,
        "vllm.num_engines": _over(gpus, said.number("vllm_tensor_parallel_size")) if engines and not served else None,
        "actor.policy_loss_type": policy,
        "actor.eps_clip_low_high": ranges.get(policy),
        "actor.eps_clip": near if policy == "ppo" and not far else None,
    }
    level, _, mode = said.text("vllm_importance_sampling_mode").partition("_")
    bounds = [said.number(f"vllm_importance_sampling_clip_{side}") for side in ("min", "max")]
    on = engines and said.true("vllm_importance_sampling_correction")
    for leaf, value in {"level": level, "mode": mode, "thresholds": bounds}.items():
        found[f"algo.correction.{leaf}"] = value if on else None
    if "reward.model_name_or_path" not in values:
        exact = "accuracy_reward" in said.text("reward_funcs")
        found |= {"reward.preset": "math" if exact else None, "reward.remote_url": None if exact else "reward.py"}
    return found


FIGURES = {"openrlhf": openrlhf, "verl": verl, "trl": trl}
"""Peer -> function that computes the keys which follow from several of its names."""


_PYTHON = re.compile(r"^(?:from|import) \w|Config\(", re.MULTILINE)


@dataclass(slots=True)
class Translation:
    """Holds the translation of a command."""

    peer: str = "OpenRLHF"
    command: str = "train"  # the command that reads the file
    values: dict[str, object] = field(default_factory=dict)  # key -> value
    flags: dict[str, str] = field(default_factory=dict)  # key -> what was written, where one flag says it
    defaults: set[str] = field(default_factory=set)  # keys whose value is a default of the peer
    left_out: list[str] = field(default_factory=list)  # a sentence for each flag without a key

    def toml(self) -> str:
        """Write the file: the keys by group, the peer's own defaults among them, then what was left out."""
        look = "check" if self.command == "train" else "data"
        lines = [
            f"# Translated from {self.peer}, for `slurm-rlhf {self.command} FILE.toml`. What it names is read by",
            f"# `slurm-rlhf {look} FILE.toml`.",
            "",
        ]
        chosen = [key for key in all_keys().values() if key.name in self.values]
        for group in dict.fromkeys(key.group for key in chosen):
            lines += [f"[{group}]"] if group else []
            for key in (key for key in chosen if key.group == group):
                setting = f"{key.name.removeprefix(f'{group}.')} = {toml_value(self.values[key.name])}"
                about = f"{self.peer}'s default" if key.name in self.defaults else self.flags.get(key.name, "")
                lines.append(f"{setting}  # {about}" if about.removeprefix("--") not in ("", key.name) else setting)
            lines.append("")
        if self.left_out:
            lines += ["# Left out:", *(f"#   {sentence}" for sentence in self.left_out), ""]
        return "\n".join(lines).rstrip() + "\n"


class Dictionary:
    """Holds the tables of a peer for one program: merged from general ones, and from those for its command."""

    def __init__(self, peer: str, program: str) -> None:
        table = peers()[peer]
        self.peer, self.command = peer, str(table["programs"][program])
        stage = ["stage"] if self.command != "train" else []
        sections = [table, *(table.get(name, {}) for name in dict.fromkeys([*stage, self.command, program]))]

        def merged(part: str) -> dict[str, Any]:
            rows = [row for section in sections for row in section.get(part, {}).items()]
            return {self._here(name): self._here(value) for name, value in rows}

        self.keys, self.values, self.needs, self.instead = map(merged, ("keys", "values", "needs", "instead"))
        self.defaults, self.constants = merged("defaults"), merged("constants")
        self.products, self.sums = merged("products"), merged("sums")
        self.notes = [note for section in sections for note in section.get("notes", ())]
        self.together = {self._here(key) for section in sections for key in section.get("together", ())}

    def _here(self, text: Any) -> Any:
        return text.replace("{stage}", self.command) if isinstance(text, str) else text

    def find(self, name: str) -> Key | str:
        """Return the key that `name` is here, or what to do instead."""
        if name in self.keys or name in self.instead:
            return all_keys()[self.keys[name]] if name in self.keys else str(self.instead[name])
        if key := key_of(name) if self.peer == "openrlhf" else all_keys().get(name):
            return key
        groups = (name.rsplit(".", dots)[0] for dots in range(1, name.count(".") + 1))
        known = next((str(self.instead[group]) for group in groups if group in self.instead), "") or meaning(name)
        return known or f"unknown; near it: {', '.join(nearest(name)) or 'nothing'}"


def translate(script: str, read: Mapping[str, Collection[str]] | None = None, peer: str = "openrlhf") -> Translation:
    """Read the flags of a line, a shell script or a Python script. Variables that it assigns are followed.

    `read`: command -> the keys and groups that it reads; others are left out. Raises ConfigError for a script without
    a program of the peer that is known here.
    """
    program, said = _program(script, peer)
    book = Dictionary(peer, program)
    found = Translation(peers()[peer]["name"], book.command)
    keys = (read or {}).get(book.command, ())
    if not said:
        raise ConfigError("no flag in the command: quote it whole, with all of its words")
    said = [each for each in said if each.words not in (["None"], ["null"], [""])]
    known = [each for each in said if not each.unknown]
    names = {each.name for each in known}
    defaults = [Setting(name, _words(value), "") for name, value in book.defaults.items() if name not in names]
    figures = PeerFigures([*known, *defaults])
    for each in [*said, *defaults]:
        if each.name not in book.needs or figures.true(book.needs[each.name]):
            _look_up(found, book, each, keys)
    computed = {name: math.prod(map(figures.number, parts)) for name, parts in book.products.items()}
    computed |= {name: sum(map(figures.number, parts)) for name, parts in book.sums.items()}
    for name, value in (computed | FIGURES[peer](figures, found.values, book.command)).items():
        if listed(all_keys()[name], keys):
            _put(found, name, value)
    every = {name: value for name, value in book.constants.items() if listed(all_keys()[name], keys)}
    found.defaults |= every.keys() - found.values.keys()
    found.values = every | found.values
    for name in [name for name in found.defaults if found.values.get(name) == all_keys()[name].default]:
        del found.values[name]
    if found.command == "train":
        _share(found)
    _fit(found)
    found.left_out += book.notes
    return found


def _words(value: object) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def _look_up(found: Translation, book: Dictionary, said: Setting, read: Collection[str]) -> None:
    """Translate a setting if a key here takes it; else note why not, unless it is a default that nobody wrote."""
    key, why = book.find(said.name), ""
    if isinstance(key, str):
        why = key if said.name not in book.needs.values() else ""
    elif key.name in found.values:
        why = f"{found.flags[key.name]} says {key.name} already" if key.name not in book.together else ""
    elif not listed(key, read):
        why = f"`slurm-rlhf {book.command}` does not read {key.name}"
    else:
        try:
            _take(found, key, said, book.values.get(said.name, {}))
        except BadValue as error:
            why = str(error)
    if why and said.flag:
        words = ["..."] if said.name in ("logger.wandb.key", "use_wandb", "hub_token") else said.words  # secrets
        found.left_out.append(f"{' '.join([said.flag, *words])}: {why}")


def _take(found: Translation, key: Key, said: Setting, values: Mapping[str, str]) -> None:
    """Read the words of a flag as its key does. Raises BadValue."""
    words, never = said.words, key.name in INTERVALS or key.name.endswith((".save_steps", ".eval_steps"))
    if len(words) == 1 and words[0].startswith("[") and key.kind in ("path", "list[str]"):
        words = [word.strip(" '\"") for word in words[0].strip("[]").split(",")]
    if said.unknown:
        raise BadValue(key, words, f"the script does not have its value; set {key.name} yourself")
    values = {**VALUES.get(key.name, {}), **({"-1": "0"} if never else {}), **values}
    read = [values.get(word.lower(), word) for word in words or (["true"] if "true" in values else [])]
    if words and not any(read):
        return
    read = [word.strip(",") for word in read if word] if key.kind.startswith("list[") else read
    if key.kind == "path" and read:
        read = [",".join(read)]
    elif key.kind == "int" and len(read) == 1 and read[0].endswith(".0"):
        read = [read[0].removesuffix(".0")]
    found.values[key.name] = from_text(key, read)
    found.flags[key.name] = said.flag
    if not said.flag:
        found.defaults.add(key.name)


def _put(found: Translation, name: str, value: Any) -> None:
    """Set a key that follows from several names. `value` None: it is not set; nan: one of the names is not known."""
    key = all_keys()[name]
    found.defaults.discard(name)
    found.values.pop(name, None)
    if isinstance(value, float) and not math.isfinite(value):
        found.left_out.append(f"{name}: it follows from values that the script does not have; set it yourself")
    elif value is not None and (value != key.default or found.flags.get(name)):
        found.values[name] = int(value) if key.kind == "int" else value


def _share(found: Translation) -> None:
    """Keep engines that share the trainer's GPUs inside a node, and divide the optimizer's batch over the ranks."""
    now = changed(Config(), found.values)
    nodes, gpus, width = now.actor.num_nodes, now.actor.num_gpus_per_node, now.vllm.tensor_parallel_size
    batch, ranks = now.train.batch_size, nodes * gpus
    responses = now.rollout.batch_size * now.rollout.n_samples_per_prompt
    fits = [size for size in range(ranks, responses + 1, ranks) if responses % size == 0] if batch % ranks else []
    new: Values = {}
    if now.train.colocate_all and width > gpus:
        new = {"vllm.tensor_parallel_size": gpus, "vllm.num_engines": nodes}
        found.left_out.append(
            f"vllm.tensor_parallel_size = {gpus}, was {width}: an engine is a TP group inside one node, as its ranks "
            f"talk at each token, and a node has {gpus} GPUs. A model that they do not hold needs larger ones"
        )
    if fits:
        new["train.batch_size"] = near = min(fits, key=lambda size: abs(size - batch))
        found.left_out.append(f"train.batch_size = {near}, was {batch}: that does not divide over {ranks} ranks")
    found.values |= new


def _fit(found: Translation) -> None:
    """Leave out keys until no rule is broken, so that `check` accepts the file.

    First keys that have no effect, then defaults, then words and switches, numbers last.
    """
    while said := _problems(found):
        named = [key for key in sorted(found.values, key=said[0].rfind, reverse=True) if key in said[0]]
        idle, number = said[0].partition(" = ")[0] if " no effect " in said[0] else "", ("int", "float")
        named.sort(key=lambda name: (name != idle, name not in found.defaults, all_keys()[name].kind in number))
        wrong = next((name for name in named if said[0] not in _problems(found, name)), None)
        if wrong is None:
            return  # the rule is about a key that is not set here: `check` will say so
        value = toml_value(found.values.pop(wrong))
        if wrong not in found.defaults:
            found.left_out.append(f"{found.flags.get(wrong, wrong)} {value}: {said[0]}")


def _problems(found: Translation, without: str = "") -> list[str]:
    config = changed(Config(), {key: value for key, value in found.values.items() if key != without})
    problems = rule_problems(config) if found.command == "train" else key_problems(config)
    return [*problems, *(row_problems("preferences", config) if found.command == "dpo" else ())]


def _program(script: str, peer: str) -> tuple[str, list[Setting]]:
    """Find the program of a peer in a script, and its settings. Raises ConfigError where there is none."""
    table = peers()[peer]
    if "classes" in table and _PYTHON.search(script):
        return python_settings(script, table)
    for words in (names := list(commands(script))):
        for place, word in enumerate(words):
            if " " in word.strip() and any(program in word for program in table["programs"]):
                return _program(word, peer)  # bash -c "..."
            name = word.removesuffix(".py").rpartition("/")[2].rpartition(".")[2]
            called = word.endswith((".py", table["module"] + name)) or words[place - 1 : place] == [peer]
            if name in table["programs"] and called:
                return name, settings(words, place, table)
    if peer == "openrlhf" and names and names[0][:1] and names[0][0].startswith("--"):
        return next(iter(table["programs"])), settings(names[0], -1, table)
    raise ConfigError(f"no command of {table['name']} in it: migrate reads {table['reads']}")
