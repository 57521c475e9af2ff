"""Small tokenizers in the shape of two families, made here: what they put before and behind a text is the point."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

BYTES = [f"<0x{value:02X}>" for value in range(256)]
TEXT = string.digits + string.ascii_letters + "+-=[]/?.,:|<>_ "


def llama_like(path: Path, merges: tuple[tuple[str, str], ...] = (), template: str = "") -> Path:
    """Byte-level BPE that puts `<|begin_of_text|>` before every text, and no space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: index for index, token in enumerate([*sorted(alphabet), *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(path, tokenizer, "<|begin_of_text|>", "<|end_of_text|>", ["<|eot_id|>"], template)


def sentencepiece_like(path: Path, pieces: tuple[str, ...] = (), template: str = "") -> Path:
    """BPE with byte fallback that puts `<s>` and a space before every text, as converted Llama 2 tokenizers do."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    letters = [character.replace(" ", "▁") for character in TEXT]
    vocab = {token: index for index, token in enumerate(["<unk>", *BYTES, *dict.fromkeys(letters), *pieces])}
    merges = [(piece[:-1], piece[-1]) for piece in pieces]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(path, tokenizer, "<s>", "</s>", [], template)


def _save(path: Path, tokenizer: Any, bos: str, eos: str, others: list[str], template: str) -> Path:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens([bos, eos, *others])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    if template:
        fast.chat_template = template
    fast.save_pretrained(path)
    return path
