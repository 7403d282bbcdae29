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
experts in each layer. A batch reads all experts that one of its tokens uses.
"""

import torch
from torch import Tensor

from lessons.lesson import shape_of
from lessons.pictures import show_lanes, show_plot
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.features.models.moe.moe_config import Experts, MoeConfig
from nanovllm.features.models.moe.qwen3_moe import SparseMLP
from nanovllm.loading.memory import num_weights
from nanovllm.models.backend import Backend

ROWS = (1, 2, 4, 16, 64)
NUMBER, USED, BATCH = 64, 8, 16  # experts, those that a token uses, and tokens of a step
HIDDEN, TOKENS = 512, (1, 4, 16)  # of the layer that is drawn, and of its steps


def make_layer(num_experts: int, hidden_size: int, size: int = 1, used: int = USED) -> SparseMLP:
    """Return a mixture of experts with random weights."""
    torch.manual_seed(0)
    experts = Experts(num_experts, used, size, normalized=True, layers=frozenset())
    layer = SparseMLP(hidden_size, experts, Backend(torch.device("cpu"), torch.float32))
    for weight in (layer.router, layer.gate_up_proj.weight, layer.down_proj.weight):
        weight.normal_(std=weight.shape[1] ** -0.5)
    return layer


def draw_hits(layer: SparseMLP) -> None:
    """Draw which experts steps of TOKENS tokens use, each a cell."""
    lanes = []
    for num in TOKENS:
        used = layer.route(torch.randn(num, HIDDEN))[1].flatten().tolist()
        cells = [(expert, 1, "", int(expert in used)) for expert in range(NUMBER)]
        lanes.append((f"{num} token{'s' * (num > 1)}: {len(set(used))} experts", cells))
    show_lanes("The experts that a step reads", lanes, not_read=0, read=1)


def by_token(layer: SparseMLP, x: Tensor) -> Tensor:
    """Compute the same as `layer`, token by token: the weighted sum of its experts' results."""
    inner = layer.gate_up_proj.weight.split(2 * layer.config.size)
    outer = layer.down_proj.weight.split(x.shape[1])
    result = torch.zeros_like(x)
    for token, (weights, choices) in enumerate(zip(*layer.route(x), strict=True)):
        for weight, expert in zip(weights, choices.tolist(), strict=True):
            row = layer.backend.silu_and_mul(x[token : token + 1] @ inner[expert].T)
            result[token] += weight * (row @ outer[expert].T)[0]
    return result


def route_four() -> tuple[list[tuple[object, ...]], float]:
    """Route four tokens to 2 of 4 experts -> a table, and the difference to `by_token`."""
    layer, x, rows = make_layer(4, 16, 8, used=2), torch.randn(4, 16), list[tuple[object, ...]]()
    probs = (x @ layer.router.T).softmax(dim=-1)
    for token, (weights, choices) in enumerate(zip(*layer.route(x), strict=True)):
        uses = [f"{w:.2f} of {e}" for w, e in zip(weights, choices.tolist(), strict=True)]
        rows.append((token, *(f"{p:.2f}" for p in probs[token]), " + ".join(uses)))
    return rows, (layer(x) - by_token(layer, x)).abs().max().item()


def reads() -> list[tuple[object, ...]]:
    """Return what a decode step of Qwen3-30B-A3B reads, in billions of weights and in GB."""
    config = shape_of("qwen3-30b-a3b")
    assert isinstance(config, MoeConfig)
    assert config.experts is not None
    total, rows = num_weights(config.model_class().on_meta(config)), list[tuple[object, ...]]()
    for num in ROWS:
        read = total - config.experts.unused_weights(config.hidden_size, num)
        used, each = f"{config.experts.expected_hits(num):.1f}", f"{2e-9 * read / num:.2f}"
        rows.append((num, used, f"{read / 1e9:.1f}", f"{2e-9 * read:.1f}", each))
    return rows


@torch.inference_mode()
def run() -> None:
    rows, difference = route_four()
    say("""A router with random weights, four tokens, and four experts of which a token uses two.
        The probabilities are the softmax of the scores. The weights of the two experts are divided
        by their sum, as `norm_topk_prob` says:""")
    show_table(("token", "expert 0", "1", "2", "3", "result"), rows)
    say(f"""The engine sorts these eight rows by expert and computes one product for each expert
        that has rows. The largest difference to a loop over tokens and their experts is
        {difference:.0e}.""")
    QUESTIONS.show(1)
    say(f"""Which of {NUMBER} experts the tokens of a step use, if each uses {USED}, in steps of 1,
        4 and 16 tokens:""")
    draw_hits(make_layer(NUMBER, HIDDEN))
    QUESTIONS.show(2)
    say(f"""How many experts a step uses depends on the router. If each token used any {USED} of X
        experts with equal probability, an expert would be left out by one token with the
        probability 1 - {USED}/X, and by T tokens with (1 - {USED}/X)^T. A step of T tokens would
        use X (1 - (1 - {USED}/X)^T). Similar inputs have similar scores, so several requests may
        choose the same experts, and a batch then uses fewer. No trained router was measured
        here.""")
    say("""What a decode step of Qwen3-30B-A3B reads by the formula, in bfloat16 and without KV. The
        last column is the GB for each token. A model without experts would read the same GB at
        every number of requests:""")
    rows = reads()
    show_table(("requests", "experts used", "billion weights", "GB", "GB / token"), rows)
    read = {float(str(row[0])): float(str(row[3])) for row in rows}
    lines = {"mixture": [*read.items()], "one MLP": [(num, read[1]) for num in read]}
    show_plot("What a decode step reads", "requests", "GB", lines, log=True)
    say(f"""A batch therefore gains less than with one MLP (lesson 6a): a step of {BATCH} requests
        reads {read[BATCH] / read[1]:.1f} times as much as a step of one. Attention, the head and
        the embeddings are read once in both, so it is less than the ratio of the experts. The more
        tokens a step has, the more of them share an expert.""")
    show_source(
        link(SparseMLP.route, "topk"),
        link("features.models.moe.experts.Groups.of", "sort(stable"),
        link("features.models.moe.experts.Groups.of", "searchsorted"),
        link("features.models.moe.experts.expert_linear", "backend.linear"),
        link("features.models.moe.experts.expert_mlp", "embedding_bag"),
        link(Experts.expected_hits),
    )


QUESTIONS = Questions("""
    A step has 16 tokens. Why does it read more weights with the mixture than with one MLP that has
    as many weights as a token uses? (a) The router reads the weights of all experts to score them.
    (b) Sorting the rows copies the weights of their experts. (c) The tokens use different experts,
    and each expert that is used is read.
    Answer: c. One MLP is read once for all tokens, and each expert once for its own tokens only.
    Hint: How many experts does a step of one token read, and how many can a step of two?

    A layer has 128 experts, and a token uses 8. How many does a step of 2 tokens use on average, if
    all are equally likely?
    Answer: 15.5. The second token shares 8 * 8 / 128 = 0.5 of its experts with the first.
    Hint: The first token uses 8. How many of the 8 of the second did the first choose already?
""")
