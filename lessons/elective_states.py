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

import torch
from torch import Tensor

from lessons.lesson import shape_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.features.models.hybrid.delta_rule import decode
from nanovllm.features.models.hybrid.hybrid_config import HybridConfig

CONTEXTS = (100, 1_000, 10_000, 40_000)
KEYS = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (0.6, 0.8)}
# Tokens: key, value, beta, e^g.
TOKENS = (
    ("a", 4.0, 1, 1),
    ("b", 6.0, 1, 1),
    ("a", 8.0, 1, 1),
    ("a", 2.0, 0.5, 1),
    ("a", 0.0, 0, 0.5),
    ("c", 10.0, 1, 1),
)


def correct(state: Tensor, k: Tensor, v: Tensor, beta: float = 1, keep: float = 1) -> Tensor:
    """Return the state [Dk, Dv] after a token with key k [Dk] and value v [Dv]; keep is e^g."""
    state = keep * state
    return state + torch.outer(k, beta * (v - state.T @ k))


def corrections() -> list[tuple[str, ...]]:
    """Compute TOKENS one by one -> the table of the values of a and b after each of them."""
    state = torch.zeros(2, 1)
    total = 0.0
    rows = []
    for name, value, beta, keep in TOKENS:
        state = correct(state, torch.tensor(KEYS[name]), torch.tensor([value]), beta, keep)
        total = keep * total + beta * value * KEYS[name][0]
        values = (beta, keep, *state[:, 0].tolist(), total)
        rows.append((f"{name} = {value:g}", *(f"{x:.4g}" for x in values)))
    return rows


def run() -> None:
    QUESTIONS.show(1)
    say("""A small S whose values are single numbers: a = 4 is a token with the key a and the value
        4. The keys a and b are orthogonal, and c = 0.6 a + 0.8 b. The fifth token has beta = 0, so
        S only forgets. The last column is the value of a if each token adds beta k v^T, without
        a correction:""")
    head = ("token", "beta", "e^g", "value of a", "value of b", "a, only added")
    show_table(head, corrections())
    say("""A second value replaces the first, as an assignment does, and beta = 0.5 goes half of the
        way. The last token changes the values of a and b, because its key is similar to theirs. In
        a KV cache no token changes the keys and values of another.""")
    QUESTIONS.show(2)
    config, other = shape_of("qwen3.5-0.8b"), shape_of("qwen3-0.6b")
    assert isinstance(config, HybridConfig)
    kv = other.block_bytes(1, 2)
    hybrid_kv = config.block_bytes(1, 2)
    state = config.state_bytes(2)
    say(f"""A decode of Qwen3-0.6B reads {kv / 2**10:g} KiB for each token of the context, in
        bfloat16. Qwen3.5-0.8B reads and writes the states of its {config.num_linear_layers} linear
        layers, {state / 2**20:.1f} MiB, and reads {hybrid_kv / 2**10:g} KiB for each token in its
        {len(config.kv_layers)} full layers. MiB per decode of one sequence, calculated, without the
        weights. The states count twice:""")
    equal = 2 * state / (kv - hybrid_kv)
    rows = []
    for n in sorted((*CONTEXTS, round(equal))):
        sizes = kv * n, 2 * state, hybrid_kv * n, 2 * state + hybrid_kv * n
        rows.append((f"{n:,}", *(f"{size / 2**20:,.1f}" for size in sizes)))
    show_table(("context", "Qwen3-0.6B: KV", "Qwen3.5-0.8B: states", "KV", "together"), rows)
    say(f"""They are equal at {equal:.0f} tokens. With a longer context Qwen3.5-0.8B reads and
        writes less.""")
    show_source(link(decode, "difference = beta"), link(HybridConfig.state_bytes))
    say("Build it: `python -m lessons build delta`, a token's step for several heads.")


QUESTIONS = Questions("""
    A token has the same key and the same value as the token before it, with beta = 1 and e^g = 1.
    What does it change?
    (a) Nothing in the whole state.
    (b) The value of its key: it doubles.
    (c) The values of the other keys.
    Answer: a. S has this value for the key, so d is 0. The delta rule adds the difference to what S
    has. If each token only added its value, the sum would grow, as in the last column of the table.
    Hint: What is S^T k before the second token, and what is d then?

    Which model reads and writes less in a decode of a context of 100 tokens, Qwen3-0.6B with a KV
    cache or Qwen3.5-0.8B with states in 18 of 24 layers?
    (a) Qwen3.5-0.8B: a state is smaller than a cache.
    (b) Qwen3-0.6B: 100 tokens have few keys and values.
    (c) Neither: what they keep of 100 tokens is as large.
    Answer: b. The states are as large for 100 tokens as for 40,000. A state is worth it for long
    contexts: its size does not depend on their length.
    Hint: How does the size of each of them depend on the length of the context?
""")

IN_VLLM = """`QwenGatedDeltaNetAttention` in
`model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py` computes the delta rule. A state is in a
block of the KV pool; here it has a pool of its own."""
