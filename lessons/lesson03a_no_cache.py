"""Lesson 3a: generate without a cache.

The model of lesson 2 reads a text and gives the probability of each next token. That is one token
and not an answer. The simplest way to an answer is a loop: run the model, choose a token, append it
to the text, and run the model over the whole text again (Vaswani et al. 2017, arXiv:1706.03762).
For a prompt of 4 tokens and an output of 3 it computes 15 tokens:

    step 1   x x x x         the prompt has 4 tokens; x: computed in this step
    step 2   x x x x x       the prompt and 1 output token
    step 3   x x x x x x     in all 4 + 5 + 6 = 15 tokens for an output of 3
"""

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from lessons.lesson import ask, make_llm, prompt_plan, timed
from lessons.pictures import show_formula, show_plot
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.sampler import sample
from nanovllm.runner.model_runner import ModelRunner

# A way to generate: (llm, prompt, number of output tokens) -> each token, and how many tokens the
# model computed for it.
Way: TypeAlias = Callable[[LLM, list[int], int], Iterator[tuple[int, int]]]
PROMPT = "What is 12 + 30?\n"
LENGTHS = (20, 40, 80, 160)


def block_table(llm: LLM) -> list[int]:
    """Return blocks for the longest text that the model can read. Lesson 5 explains blocks."""
    size = llm.engine.scheduler.block_manager.block_size
    return list(range(1, 1 - (-llm.engine.input_processor.max_model_len // size)))


def generate(llm: LLM, prompt: list[int], num_output: int) -> Iterator[tuple[int, int]]:
    """Generate without a cache.

    The scheduler sends a StepPlan to the runner. Each plan here begins at position 0, so the runner
    reads nothing that an earlier step has stored.
    """
    ids, table = list(prompt), block_table(llm)
    for _ in range(num_output):
        plan = prompt_plan([list(ids)], [table])
        [token] = llm.engine.runner.run(plan)().token_ids
        ids.append(token)
        yield token, plan.num_tokens


def show_steps(llm: LLM, text: str, num_steps: int) -> None:
    """Print the most likely next tokens in each step."""
    output = ask(llm, [text], max_tokens=num_steps, logprobs=-1)[0].outputs[0]
    rows, read = [], text
    for token, entry in zip(output.token_ids, output.logprobs or [], strict=True):
        ranked = sorted(entry.values(), key=lambda candidate: candidate.rank)
        best = [f"{c.decoded_token!r} {math.exp(c.logprob):.3f}" for c in ranked[:3]]
        rows.append((repr(read), *best))
        assert abs(sum(math.exp(c.logprob) for c in ranked) - 1) < 1e-3
        read += entry[token].decoded_token or ""
    show_table(("the model reads", "most likely", "second", "third"), rows)


def measure(way: Way, llm: LLM, prompt: list[int], length: int) -> tuple[list[int], int, float]:
    """Generate `length` tokens -> (tokens, tokens computed, seconds)."""
    steps, seconds = timed(lambda: list(way(llm, prompt, length)), repeats=1)
    return [token for token, _ in steps], sum(computed for _, computed in steps), seconds


def run() -> None:
    llm = make_llm(attention_backend="sdpa")
    vocab_size = llm.engine.input_processor.vocab_size
    say(f"""One step of the embedded model gives {vocab_size:,} probabilities, one for each token of
        its vocabulary. Greedy sampling takes the most likely token, and the next step reads the
        text with this token:""")
    show_steps(llm, "Prefix", 5)
    say("""The same loop, with plans written by hand. Each step computes the prompt and the output
        so far. The token that the last step samples is never computed:""")

    prompt = llm.get_tokenizer().encode(PROMPT)
    steps = list(generate(llm, prompt, 10))
    rows = [(repr(llm.get_tokenizer().decode([token])), n) for token, n in steps]
    show_table(("next token", "tokens computed"), rows)
    assert [token for token, _ in steps] == ask(llm, [PROMPT], max_tokens=10)[0]["token_ids"]

    QUESTIONS.show(1)
    say(f"""The model computes this number of tokens for a prompt of p = {len(prompt)} tokens and an
        output of n tokens:""")
    show_formula(
        "p + (p + 1) + ... + (p + n - 1) = n * p + n * (n - 1) / 2",
        r"p + (p + 1) + \dots + (p + n - 1) = np + \frac{n (n - 1)}{2}",
    )
    table, counts = [], []
    for n in LENGTHS:
        _, computed, seconds = measure(generate, llm, prompt, n)
        assert computed == n * len(prompt) + n * (n - 1) // 2
        table.append((n, f"{computed:,}", f"{seconds:.2f}", f"{1e3 * seconds / n:.1f}"))
        counts.append(computed)
    show_table(("output tokens", "tokens computed", "seconds", "ms per output token"), table)
    lines = {
        "computed": [*zip(LENGTHS, counts, strict=True)],
        "prompt and output": [(n, len(prompt) + n) for n in LENGTHS],
    }
    show_plot("Without a cache, tokens are computed again", "output tokens", "tokens", lines)
    say(f"""For {LENGTHS[-1] / LENGTHS[0]:.0f} times as many output tokens the model computes
        {counts[-1] / counts[0]:.0f} times as many. A step also has a fixed cost, which hides the
        growth in short texts. Lesson 3b computes each token once.""")
    show_source(link(ModelRunner.run), link(Qwen3.forward), link(Qwen3.logits), link(sample))


QUESTIONS = Questions("""
    An output is twice as long as another, and both are much longer than the prompt. Why does the
    model compute about four times as many tokens for it, and not twice as many?
    (a) Each token is compared with twice as many tokens of the vocabulary.
    (b) There are twice as many steps, and a step computes twice as many tokens on average.
    (c) The model needs more layers for a longer text.
    Answer: b. The first step computes the prompt, and the last one nearly the whole text.
    Hint: How many steps are there, and how many tokens does a step in the middle compute?
""")
