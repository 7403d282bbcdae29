"""A solution of `python -m lessons build filter`."""

from torch import Tensor

MASKED = float("-inf")


def keep_typical_p(logits: Tensor, typical_p: Tensor) -> Tensor:
    log_probs = logits.log_softmax(dim=-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).nansum(dim=-1, keepdim=True)
    distance = (-log_probs - entropy).abs()
    ordered, order = distance.sort(dim=-1)
    sorted_probs = probs.gather(1, order)
    before = sorted_probs.cumsum(dim=-1) - sorted_probs
    kept = (before < typical_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
    last = ordered.gather(1, kept - 1)
    return logits.masked_fill((distance > last) & (typical_p < 1)[:, None], MASKED)
