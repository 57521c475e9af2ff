"""A workload with a long tail: a model that counts down, and prompts that tell it from where.

The response to a prompt `w37` is `w36 w35 ... w0` and the end, so its length is in the prompt, whatever the seed. The
model is a transformer of full size and does all of its computing; its layers add 0 to what passes through them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

EOS = "<eos>"
# At this scale the logit of the next word is above all others by so much that sampling never takes another one.
_LOGIT = 60.0

REWARD = '''"""Rewards that differ within a group, so that nothing is skipped for want of spread."""


def reward_func(responses):
    return [float(index % 2) for index in range(len(responses))]
'''


@dataclass(frozen=True, slots=True)
class LongTail:
    """Say how long responses are, in tokens: log-normal, cut at `longest`."""

    median: int
    sigma: float  # standard deviation of the logarithm
    longest: int

    def lengths(self, count: int, seed: int) -> NDArray[np.int64]:
        """Draw the lengths of `count` responses, [count], from 1 to `longest`."""
        drawn = np.random.default_rng([seed, count]).lognormal(np.log(self.median), self.sigma, count)
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)


def write_workload(directory: Path, tail: LongTail, prompts: int, hidden: int, layers: int) -> list[int]:
    """Write model/, prompts.jsonl and reward.py into `directory`; answer the lengths of the responses."""
    lengths = [int(length) for length in tail.lengths(prompts, 0)]
    rows = [{"input": f"w{length - 1}"} for length in lengths]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")
    make_counting_model(directory / "model", tail.longest, hidden, layers)
    return lengths


def make_counting_model(path: Path, longest: int, hidden: int, layers: int) -> None:
    """Write a Qwen2 that answers word n with word n - 1, and word 0 with the end of the sequence."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer(longest)
    heads = max(2, hidden // 64)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=longest + 8,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # Random directions are nearly orthogonal: word n's embedding meets the head's row n - 1 alone.
        words = torch.nn.functional.normalize(torch.randn(len(tokenizer), hidden), dim=1)
        model.model.embed_tokens.weight.copy_(words)
        head = torch.zeros_like(words)
        head[:-1] = words[1:] * _LOGIT / hidden**0.5  # the norm before the head gives vectors of length sqrt(hidden)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _tokenizer(words: int) -> Any:
    """The end is token 0, word n token n + 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [EOS, *(f"w{number}" for number in range(words))]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)
