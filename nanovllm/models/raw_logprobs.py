"""Log-probabilities from raw logits: of given tokens, and of the most likely ones."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Compute log-probabilities of tokens [Q] (>= 0) and the k most likely from raw logits [Q, V].

    Returns [Q, 2 + 2k] float64: log-probability and rank of the token, k log-probabilities, k ids.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    logprob = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > logprob).sum(dim=-1, keepdim=True) + 1
    return torch.cat((logprob.double(), rank, *most_likely(logprobs, k)), dim=1)


def most_likely(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest numbers of each row of logits [R, V] float32, and their tokens [R, k].

    On a CPU, the first tokens of equal ones come first. `topk` alone takes others for another k,
    which is the largest of all rows of a step.
    """
    if logits.device.type != "cpu":
        return logits.topk(k)
    bits = logits.view(torch.int32).long()
    in_order = bits ^ (bits >> 31 & 0x7FFFFFFF)  # as integers, in the order of the numbers
    keys = (in_order << 32) - torch.arange(logits.shape[1], device="cpu")
    ids = -keys.topk(k).values & 0xFFFFFFFF
    return logits.gather(1, ids), ids
