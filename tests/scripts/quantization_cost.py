"""Measures what bfloat16, int8 and fp8 cost on smollm2-135m, compared with float32.

  python tests/scripts/quantization_cost.py

The text is what Python's own modules say of themselves, and the licence: 20,000 tokens in windows of
1,000. For each setting it prints the perplexity, at how many positions the most likely token is that
of float32, and for 16 chats how many of their greedy tokens are the same before the first difference.
"""

import argparse
import email
import inspect
import json
import math
import pydoc
import re
import subprocess
import sys
import typing
import unittest
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
WINDOW, NUM_TOKENS = 1000, 20_000
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "fp8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8, fp8 KV": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "fp8"},
    "int8 in float32": {"dtype": "float32", "quantization": "int8"},
}


def measure(name: str) -> dict[str, Any]:
    """Return the log-probabilities and most likely tokens of the text, and the greedy tokens."""
    from test_real_model import CHATS  # the questions of the tests

    llm = LLM("smollm2-135m", max_model_len=2048, **SETTINGS[name])
    modules = (argparse, email, inspect, json, typing, unittest)
    text = "\n".join(pydoc.render_doc(module, renderer=pydoc.plaintext) for module in modules)
    text = re.sub("0x[0-9a-f]+", "0x0", text)  # addresses, which differ from process to process
    ids = llm.get_tokenizer().encode(f"{(ROOT / 'LICENSE').read_text()}\n{text}")[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    windows = [ids[i : i + WINDOW] for i in range(0, NUM_TOKENS, WINDOW)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    logprobs, best = [], []
    for window, output in zip(windows, llm.generate(windows, params), strict=True):
        for token, entries in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            logprobs.append(entries[token].logprob)
            best.append(next(t for t, entry in entries.items() if entry.rank == 1))
    greedy = SamplingParams(temperature=0, max_tokens=128)
    answers = [out.outputs[0].token_ids for out in llm.chat(CHATS, greedy)]
    return {"logprobs": logprobs, "best": best, "answers": answers}


def same(wanted: list[int], found: list[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = enumerate(zip(wanted, found, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(found)))


def main() -> None:
    if sys.argv[1:]:
        sys.path.append(str(ROOT / "tests"))
        print(json.dumps(measure(sys.argv[1])))
        return
    wanted: dict[str, Any] = {}
    print("setting | perplexity | most likely token | greedy tokens | whole answers")
    for name in SETTINGS:
        command = [sys.executable, __file__, name]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        wanted = wanted or found
        perplexity = math.exp(-sum(found["logprobs"]) / len(found["logprobs"]))
        agree = sum(a == b for a, b in zip(wanted["best"], found["best"], strict=True))
        pairs = list(zip(wanted["answers"], found["answers"], strict=True))
        equal = sum(same(a, b) for a, b in pairs)
        total = sum(map(len, wanted["answers"]))
        print(
            f"{name} | {perplexity:.4f} | {agree / len(found['best']):.2%} | {equal / total:.1%} | "
            f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
