"""Asks a model a handful of questions: `python example.py`, or with `--model Qwen/Qwen3-0.6B`."""

import argparse

from nanovllm import LLM

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
    args = parser.parse_args()

    try:
        llm = LLM(args.model)
    except ValueError as error:
        parser.error(str(error))
    # All questions are one batch; without sampling_params the checkpoint's own defaults hold.
    outputs = llm.chat([[{"role": "user", "content": q}] for q in QUESTIONS])
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\n> {question}\n{output.outputs[0].text}")


if __name__ == "__main__":
    main()
