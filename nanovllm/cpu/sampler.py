"""The sampler on a CPU: filters by torch without a full sort; draws and log-probabilities by kernels."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import SamplingBatch
from nanovllm.cpu import kernels
from nanovllm.models import logit_rules
from nanovllm.models.sampler import FILTER_FUNCTIONS, HIDDEN, filtered_logits

CANDIDATES = 256  # most likely tokens that top-p considers first
MAX_LOGPROBS = 64  # the kernel inserts one by one, which is slow for more


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V] -> token ids [R] int64."""
    temperature = batch.temperature
    if batch.filters and not batch.all_greedy:
        logits = filtered_logits(logits, batch, FILTER_FUNCTIONS | {"top_p": keep_top_p})
        temperature = (temperature > 0).float()  # the filtered logits have been divided by it
    tokens = np.empty(len(logits), np.int64)
    rows = (x.numpy() for x in (temperature, batch.seeds, batch.positions))
    example = kernels.DTYPE_EXAMPLE[logits.dtype]
    kernels.draw(logits.data_ptr(), *logits.shape, *rows, tokens, example)
    return torch.from_numpy(tokens)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """As models.sampler.keep_top_p, but it sorts only as many tokens as it takes to reach p."""
    rows = (top_p < 1).nonzero().flatten()
    probs, p, size = logits[rows].softmax(dim=-1), top_p[rows, None], CANDIDATES
    ordered = probs.topk(min(size, probs.shape[1])).values
    while size < probs.shape[1] and (ordered.sum(dim=-1, keepdim=True) < p).any():
        size *= 8
        ordered = probs.topk(min(size, probs.shape[1])).values
    before = ordered.cumsum(dim=-1) - ordered
    least = ordered.gather(1, (before < p).sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    logits[rows] = logits[rows].masked_fill_(probs < least, HIDDEN)
    return logits


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """As models.logit_rules.token_logprobs."""
    if k > MAX_LOGPROBS:
        return logit_rules.token_logprobs(logits, tokens, k)
    logits, packed = logits.contiguous(), np.empty((len(logits), 2 + 2 * k))
    example = kernels.DTYPE_EXAMPLE[logits.dtype]
    kernels.token_logprobs(logits.data_ptr(), *logits.shape, tokens.numpy(), packed, example)
    return torch.from_numpy(packed)
