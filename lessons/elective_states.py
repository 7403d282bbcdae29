"""Elective states: a state instead of a cache.

A KV cache stores the key and the value of each token, so every decode reads more than the one
before. A layer of linear attention stores a matrix S instead. It maps keys to values, and has the
same size after any number of tokens. By the gated delta rule (Yang et al. 2024, arXiv:2412.06464)
each token corrects S. Its key k, its value v and its query q are vectors, and k has length 1:

    S <- e^g S              forget: e^g is between 0 and 1
    d  = beta (v - S^T k)   the token's value minus the value that S has for k
    S <- S + k d^T          the correction; after it S^T k = v, if beta is 1
    o  = S^T q              the output: the value that S has for the query

The model computes g and beta from the token, for each head. Three of four layers of Qwen3.5 are of
this kind, and the fourth has a KV cache.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lessons.lesson import shape_of
from lessons.pictures import show_formula, show_lanes, show_plot
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.features.models.hybrid.delta_rule import CHUNK, advance, decode, solve
from nanovllm.features.models.hybrid.hybrid_config import HybridConfig

DIM = 128  # numbers of a key, as in Qwen3.5
CONTEXTS = (100, 1_000, 10_000, 40_000)
KEYS = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (0.6, 0.8)}
# Tokens: key, value, beta, e^g.
TOKENS = (
    ("a", 4, 1, 1),
    ("b", 6, 1, 1),
    ("a", 8, 1, 1),
    ("a", 2, 0.5, 1),
    ("a", 0, 0, 0.5),
    ("c", 10, 1, 1),
)


class Tokens(NamedTuple):
    """What a layer computes from Q tokens: q, k [Q, H, Dk], v [Q, H, Dv], beta and g [Q, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor


def compute(tokens: Tokens, state: Tensor) -> Tensor:
    """Advance state [H, Dk, Dv] by the engine's functions -> the outputs [H, Q, Dv]."""
    q, k, v, beta, g = tokens
    layer: Any = SimpleNamespace(sizes=(k.shape[1], k.shape[1], k.shape[2], v.shape[2]))
    mixed = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
    return advance(solve(layer, mixed, beta, g), state)[:, : len(q)]


def write(state: Tensor, keys: Tensor, values: Tensor, beta: float = 1, keep: float = 1) -> None:
    """Advance the state [1, Dk, Dv] of one head by tokens with keys [Q, Dk] and values [Q, Dv]."""
    ones, k = torch.ones(len(keys), 1), keys[:, None]
    compute(Tokens(k, k, values[:, None], beta * ones, (keep * ones).log()), state)


def read(state: Tensor, keys: Tensor) -> Tensor:
    """Return the values [Q, Dv] of keys [Q, Dk]. Tokens with beta = 0 and g = 0 change nothing."""
    zero, k = torch.zeros(len(keys), 1), keys[:, None]
    return compute(Tokens(k, k, torch.zeros(len(keys), 1, state.shape[2]), zero, zero), state)[0]


def corrections() -> list[tuple[str, ...]]:
    """Compute TOKENS one by one -> the table of the values of a and b after each of them."""
    state, total, rows = torch.zeros(1, 2, 1), torch.zeros(2), []
    keys = {name: torch.tensor([key]) for name, key in KEYS.items()}
    for name, value, beta, keep in TOKENS:
        write(state, keys[name], torch.tensor([[float(value)]]), beta, keep)
        total = keep * total + beta * value * keys[name][0]
        reads = (*(read(state, keys[key]).item() for key in "ab"), total[0].item())
        rows.append((f"{name} = {value}", f"{beta:g}", f"{keep:g}", *(f"{x:.4g}" for x in reads)))
    return rows


def draw_matrix() -> Tensor:
    """Draw a token's correction of a state of 4 rows and 4 columns -> the state after it."""
    before = torch.zeros(1, 4, 4)
    write(before, torch.eye(4)[:3], torch.tensor([[4.0, 0, 0, 0], [0, 6, 0, 0], [1, 1, 1, 1]]))
    after = before.clone()
    write(after, torch.tensor([[0.6, 0.8, 0, 0]]), torch.tensor([[5.0, 5, 0, 0]]))
    lanes = []
    for row, name in enumerate(("k = 0.6", "k = 0.8", "k = 0", "k = 0")):
        cells = []
        for place, matrix in enumerate((before, after - before, after)):
            values = matrix[0, row].tolist()
            cells += [(5 * place + i, 1, f"{v:.3g}", place) for i, v in enumerate(values)]
        lanes.append((name, cells))
    show_lanes("S, the correction k d^T, and their sum", lanes, S=0, correction=1, sum=2)
    return after[0]


def errors(number: int) -> tuple[float, float]:
    """Write pairs with random keys -> the error of the last value, and of all, relative."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, number, DIM, generator=generator)
    keys, state = keys / keys.norm(dim=1, keepdim=True), torch.zeros(1, DIM, DIM)
    write(state, keys, values)
    wrong = (read(state, keys) - values).norm(dim=1) / values.norm(dim=1)
    return wrong[-1].item(), wrong.mean().item()


def run() -> None:
    show_formula(
        "S' = e^g S + k d^T   with   d = beta (v - e^g S^T k)   o = S'^T q",
        r"S' = e^g S + k\,d^\top \qquad d = \beta\,(v - e^g S^\top k) \qquad o = S'^\top q",
    )
    QUESTIONS.show(1)
    say("""A small S whose values are single numbers: a = 4 is a token with the key a and the value
        4. The keys a and b are orthogonal, and c = 0.6 a + 0.8 b. The fifth token has beta = 0, so
        S only forgets. The last column is the value of a if each token adds beta k v^T, without
        a correction:""")
    head = ("token", "beta", "e^g", "value of a", "value of b", "a, only added")
    show_table(head, corrections())
    say("""A second value replaces the first, as an assignment does, and beta = 0.5 goes half of the
        way. The last token changes the values of a and b, because its key is similar to theirs.""")
    say("""A larger S, whose values are vectors of 4 numbers. The key of the token is (0.6, 0.8, 0,
        0) and its value (5, 5, 0, 0). Each row of S changes in proportion to its number of the key,
        so two of four rows stay as they are:""")
    draw_matrix()
    say(f"""If all keys are orthogonal, S holds as many pairs as it has rows. Here, pairs with
        random keys of {DIM} numbers, as in a head of Qwen3.5, are written with beta = 1 and then
        read. The error is the length of the difference between what is read and what was written,
        divided by the length of the latter:""")
    rows = [(n, *(f"{error:.2f}" for error in errors(n))) for n in (8, 32, 128, 512, 2048)]
    show_table(("pairs", "last pair", "all pairs"), rows)
    say("""The last pair is always right. The more pairs there are, the larger is the error of the
        earlier ones. In a KV cache no token changes the keys and values of another.""")

    say(f"""A prompt need not be computed token by token. The corrections d of {CHUNK} tokens depend
        on each other only through the products of their keys. They are the solution of a triangular
        system, and S is read and written once for all of them.""")
    config, other = shape_of("qwen3.5-0.8b"), shape_of("qwen3-0.6b")
    assert isinstance(config, HybridConfig)
    kv, hybrid_kv, state = other.block_bytes(1, 2), config.block_bytes(1, 2), config.state_bytes(2)
    QUESTIONS.show(2)
    say(f"""A decode of Qwen3-0.6B reads {kv / 2**10:g} KiB for each token of the context, in
        bfloat16. Qwen3.5-0.8B reads and writes the states of its {config.num_linear_layers} linear
        layers, {state / 2**20:.1f} MiB, and reads {hybrid_kv / 2**10:g} KiB for each token in its
        {len(config.kv_layers)} full layers. MiB per decode of one sequence, calculated, without the
        weights:""")
    equal = 2 * state / (kv - hybrid_kv)
    rows = []
    for n in sorted((*CONTEXTS, round(equal))):
        sizes = kv * n, 2 * state, hybrid_kv * n, 2 * state + hybrid_kv * n
        rows.append((f"{n:,}", *(f"{size / 2**20:,.1f}" for size in sizes)))
    show_table(("context", "Qwen3-0.6B", "Qwen3.5: states", "KV", "together"), rows)
    lines = {
        "Qwen3-0.6B: KV": [(n, kv * n / 2**20) for n in CONTEXTS],
        "Qwen3.5-0.8B: states and KV": [(n, (2 * state + hybrid_kv * n) / 2**20) for n in CONTEXTS],
    }
    show_plot("Memory that a decode reads and writes", "tokens", "MiB", lines, log=True)
    say(f"""They are equal at {equal:.0f} tokens. With a longer context Qwen3.5-0.8B reads and
        writes less. Both also read their weights, but once for all sequences of a step (lesson
        4).""")
    show_source(
        link(decode, "difference = beta"),
        link(solve, "solve_triangular"),
        link(advance, "corrections = "),
        link(HybridConfig.state_bytes),
    )


QUESTIONS = Questions("""
    A token has the same key and the same value as the token before it, with beta = 1 and e^g = 1.
    What does it change? (a) Nothing: S has this value for the key, so d is 0. (b) The value for the
    key is twice as large. (c) S forgets all other keys.
    Answer: a. The delta rule adds the difference to what S has. If each token only added its value,
    the sum would grow, as in the last column of the table.
    Hint: What is S^T k before the second token, and what is d then?

    Which model reads and writes less in a decode of a context of 100 tokens, Qwen3-0.6B with a KV
    cache or Qwen3.5-0.8B with states in 18 of 24 layers? (a) Qwen3.5-0.8B: a state is smaller than
    a cache. (b) Qwen3-0.6B: the states are as large for 100 tokens as for 40,000, and 100 tokens
    have little KV. (c) Both as much, because the context is the same.
    Answer: b. A state is worth it for long contexts: its size does not depend on their length.
    Hint: How does the size of each of them depend on the length of the context?
""")
