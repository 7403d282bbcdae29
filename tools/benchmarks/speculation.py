"""Measures generation with and without speculation by n-grams, in turns.

    python -m tools.benchmarks.speculation                       the embedded model, one row
    python -m tools.benchmarks.speculation --model smollm2-135m --rows 4
    python -m tools.benchmarks.speculation --workload cpu-mixed  random tokens, random weights

Without --workload, each prompt begins to repeat a list that it contains, and the model continues
greedily. The prefix cache is empty at the beginning of each turn.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED
from tools.benchmarks.machine import cpu_seconds, describe, describe_load, other_load
from tools.benchmarks.workloads import WORKLOADS, make_workload, write_shape
from tools.training.topics import TOPICS

OUTPUT = 100  # tokens


def copies(rows: int, is_embedded: bool) -> tuple[list[str], list[SamplingParams]]:
    """Return prompts that begin to repeat what they contain."""
    prompts = []
    for i in range(1, rows + 1):
        if is_embedded:  # The embedded model was trained on such questions.
            question = f"Count from 1 to {40 + i}\n"
            numbers = map(str, range(1, 41 + i))
            prompts.append(f"{question}{', '.join(numbers)}\n\n{question}")
        else:
            lines = [f"{k}. {topic.names[0]}\n" for k, topic in enumerate(TOPICS[i : i + 20])]
            prompts.append(f"List:\n{''.join(lines)}\nThe same list again:\n{lines[0]}")
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    return prompts, [params] * rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.speculation")
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--workload", choices=[n for n, w in WORKLOADS.items() if not w.chats])
    parser.add_argument("--rows", type=int, default=1, help="requests at a time (%(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each (%(default)s)")
    args = parser.parse_args()
    options: dict[str, Any] = dict(dtype=args.dtype, enforce_eager=True, max_num_seqs=64)
    if not torch.cuda.is_available():
        options["attention_backend"] = "numba"  # waits until the kernels are compiled
    prompts: Any
    with tempfile.TemporaryDirectory() as parent:
        model = args.model
        spec = WORKLOADS.get(args.workload)
        if spec is not None and spec.model is not None:
            model = str(write_shape(spec.model, Path(parent)))
            options |= dict(load_format="dummy", skip_tokenizer_init=True, max_model_len=4096)
        engines = {
            name: LLM(model, **options, speculative_config=config)
            for name, config in (("without", None), ("with", {"method": "ngram"}))
        }
    if spec is None:
        prompts, params = copies(args.rows, args.model == EMBEDDED)
    else:
        vocab_size = engines["with"].engine.input_processor.vocab_size
        work = make_workload(args.workload, spec, vocab_size)
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        params = [
            SamplingParams(temperature=work.temperature, seed=i, max_tokens=n, ignore_eos=True)
            for i, n in enumerate(work.outputs)
        ]
    times: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[list[int]]] = {}
    load = cpu_seconds()
    for turn in range(args.repeats + 1):  # the first is not counted
        for name, llm in engines.items():
            llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if turn:
                times[name].append(time.perf_counter() - start)
            tokens[name] = [output.outputs[0].token_ids for output in outputs]
    ratios = [a / b for a, b in zip(times["without"], times["with"], strict=True)]
    stats = engines["with"].stats()
    total = sum(map(len, tokens["with"]))
    runner: Any = engines["with"].engine.runner
    print(*(f"{name}: {value}" for name, value in describe(runner.device).items()), sep="\n")
    for name, seconds in times.items():
        print(f"{name} speculation: {total / median(seconds):,.0f} output tokens/s")
    print(f"{median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")
    equal = sum(map(list.__eq__, tokens["without"], tokens["with"]))
    print(f"{equal} of {len(prompts)} outputs are equal")
    print(f"{stats['accepted_tokens']:,} of {stats['drafted_tokens']:,} drafts were accepted")
    print(describe_load(other_load(load)))


if __name__ == "__main__":
    main()
