"""Elective fp8_cache: a KV cache in 8 bits.

With many long contexts a decode reads more keys and values than weights (lesson 4), and the cache
decides how many sequences can run. kv_cache_dtype="fp8" stores each number in 8 bits, in the format
e4m3 (Micikevicius et al. 2022, arXiv:2209.05433), which is half of bfloat16:

    bit        7      6 5 4 3     2 1 0
             sign   exponent e  mantissa m      value = (1 + m / 8) * 2^(e - 7)
                                       if e = 0: value = m / 8 * 2^-6

From a power of two to the next one there are 8 equal steps, and rounding changes a number by half a
step at most, 1/17 of it. Int8 (`int8`) has equal steps instead; keys and values have outliers,
for which relative steps are better. e = 15 and m = 7 is NaN, so 1.75 * 2^8 = 448 is the largest
number. Larger ones need a scale for each layer (k_scale and v_scale of a checkpoint, otherwise 1).
"""

import torch

from lessons.lesson import ask, make_llm, mean_logprob
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.models.fp8 import FP8_MAX, to_fp8
from tools.training.data import OPEN_TASKS, graded_samples

# Questions that were not in the training of the embedded model.
SAMPLES = [sample for task in OPEN_TASKS for sample in graded_samples(task, 3)]


def show_rounding() -> float:
    """Print numbers and what is stored of them. Returns the largest relative error of many."""
    rows, step = [], FP8_MAX / 127  # of int8, if 127 stands for the largest number of fp8
    for value in (0.1, 1.06, 1.07, 3.3, 100.0, 440.0, 1000.0):
        x = torch.tensor(value)
        stored, scaled = float(to_fp8(x, 1.0).float()), float(to_fp8(x, 4.0).float() * 4)
        int8 = min(127, round(value / step)) * step
        errors = (f"{abs(y / value - 1):.1%}" for y in (stored, int8))
        rows.append((f"{value:g}", f"{stored:g}", f"{scaled:g}", *errors))
    show_table(
        ("number", "fp8", "with a scale of 4", "error of fp8 (no scale)", "error of int8"), rows
    )
    many = torch.linspace(2**-6, FP8_MAX, 100_001)
    return float((to_fp8(many, 1.0).float() / many - 1).abs().max())


def run() -> None:
    QUESTIONS.show(1)
    say("Some numbers in fp8, and the error of int8 with a scale for 448:")
    worst = show_rounding()
    say(f"""The largest error of fp8 between 2^-6 and 448 is {worst:.1%}. Above 448 numbers are cut
        off, and a scale moves the range.""")
    say("""What it loses: the embedded model continues questions in float32, and its tokens are
        scored with both caches, by the mean log-probability of a token. Sums over many keys average
        the errors out:""")
    prompts, said, rows = [sample.question for sample in SAMPLES], list[list[int]](), []
    for dtype in ("auto", "fp8"):
        llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=128, kv_cache_dtype=dtype)
        outputs = ask(llm, prompts, max_tokens=12)
        tokens = [output["token_ids"] for output in outputs]
        said = said or tokens
        same = sum(a == b for a, b in zip(tokens, said, strict=True))
        score = mean_logprob(llm, [output.prompt_token_ids for output in outputs], said)
        rows.append((dtype, f"{same} of {len(said)}", f"{score:.6f}"))
    show_table(("kv_cache_dtype", "same answers", "log-probability"), rows)
    say("""What it gains: twice as many tokens fit into the same memory, and a decode reads half as
        many bytes of the cache (the last table of lesson 4). The gain in time is smaller, because
        numbers must be converted before they are multiplied. docs/performance.md says what was
        measured: on an H100 fp8 was no longer limited by memory, and on a CPU it can be slower.""")
    QUESTIONS.show(2)
    show_source(
        link(to_fp8, ".clamp("),
        link("models.attention.PlainAttention.store", "to_fp8"),
        link("models.attention.PlainAttention.attend", "k_scale"),
    )


QUESTIONS = Questions("""
    The largest number of a row is 100, and int8 has a scale for the row. Which cache stores 0.01
    with a smaller relative error, int8 or fp8? (a) Int8: its scale is made for this row. (b) fp8:
    its steps are smaller for smaller numbers. (c) Neither: both have 256 values.
    Answer: b. Int8 has steps of 100 / 127, so 0.01 becomes 0. fp8 has relative steps down to 2^-6,
    and absolute ones of 2^-9 below it, so 0.01 becomes 0.0098.
    Hint: How large is a step of int8, if 127 stands for 100?

    All keys of a layer have one scale, s. Why does attention need no multiplication of each cached
    key by s? (a) The scale is always 1. (b) Softmax removes it. (c) It can multiply the query once,
    because q (s k) = (s q) k.
    Answer: c. For the same reason the scale of values multiplies the output, once for each token.
    Hint: How many multiplications by s does each way take, for 4,000 keys?
""")
