"""Lesson 2: the model in one page.

In lesson 1 the model was a black box. What an engine may store and share depends on what is in it:
which results of a token depend on other tokens? This is the complete Qwen3, first as formulas and
then in plain torch, with the weights of the embedded model. x [T, E] has E numbers for each of T
tokens, and the vocabulary has V tokens:

    token ids --> rows of the embedding matrix: x
    each layer    x = x + o_proj(attention(RMSNorm(x)))
                  x = x + SwiGLU(RMSNorm(x))
    RMSNorm(x) --> products with the rows of the embedding: logits [T, V]

    RMSNorm(x) = x / sqrt(mean(x^2) + eps) * weight, for each row of x
    attention  = softmax(q k / sqrt(D)) v per head, over tokens up to this one,
                 where a head of q or k is first changed to rope(RMSNorm(head))
    rope(x)    = x[i] and x[i + D / 2] are a pair, for i < D / 2: it is rotated
                 by the angle position * theta^(-2 i / D)
    SwiGLU(x)  = down(silu(gate(x)) * up(x)), silu(x) = x / (1 + exp(-x))

q, k, v, o_proj, gate, up and down are products with weights; eps = 1e-6 and theta = 10,000 are
fixed numbers of the model. q has H heads, k and v have K heads, all of D numbers. A group of H / K
heads of q uses the same head of k and v (RMSNorm: Zhang and Sennrich 2019; rope: Su et al. 2021;
SwiGLU: Shazeer 2020).
"""

from collections.abc import Callable, Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from lessons.lesson import make_llm, next_logprobs
from lessons.show import Questions, link, say, show_lines, show_source
from nanovllm.config import EMBEDDED
from nanovllm.loading.checkpoint import Checkpoint, find_checkpoint

# (layer, q [T, H, D], k [T, K, D], v [T, K, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
PROMPT = "What is 12 + 30?\n"


class Model:
    """The embedded model in float32. It owns its weights, under their names in the checkpoint."""

    def __init__(self) -> None:
        directory = find_checkpoint(EMBEDDED)
        self.config = Checkpoint(directory).model_config
        weights = load_file(directory / "model.safetensors").items()
        self.weights = {name.removesuffix(".weight"): weight.float() for name, weight in weights}

    def logits(self, ids: Sequence[int], positions: Sequence[int], attend: Attend) -> Tensor:
        """Return the logits [T, V] after each of T tokens. `attend` is like `attention`."""
        w = self.weights
        heads = (len(ids), -1, self.config.head_dim)
        x = w["model.embed_tokens"][list(ids)]
        for i in range(self.config.num_layers):
            layer = f"model.layers.{i}"
            y = self.rms_norm(x, f"{layer}.input_layernorm")
            q, k, v = (F.linear(y, w[f"{layer}.self_attn.{n}_proj"]).view(heads) for n in "qkv")
            q = self.rope(self.rms_norm(q, f"{layer}.self_attn.q_norm"), positions)
            k = self.rope(self.rms_norm(k, f"{layer}.self_attn.k_norm"), positions)
            x = x + F.linear(attend(i, q, k, v).flatten(1), w[f"{layer}.self_attn.o_proj"])
            y = self.rms_norm(x, f"{layer}.post_attention_layernorm")
            gate, up = (F.linear(y, w[f"{layer}.mlp.{n}_proj"]) for n in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[f"{layer}.mlp.down_proj"])
        return F.linear(self.rms_norm(x, "model.norm"), w["model.embed_tokens"])

    def rms_norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config.rms_norm_eps)

    def rope(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """Rotate the pairs (x[i], x[i + D / 2]) of x [T, heads, D] by their position."""
        half = self.config.head_dim // 2
        frequencies = self.config.rope.rope_theta ** (-torch.arange(half) / half)
        angles = (torch.tensor(positions)[:, None] * frequencies)[:, None]  # [T, 1, D / 2]
        a, b = x.chunk(2, dim=-1)
        cos = angles.cos()
        sin = angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, H, D], k and v [T, K, D] of a whole text -> [T, H, D], without a cache."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def run() -> None:
    QUESTIONS.show(1)
    for function in (Model.logits, Model.rms_norm, Model.rope, attention):
        show_lines(function, "def ", "    return ")
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    ids = llm.get_tokenizer().encode(PROMPT)
    ours = Model().logits(ids, range(len(ids)), attention)[-1].log_softmax(0)
    difference = float((ours - next_logprobs(llm, PROMPT)).abs().max())
    cause = "comes from rounding" if difference < 1e-3 else "is too much: this is another model"
    say(f"""The most likely token after {PROMPT!r} is {llm.get_tokenizer().decode(ours.argmax())!r}.
        All log-probabilities differ from the engine's by {difference:.0e} at most, which
        {cause}.""")
    QUESTIONS.show(2)
    show_source(link("models.qwen3.DecoderLayer"), link("models.qwen3.SelfAttention"))
    say("""Build it: `python -m lessons build attention` asks for `attention` again, in which each
        query head reads its own head of k and v, and compares the logits that it gives.""")


QUESTIONS = Questions("""
    Why are keys and values all that a cache has to keep of earlier tokens?
    (a) They are the largest results that a layer computes.
    (b) All of the other results can be computed from them.
    (c) No other result of a token is read by later tokens.
    Answer: c. Only attention reads other tokens than its own, and of these only k and v. All other
    formulas use one row of x, and a query is needed only for its own token.
    Hint: Which of the formulas has more than one row of x?

    Rope rotates queries and keys. A query at position 1,000 and a key at position 940 have a score.
    The same query is at position 70. At which position must the same key be for the same score?
    Answer: 10. A score depends on the difference of both angles, and the distance is 60 in both
    cases. A cached key is rotated by its position: it can be shared only at the same position.
    Hint: Rotations by a and b differ by a rotation by a - b.
""")

IN_VLLM = """`Qwen3ForCausalLM` in `model_executor/models/qwen3.py` has the same formulas, as torch
modules. Its attention is a layer that finds the batch in a global, the `ForwardContext`; here the
batch is an argument."""
