"""Teaches qwen3-nano to sort 9 to 12 numbers, and prints the rewards; see docs/rl.md."""

import argparse
import random
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.loading.checkpoint import find_checkpoint
from tools.training.data import held_out

CHECKPOINT = find_checkpoint("qwen3-nano")
PROMPTS = 32  # questions of a step
SAMPLES = 8  # answers to each question
Sample = tuple[list[int], list[int], list[float], float]  # prompt, output, log-probs, advantage


def questions(rng: random.Random, number: int, test: bool = False) -> tuple[list[Any], list[str]]:
    """Return chats and their answers. No question of the test is used for training."""
    chats, answers = list[Any](), list[str]()
    while len(chats) < number:
        items = [rng.randint(0, 99) for _ in range(rng.randint(9, 12))]
        if held_out(sorted(items)) == test:
            chats.append([{"role": "user", "content": f"Sort {', '.join(map(str, items))}."}])
            answers.append(", ".join(map(str, sorted(items))))
    return chats, answers


def grade(llm: LLM) -> float:
    """Return the share of 400 unseen questions whose greedy answer is right."""
    chats, answers = questions(random.Random(0), 400, test=True)
    outputs = llm.chat(chats, SamplingParams(temperature=0), use_tqdm=False)
    return sum(x.outputs[0].text == y for x, y in zip(outputs, answers, strict=True)) / 400


def rollouts(llm: LLM, rng: random.Random, number: int, seed: int) -> tuple[list[Sample], float]:
    """Sample answers to `number` questions. Returns them with the mean reward.

    A right answer has the reward 1. The advantage is the reward minus the mean reward of the
    answers to the same question (GRPO, arXiv:2402.03300, without a division: arXiv:2503.20783).
    """
    chats, answers = questions(rng, number)
    outputs = llm.chat(chats, SamplingParams(n=SAMPLES, logprobs=0, seed=seed), use_tqdm=False)
    samples = list[Sample]()
    total = 0.0
    for out, answer in zip(outputs, answers, strict=True):
        rewards = [float(x.text == answer) for x in out.outputs]
        total += sum(rewards)
        for x, reward in zip(out.outputs, rewards, strict=True):
            logprobs = [next(iter(entry.values())).logprob for entry in x.logprobs or ()]
            advantage = reward - sum(rewards) / SAMPLES
            samples.append((out.prompt_token_ids, x.token_ids, logprobs, advantage))
    return samples, total / len(samples)


def score(model: Any, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities by `model` and engine, and the advantages, of M tokens [M]."""
    length = max(len(prompt) + len(output) for prompt, output, *_ in samples)
    # What follows a sample is computed and not used.
    ids = torch.tensor([(p + o + [0] * length)[:length] for p, o, *_ in samples])
    scores = -F.cross_entropy(model(ids).logits[:, :-1].float().mT, ids[:, 1:], reduction="none")
    rows = zip(scores, samples, strict=True)
    trainer = [row[len(p) - 1 :][: len(o)] for row, (p, o, *_) in rows]
    engine = [torch.tensor(logprobs) for _, _, logprobs, _ in samples]
    advantages = [torch.full_like(x, sample[3]) for x, sample in zip(engine, samples, strict=True)]
    return torch.cat(trainer), torch.cat(engine), torch.cat(advantages)


def train(seed: int, steps: int, dtype: str) -> None:
    """Train a new model, and print its rewards and grades."""
    rng = random.Random(seed)
    llm = LLM(dtype=dtype)
    start = time.time()
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    before = grade(llm)
    for step in range(steps):
        samples, reward = rollouts(llm, rng, PROMPTS, seed * steps + step)
        print(f"{time.time() - start:4.0f} s, step {step:2}: {reward:.2f} {'#' * int(60 * reward)}")
        samples = [sample for sample in samples if sample[3]]  # the others have no gradient
        if not samples:
            continue
        trainer, engine, advantages = score(model, samples)
        ratio = (trainer - engine).exp()
        clipped = ratio.clamp(0.8, 1.2)  # as in PPO (arXiv:1707.06347)
        loss: Any = -torch.minimum(ratio * advantages, clipped * advantages).sum()
        (loss / (PROMPTS * SAMPLES * 40)).backward()  # an answer has about 40 tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-4 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        llm.load_weights(model.named_parameters())
    print(f"seed {seed}: {before:.1%} of unseen questions are right before, {grade(llm):.1%} after")


def compare() -> None:
    """Print how much log-probabilities of the engine and of the trainer differ in 256 samples."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32")
    for dtype in ("float32", "bfloat16"):
        samples, _ = rollouts(LLM(dtype=dtype), random.Random(0), 32, seed=0)
        with torch.no_grad():
            trainer, engine, _ = score(model, samples)
        apart = (trainer - engine).abs()
        print(
            f"engine in {dtype}, {len(samples)} samples, {len(apart)} tokens: log-probabilities "
            f"differ by {apart.mean():.1e} on average and by {apart.max():.1e} at most"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.rl", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="one run for each (0)")
    parser.add_argument("--steps", type=int, default=50, help="(%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, not {args.steps}")
    compare()
    for seed in args.seeds:
        train(seed, args.steps, args.dtype)
