"""`final_model.py DIR`: sample with vLLM and score with transformers; prints the largest difference of log-probs, and
the largest change of a weight against the model that the run started from (../../model)."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm_rlhf.engine.vllm import prepare_environment

prepare_environment()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402


def main(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    first = AutoModelForCausalLM.from_pretrained(directory.parent.parent / "model", dtype=torch.float32)
    changed = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), first.parameters(), strict=True))
    prompt = AutoTokenizer.from_pretrained(directory)("1+2=")["input_ids"]
    llm = LLM(str(directory), dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 26)
    sampled = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0), use_tqdm=False
    )[0].outputs[0]
    tokens = list(sampled.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    ours = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    theirs = torch.tensor([step[token].logprob for step, token in zip(sampled.logprobs, tokens, strict=True)])
    print(float((ours - theirs).abs().max()), changed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
