"""Elective int8: weights in 8 bits, and what they lose.

A decode takes as long as reading the weights (lesson 4): 1.2 GB for Qwen3-0.6B in bfloat16. With
quantization="int8" it reads half of that: each weight of a linear layer is stored in 8 bits. Each
row of weights, which computes one output, has a scale (as in LLM.int8(), Dettmers et al. 2022,
arXiv:2208.07339):

    weights        0.0314  -0.1270   0.0638   0.0019   scale = 0.127 / 127
    values             31     -127       64        2   weight / scale, rounded
    value * scale  0.0310  -0.1270   0.0640   0.0020   at most scale / 2 away

The weights are rounded when they are loaded. On a CPU the activations, which are the inputs of a
layer, are rounded in the same way for each token, and the products are products of integers.
"""

from torch import Tensor

from lessons.lesson import make_llm, runner_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM
from tools.training.data import OPEN_TASKS, graded_samples
from tools.training.grade import wrong_answers

# Questions that were not in the training of the embedded model.
SAMPLES = [sample for task in OPEN_TASKS for sample in graded_samples(task, 10)]
# Bits, and whether each row has a scale.
ROUNDINGS = ((8, True), (8, False), (4, True), (4, False), (3, True), (3, False))


def rounded(weight: Tensor, bits: int, by_row: bool) -> Tensor:
    """Return a weight [O, I] rounded to integers of `bits` bits, times their scale."""
    largest = weight.abs().amax(dim=1, keepdim=True) if by_row else weight.abs().max()
    scale = largest.clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    restored: Tensor = (weight / scale).round() * scale
    return restored


def right_answers(llm: LLM) -> str:
    llm.reset_prefix_cache()  # the keys and values are of other weights
    return f"{len(SAMPLES) - len(wrong_answers(llm, SAMPLES))} of {len(SAMPLES)}"


def run() -> None:
    QUESTIONS.show(1, 2)
    say(f"""The embedded model answers {len(SAMPLES)} questions that were not in its training, with
        its weights rounded in several ways. The error is the length of the difference of all
        weights, divided by their length:""")
    options = dict(attention_backend="sdpa", num_kv_cache_blocks=256)
    llm = make_llm(**options)
    layers = list(runner_of(llm).model.linears())
    originals = [layer.weight.clone() for layer in layers]
    size = sum(float(weight.square().sum()) for weight in originals)
    rows = [("float32", "0.00%", right_answers(llm))]
    for bits, by_row in ROUNDINGS:
        error = 0.0
        for layer, weight in zip(layers, originals, strict=True):
            layer.weight.copy_(rounded(weight, bits, by_row))
            error += float((layer.weight - weight).square().sum())
        name = f"{bits} bits, {'a scale for each row' if by_row else 'one scale for a weight'}"
        rows.append((name, f"{(error / size) ** 0.5:.2%}", right_answers(llm)))
    show_table(("weights", "error", "right answers"), rows)
    right = right_answers(make_llm(**options, quantization="int8"))
    say(f"""With quantization="int8", where the activations are rounded too, {right} answers are
        right. A small model that was trained for few tasks may tolerate more rounding than others.
        docs/performance.md says how fast it is.""")
    show_source(link("backends.int8.quantize"), link("backends.int8.dynamic", "integer_product"))


QUESTIONS = Questions("""
    The weights of a row are -0.508, 0.028 and 0.002. Which integer is stored for 0.028?
    Answer: 7. The largest weight becomes -127, so the scale is 0.508 / 127 = 0.004.
    Hint: What is the scale of the row?

    Why does each row of a weight have a scale, and not the whole weight one?
    (a) One large number would make all rows coarse.
    (b) The products of the integers would overflow.
    (c) A row would have to be multiplied more often.
    Answer: a. The error of a number is at most half of its row's scale, so rows of small numbers
    lose little. With one scale, the row with the largest number would decide it for all. A scale
    costs 4 bytes a row.
    Hint: Which number of a weight decides a scale, and which numbers are rounded with it?
""")

IN_VLLM = """`CompressedTensorsW8A8Int8` in
`model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_int8.py`.
Most methods are for checkpoints whose weights were rounded before; here they are rounded while they
are loaded."""
