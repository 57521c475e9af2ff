"""A causal language model with random weights and a tokenizer, for measuring speed where no model is at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

EOS = "<eos>"


@dataclass(frozen=True, slots=True)
class ModelSize:
    hidden: int = 256
    layers: int = 4
    vocab: int = 8192
    positions: int = 2048


def make_random_model(path: Path, size: ModelSize, mean_response: int) -> Path:
    """Write a Qwen2 of `size` (head size 64 at most, tied embeddings, fp32) to directory `path`.

    So many of its tokens end a sequence that responses have about `mean_response` tokens on average, of all lengths.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer(size.vocab)
    vocab = len(tokenizer)
    heads = max(2, size.hidden // 64)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=size.positions,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    ends = list(range(0, vocab, max(1, min(mean_response, vocab))))
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer(vocab: int) -> Any:
    """`vocab` tokens, at least 258: the end, a byte each, and words that no text is cut into."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [EOS, *letters, *(f"Ġw{number}" for number in range(vocab - len(letters) - 1))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)
