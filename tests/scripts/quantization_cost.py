"""Measures what bfloat16, int8, fp8 and quantized checkpoints cost on smollm2-135m.

  python tests/scripts/quantization_cost.py                  all settings
  python tests/scripts/quantization_cost.py float32 int8     some, the first as the reference

The text is what Python's own modules say of themselves, and the licence: 20,000 tokens in windows of
1,000. For each setting it prints the perplexity, at how many positions the most likely token is the same as with
float32, and for 16 chats how many of their greedy tokens are the same before the first difference.
"""

import argparse
import email
import inspect
import json
import math
import pydoc
import re
import shutil
import subprocess
import sys
import tempfile
import typing
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from quantized_files import (  # noqa: E402
    AWQ,
    FP8_BLOCKS,
    GPTQ,
    W4,
    awq,
    fp8,
    gptq,
    int8,
    packed,
    quantize_layers,
    scheme,
)

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.features.formats.gguf.named import find_named  # noqa: E402

WINDOW, NUM_TOKENS = 1000, 20_000
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "fp8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8, fp8 KV": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "fp8"},
    "int8 in float32": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int4, fp8 KV": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "fp8"},
}
# Checkpoints whose linear layers are rounded to the nearest number of each format.
W8A8 = scheme("int-quantized", strategy="channel")
W4A16 = scheme("pack-quantized", 4, **W4)
FILES: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "FP8, blocks of 128 x 128": (
        FP8_BLOCKS | {"weight_block_size": [128, 128]},
        lambda w: fp8(w, (128, 128)),
    ),
    "compressed-tensors W8": (W8A8, int8),
    "compressed-tensors W4, groups of 32": (W4A16, packed),
    "GPTQ layout, 8 bits": (GPTQ | {"bits": 8}, lambda w: gptq(w, bits=8)),
    "GPTQ layout, 4 bits": (GPTQ, gptq),
    "AWQ layout, 4 bits": (AWQ, awq),
}


def measure(name: str) -> dict[str, Any]:
    """Return the log-probabilities and most likely tokens of the text, and the greedy tokens."""
    from test_real_model import CHATS  # the questions of the tests

    with tempfile.TemporaryDirectory() as folder:
        if name in FILES:
            path = Path(shutil.copytree(find_named("smollm2-135m"), folder, dirs_exist_ok=True))
            quantize_layers(path, *FILES[name])
            llm = LLM(folder, max_model_len=2048, dtype="bfloat16")
        else:
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
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    wanted: dict[str, Any] = {}
    print("setting | perplexity | most likely token | greedy tokens | whole answers")
    for name in sys.argv[1:] or [*SETTINGS, *FILES]:
        command = [sys.executable, __file__, "--measure", name]
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
