"""Log-probabilities of tokens: one tensor per step on the device, unpacked on the host."""

import torch
from torch import Tensor

from nanovllm.plan import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Compute log-probabilities of tokens [Q] (>= 0) and the k most likely from raw logits [Q, V].

    Returns [Q, 2 + 2k] float64: log-probability and rank of the token, k log-probabilities, k ids.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    logprob = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > logprob).sum(dim=-1, keepdim=True) + 1
    return torch.cat((logprob.double(), rank, *logprobs.topk(k)), dim=1)


def unpack_logprobs(packed: list[float], token: int, k: int) -> TokenLogprobs:
    """Unpack a row of `token_logprobs` to (token, log-probability, rank), for `token` first."""
    logprob, rank = packed[:2]
    likely = enumerate(likely_tokens(packed[2:], k), start=1)
    others = [(other, p, i) for i, (other, p) in likely if other != token]
    return [(token, logprob, int(rank)), *others]


def likely_tokens(packed: list[float], k: int) -> list[tuple[int, float]]:
    """Return (token, log-probability) of the first k from n log-probabilities and n token ids."""
    half = len(packed) // 2
    return list(zip(map(int, packed[half : half + k]), packed[:k], strict=True))
