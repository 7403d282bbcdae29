"""Lesson 2: the model in one page.

In lesson 1 the model was a black box between a batch and its logits. What an engine may store,
share and leave out depends on what is in the box: which results of a token depend on other tokens?
The class `Model` below is the complete Qwen3 in plain torch, with the weights of the embedded
model. x [T, E] has one vector of E numbers for each of T tokens:

    token ids --> rows of the embedding matrix: x
    each layer    x = x + o_proj(attention(RMSNorm(x)))
                  x = x + SwiGLU(RMSNorm(x))
    RMSNorm(x) --> products with the rows of the embedding: logits [T, V]

    RMSNorm(x) = x / sqrt(mean(x^2)) * weight, for each row of x
    rope       = x[i] and x[i + D / 2] are a pair, for i < D / 2: it is rotated
                 by the angle position * theta^(-2 i / D)
    attention  = softmax(q k / sqrt(D)) v, causal; query heads share KV heads
    SwiGLU(x)  = down(silu(gate(x)) * up(x)), silu(x) = x / (1 + exp(-x))

o_proj, gate, up and down are products with weights, as q, k and v are of RMSNorm(x). Qwen3
normalizes each head of q and k too. RMSNorm is by Zhang and Sennrich (2019), rope by Su et al.
(2021) and SwiGLU by Shazeer (2020).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from lessons.lesson import embedded_config, make_llm, next_logprobs
from lessons.show import Questions, link, say, show_lines, show_source, show_table
from nanovllm.config import EMBEDDED
from nanovllm.loading.checkpoint import find_checkpoint

# (layer, q [T, H, D], k [T, K, D], v [T, K, D]) -> [T, H, D]
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
PROMPT = "What is 12 + 30?\n"


class Model:
    """The embedded model in float32. It owns its weights, under their names in the checkpoint."""

    def __init__(self) -> None:
        self.config = embedded_config()
        tensors = load_file(find_checkpoint(EMBEDDED) / "model.safetensors")
        self.weights = {name: tensor.float() for name, tensor in tensors.items()}

    def logits(self, ids: Sequence[int], positions: Sequence[int], attend: Attend) -> Tensor:
        """Return the logits [T, V] after each of T tokens. `attend` may store k and v."""
        heads, weights = (len(ids), -1, self.config.head_dim), self.weights
        x = weights["model.embed_tokens.weight"][list(ids)]
        for layer in range(self.config.num_layers):
            w = {
                name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
                for name, tensor in weights.items()
            }
            y = self.rms_norm(x, w["input_layernorm"])
            q, k, v = (F.linear(y, w[f"self_attn.{i}_proj"]).view(heads) for i in "qkv")
            q, k = self.rms_norm(q, w["self_attn.q_norm"]), self.rms_norm(k, w["self_attn.k_norm"])
            q, k = self.rope(q, positions), self.rope(k, positions)
            x = x + F.linear(attend(layer, q, k, v).flatten(1), w["self_attn.o_proj"])
            y = self.rms_norm(x, w["post_attention_layernorm"])
            gate, up = F.linear(y, w["mlp.gate_proj"]), F.linear(y, w["mlp.up_proj"])
            x = x + F.linear(F.silu(gate) * up, w["mlp.down_proj"])
        # The matrix [V, E] of the logits is often the embedding matrix.
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return F.linear(self.rms_norm(x, weights["model.norm.weight"]), head)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config.rms_norm_eps) * weight

    def rope(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """Rotate the pairs (x[i], x[i + D / 2]) of x [T, heads, D] by their position."""
        half = self.config.head_dim // 2
        frequencies = self.config.rope.rope_theta ** (-torch.arange(half) / half)
        angles = (torch.tensor(positions)[:, None] * frequencies)[:, None]  # [T, 1, D / 2]
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to a whole text, without a cache: an `Attend`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def run() -> None:
    QUESTIONS.show(1)
    show_lines(Model.logits, "heads, weights =", "return F.linear")
    model, llm = Model(), make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    ids: list[int] = llm.get_tokenizer().encode(PROMPT)
    answer, eos = list(ids), llm.engine.input_processor.eos_token_ids
    while answer[-1] not in eos and len(answer) < 40:
        logits = model.logits(answer, range(len(answer)), attention)
        answer.append(int(logits[-1].argmax()))
    ours = logits[len(ids) - 1].log_softmax(0)
    difference = float((ours - next_logprobs(llm, PROMPT)).abs().max())
    assert difference < 1e-3
    say(f"""Taking the largest logit again and again after {PROMPT!r} gives
        {llm.get_tokenizer().decode(answer[len(ids) : -1])!r}. The log-probabilities of the first
        token differ from the engine's by {difference:.0e} at most.""")
    QUESTIONS.show(2)
    say("""Rope: the score of a query and a key depends on their distance, and not on where they
        are. The same q and k at different positions:""")
    generator, rows = torch.Generator().manual_seed(0), []
    q, k = torch.randn(2, 1, 1, model.config.head_dim, generator=generator)
    for i, j in ((3, 0), (10, 7), (100, 97), (100, 0)):
        rows.append((i, j, f"{float((model.rope(q, [i]) * model.rope(k, [j])).sum()):.3f}"))
    show_table(("position of q", "of k", "score"), rows)
    show_source(
        link("models.qwen3.DecoderLayer.__call__"),
        link("models.qwen3.SelfAttention.__call__"),
        link("models.layers.rotate"),
    )
    say("""What to do: write `attention` of this file again, with a loop over the query heads and
        without repeating k and v. The lesson compares your logits with the engine's when you run
        it. Lesson 3 lets the model generate.""")


QUESTIONS = Questions("""
    Why are keys and values all that a cache has to keep of earlier tokens? (a) They are the largest
    results of a layer. (b) All other results can be computed from them. (c) Only attention reads
    other tokens than its own, and of these only k and v.
    Answer: c. Embedding, RMSNorm, SwiGLU and the head compute each row of x alone. That is also why
    tokens of different requests can share a step.
    Hint: Which of the formulas has more than one row of x?

    A query at position 1,000 and a key at position 940 have a score. The same query is at position
    70. At which position must the same key be for the same score?
    Answer: 10. The distance is 60 in both cases. Cached keys are rotated by their own position, so
    a block can only be shared at the same position: the prefix cache needs the beginning.
    Hint: Rotations by a and b differ by a rotation by a - b.
""")
