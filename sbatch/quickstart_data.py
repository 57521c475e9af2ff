"""Writes what the quickstart learns from: additions as JSONL files, and a small untrained model.

    python sbatch/quickstart_data.py DIRECTORY

sft.jsonl    demonstrations by a careless pupil, who forgets four times out of five to carry from the ones to the tens
train.jsonl  problems for PPO, each with its right answer as the label of the reward function
eval.jsonl   problems that are in neither of the two others
untrained/   a Qwen2 model of about a million parameters with tied embeddings, and a tokenizer of single characters
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

SIZES = {"eval": 1024, "sft": 30_000, "train": 20_000}
FORGETFULNESS = 0.8
SEED = 1


def main(directory: Path) -> None:
    """Write all files into a directory that is there."""
    rng = random.Random(SEED)
    problems = iter(draw_problems(sum(SIZES.values()), rng))
    for name, size in SIZES.items():
        with (directory / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(size):
                a, b = next(problems)
                row = {"input": f"{a}+{b}="} | (
                    {"output": careless(a, b, rng)} if name == "sft" else {"label": str(a + b)}
                )
                file.write(json.dumps(row) + "\n")
    write_model(directory / "untrained")


def draw_problems(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Pairs of three-digit numbers, all different also when turned around: 1+2 does not give 2+1 away."""
    seen: set[tuple[int, int]] = set()
    problems = []
    while len(problems) < count:
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        if (min(a, b), max(a, b)) not in seen:
            seen.add((min(a, b), max(a, b)))
            problems.append((a, b))
    return problems


def careless(a: int, b: int, rng: random.Random) -> str:
    """The sum as the pupil writes it."""
    carries = a % 10 + b % 10 >= 10
    return str(a + b - 10 if carries and rng.random() < FORGETFULNESS else a + b)


def write_model(directory: Path, characters: Iterable[str] = "0123456789+=", longest: int = 64) -> None:
    """An ordinary Hugging Face directory; `longest`: tokens that the model sees at most."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    vocabulary = ["<pad>", "<eos>", *characters]
    single = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    single.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    single.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=single, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", model_max_length=longest
    )
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        initializer_range=0.08,  # the usual 0.02 is for wide models: a narrow one takes much longer to learn from it
        **special,
    )
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
