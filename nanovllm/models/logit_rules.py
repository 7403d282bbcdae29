"""RowRules: changes to the logits of a row beyond temperature and filters.

It owns, for one row, the token counts and tokens that its rules depend on, and changes the row's
logits. A row without rules has no RowRules and costs nothing.

The order is that of transformers and vLLM: log-probabilities of the raw logits, allowed tokens, bad
words, minimum length, bias, penalties, logits processors. The sampler follows.
"""

import torch
from torch import Tensor

from nanovllm.plan import LogitRules, TokenLogprobs

HIDDEN = float("-inf")


class RowRules:
    def __init__(
        self,
        rules: LogitRules,
        prompt: list[int],
        output: list[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`prompt` and `output` are the tokens that are known when the row joins."""
        self.rules = rules
        self.prompt = prompt
        self.output = list(output)
        self.device = device
        self.counts = self.in_prompt = torch.empty(0)
        if rules.has_penalties:
            ids = torch.tensor(output, dtype=torch.int64, device=device)
            self.counts = torch.bincount(ids, minlength=vocab_size).float()  # [V], of the output
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.in_prompt[torch.tensor(prompt, device=device)] = True

    def apply(self, logits: Tensor) -> None:
        """Change the row's logits [V] in place."""
        rules = self.rules
        if rules.allowed_token_ids is not None:
            kept = logits[list(rules.allowed_token_ids)]
            logits.fill_(HIDDEN)[list(rules.allowed_token_ids)] = kept
        for *start, last in rules.bad_words:
            if not start or self.output[-len(start) :] == start:
                logits[last] = HIDDEN
        if len(self.output) < rules.min_tokens:
            logits[list(rules.stops)] = HIDDEN
        if rules.logit_bias:
            tokens, values = zip(*rules.logit_bias, strict=True)
            logits[list(tokens)] += torch.tensor(values, device=self.device)
        if rules.has_penalties:
            in_output = self.counts > 0
            scaled = torch.where(
                logits > 0, logits / rules.repetition_penalty, logits * rules.repetition_penalty
            )
            logits.copy_(torch.where(in_output | self.in_prompt, scaled, logits))
            logits -= rules.frequency_penalty * self.counts + rules.presence_penalty * in_output
        for processor in rules.logits_processors:
            logits.copy_(processor([*self.prompt, *self.output], logits))

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.output.append(token)
        if self.rules.has_penalties:
            self.counts[token] += 1


def token_logprobs(logits: Tensor, token: int, k: int) -> TokenLogprobs:
    """(token, log-probability, rank) of `token` and the k most likely ones, from raw logits [V]."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs[token]
    entry = (token, float(own), int((logprobs > own).sum()) + 1)
    values, ids = logprobs.topk(k)
    most_likely = zip(ids.tolist(), values.tolist(), range(1, k + 1), strict=True)
    return [entry, *(other for other in most_likely if other[0] != token)]
