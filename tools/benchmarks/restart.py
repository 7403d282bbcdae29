"""Measures the first token of a prompt after a restart, with the prefix cache on disk and without.

    python -m tools.benchmarks.restart                                    smollm2-135m
    python -m tools.benchmarks.restart --shape qwen3-0.6b --tokens 4000   random weights

Each turn is a new process, which runs a short prompt first. The time with the prefix cache includes
`load_prefix_cache`. The prompt is saved once, and its file stays in the page cache.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from nanovllm import LLM, SamplingParams
from tools.benchmarks.workloads import SHAPES, write_shape

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


def turn(model: str, tokens: int, directory: str, how: str) -> dict[str, Any]:
    """Run the prompt in this process. how: "save", "load" or "compute"."""
    llm = LLM(model, skip_tokenizer_init=True, attention_backend="numba")
    llm.generate([*range(1, 33)], GREEDY, use_tqdm=False)
    prompt: list[int] = [7 * i % 9001 + 50 for i in range(tokens)]
    result: dict[str, Any] = {}
    if how == "save":  # in bfloat16, a cached prefix can lead to other tokens
        llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    start = time.perf_counter()
    if how == "load":
        llm.load_prefix_cache(directory)
        result["load"] = time.perf_counter() - start
    for new in llm.stream({"prompt_token_ids": prompt}, GREEDY):
        result.setdefault("first", time.perf_counter() - start)
        result.setdefault("tokens", []).extend(new.token_ids)
    if how == "save":
        llm.save_prefix_cache(directory)
    return result


def read_rate(file: Path) -> float:
    """Return the bytes per second at which a file in the page cache is read into new memory.

    As the KV cache on a CPU, this memory is NumPy's, which asks Linux for huge pages.
    """
    memory = np.empty(file.stat().st_size, np.uint8)
    start = time.perf_counter()
    with file.open("rb", buffering=0) as source:
        source.readinto(memory.data)
    return len(memory) / (time.perf_counter() - start)


def middle(values: list[float]) -> str:
    """Return the median, the smallest and the largest value."""
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def save_random_weights(directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.restart")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=1500, help="of the prompt (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (%(default)s)")
    parser.add_argument("--turn", nargs=2, metavar=("DIR", "HOW"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(turn(args.model, args.tokens, *args.turn)))
        return
    with tempfile.TemporaryDirectory() as parent:
        model = args.model
        directory = str(Path(parent) / "cache")
        if args.shape:
            model = str(write_shape(args.shape, Path(parent)))
            save_random_weights(Path(model))
        command = [sys.executable, "-m", "tools.benchmarks.restart", "--model", model]
        command += ["--tokens", str(args.tokens), "--turn", directory]
        results: dict[str, list[dict[str, Any]]] = {"load": [], "compute": [], "save": []}
        for how in ("save", *("compute", "load") * args.repeats):
            done = subprocess.run([*command, how], stdout=subprocess.PIPE, text=True, check=True)
            results[how].append(json.loads(done.stdout.splitlines()[-1]))
        [file] = Path(directory).iterdir()
        rates = [read_rate(file) / 1e9 for _ in range(args.repeats)]
        size = file.stat().st_size
    for how in ("compute", "load"):
        print(f"first token, {how}: {middle([r['first'] for r in results[how]])} s")
    pairs = zip(results["compute"], results["load"], strict=True)
    print(f"{middle([a['first'] / b['first'] for a, b in pairs])} times sooner")
    loads = [size / r["load"] / 1e9 for r in results["load"]]
    print(f"loading {size / 1e6:,.0f} MB: {middle(loads)} GB/s")
    print(f"reading the file into new memory: {middle(rates)} GB/s")
    wanted = results["save"][0]["tokens"]
    equal = sum(r["tokens"] == wanted for r in results["load"])
    print(f"{equal} of {args.repeats} outputs are equal")


if __name__ == "__main__":
    main()
