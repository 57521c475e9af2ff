"""Time two ways to do the same work in turns, so that other load on the machine slows both; make random models."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rlhf.config.schema import Config
from slurm_rlhf.eval.report import table as aligned


def compare(ours: Callable[[int], int], baseline: Callable[[int], int], repeats: int) -> dict[str, Any]:
    """Call both with 0 .. repeats, in turns, and alternate which side goes first.

    Both return how many tokens they have processed. Repetition 0 is a warm-up that does not count. Returns medians of
    tokens per second, `ratio` and `cpu_ratio` (ours over bare, medians of the pairs, by the clock and by the CPU time
    of all threads), the single runs, and `load`, the machine's load average. Other work on the machine changes `ratio`
    much more than `cpu_ratio`.
    """
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    by_cpu: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(repeats + 1):
        sides = [("ours", ours), ("bare", baseline)]
        for name, work in sides if number % 2 else reversed(sides):
            began, began_cpu = time.perf_counter(), time.process_time()
            tokens = work(number)
            seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
            if number:
                rates[name].append(tokens / seconds)
                by_cpu[name].append(tokens / cpu)
    return {
        **{name: statistics.median(each) for name, each in rates.items()},
        "ratio": statistics.median(mine / other for mine, other in zip(*rates.values(), strict=True)),
        "cpu_ratio": statistics.median(mine / other for mine, other in zip(*by_cpu.values(), strict=True)),
        "runs": rates,
        "load": os.getloadavg()[0],
    }


@contextmanager
def with_model(options: Mapping[str, Any], config: Config, mean_response: int) -> Iterator[Config]:
    """Yield `config` with a model: the one it names, or a random one that is removed after the block.

    One in `mean_response` of its tokens ends a sequence, so responses have about that mean length.
    """
    if config.actor.model_name_or_path:
        yield config
        return
    from transformers import GenerationConfig

    def ends(model: Any) -> None:
        vocab = model.config.vocab_size
        every = range(0, vocab, max(1, min(mean_response, vocab)))
        model.generation_config = GenerationConfig(eos_token_id=list(every), pad_token_id=0)

    with tempfile.TemporaryDirectory(prefix="slurm-rlhf-bench-") as scratch:
        size = ModelSize(options["hidden"], options["layers"], options["vocab"], config.data.max_len)
        made = write_qwen2(Path(scratch) / "model", _tokenizer(size.vocab), size, ends)
        config.actor.model_name_or_path = str(made)
        yield config


def table(rows: Mapping[str, Mapping[str, Any]], unit: str) -> str:
    """Format both sides of each comparison, their ratio, and the load of the machine."""
    shown = {"ours": ".0f", "bare": ".0f", "ratio": ".3f", "cpu_ratio": ".3f", "load": ".3f"}
    figures = [[name, *(format(row[key], how) for key, how in shown.items())] for name, row in rows.items()]
    return aligned([[unit, "slurm-rlhf", "bare", "ratio", "by CPU time", "load"], *figures])


EOS = "<eos>"


@dataclass(frozen=True, slots=True)
class ModelSize:
    hidden: int = 256
    layers: int = 4
    vocab: int = 8192
    positions: int = 2048
    tied: bool = True  # input and output embeddings are shared


def write_qwen2(path: Path, tokenizer: Any, size: ModelSize, change: Callable[[Any], None]) -> Path:
    """Write a random fp32 Qwen2 and its tokenizer, after `change` was applied; token 0 ends a sequence."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = max(2, size.hidden // 64)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=size.positions,
        tie_word_embeddings=size.tied,
        eos_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        change(model)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer(vocab: int) -> Any:
    """Make a tokenizer with `vocab` tokens, at least 258: EOS, all bytes, and words that no text is encoded to."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [EOS, *letters, *(f"Ġw{number}" for number in range(vocab - len(letters) - 1))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast_tokenizer(tokenizer)


def fast_tokenizer(tokenizer: Any) -> Any:
    """Wrap a tokenizer of `tokenizers` for transformers; EOS is its pad token, too."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)
