"""Grades qwen3-nano through the engine: `python -m tools.training.grade`.

An answer is right if it is exactly the expected text and ends with a stop token.
"""

import argparse
from collections.abc import Iterable

from nanovllm import LLM
from tools.training.data import ALL_TASKS, Sample, graded_samples

ABOUT = f"""Asks the embedded model, or another checkpoint, questions that its training never saw.
Prints the number of right answers of each task ({", ".join(ALL_TASKS)}). About 10 seconds on 2
cores."""


def wrong_answers(
    llm: LLM, samples: list[Sample], use_tqdm: bool = False
) -> list[tuple[Sample, str]]:
    """Return the samples with wrong answers, each with the answer of the model."""
    chats = [[{"role": "user", "content": s.question}] for s in samples]
    outs = llm.chat(chats, use_tqdm=use_tqdm)  # greedy: the checkpoint's generation_config
    wrong = []
    for sample, out in zip(samples, outs, strict=True):
        answer = out.outputs[0]
        if (answer.text, answer.finish_reason) != (sample.answer, "stop"):
            wrong.append((sample, answer.text))
    return wrong


def accuracy(
    llm: LLM, tasks: Iterable[str] = ALL_TASKS, number: int = 200, use_tqdm: bool = False
) -> dict[str, tuple[int, int, list[tuple[Sample, str]]]]:
    """Return task -> (right answers, questions, wrong answers). All questions are one batch."""
    by_task = {task: graded_samples(task, number) for task in tasks}
    wrong = wrong_answers(llm, [s for samples in by_task.values() for s in samples], use_tqdm)
    report = {}
    for task, samples in by_task.items():
        failed = [(s, said) for s, said in wrong if s.task == task]
        report[task] = (len(samples) - len(failed), len(samples), failed)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.training.grade", description=ABOUT)
    parser.add_argument("--model", default="qwen3-nano", help="checkpoint to grade (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (%(default)s)")
    parser.add_argument(
        "--number", type=int, default=200, help="prompts of an open task (%(default)s)"
    )
    parser.add_argument(
        "--show", type=int, default=3, help="wrong answers to show for a task (%(default)s)"
    )
    args = parser.parse_args()
    if args.number < 1:
        parser.error(f"--number {args.number}: give 1 or more")
    llm = LLM(args.model, dtype=args.dtype)
    for task, (right, total, failed) in accuracy(llm, number=args.number, use_tqdm=True).items():
        print(f"{task:10} {right:4} of {total:4}  {right / total:7.2%}")
        for sample, said in failed[: args.show]:
            print(f"    {sample.question!r}: {said!r}, not {sample.answer!r}")


if __name__ == "__main__":
    main()
