"""Elective fp8_cache: a KV cache in 8 bits.

With many long contexts a decode reads more keys and values than weights (lesson 4), and the cache
decides how many sequences can run. kv_cache_dtype="fp8" stores each number in 8 bits, in the format
e4m3 (Micikevicius et al. 2022, arXiv:2209.05433), which is half of bfloat16:

    bit        7      6 5 4 3     2 1 0
             sign   exponent e  mantissa m      value = (1 + m / 8) * 2^(e - 7)
                                       if e = 0: value = m / 8 * 2^-6

From a power of two to the next one there are 8 equal steps, and rounding changes a number by half a
step at most, 1/17 of it. Int8 (`int8`) has equal steps everywhere. e = 15 and m = 7 is NaN, so
1.75 * 2^8 = 448 is the largest number. Larger ones need a scale, as in int8: a checkpoint may have
one for the keys of each layer (k_scale) and one for the values (v_scale).
"""

import torch

from lessons.lesson import ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.models.fp8 import FP8_MAX, to_fp8
from tools.training.data import OPEN_TASKS, graded_samples

# Questions that were not in the training of the embedded model.
SAMPLES = [sample for task in OPEN_TASKS for sample in graded_samples(task, 3)]


def run() -> None:
    QUESTIONS.show(1)
    say("Some numbers in fp8, and in int8 if 127 stands for 448:")
    rows = []
    step = FP8_MAX / 127
    for value in (0.1, 1.06, 1.07, 3.3, 100.0, 440.0, 1000.0):
        fp8 = float(to_fp8(torch.tensor(value), 1.0).float())
        int8 = min(127, round(value / step)) * step
        errors = (f"{abs(stored / value - 1):.1%}" for stored in (fp8, int8))
        rows.append((f"{value:g}", f"{fp8:g}", f"{int8:.4g}", *errors))
    show_table(("number", "fp8", "int8", "error of fp8", "error of int8"), rows)
    say("""Above 448 numbers are cut off. Keys and values have a few large numbers, next to which
        int8 would lose the small ones. What fp8 loses: the embedded model answers questions with
        both caches ("auto" is float32 here). Sums over many keys average the errors out:""")
    rows = []
    said = list[list[list[int]]]()
    for dtype in ("auto", "fp8"):
        llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=128, kv_cache_dtype=dtype)
        outputs = ask(llm, [sample.question for sample in SAMPLES], max_tokens=12)
        said.append([output["token_ids"] for output in outputs])
        same = sum(a == b for a, b in zip(said[0], said[-1], strict=True))
        rows.append((dtype, f"{same} of {len(SAMPLES)}"))
    show_table(("kv_cache_dtype", "same answers"), rows)
    say("""What is gained: twice as many tokens as in bfloat16 fit into the same memory, and a
        decode reads half as many bytes of the cache. The gain in time is smaller, because numbers
        must be converted before they are multiplied; see docs/performance.md.""")
    QUESTIONS.show(2)
    show_source(link(to_fp8, ".clamp("), link("models.attention.PlainAttention.attend", "k_scale"))


QUESTIONS = Questions("""
    The largest number of a row is 100, and int8 has a scale for the row. Which cache stores 0.01
    with a smaller relative error, int8 or fp8?
    (a) Int8: its scale is made for this row.
    (b) fp8: its steps are smaller near zero.
    (c) Neither: both have the same 256 values.
    Answer: b. Int8 has steps of 100 / 127, so 0.01 becomes 0, and fp8 stores 0.0098.
    Hint: How large is a step of int8, if 127 stands for 100?

    All keys of a layer have one scale, s. Why does attention need no multiplication of each cached
    key by s?
    (a) The softmax divides all scores by s again.
    (b) The keys were multiplied when they were stored.
    (c) It can multiply the query by s, which is one vector.
    Answer: c. q (s k) = (s q) k, so one multiplication serves all keys. For the same reason the
    scale of values multiplies the output, once for each token.
    Hint: How many multiplications by s does each way take, for 4,000 keys?
""")

IN_VLLM = """`reshape_and_cache_kernel_flash` in
`v1/attention/ops/triton_reshape_and_cache_flash.py` rounds, and `BaseKVCacheMethod` in
`model_executor/layers/quantization/kv_cache.py` has the scales of a layer. There are other formats
too, such as e5m2, and scales for each token and head."""
