"""Asks a model six questions: `python example.py`, or with `--model Qwen/Qwen3-0.6B`.

`python example.py --trace` instead prints each step of two prompts that share a prefix, and writes
the page trace.html, which shows the same.
"""

import argparse
from pathlib import Path

from nanovllm import LLM, SamplingParams, Trace

QUESTIONS = [
    "Introduce yourself.",
    "List all prime numbers within 100.",
    "What is 34 + 58?",
    "Sort 42, 7, 99, 23, 4, 68.",
    "Reverse the word planet.",
    "What is prefix sharing?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default="qwen3-nano",
        help="a directory, a hub id, or the embedded model (%(default)s)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="print every step of two prompts that share a prefix, and write the page trace.html",
    )
    args = parser.parse_args()

    try:
        if args.trace:
            print_trace(args.model)
            return
        llm = LLM(args.model)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    # All questions are one batch. Without sampling_params, the defaults of the checkpoint apply.
    outputs = llm.chat([[{"role": "user", "content": q}] for q in QUESTIONS])
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\n> {question}\n{output.outputs[0].text}")


def print_trace(model: str) -> None:
    """Show a trace of a small cache and token budget, whose numbers can be checked by hand."""
    llm = LLM(model, block_size=4, num_kv_cache_blocks=12, max_num_batched_tokens=12)
    prompts = ["What is 12 + 30?\n", "What is 12 + 7?\n"]
    with Trace(llm) as trace:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    print(trace)
    page = Path("trace.html").resolve()
    trace.save(page)
    print(f"\nThe same as a page for a browser: {page.as_uri()}")


if __name__ == "__main__":
    main()
