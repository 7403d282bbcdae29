"""Elective experts: mixtures of experts.

The MLP of a layer multiplies each token by all of its weights, so a larger model is slower. A
mixture of experts has many small MLPs instead, the experts, and a token uses a few of them (Shazeer
et al. 2017, arXiv:1701.06538): Qwen3-30B-A3B has 30 billion weights, and a token uses 3 billion.
The router, a small linear layer, scores the experts for each token. The token uses the k experts
with the highest scores, and the result is the weighted sum of their results. The rows of a step,
one for each token and each of its experts, are sorted by expert. The rows of an expert are then
consecutive, and its weights are read once for all of them:

    token     0  0  1  1  2  2             0  2  1  0  1  2
    expert    3  0  1  3  0  3   sorted    0  0  1  3  3  3
                                           ----  -  -------
                                           three products, none for expert 2

A decode takes as long as reading the weights (lesson 4). A request that decodes alone reads k
experts in each layer.
"""

import torch

from lessons.lesson import shape_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.features.models.moe.moe_config import Experts, MoeConfig
from nanovllm.features.models.moe.qwen3_moe import SparseMLP
from nanovllm.loading.memory import num_weights
from nanovllm.models.backend import Backend
from tools.benchmarks import roofline

REQUESTS = (1, 2, 4, 16, 64)
HIDDEN = 512  # numbers of a token


def make_layer(num_experts: int, used: int) -> SparseMLP:
    """Return a mixture of experts whose router has random weights."""
    torch.manual_seed(0)
    experts = Experts(num_experts, used, size=1, normalized=True, layers=frozenset())
    layer = SparseMLP(HIDDEN, experts, Backend(torch.device("cpu"), torch.float32))
    layer.router.normal_(std=HIDDEN**-0.5)
    return layer


@torch.inference_mode()
def run() -> None:
    layer = make_layer(4, 2)
    x = torch.randn(4, HIDDEN)
    rows = list[tuple[object, ...]]()
    probs = (x @ layer.router.T).softmax(dim=-1)
    for token, (weights, choices) in enumerate(zip(*layer.route(x), strict=True)):
        uses = [f"{w:.2f} of {e}" for w, e in zip(weights, choices.tolist(), strict=True)]
        rows.append((token, *(f"{p:.2f}" for p in probs[token]), " + ".join(uses)))
    say("""A router with random weights, four tokens, and four experts of which a token uses two.
        The probabilities are the softmax of the scores. The weights of the two experts are divided
        by their sum, so that they add up to 1:""")
    show_table(("token", "expert 0", "1", "2", "3", "result"), rows)
    QUESTIONS.show(1, 2)
    config = shape_of("qwen3-30b-a3b")
    assert isinstance(config, MoeConfig)
    assert config.experts is not None
    total = num_weights(config.model_class().on_meta(config))
    rows = []
    for num in REQUESTS:
        gb = 2e-9 * (total - roofline.unused_weights(config.experts, config.hidden_size, num))
        used = roofline.experts_used(config.experts, num)
        rows.append((num, f"{used:.1f}", f"{gb:.1f}", f"{gb / num:.2f}"))
    say(f"""If each token uses any 8 of 128 experts with equal probability, an expert is not used by
        one token with the probability 1 - 8/128, and by T tokens with (1 - 8/128)^T. What a decode
        step of Qwen3-30B-A3B then reads of its {2e-9 * total:.0f} GB in bfloat16, without KV:""")
    show_table(("requests", "experts used", "GB", "GB / request"), rows)
    say("""With one MLP, a step of 64 requests would read the same as a step of one. A batch
        therefore gains less with a mixture (lesson 6a). A trained router may choose the same
        experts for similar tokens, and then a batch reads less.""")
    show_source(
        link(SparseMLP.route, "topk"),
        link("features.models.moe.experts.Groups.of", "sort(stable"),
        link(roofline.experts_used),
    )


QUESTIONS = Questions("""
    If a layer has one MLP, a step of 16 tokens reads as many weights as a step of one token. What
    if it has a mixture of experts?
    (a) As many: each expert is read only once.
    (b) Fewer: an expert is smaller than an MLP.
    (c) More: the tokens use different experts.
    Answer: c. One MLP is read once for all tokens, and each expert once for its own tokens only.
    Hint: How many experts does a step of one token read, and how many can a step of two?

    A layer has 128 experts, and a token uses 8. How many does a step of 2 tokens use on average, if
    all are equally likely?
    Answer: 15.5. The second token shares 8 * 8 / 128 = 0.5 of its experts with the first.
    Hint: The first token uses 8. How many of the 8 of the second did the first choose already?
""")

IN_VLLM = """`fused_topk` in `model_executor/layers/fused_moe/router/fused_topk_router.py` chooses
the experts, and `moe_align_block_size` in `model_executor/layers/fused_moe/moe_align_block_size.py`
sorts the rows, so that each tile of a kernel has rows of one expert. It can divide experts among
GPUs (expert parallelism)."""
